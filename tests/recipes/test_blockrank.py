"""The recipe on ranking by attention: its prompts, its model, every arm, and a short real run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from gossamer.recipes import _ranking as ranking
from gossamer.recipes._ranking import (
    PromptDecoder,
    Prompts,
    PromptStream,
    draw_prompts,
    layout_of,
    measure_prompts,
    prompt_loss,
)
from gossamer.recipes.blockrank import RECIPE, Config, reading, run
from gossamer.train import NoLogger, TrainConfig, Trainer

TINY = Config(
    dim=32, hidden_dim=16, batch_size=4, steps=4, num_samples=32, every=2, curve_samples=16
)
LOSS: dict[str, Any] = {"layer": 2, "stand_in_weight": 0.3, "temperature": 0.05}


def prompts(count: int = 200, documents: int = 8) -> Prompts:
    return draw_prompts(count, documents, torch.Generator().manual_seed(3))


def documents_of(made: Prompts) -> torch.Tensor:
    """Return the words of each document, `(B, N, 6)`."""
    return made.tokens[:, 6:-7].view(len(made.tokens), made.documents, 9)[..., 2:8]


# --- prompts ---


def test_prompts_are_as_described() -> None:
    made = prompts()
    assert made.tokens.shape == (200, 85)
    query = made.tokens[:, 1:5]
    assert torch.equal(query, made.tokens[:, -6:-2])
    words = documents_of(made)
    assert int(words.max()) < ranking.CONTENT
    assert all(len(set(row.tolist())) == 6 for row in words.flatten(0, 1))
    shared = (words[..., None] == query[:, None, None]).any(-1).sum(-1)
    right = shared.gather(1, made.relevant[:, None])
    assert right.eq(3).all()
    others = shared.scatter(1, made.relevant[:, None], 0)
    assert int(others.max()) == 1
    assert abs(others.sum() / (200 * 7) - 0.5) < 0.05
    blocks = made.tokens[:, 6:-7].view(200, 8, 9)
    assert torch.equal(blocks[..., 1], made.ids)
    assert torch.equal(blocks[..., 8], made.ids)
    assert all(len(set(row.tolist())) == 8 for row in made.ids)
    assert torch.equal(made.answers, made.ids[torch.arange(200), made.relevant])
    assert layout_of(8).lengths == (6, *[9] * 8, 7)
    assert made.relevant.bincount(minlength=8).min() > 10


def test_batches_by_number_are_the_same_again_and_grow() -> None:
    stages = ((0.0, 1), (0.12, 2), (0.25, 4), (0.4, 8))
    stream = PromptStream(2, stages, 100, seed=1)
    sizes = [stream.batch(number).documents for number in range(100)]
    assert [sizes.count(n) for n in (1, 2, 4, 8)] == [12, 13, 15, 60]
    assert torch.equal(stream.batch(7).tokens, stream.batch(7).tokens)
    assert not torch.equal(stream.batch(7).tokens, stream.batch(8).tokens)
    other = PromptStream(2, stages, 100, seed=2)
    assert not torch.equal(stream.batch(7).tokens, other.batch(7).tokens)


# --- model and loss ---


def test_the_order_of_documents_changes_nothing_by_blocks_and_something_in_full() -> None:
    made = prompts(4, 3)
    order = torch.tensor([2, 0, 1])
    blocks = made.tokens[:, 6:-7].view(4, 3, 9)[:, order].flatten(1)
    moved = Prompts(
        torch.cat((made.tokens[:, :6], blocks, made.tokens[:, -7:]), 1), made.ids[:, order],
        made.relevant,
    )  # fmt: skip
    for by_blocks in (True, False):
        torch.manual_seed(0)
        model = PromptDecoder(by_blocks)
        with torch.no_grad():
            (hidden, scores), (again, found) = model(made), model(moved)
        same = torch.allclose(scores[3][:, order], found[3], atol=1e-5)
        assert same == by_blocks
        assert torch.allclose(hidden[:, -1], again[:, -1], atol=1e-4) == by_blocks
        torch.testing.assert_close(scores[0].sum(1), torch.ones(4))


def test_the_model_has_the_size_and_the_start_that_are_told() -> None:
    model = PromptDecoder(True)
    assert model.num_parameters() == 140_480
    attention = model.decoder.layers[0].attention
    assert torch.equal(attention.to_q.weight, attention.to_k.weight)
    assert abs(float(model.decoder.embedding.weight.detach().std()) - 1) < 0.05


def test_the_loss_is_the_sum_of_its_parts() -> None:
    made, layout = prompts(3, 2), layout_of(2)
    model = PromptDecoder(True, dim=32)
    hidden, scores = model(made)
    log = model.logits(hidden).log_softmax(-1)[:, :-1]
    each = -log.gather(2, made.tokens[:, 1:, None])[..., 0]
    length = layout.num_tokens
    answer = -model.logits(hidden[:, -1]).log_softmax(-1).gather(1, made.answers[:, None]).mean()
    repeated = each[:, length - 7 : length - 3].mean()
    closing = each[:, [13, 22]].mean()
    assert torch.equal(made.tokens[:, [14, 23]], made.ids)
    s = scores[2] / 0.05
    aux = (s.logsumexp(1) - s.gather(1, made.relevant[:, None])[:, 0]).mean()
    found = prompt_loss(model, made, aux_weight=2.0, **LOSS)
    torch.testing.assert_close(found, answer + 0.3 * (repeated + closing) + 2.0 * aux)


def test_measures_count_first_places(monkeypatch: pytest.MonkeyPatch) -> None:
    model = PromptDecoder(True, dim=32, num_layers=1)

    def cheat(self: PromptDecoder, made: Prompts) -> tuple[torch.Tensor, list[torch.Tensor]]:
        right = torch.nn.functional.one_hot(made.relevant, made.documents).float()
        right[0] = 1 - right[0]
        return torch.zeros(len(made.tokens), 1, 32), [right]

    monkeypatch.setattr(PromptDecoder, "forward", cheat)
    read, _ = measure_prompts(model, 2, 256, torch.Generator().manual_seed(0))
    assert read == [pytest.approx(100 * 254 / 256)]  # two portions, one miss in each


# --- arms ---


def test_reading_is_generous_to_arms_without_the_loss() -> None:
    assert reading([1.0, 9.0, 2.0], "block_aux", Config()) == 2.0
    assert reading([1.0, 9.0, 2.0], "block_ntp", Config()) == 9.0


@pytest.mark.parametrize("arm", [arm.name for arm in RECIPE.arms])
def test_every_arm_gives_what_table_claims_and_figures_ask(arm: str) -> None:
    outcome = run(TINY, arm, 0, NoLogger())
    assert set(outcome.scalars) == {column.name for column in RECIPE.columns}
    assert all(math.isfinite(value) for value in outcome.scalars.values())
    kinds = {row["what"] for row in outcome.rows}
    assert kinds == {figure.options["where"]["what"] for figure in RECIPE.figures}
    points = [row for row in outcome.rows if row["what"] == "attention"]
    assert [row["step"] for row in points] == [0, 2, 4]


def test_arms_differ_in_what_they_say_they_differ_in(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    plain = ranking.prompt_loss

    def watch(model: PromptDecoder, made: Prompts, **options: Any) -> torch.Tensor:
        seen[arm.name] = (model.blocks, options["aux_weight"], made.tokens.sum().item())
        return plain(model, made, **options)

    monkeypatch.setattr(ranking, "prompt_loss", watch)
    for arm in RECIPE.arms:
        run(replace(TINY, steps=1), arm.name, 0, NoLogger())
    assert {name: entry[:2] for name, entry in seen.items()} == {
        "block_aux": (True, 1.0), "full_aux": (False, 1.0), "block_ntp": (True, 0.0),
        "full_ntp": (False, 0.0),
    }  # fmt: skip
    assert len({entry[2] for entry in seen.values()}) == 1


@pytest.mark.recipe
@pytest.mark.timeout(600)
def test_two_thirds_of_a_run_are_enough_for_attention_to_rank() -> None:
    class Enough(Exception):
        pass

    config = Config()
    torch.manual_seed(0)
    model = PromptDecoder(True)

    def loss(model: PromptDecoder, made: Prompts) -> torch.Tensor:
        if made.number == 800:
            raise Enough
        return prompt_loss(model, made, aux_weight=1.0, **LOSS)

    loop = TrainConfig(
        steps=config.steps, lr=config.lr, weight_decay=0.01, warmup=50 / 1200, device="cpu",
        checkpoint_every=0,
    )  # fmt: skip
    stages = tuple(zip(config.begins, config.documents, strict=True))
    stream = PromptStream(config.batch_size, stages, config.steps, seed=0)
    with pytest.raises(Enough):
        Trainer(model, loss, loop, quiet=True).fit(stream)
    read, _ = measure_prompts(model, 8, 512, torch.Generator().manual_seed(1))
    assert read[config.layer] >= 95
