"""What the folder of a retriever's training says of it."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from gossamer.models import DualEncoder
from gossamer.retrieval.training_rows import TrainingRows

__all__ = ["run_settings"]


def run_settings(
    config: Any, loss: Any, negatives: str, model: DualEncoder, rows: TrainingRows
) -> str:
    """Return what must be the same when a run is resumed, and tells one run from another."""
    import tomli_w

    name = loss if isinstance(loss, str) else _name_of(loss)
    values = {key: value for key, value in dataclasses.asdict(config).items() if value is not None}
    del values["device"]  # may change between the parts of a run
    return tomli_w.dumps(
        {
            "loss": name,
            "negatives": negatives,
            "rows": f"{len(rows.texts)} rows, {len(rows.label_texts)} labels, "
            f"checksum {rows.checksum():08x}",
            "retriever": values,
            "model": model.describe(),
        }
    )


def _name_of(loss: Any) -> str:
    """Return a loss as text: with its options, and without an address that changes."""
    if isinstance(loss, nn.Module):
        return repr(loss)
    return str(getattr(loss, "__qualname__", type(loss).__name__))
