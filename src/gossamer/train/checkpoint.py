"""Checkpoints: one safetensors file, written whole or not at all; nothing is pickled."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gossamer.errors import DataError
from gossamer.files import replacing

__all__ = ["load_checkpoint", "random_state", "restore_random_state", "save_checkpoint"]

FILE = "checkpoint.safetensors"


def save_checkpoint(folder: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write a state: a nested dict of tensors, NumPy arrays and JSON values.

    The file is complete or absent, whenever the process is killed.

    Args:
        folder: Where `checkpoint.safetensors` goes.
        state: Keys are strings without `/`; non-tensor leaves are plain JSON values.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> save_checkpoint(folder, {"step": 3, "model": {"w": torch.ones(2)}})
        >>> load_checkpoint(folder)["model"]["w"].tolist()
        [1.0, 1.0]
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    _flatten(state, "", tensors, values)
    with replacing(Path(folder) / FILE) as temporary:
        save_file(tensors, temporary, metadata={"values": json.dumps(values)})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())


def load_checkpoint(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Read what `save_checkpoint` wrote, or `None` when the folder holds no checkpoint.

    Raises:
        DataError: If the file is damaged.
    """
    path = Path(folder) / FILE
    if not path.exists():
        return None
    state: dict[str, Any] = {}
    try:
        with safe_open(path, framework="pt") as file:
            values = json.loads(file.metadata()["values"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} must be a checkpoint of this library; got: {error}. Delete it to start anew."
        ) from None
    for key, value in {**values, **tensors}.items():
        _insert(state, key.split("/"), value)
    return state


def _flatten(value: Any, prefix: str, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            _flatten(item, f"{prefix}/{key}" if prefix else str(key), tensors, values)
    elif isinstance(value, Tensor):
        tensors[prefix] = value.detach().cpu().contiguous().clone()
    elif isinstance(value, np.ndarray):
        tensors[prefix] = torch.from_numpy(value.copy())
    else:
        values[prefix] = value


def _insert(state: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        state = state.setdefault(key, {})
    state[keys[-1]] = value


def random_state() -> dict[str, Any]:
    """Return the state of every global generator: Python, NumPy, torch and CUDA.

    Example:
        >>> sorted(random_state())
        ['cuda', 'numpy', 'python', 'torch']
    """
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": {
            "version": version,
            "internal": np.array(internal, dtype=np.int64),
            "gauss": gauss,
        },
        "numpy": {
            "name": name,
            "keys": np.asarray(keys).astype(np.int64),
            "rest": [int(position), int(has_gauss), float(cached)],
        },
        "torch": torch.get_rng_state(),
        "cuda": {str(i): s for i, s in enumerate(cuda)},
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Set every global generator to what `random_state` returned."""
    python, numpy = state["python"], state["numpy"]
    internal = tuple(int(i) for i in python["internal"])
    random.setstate((python["version"], internal, python["gauss"]))
    position, has_gauss, cached = numpy["rest"]
    keys = np.asarray(numpy["keys"]).astype(np.uint32)
    np.random.set_state((numpy["name"], keys, position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and state["cuda"]:
        torch.cuda.set_rng_state_all([state["cuda"][k] for k in sorted(state["cuda"], key=int)])
