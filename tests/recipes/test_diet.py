"""The parts of the recipe on encoders: the baseline's formula, ranks, times, and every arm."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from gossamer.recipes._encoders import SegmentsAtInput, TupePositions, measure_times
from gossamer.recipes.diet import RECIPE, Config, encoder_of, rank_of, run
from gossamer.train import FileLogger
from gossamer.train.logging import NoLogger

TINY = Config(
    length=8, projection=4, test_tokens=64, dim=8, layers=1, batch_size=4, steps=2,
    rank=4, speed_dim=16, speed_layers=1, speed_length=8, speed_batch=2, forward_repeats=2,
    step_repeats=1,
)  # fmt: skip
ARMS = [arm.name for arm in RECIPE.arms]


# --- reference values ---


def test_tupe_is_its_formula() -> None:
    torch.manual_seed(0)
    positions = TupePositions(6, 2, 9).double()
    torch.nn.init.normal_(positions.relative.table)
    ids = torch.tensor([[3, 1, 9]])
    found = positions.bias(ids, ids, q_index=ids * 0)[0]
    rows = positions.table.weight
    spread = (rows - rows.mean(1, keepdim=True)) / (rows.var(1, correction=0) + 1e-5).sqrt()[
        :, None
    ]
    for head in range(2):
        part = slice(3 * head, 3 * head + 3)
        for i, p in enumerate((3, 1, 9)):
            for j, r in enumerate((3, 1, 9)):
                q = positions.to_q.weight[part] @ spread[p]
                k = positions.to_k.weight[part] @ spread[r]
                bucket = positions.relative.bucket(torch.tensor(p - r))
                expected = (q * k).sum() / math.sqrt(2 * 3) + positions.relative.table[head, bucket]
                torch.testing.assert_close(found[head, i, j], expected)


def test_tupe_scales_the_content_alike() -> None:
    model = encoder_of("tupe", TINY, 9, 8, 2, 4, 8)
    assert [layer.attention.scale for layer in model.layers] == [1 / math.sqrt(2 * 2)] * 2
    assert sum(isinstance(m, TupePositions) for m in model.modules()) == 1  # shared by the layers
    tokens = torch.randint(9, (1, 8))
    assert not torch.allclose(model(tokens.flip(1)), model(tokens).flip(1))


def test_segments_at_the_input_are_those_of_the_ids() -> None:
    model = encoder_of("segments_input", TINY, 9, 8, 1, 4, 8)
    assert isinstance(model, SegmentsAtInput)
    tokens, segments = torch.randint(9, (2, 8)), torch.randint(2, (2, 8))
    places = torch.arange(1, 9).expand(2, 8)
    found = model(tokens, torch.stack((places, segments + 1), dim=-1))
    torch.testing.assert_close(found, model.encoder(tokens, segments=segments))
    assert model.num_parameters() == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("seed", range(3))
def test_ranks_are_those_of_the_theory(seed: int) -> None:
    found = {arm: rank_of(arm, seed) for arm in ("input", "none", "diet_absolute")}
    assert {arm: value["rank"] for arm, value in found.items()} == {
        "input": 16, "none": 16, "diet_absolute": 32,
    }  # fmt: skip
    assert all(value["rank_off"] == 0 for value in found.values())
    for arm in ("diet_relative", "t5", "tupe"):
        assert rank_of(arm, seed)["rank"] > 32
    assert rank_of("shaw", seed) == {}


class Clocked(torch.nn.Module):
    """A model whose passes take a given time, by a clock of the test."""

    now = 0.0

    def __init__(self, costs: list[float]) -> None:
        super().__init__()
        self.costs = costs
        self.table = torch.nn.Embedding(3, 3)
        self.modes: list[tuple[bool, bool]] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        Clocked.now += self.costs[len(self.modes) % len(self.costs)]
        self.modes.append((self.training, torch.is_grad_enabled()))
        return self.table(tokens)


def test_times_are_ratios_of_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.process_time", lambda: Clocked.now)
    # the warm-up is not counted, and one slow round moves no median
    slow, plain = Clocked([100.0, 3.0, 3.0, 50.0]), Clocked([2.0])
    tokens = torch.zeros(1, 2, dtype=torch.long)
    times = measure_times([slow, plain], tokens, forward_repeats=3, step_repeats=3)
    assert times == {"forward": 1.5, "step": 1.5}
    assert slow.modes == plain.modes == [(False, False)] * 4 + [(True, True)] * 4


# --- arms ---


def test_compared_arms_differ_in_positions_alone() -> None:
    def rest(arm: str) -> dict[str, torch.Size]:
        state = encoder_of(arm, TINY, 9, 8, 2, 4, 8).state_dict()
        return {
            name.removeprefix("encoder."): value.shape
            for name, value in state.items()
            if not name.removeprefix("encoder.").startswith(("positions", "segment_embedding"))
        }

    plain = rest("none")
    for arm in ("input", "diet_absolute", "diet_relative", "t5", "tupe", "segments_head"):
        assert rest(arm) == plain
    assert rest("segments_input") == plain
    assert rest("linformer_diet") == rest("linformer_input")


@pytest.fixture
def tiny(tmp_path: Path) -> Config:
    """The tiny settings on a short text."""
    file = tmp_path / "song.txt"
    file.write_text("la la li la, " * 30)
    return dataclasses.replace(TINY, text=str(file))


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_gives_what_the_claims_ask_for(arm: str, tiny: Config, tmp_path: Path) -> None:
    torch.manual_seed(0)
    outcome = run(tiny, arm, 0, FileLogger(tmp_path))
    wanted = {c.metric for c in RECIPE.claims if arm in (c.ours, *c.baselines)}
    assert wanted <= set(outcome.scalars) <= {column.name for column in RECIPE.columns}
    assert all(math.isfinite(value) for value in outcome.scalars.values())
    assert [row["step"] for row in outcome.rows if "step" in row] == [2]


def test_the_same_seed_gives_the_same_loss(tiny: Config) -> None:
    def losses(seed: int) -> dict[str, float]:
        torch.manual_seed(seed)
        return run(tiny, "segments_head", seed, NoLogger()).scalars

    assert losses(3) == losses(3)
    assert losses(3) != losses(4)
