"""Position encodings by name, as models and configuration files ask for them."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from gossamer.checks import check_choice, check_given, check_keys
from gossamer.positions.base import Positions

__all__ = ["POSITION_NAMES", "build_positions"]

# name -> module, class, and which sizes of the model the constructor takes first
_ENCODINGS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "none": ("none", "NoPositions", ()),
    "learned": ("learned", "LearnedPositions", ("dim",)),
    "coupled": ("learned", "CoupledPositions", ("dim",)),
    "coupled_relative": ("coupled", "CoupledRelativePositions", ("num_heads",)),
    "rope": ("rope", "RopePositions", ("head_dim",)),
    "alibi": ("alibi", "AlibiPositions", ("num_heads",)),
    "kerple_log": ("kerple", "KerpleLogPositions", ("num_heads",)),
    "kerple_power": ("kerple", "KerplePowerPositions", ("num_heads",)),
    "t5": ("t5", "T5Positions", ("num_heads",)),
    "fire": ("fire", "FirePositions", ("num_heads",)),
    "diet_absolute": ("diet", "DietAbsolutePositions", ("num_heads",)),
    "diet_relative": ("diet", "DietRelativePositions", ("num_heads",)),
}

POSITION_NAMES = tuple(_ENCODINGS)


def build_positions(
    name: str, *, dim: int, num_heads: int, head_dim: int, **options: Any
) -> Positions:
    """Build a position encoding by name.

    Args:
        name: One of `POSITION_NAMES`.
        dim: Model width; read by learned tables.
        num_heads: Attention heads; read by biases.
        head_dim: Width of a head; read by rotations.
        **options: The encoding's own keywords, for example `window=3`.

    Raises:
        ConfigError: If the name or an option is unknown, or a needed option is missing.

    Example:
        >>> build_positions("rope", dim=64, num_heads=4, head_dim=16)
        RopePositions(head_dim=16, theta=10000, scale=1)
    """
    check_choice(name, _ENCODINGS, "position encoding")
    module, symbol, takes = _ENCODINGS[name]
    encoding = getattr(importlib.import_module(f"gossamer.positions.{module}"), symbol)
    parameters = [p for p in inspect.signature(encoding).parameters.values() if p.name not in takes]
    check_keys(options, [p.name for p in parameters], f"position encoding {name!r}")
    for parameter in parameters:
        if parameter.default is inspect.Parameter.empty:
            check_given(options, parameter.name, f"position encoding {name!r}")
    sizes = {"dim": dim, "num_heads": num_heads, "head_dim": head_dim}
    built: Positions = encoding(*(sizes[size] for size in takes), **options)
    return built
