"""Fine-tuning of a ranker: its loss, what it changes, what a resumed run gives, bad input."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("transformers")

from gossamer.errors import (
    ConfigError,
    DataError,
    DtypeError,
    MissingDependencyError,
    UnsupportedError,
)
from gossamer.files import read_json, read_lines
from gossamer.retrieval import (
    BlockRanker,
    RankerFitConfig,
    RankingRow,
    fit_ranker,
    select_layer,
)
from gossamer.retrieval._ranker_training import RankingStream, RowLoss, block_attention_in
from gossamer.retrieval._ranking_prompt import RankingTemplate
from gossamer.train import TrainConfig

from .tiny_ranker import model, rows, tokenizer

OFFSET = 300
LOOP = TrainConfig(steps=4, lr=1e-2, device="cpu", checkpoint_every=2, log_every=1)
FIT = RankerFitConfig(train=LOOP, batch_size=2, query_position_offset=OFFSET, quiet=True)


def template() -> RankingTemplate:
    return RankingTemplate(tokenizer(), query_offset=OFFSET, max_position=512)


def stream(batch_size: int = 1) -> RankingStream:
    return RankingStream(rows(), template(), batch_size, seed=0)


def weights(trained: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trained.named_parameters()}


# --- reference values ---


@pytest.mark.parametrize("answer_weight", [1.0, 0.0])
def test_the_loss_is_that_of_the_formula_under_the_whole_mask(answer_weight: float) -> None:
    llama = model().double()
    (row,) = stream().batch(0)
    prompt, layer = row.prompt, 1
    loss = RowLoss(layer, aux_weight=0.1, answer_weight=answer_weight, temperature=0.05)
    with block_attention_in(llama):
        found = loss(llama, [row])
    llama.set_attn_implementation("eager")
    mask = torch.zeros(prompt.layout.mask().shape, dtype=torch.float64)
    mask = mask.masked_fill(~prompt.layout.mask(), -1e30)[None, None]
    out = llama(
        prompt.input_ids[None],
        attention_mask=mask,
        position_ids=prompt.position_ids()[None],
        output_attentions=True,
    )
    targets = prompt.targets()[1:]
    told = targets != -100
    answer = F.cross_entropy(out.logits[0, :-1][told], targets[told])
    blocks = prompt.layout.block_ids()
    first = len(blocks) - prompt.num_answer - 2
    weight = out.attentions[layer][0, :, first : first + 2].double()
    shares = torch.stack([weight[..., blocks == 1 + k].sum(-1) for k in range(4)], -1)
    scores = (shares / shares.sum(-1, keepdim=True)).mean((0, 1)) / 0.05
    ranking = scores.logsumexp(0) - scores[list(row.places)].logsumexp(0)
    expected = answer_weight * answer + 0.1 * ranking
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # its softmax is float32


def test_every_epoch_has_another_order_and_answers_follow_it() -> None:
    source, given = stream(), {row.query_id: row for row in rows()}
    words = tokenizer()
    seen = []
    for number in range(12):
        (row,) = source.batch(number)
        text = words.decode(row.prompt.input_ids)
        query = next(r for r in given.values() if f"Query : {r.query} " in text)
        (place,) = row.places
        answer = words.decode(row.prompt.input_ids[-row.prompt.num_answer :])
        assert answer.startswith(f"{place} ]")
        right = query.documents[query.answer_ids[0]]
        assert f"ID : {place} | CONTENT : {right} | END ID : {place}" in text
        seen.append((query.query_id, place))
    assert sorted(q for q, _ in seen[:6]) == sorted(q for q, _ in seen[6:]) == sorted(given)
    assert seen[:6] != seen[6:]
    places = dict(seen[:6])
    assert any(places[query] != place for query, place in seen[6:])
    assert [r.places for r in stream(3).batch(1)] == [(place,) for _, place in seen[3:6]]


def test_a_long_document_is_told_of_once() -> None:
    short = RankingTemplate(tokenizer(), query_offset=OFFSET, max_document_length=8)
    source = RankingStream(rows(), short, 1, seed=0)
    with pytest.warns(UserWarning, match=r"max_document_length = 8 tokens lose their end: 4 of 4"):
        source.batch(0)
    source.batch(1)


# --- what training does ---


def test_it_learns_to_rank_and_the_folder_loads(tmp_path: Path) -> None:
    llama, examples = model(), rows(2)
    loop = replace(LOOP, steps=16, checkpoint_every=0)
    config = replace(FIT, train=loop, folder=tmp_path)
    ranker = fit_ranker(llama, tokenizer(), examples, aux_weight=1.0, aux_layer=1, config=config)
    assert ranker.layer == 1
    assert ranker.template.query_offset == OFFSET
    assert ranker.model is llama
    assert not llama.training
    assert llama.config._attn_implementation == "sdpa"
    losses = [line["loss"] for line in read_lines(tmp_path / "metrics.jsonl")]
    assert losses[-1] < 0.5 * losses[0]
    loaded = BlockRanker.from_pretrained(tmp_path)
    assert (loaded.layer, loaded.template.query_offset) == (1, OFFSET)
    for row in examples:
        found = loaded.rank(row.query, [{"id": k, "text": t} for k, t in row.documents.items()])
        assert found.ids[0] == row.answer_ids[0]
        mine = ranker.rank(row.query, list(row.documents.values()))
        torch.testing.assert_close(torch.tensor(mine.scores), torch.tensor(found.scores))


def test_checkpointing_and_its_absence_give_the_same_weights() -> None:
    trained = []
    for checkpointing in (False, True):
        llama = model()
        config = replace(FIT, checkpointing=checkpointing)
        fit_ranker(llama, tokenizer(), rows(), aux_weight=1.0, config=config)
        assert not any(getattr(m, "gradient_checkpointing", False) for m in llama.modules())
        trained.append(weights(llama))
    for name, value in trained[0].items():
        torch.testing.assert_close(value, trained[1][name], msg=name)


def test_a_run_that_broke_off_ends_like_one_that_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = model(), model()
    fit_ranker(whole, tokenizer(), rows(), config=replace(FIT, folder=tmp_path / "whole"))
    plain, calls = RowLoss.__call__, []

    def breaks(self: RowLoss, *args: Any) -> torch.Tensor:
        calls.append(0)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return plain(self, *args)

    config = replace(FIT, folder=tmp_path / "broken")
    monkeypatch.setattr(RowLoss, "__call__", breaks)
    with pytest.raises(KeyboardInterrupt):
        fit_ranker(broken, tokenizer(), rows(), config=config)
    assert broken.config._attn_implementation == "sdpa"
    fit_ranker(model(seed=5), tokenizer(), rows(), config=config, resume=True)
    assert len(calls) == 4 + 2
    again = BlockRanker.from_pretrained(tmp_path / "broken").model
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(again)[name]), name
    with pytest.raises(DataError, match=r"was begun with aux_weight = 0.1; got 0.2"):
        fit_ranker(model(), tokenizer(), rows(), aux_weight=0.2, config=config, resume=True)
    with pytest.raises(DataError, match=r"was begun with rows = '6 rows, checksum"):
        fit_ranker(model(), tokenizer(), rows(seed=1), config=config, resume=True)


def test_adapters_are_added_to_the_weights(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    llama, config = model(), replace(FIT, folder=tmp_path)
    before = weights(llama)
    ranker = fit_ranker(llama, tokenizer(), rows(), lora=2, aux_weight=1.0, config=config)
    after = weights(ranker.model)
    assert list(after) == list(before)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert changed == {name for name in before if any(kind in name for kind in kinds)}
    assert read_json(tmp_path / "config.json")["block_rank_layer"] == 2
    loaded = BlockRanker.from_pretrained(tmp_path)
    for name, value in weights(loaded.model).items():
        torch.testing.assert_close(value, after[name])


def test_frozen_parameters_stay() -> None:
    llama = model()
    llama.requires_grad_(False)
    llama.model.layers[0].self_attn.q_proj.requires_grad_(True)
    before = weights(llama)
    config = replace(FIT, answer_weight=0.0)
    fit_ranker(llama, tokenizer(), rows(), aux_weight=1.0, config=config)
    changed = [name for name, p in weights(llama).items() if not torch.equal(p, before[name])]
    assert changed == ["model.layers.0.self_attn.q_proj.weight"]


# --- choice of the layer ---


def test_the_table_of_layers_is_what_rankers_of_each_layer_give() -> None:
    llama, examples = model(), rows(8)
    ranker = BlockRanker(llama, tokenizer(), query_position_offset=OFFSET)
    report = select_layer(ranker, examples)
    for layer, accuracy in enumerate(report.accuracy):
        one = BlockRanker(llama, tokenizer(), layer=layer, query_position_offset=OFFSET)
        firsts = [one.rank(r.query, list(r.documents.values())).order[0] for r in examples]
        hits = [first in r.answer_places for first, r in zip(firsts, examples, strict=True)]
        assert math.isclose(accuracy, sum(hits) / 8, abs_tol=1e-6)
    assert report.accuracy[report.layer] == max(report.accuracy)
    assert report.chance == 0.25
    assert len(report.rows()) == 3
    assert report.to_dict()["num_queries"] == 8
    assert llama.config._attn_implementation == "sdpa"


# --- bad input ---


def test_rows_that_cannot_be_trained_on() -> None:
    def fit(examples: list[Any]) -> None:
        fit_ranker(model(), tokenizer(), examples, config=FIT)

    with pytest.raises(DataError, match="rows must hold at least one row"):
        fit([])
    with pytest.raises(DataError, match=r"among the row's 1 documents; got 'b' at place 0"):
        fit([RankingRow("w1", {"a": "w1"}, ("b",))])
    with pytest.raises(DataError, match=r"documents; got 'none' at place 0"):
        fit([RankingRow("w1", {"a": "w1"}, ())])
    with pytest.raises(DataError, match="rows must be RankingRows; got dict at place 0"):
        fit([{"query": "w1"}])
    with pytest.raises(DataError, match="query must be a text that is not blank"):
        fit([RankingRow(" ", {"a": "w1"}, ("a",))])


def test_options_out_of_range() -> None:
    def fit(config: RankerFitConfig = FIT, **options: Any) -> None:
        fit_ranker(model(), tokenizer(), rows(), config=config, **options)

    with pytest.raises(ConfigError, match="layer must be >= 0 and <= 2; got 3"):
        fit(aux_layer=3)
    with pytest.raises(ConfigError, match="layer must be a number from 0 or 'auto'; got 'last'"):
        fit(aux_layer="last")
    with pytest.raises(ConfigError, match="aux_weight must be >= 0"):
        fit(aux_weight=-1.0)
    with pytest.raises(ConfigError, match="temperature must be > 0"):
        fit(temperature=0.0)
    with pytest.raises(ConfigError, match="lora must be >= 1; got 0"):
        fit(lora=0)
    with pytest.raises(ConfigError, match="query_position_offset must lie below the end"):
        fit(replace(FIT, query_position_offset=512))
    with pytest.raises(ConfigError, match="must lie after the instruction"):
        fit(replace(FIT, query_position_offset=10))
    with pytest.raises(ConfigError, match="batch_size must be >= 1"):
        RankerFitConfig(batch_size=0)
    with pytest.raises(ConfigError, match="answer_weight must be >= 0"):
        RankerFitConfig(answer_weight=-0.5)


def test_models_that_cannot_be_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import BertConfig, BertModel

    with pytest.raises(DtypeError, match="trained parameters must be float32"):
        fit_ranker(model().bfloat16(), tokenizer(), rows(), config=FIT)
    with pytest.raises(ConfigError, match="must have parameters that require a gradient"):
        fit_ranker(model().requires_grad_(False), tokenizer(), rows(), config=FIT)
    small = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    with pytest.raises(UnsupportedError, match="must be a causal decoder"):
        fit_ranker(BertModel(small), tokenizer(), rows(), config=FIT)
    with pytest.raises(UnsupportedError, match=r"got the name 'my-model'. Load it"):
        fit_ranker("my-model", tokenizer(), rows(), config=FIT)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedError, match="WORLD_SIZE = 2"):
        fit_ranker(model(), tokenizer(), rows(), config=FIT)
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingDependencyError, match=r"gossamer\[retrieval\]"):
        fit_ranker(model(), tokenizer(), rows(), config=FIT, lora=2)
