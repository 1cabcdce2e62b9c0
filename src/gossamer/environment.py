"""The machine and the versions behind a run."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from gossamer._version import __version__

__all__ = ["PACKAGES", "describe_environment", "package_versions"]


PACKAGES = ("torch", "numpy", "scipy", "scikit-learn", "accelerate", "safetensors", "matplotlib")


def describe_environment() -> dict[str, Any]:
    """Return what `environment.json` holds; plain values, nothing that names a person or a place.

    Example:
        >>> "python" in describe_environment()
        True
    """
    return {
        "gossamer": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "packages": package_versions(PACKAGES),
        "finished": time.strftime("%Y-%m-%d"),
    }


def package_versions(names: Sequence[str]) -> dict[str, str]:
    """Return the installed version of each package, or `"missing"`.

    Example:
        >>> package_versions(["no-such-package"])
        {'no-such-package': 'missing'}
    """
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "missing"
    return versions


def _processor() -> str:
    linux = Path("/proc/cpuinfo")
    for line in linux.read_text(encoding="utf-8").splitlines() if linux.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
