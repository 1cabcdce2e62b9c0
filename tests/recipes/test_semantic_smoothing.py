"""The recipe on smoothing over sentences: data, arms, losses, measures, scales."""

from __future__ import annotations

import dataclasses
import gzip
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gossamer.errors import ConfigError, DataError, GossamerError
from gossamer.measures import corpus_bleu
from gossamer.models import shift_right
from gossamer.recipes import Claim, run_recipe
from gossamer.recipes import _restaurant_texts as texts
from gossamer.recipes import _semantic_smoothing as parts
from gossamer.recipes.semantic_smoothing import MINING, RECIPE, Config, run
from gossamer.train.logging import NoLogger

TINY = Config(
    data="nothing-of-this-name",
    dim=16,
    layers=1,
    heads=2,
    hidden_dim=16,
    steps=2,
    warmup=1,
    batch_size=16,
    log_every=1,
    mining_data="nothing-of-this-name",
    mining_sentences=60,
)
TRAINED = [arm.name for arm in RECIPE.arms if arm.name != MINING]


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LONGEST", 40)


# --- data ---


def test_names_become_placeholders_and_inputs_sets() -> None:
    slots = [("name", "Blue Spice"), ("near", "Café X"), ("eatType", "Pub")]
    found = texts.with_placeholders(slots, "Blue Spice, a pub near Café X.")
    expected = (("eatType", "pub"), ("name", "x-name"), ("near", "x-near"))
    assert found == (expected, "x-name , a pub near x-near .")
    assert texts.with_placeholders(slots[::-1], "")[0] == expected


def test_the_stand_in_has_inputs_apart_and_says_so() -> None:
    data = texts.load_texts("nothing-of-this-name")
    assert data.generated
    train = {source for source, _ in data.pairs}
    test = {source for source, _ in data.test}
    assert not train & test
    assert (len(test), len(data.pairs)) == (texts.HELD_OUT, texts.FEWEST - 2 * texts.HELD_OUT)
    assert {target for _, target in data.pairs} <= set(data.corpus)
    assert len(set(data.corpus)) == len(data.corpus)
    named = [
        value in text
        for (_, sentences), values in zip(data.test, data.values, strict=True)
        for text in sentences
        for value in values
    ]
    assert all(named)


def test_the_data_set_is_pooled_and_split_by_input() -> None:
    folder = Path(os.environ.get("GOSSAMER_DATA", "")) / "e2e_nlg"
    if not folder.is_dir():
        pytest.skip("GOSSAMER_DATA has no e2e_nlg")
    rows = [row for file in texts.FILES for row in texts.read_rows(folder / file)]
    assert len(rows) == 9365
    assert len({source for source, _ in rows}) == 1101
    data = texts.load_texts("e2e_nlg")
    assert not data.generated
    assert (len(data.pairs), len(data.test)) == (801, 150)
    assert not {s for s, _ in data.pairs} & {s for s, _ in data.test}
    held = {text for _, sentences in data.test for text in sentences}
    assert len(data.corpus) == len(set(data.corpus)) > 6000
    by_input = {s for s, _ in data.pairs}
    said = {text for source, text in rows if source in by_input}
    assert said == set(data.corpus)
    assert len(held) > 1000


def test_bad_files_of_the_data_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must hold devset.csv.gz"):
        list(texts.read_rows(tmp_path / "devset.csv.gz"))
    path = tmp_path / "devset.csv.gz"
    path.write_bytes(gzip.compress(b"mr,ref\nname[A],A is good\nnothing here,text\n"))
    with pytest.raises(DataError, match="row 3: expected columns mr"):
        list(texts.read_rows(path))


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("x-name is not a cheap pub .", {"x-name", "not", "cheap", "pub"}),
        ("rated 5 out of 5 in the city centre", {"5", "city", "centre"}),
        ("a notable publication", set()),
    ],
)
def test_the_facts_of_a_sentence(text: str, facts: set[str]) -> None:
    assert set(re.findall(texts.GUARD, text)) == facts


# --- arms ---


@pytest.mark.parametrize("arm", [arm.name for arm in RECIPE.arms])
def test_every_arm_gives_what_its_claims_need(arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LONGEST", 8)
    outcome = run(TINY, arm, 0, NoLogger())
    needed = {c.metric for c in RECIPE.claims if arm in (c.ours, *c.baselines)}
    assert needed <= set(outcome.scalars) <= {column.name for column in RECIPE.columns}
    assert all(math.isfinite(value) for value in outcome.scalars.values())
    assert outcome.scalars["generated"] == 1.0
    assert len(outcome.rows) == (0 if arm == MINING else 2)
    for figure in RECIPE.figures:
        # the runner adds the arm to each row
        assert all({figure.x, figure.y} <= {"arm", *row} for row in outcome.rows)


@pytest.mark.parametrize("arm", TRAINED)
def test_arms_replace_their_share_of_the_targets(arm: str) -> None:
    drawn = parts.draws(TINY, arm, 0)(3)
    assert len(drawn) == len(parts.load(TINY.data).texts.pairs)
    assert drawn == parts.draws(TINY, arm, 0)(3)
    replaces = arm in ("random", *parts.MINED)
    share = np.mean([place >= 0 for place in drawn])
    assert (0.15 < share < 0.4) if replaces else share == 0
    if replaces:
        assert drawn != parts.draws(TINY, arm, 1)(3)
        assert drawn != parts.draws(TINY, arm, 0)(4)
    if arm in parts.MINED:
        table = parts.neighbors(TINY.data, arm)
        for own, place in zip(table.indices.tolist(), drawn, strict=True):
            assert place == -1 or place in own
    if arm == "guarded":
        for target, own in zip(table.targets, table.indices.tolist(), strict=True):
            for place in own:
                if place >= 0:
                    facts = [set(re.findall(texts.GUARD, t)) for t in (target, table.corpus[place])]
                    assert facts[0] == facts[1]


def test_rerank_raises_the_overlap() -> None:
    tables = {arm: parts.neighbors(TINY.data, arm) for arm in ("cosine", "method")}
    assert parts.overlap(tables["method"]) > parts.overlap(tables["cosine"])
    assert (tables["cosine"].indices >= 0).all()


@pytest.mark.parametrize("arm", ["none", "random"])
def test_a_drawn_sentence_stands_in_the_place_of_a_target(arm: str) -> None:
    data = parts.load(TINY.data)
    stream = parts.Stream(TINY, data, arm, 2)
    for epoch in (1, 0):
        drawn = parts.draws(TINY, arm, 2)(epoch)
        seen = []
        for number in range(stream.per_epoch):
            batch = stream.batch(epoch * stream.per_epoch + number)
            rows = zip(batch.rows.tolist(), batch.source, batch.labels, strict=True)
            for row, tokens, labels in rows:
                source, target = data.texts.pairs[row]
                assert tokens[tokens != 0].tolist() == data.source(source)
                text = target if drawn[row] < 0 else data.texts.corpus[drawn[row]]
                assert labels[labels != -100].tolist() == [*data.target(text), 1]
                seen.append(row)
        assert sorted(seen) == list(range(len(data.texts.pairs)))


def test_losses_of_words_by_hand() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(7, 5), torch.randint(5, (7,))
    log_p = logits.log_softmax(-1)
    own = -log_p[torch.arange(7), labels]
    plain = parts.token_loss(TINY, "none", [[2]], 5)(logits, labels)
    torch.testing.assert_close(plain, own.mean())
    even = parts.token_loss(TINY, "token", [[2]], 5)(logits, labels)
    torch.testing.assert_close(even, (0.9 * own - 0.1 * log_p.mean(1)).mean())
    # targets [2, 2, 3] and [2], each with its end token 1
    shares = torch.tensor([0.0, 2 / 6, 3 / 6, 1 / 6, 0.0])
    by_count = parts.token_loss(TINY, "unigram", [[2, 2, 3], [2]], 5)(logits, labels)
    torch.testing.assert_close(by_count, (0.9 * own - 0.1 * (log_p * shares).sum(1)).mean())


# --- measures ---


def test_a_model_that_knows_the_answers_scores_fully() -> None:
    data = parts.load(TINY.data)

    class Oracle(torch.nn.Module):
        """Says the first reference of each input."""

        def generate(self, tokens: torch.Tensor, **options: object) -> torch.Tensor:
            made = [[*data.target(sentences[0]), 1] for _, sentences in data.texts.test]
            return parts.pad_rows(made, 1)

        def forward(self, source: torch.Tensor, target: torch.Tensor, **options: object):
            return torch.zeros(*target.shape, data.vocab_size)

    found = parts.measure(Oracle(), data)  # type: ignore[arg-type]
    firsts = [data.text(torch.tensor(data.target(s[0]))) for _, s in data.texts.test]
    assert found["greedy"] == found["beam"] == corpus_bleu(firsts, [s for _, s in data.texts.test])
    assert found["greedy"] > 95
    assert found["values"] == 100.0
    assert found["nll"] == pytest.approx(math.log(data.vocab_size), rel=1e-5)


def test_the_loss_of_the_references_is_that_of_each_token() -> None:
    data = parts.load(TINY.data)
    model = parts.train(TINY, "none", 0, NoLogger())
    total = count = 0.0
    with torch.no_grad():
        for source, sentences in data.texts.test[:5]:
            for sentence in sentences:
                labels = torch.tensor([[*data.target(sentence), 1]])
                logits = model(torch.tensor([data.source(source)]), shift_right(labels))
                total += float(F.cross_entropy(logits[0], labels[0], reduction="sum"))
                count += labels.numel()
    few = parts.Data(
        texts.Texts(data.texts.pairs, data.texts.corpus, data.texts.test[:5], True),
        data.words,
        data.slots,
    )
    with torch.no_grad():
        assert parts.reference_loss(model, few) == pytest.approx(total / count, rel=1e-5)


def test_training_depends_on_the_seed_alone() -> None:
    one, two, other = (parts.train(TINY, "guarded", seed, NoLogger()) for seed in (0, 0, 1))
    weights = [model.embedding.weight for model in (one, two, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    with pytest.raises(GossamerError, match="must be finite; got nan at step"):
        parts.train(dataclasses.replace(TINY, lr=1e20, steps=6), "none", 0, NoLogger())


# --- scales ---


def test_the_small_scale_judges_mining_alone() -> None:
    small, medium = RECIPE.at("small"), RECIPE.at("medium")
    assert {claim.ours for claim in small.claims} == {MINING}
    assert {arm.name for arm in small.arms} == {MINING, "none", "random", "guarded"}
    assert {"unigram", "random", "none"} <= {arm.name for arm in medium.arms}
    assert medium.claims == RECIPE.claims


def test_a_small_run_from_end_to_end(tmp_path: Path) -> None:
    changed = {
        name: getattr(TINY, name)
        for name in Config.__dataclass_fields__
        if getattr(TINY, name) != getattr(Config(), name)
    }
    result = run_recipe(RECIPE.name, config=changed, out=tmp_path / "r", jobs=1, quiet=True)
    assert result.summary["seeds"] == [0]
    assert [row["arm"] for row in result.summary["table"]] == [
        MINING, "guarded", "random", "none",
    ]  # fmt: skip
    assert len(result.summary["claims"]) == 2
    page = (tmp_path / "r" / "report.md").read_text()
    assert "generated sentences" in page


def test_a_claim_of_a_scale_needs_its_arms() -> None:
    claim = Claim("x", "beam", "", "method", "higher", "bar", 0.0)
    with pytest.raises(ConfigError, match="unknown arm in a claim"):
        dataclasses.replace(RECIPE, claims=(claim,)).at("small")
