"""`gossamer doctor`."""

from __future__ import annotations

import importlib.util
import os
import platform
import tempfile
from typing import Annotated, Any

from cyclopts import Parameter

from gossamer._version import __version__
from gossamer.cli._common import COMMON, Common, print_json
from gossamer.environment import PACKAGES, package_versions
from gossamer.errors import MissingDependencyError

__all__ = ["run"]

_NEEDED = (*PACKAGES, "numba")
_EXTRAS = {
    "hf": ("transformers", "huggingface_hub"),
    "models": ("transformers", "gguf"),
    "retrieval": ("faiss", "peft", "sentence_transformers"),
    "serve": ("starlette", "uvicorn"),
}


def run(*, net: Annotated[bool, Parameter(negative="")] = False, common: Common = COMMON) -> int:
    """Check the installation: versions, threads, device, writable folder, optional extras.

    Exits with 1 when something that is needed is wrong.

    Example: gossamer doctor

    Args:
        net: Also try to reach the Hugging Face hub, which nothing here needs. This is the only
            command that opens a connection, and it sends nothing but that request.
    """
    facts, warnings = _facts()
    if net:
        facts["hub"] = _hub()
    if common.json:
        print_json({"command": "doctor", "version": __version__, **facts, "warnings": warnings})
    else:
        for name, value in facts.items():
            print(f"{name:14}{value}")
        for warning in warnings:
            print(f"warning: {warning}")
        print("all good" if not warnings else f"{len(warnings)} warning(s)")
    return 0 if facts["writable"] == "yes" and "missing" not in facts.values() else 1


def _facts() -> tuple[dict[str, Any], list[str]]:
    import torch

    warnings = []
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda ({torch.cuda.get_device_name()})"
    elif torch.version.cuda:
        warnings.append("CUDA build of torch, no GPU found; a CPU build would save over 2 GB")
    elif torch.backends.mps.is_available():
        device = "mps"
    facts: dict[str, Any] = {"gossamer": __version__, "python": platform.python_version()}
    facts |= package_versions(_NEEDED)
    warnings += [f"{name} is missing" for name in _NEEDED if facts[name] == "missing"]
    facts |= {"device": device, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    facts["writable"] = "yes" if os.access(os.getcwd(), os.W_OK) and _can_write() else "no"
    if facts["writable"] == "no":
        warnings.append(f"{os.getcwd()} is not writable; give --out to every command")
    for extra, modules in _EXTRAS.items():
        there = all(importlib.util.find_spec(module) for module in modules)
        facts[f"extra {extra}"] = "installed" if there else f'no (pip install "gossamer[{extra}]")'
    return facts, warnings


def _can_write() -> bool:
    try:
        with tempfile.TemporaryFile(dir=os.getcwd()):
            return True
    except OSError:
        return False


def _hub() -> str:
    from urllib.error import URLError
    from urllib.request import Request, urlopen

    try:
        from huggingface_hub.constants import ENDPOINT
    except ImportError:
        raise MissingDependencyError("huggingface_hub", "hf") from None
    try:
        with urlopen(Request(ENDPOINT, method="HEAD"), timeout=5) as answer:
            return f"reached ({answer.status})"
    except (URLError, TimeoutError, OSError) as error:
        return f"not reached ({error})"
