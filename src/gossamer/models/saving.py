"""Models as folders: `config.json` with plain keywords, `model.safetensors` with the weights."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from gossamer._version import __version__
from gossamer.checks import check_given, check_keys
from gossamer.errors import DataError
from gossamer.files import read_json, replacing, write_json

__all__ = ["PretrainedModel"]


class PretrainedModel(nn.Module):
    """Base of models that are saved and loaded by their constructor's plain keywords.

    A subclass calls `super().__init__()` and sets `self.config` to the keywords it was built with.
    Nothing is ever unpickled.

    Example:
        >>> from gossamer.models import Decoder
        >>> Decoder(10, 8, 1, 2).config["dim"]
        8

    Source: the folder layout of the Hugging Face hub.
    Deviations: none
    """

    config: dict[str, Any]

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write `config.json` and `model.safetensors`, each by a temporary name and a rename."""
        path = Path(folder)
        config = {"model": type(self).__name__, "gossamer_version": __version__, **self.config}
        write_json(path / "config.json", config)
        elsewhere = self._kept_elsewhere()
        weights = {
            name: tensor.contiguous()
            for name, tensor in self.state_dict().items()
            if name not in elsewhere
        }
        with replacing(path / "model.safetensors") as temporary:
            save_file(weights, temporary)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> Self:
        """Build the model from a folder, on the CPU and in evaluation mode.

        Args:
            folder: What `save_pretrained` wrote.

        Raises:
            DataError: If a file is missing, broken, or of another model.
            ConfigError: If `config.json` has an unknown key.
        """
        path = Path(folder)
        config = cls._read_config(path / "config.json")
        parameters = inspect.signature(cls).parameters
        check_keys(config, parameters, str(path / "config.json"))
        for name, parameter in parameters.items():
            if parameter.default is inspect.Parameter.empty:
                check_given(config, name, str(path / "config.json"))
        model = cls(**config)
        model._load_weights(path / "model.safetensors")
        return model.eval()

    @classmethod
    def _read_config(cls, path: Path) -> dict[str, Any]:
        remedy = "Give a folder that save_pretrained or `gossamer train` wrote."
        config = read_json(path, remedy)
        name = config.pop("model", None)
        config.pop("gossamer_version", None)
        if name != cls.__name__:
            raise DataError(
                f"{path} must describe a {cls.__name__}; got {name!r}. Load it with that class."
            )
        return config

    def _load_weights(self, path: Path) -> None:
        try:
            weights = load_file(path)
            self.load_state_dict({**self._kept_elsewhere(), **weights})
        except (OSError, SafetensorError, RuntimeError) as error:
            first = str(error).strip().replace("\n", " ")
            raise DataError(
                f"{path} must hold the weights that config.json describes; got: {first}. "
                "Copy both files of one run."
            ) from None

    def _kept_elsewhere(self) -> dict[str, torch.Tensor]:
        """Return weights that `model.safetensors` leaves out because a part keeps them itself."""
        return {}

    def num_parameters(self) -> int:
        """Return how many numbers are trained."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device
