"""Shared fixtures: one thread, and fresh memory filled with NaN."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

DATA = Path(__file__).parent / "data"


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill `torch.empty` with NaN, so that code which forgets to write a value fails."""
    plain = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        made = plain(*args, **kwargs)  # type: ignore[call-overload]
        return made.fill_(float("nan")) if made.is_floating_point() and made.is_leaf else made

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def outside_data() -> Path:
    """The folder of data sets that are not shipped; the test is skipped where it is absent."""
    folder = os.environ.get("GOSSAMER_DATA")
    if not folder:
        pytest.skip("GOSSAMER_DATA is not set: this test needs data that is not shipped")
    return Path(folder)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
