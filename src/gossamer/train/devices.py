"""Which device a user may ask for on this machine."""

from __future__ import annotations

import torch

from gossamer.checks import check_choice
from gossamer.errors import ConfigError

__all__ = ["check_device", "pick_device"]


def check_device(name: str) -> None:
    """Check that a device is here.

    Raises:
        ConfigError: If the name is unknown or the device is absent.

    Example:
        >>> check_device("cpu")
    """
    check_choice(name, ("auto", "cpu", "cuda", "mps"), "device")
    here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not here.get(name, True):
        raise ConfigError(
            f"device {name!r} needs that device and a build of torch for it; there is none here. "
            "Use 'cpu' or 'auto'."
        )


def pick_device(name: str) -> torch.device:
    """Return the device of a name; `"auto"` takes CUDA, then MPS, then the CPU.

    Example:
        >>> pick_device("cpu")
        device(type='cpu')
    """
    check_device(name)
    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
