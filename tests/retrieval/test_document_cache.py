"""Documents on disk: equal to documents that are read anew, resumable, and only where they fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gossamer.errors import ConfigError, DataError, UnsupportedError
from gossamer.retrieval import BlockRanker
from gossamer.retrieval._document_cache import DocumentCache

from .ranking_models import DOCUMENTS, language_model, tokenizer

MODEL = language_model()
CORPUS = {d["id"]: d for d in DOCUMENTS}
QUERY = "what carries lift?"


def make(**options) -> BlockRanker:
    options = {"query_in_prefix": False, "layer": 2, **options}
    return BlockRanker(options.pop("model", MODEL), tokenizer(), **options)


def scores(result) -> dict[str, float]:
    return dict(zip(result.ids, result.scores, strict=True))


@pytest.mark.parametrize(
    ("dtype", "atol"), [("float32", 1e-6), ("float16", 2e-3), ("bfloat16", 0.03)]
)
@pytest.mark.parametrize("layer", [0, 2])
def test_cached_documents_rank_as_fresh_ones(
    tmp_path: Path, dtype: str, atol: float, layer: int
) -> None:
    ranker = make(layer=layer)
    fresh = ranker.rank(QUERY, DOCUMENTS[::-1], labels=[3, 2, 1, 0])
    kept = ranker.cache(CORPUS, tmp_path / "cache", dtype=dtype, batch_tokens=100, quiet=True)
    assert len(kept) == 4
    assert ranker.document_cache is kept
    found = ranker.rank(QUERY, DOCUMENTS[::-1])
    assert scores(found) == pytest.approx(scores(fresh), abs=atol)
    assert found.lengths == ranker.rank(QUERY, DOCUMENTS[::-1]).lengths
    again = make(layer=layer)
    again.cache({}, tmp_path / "cache", quiet=True)
    assert scores(again.rank(QUERY, DOCUMENTS[::-1])) == scores(found)


def test_a_model_in_half_precision_uses_its_cache_too(tmp_path: Path) -> None:
    ranker = make(model=language_model().bfloat16())
    fresh = ranker.rank(QUERY, DOCUMENTS, labels=[0, 1, 2, 3])
    ranker.cache(CORPUS, tmp_path, quiet=True)
    assert scores(ranker.rank(QUERY, DOCUMENTS)) == pytest.approx(scores(fresh), abs=1e-3)
    grown = make(model=language_model().bfloat16())
    grown.cache({**CORPUS, "d5": "a document more"}, tmp_path, quiet=True)
    assert len(grown.rank(QUERY, [*DOCUMENTS, {"id": "d6", "text": "and one"}]).ids) == 5


def test_the_layers_do_not_run_for_cached_documents(tmp_path: Path) -> None:
    model = language_model()
    ranker = make(model=model)
    ranker.cache(CORPUS, tmp_path, quiet=True)
    seen = []
    model.model.embed_tokens.register_forward_hook(lambda m, a, out: seen.append(out.shape[1]))
    ranker.rank(QUERY, DOCUMENTS)
    assert seen == [len(ranker.template.question_tokens(QUERY))]


def test_a_corpus_may_grow_and_other_documents_may_stand_beside(tmp_path: Path) -> None:
    ranker = make()
    ranker.cache({k: CORPUS[k] for k in ("d1", "d2")}, tmp_path, dtype="float32", quiet=True)
    files = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("states-*")}
    mixed = ranker.rank(QUERY, DOCUMENTS)
    assert scores(mixed) == pytest.approx(
        scores(make().rank(QUERY, DOCUMENTS, labels=[0, 1, 4, 5])), abs=1e-6
    )
    kept = make().cache(CORPUS, tmp_path, quiet=True)
    assert [kept.documents[name].row for name in CORPUS] == [0, 1, 2, 3]
    assert kept.dtype == "float32"
    for name, time in files.items():
        assert (tmp_path / name).stat().st_mtime_ns == time


def test_an_interrupted_call_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = DocumentCache.add
    calls = []

    def stops(self: DocumentCache, *arguments: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        plain(self, *arguments)

    monkeypatch.setattr(DocumentCache, "add", stops)
    with pytest.raises(KeyboardInterrupt):
        make().cache(CORPUS, tmp_path, batch_tokens=50, quiet=True)
    monkeypatch.undo()
    (tmp_path / "states-00001.npy").write_bytes(b"half")
    kept = make().cache(CORPUS, tmp_path, batch_tokens=50, quiet=True)
    assert list(kept.documents) == list(CORPUS)


def test_cut_documents_are_counted_from_the_cache_too(tmp_path: Path, recwarn) -> None:
    ranker = make(max_document_length=50)
    ranker.cache(CORPUS, tmp_path, quiet=True)
    assert ranker.rank(QUERY, DOCUMENTS).num_cut == 1
    assert len(recwarn.list) == 1


def test_a_text_without_an_id_is_never_taken_from_the_cache(tmp_path: Path) -> None:
    ranker = make()
    ranker.cache({"0": "one text", "1": "two texts"}, tmp_path, quiet=True)
    assert ranker.rank(QUERY, ["another text", "and another"]).num_candidates == 2


# --- bad input ---


@pytest.mark.parametrize(
    ("options", "dtype", "message"),
    [
        ({"layer": 1}, None, "layer differ: layer is 2 there and 1 here"),
        ({"max_document_length": 99}, None, "max_document_length differ"),
        ({"model": language_model(attention_bias=True)}, None, "model differ"),
        ({}, "bfloat16", "dtype differ: dtype is 'float16' there and 'bfloat16' here"),
    ],
)
def test_a_cache_of_other_settings(tmp_path: Path, options, dtype, message: str) -> None:
    make().cache(CORPUS, tmp_path, quiet=True)
    with pytest.raises(ConfigError, match=message):
        make(**options).cache(CORPUS, tmp_path, dtype=dtype, quiet=True)


def test_a_cache_of_another_prompt(tmp_path: Path) -> None:
    make().cache(CORPUS, tmp_path, quiet=True)
    other = BlockRanker(MODEL, tokenizer(None), query_in_prefix=False, layer=2)
    with pytest.raises(ConfigError, match="prompt differ"):
        other.cache(CORPUS, tmp_path, quiet=True)


def test_documents_that_changed(tmp_path: Path) -> None:
    ranker = make()
    ranker.cache(CORPUS, tmp_path, quiet=True)
    with pytest.raises(DataError, match="'d1' must have the text that it had"):
        ranker.rank(QUERY, [{"id": "d1", "text": "other"}])
    with pytest.raises(DataError, match="'d1' must have the text that it had"):
        make().cache({"d1": "other"}, tmp_path, quiet=True)


@pytest.mark.parametrize("options", [{"query_in_prefix": True}, {"engine": "block"}])
def test_rankers_that_cannot_use_a_cache(tmp_path: Path, options) -> None:
    with pytest.raises(UnsupportedError, match="query_in_prefix=False"):
        make(**options).cache(CORPUS, tmp_path)


def test_states_too_large_for_float16(tmp_path: Path) -> None:
    model = language_model()
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(1e6)
    with pytest.raises(DataError, match=r"finite in the cache's float16.*bfloat16"):
        make(model=model).cache(CORPUS, tmp_path, quiet=True)
    assert not (tmp_path / "meta.json").exists()


def test_files_that_are_missing_or_broken(tmp_path: Path) -> None:
    make().cache(CORPUS, tmp_path, quiet=True)
    states = tmp_path / "states-00000.npy"
    whole = states.read_bytes()
    np.save(states, np.zeros(3, dtype=np.float16))
    with pytest.raises(DataError, match=r"states-00000\.npy holds \(3,\) float16"):
        make().cache({}, tmp_path)
    states.write_bytes(b"no array")
    with pytest.raises(DataError, match="must be a NumPy array"):
        make().cache({}, tmp_path)
    states.write_bytes(whole)
    meta = json.loads((tmp_path / "meta.json").read_text())
    (tmp_path / "meta.json").write_text(json.dumps({**meta, "num_documents": 9}))
    with pytest.raises(DataError, match="4 of 9 documents found"):
        make().cache({}, tmp_path)
    (tmp_path / "meta.json").write_text(json.dumps({**meta, "format": 99}))
    with pytest.raises(DataError, match="another version"):
        make().cache({}, tmp_path)
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    states.unlink()
    with pytest.raises(DataError, match="shard 0 is missing"):
        make().cache({}, tmp_path)


def test_an_unknown_precision(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown dtype of a cache 'float64'"):
        make().cache(CORPUS, tmp_path, dtype="float64")
