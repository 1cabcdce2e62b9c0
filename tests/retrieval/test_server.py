"""What each path answers, and what is said to wrong requests."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import sys
from typing import Any

import numpy as np
import pytest
import torch

from gossamer.errors import ConfigError, DataError, MissingDependencyError, ShapeError
from gossamer.models import BagEncoder, DualEncoder
from gossamer.retrieval import BlockRanker, BM25Index, DenseIndex, ServerLimits, create_app
from gossamer.retrieval._request_checks import check_body
from gossamer.retrieval._schemas import build_endpoints

from ._serving import Letters, Ranker, ask, call

DOCUMENTS = ["abc", {"text": "aab", "title": "b", "more": [1]}, "hh", "aab"]
SCHEMAS = {endpoint.path: endpoint for endpoint in build_endpoints(ServerLimits())}


def fits(path: str, answer: Any) -> Any:
    """Check an answer against what the server says of itself."""
    assert answer.status == 200, answer.body
    assert check_body(answer.body, SCHEMAS[path].answer) == answer.body
    return answer.body


@pytest.fixture
def app() -> Any:
    return create_app(encoder=Letters(), index=BM25Index({"d1": "red wings", "d2": "red boats"}))


# --- answers ---


def test_rerank_by_inner_products(app: Any) -> None:
    body = fits("/rerank", ask(app, "/rerank", {"query": "ab", "documents": DOCUMENTS}))
    # title and text of the second are "b aab": two a and two b
    assert [(r["index"], r["relevance_score"]) for r in body["results"]] == [
        (1, 8.0),
        (3, 6.0),
        (0, 4.0),
        (2, 0.0),
    ]
    assert body["model"] == "Letters"
    assert {k: v for k, v in body["meta"].items() if k != "seconds"} == {
        "num_documents": 4,
        "num_cut": 0,
        "max_tokens": None,
    }


def test_rerank_cuts_repeats_and_echoes(app: Any) -> None:
    asked = {"query": "ab", "documents": DOCUMENTS, "top_n": 2, "return_documents": True}
    body = fits("/rerank", ask(app, "/rerank", {**asked, "model": "mine"}))
    assert [r["document"] for r in body["results"]] == [DOCUMENTS[1], {"text": "aab"}]
    assert body["model"] == "mine"
    many = fits("/rerank", ask(app, "/rerank", {**asked, "top_n": 99}))
    assert len(many["results"]) == 4


def test_equal_scores_keep_the_order_of_the_request(app: Any) -> None:
    body = ask(app, "/rerank", {"query": "a", "documents": ["ab", "a", "ba", "b"]}).body
    assert [r["index"] for r in body["results"]] == [0, 1, 2, 3]


def test_a_ranker_goes_before_the_encoder() -> None:
    app = create_app(ranker=Ranker(), encoder=Letters())
    asked = {"query": "a", "documents": ["aaa", "bbbbbbb", "c"], "top_n": 2}
    body = fits("/rerank", ask(app, "/rerank", asked))
    assert [(r["index"], r["relevance_score"]) for r in body["results"]] == [(1, 7.0), (0, 3.0)]
    assert (body["meta"]["num_cut"], body["meta"]["max_tokens"]) == (1, 5)
    assert body["model"] == "Ranker"


@pytest.mark.slow
def test_a_language_model_ranks() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    class Letters:
        def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
            return {"input_ids": [[min(ord(x), 127) for x in text] for text in texts]}

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2,
    )  # fmt: skip
    ranker = BlockRanker(LlamaForCausalLM(config).eval(), Letters(), max_document_length=80)
    documents = ["because", {"text": "therefore", "title": "So"}, "because"]
    app = create_app(ranker=ranker)
    body = fits("/rerank", ask(app, "/rerank", {"query": "why?", "documents": documents}))
    result = ranker.rank("why?", ["because", "So therefore", "because"])
    assert [r["index"] for r in body["results"]] == list(result.order)
    assert [r["relevance_score"] for r in body["results"]] == pytest.approx(list(result.scores))
    assert body["meta"]["max_tokens"] == 80
    with pytest.warns(UserWarning, match="lost their ends"):
        ranker.rank("why?", ["x" * 200])
    cut = ask(app, "/rerank", {"query": "why?", "documents": ["x" * 200, "y"]}).body
    assert cut["meta"]["num_cut"] == 1


@pytest.mark.parametrize("role", [{"ranker": Ranker()}, {"encoder": Letters()}])
def test_no_documents_no_results(role: dict[str, Any]) -> None:
    body = fits("/rerank", ask(create_app(**role), "/rerank", {"query": "a", "documents": []}))
    assert body["results"] == []
    assert body["meta"]["num_documents"] == 0


def test_embed(app: Any) -> None:
    one = fits("/embed", ask(app, "/embed", {"input": "aab"}))
    assert [d["embedding"][:3] for d in one["data"]] == [[4.0, 2.0, 0.0]]
    asked = {"input": ["aab", "c"], "input_type": "query", "encoding_format": "base64"}
    two = fits("/embed", ask(app, "/embed", asked))
    assert [d["index"] for d in two["data"]] == [0, 1]
    rows = [np.frombuffer(base64.b64decode(d["embedding"]), "<f4") for d in two["data"]]
    assert np.array_equal(np.stack(rows)[:, :3], [[2, 1, 0], [0, 0, 1]])
    assert fits("/embed", ask(app, "/embed", {"input": []}))["data"] == []


def test_embed_gives_what_the_encoder_gives() -> None:
    torch.manual_seed(0)
    encoder = DualEncoder(BagEncoder(8))
    texts = ["red wings", "ein Stück Holz ✓", ""]
    body = ask(create_app(encoder=encoder), "/embed", {"input": texts}).body
    rows = torch.tensor([d["embedding"] for d in body["data"]])
    torch.testing.assert_close(rows, encoder.encode_documents(texts))
    half = ask(create_app(encoder=encoder.to(torch.bfloat16)), "/embed", {"input": texts}).body
    assert half["data"][0]["embedding"] == pytest.approx(rows[0].tolist(), abs=0.02)


def test_search_words(app: Any) -> None:
    body = fits("/search", ask(app, "/search", {"query": "red wings", "top_k": 1}))
    assert [r["id"] for r in body["results"]] == ["d1"]
    assert len(ask(app, "/search", {"query": "red"}).body["results"]) == 2
    assert ask(app, "/search", {"query": "zebra"}).body["results"] == []


def test_search_vectors(tmp_path: Any) -> None:
    encoder, index = Letters(), DenseIndex(tmp_path / "index")
    index.add(["a", "b", "ab"], encoder.encode_documents(["aa", "bb", "ab"]))
    app = create_app(encoder=encoder, index=index)
    body = fits("/search", ask(app, "/search", {"query": "aab", "top_k": 2}))
    assert body["results"] == [{"id": "a", "score": 8.0}, {"id": "ab", "score": 6.0}]


def test_documents_that_are_cut_are_counted() -> None:
    class Tower:
        max_length = 3

        def tokenizer(self, texts: list[str], **_: Any) -> dict[str, Any]:
            return {"input_ids": [text.split() for text in texts]}

    encoder: Any = Letters()
    encoder.encoder = Tower()
    asked = {"query": "a b c d", "documents": ["a b c", "a b c d", "a", "b b b b b"]}
    meta = ask(create_app(encoder=encoder), "/rerank", asked).body["meta"]
    assert (meta["num_cut"], meta["max_tokens"]) == (2, 3)
    body = fits("/embed", ask(create_app(encoder=encoder), "/embed", {"input": ["a b c d", "a"]}))
    assert body["meta"]["num_cut"] == 1
    assert body["usage"] == {"prompt_tokens": 4, "total_tokens": 4}


def test_health_counts(app: Any) -> None:
    before = fits("/health", ask(app, "/health"))
    assert before["roles"] == {"rerank": "Letters", "embed": "Letters", "search": "BM25Index"}
    assert (before["served"], before["refused"], before["failed"]) == (0, 0, 0)
    ask(app, "/embed", {"input": ["a", "b"]})
    ask(app, "/embed", {"input": 1})
    ask(app, "/embed", {"input": "nan"})
    after = ask(app, "/health").body
    assert (after["served"], after["refused"], after["failed"]) == (1, 1, 1)
    assert (after["waiting"], after["batches"], after["items"]) == (0, 2, 3)


def test_descriptions(app: Any) -> None:
    document = ask(app, "/openapi.json").body
    assert document["openapi"] == "3.1.0"
    for path, endpoint in SCHEMAS.items():
        operation = document["paths"][path][endpoint.method.lower()]
        if endpoint.body is not None:
            content = operation["requestBody"]["content"]["application/json"]
            assert content["schema"] == endpoint.body
            assert ask(app, path, content["example"]).status == 200
    html = ask(app, "/docs")
    assert html.headers["content-type"].startswith("text/html")
    assert "src=" not in html.body
    assert "return_documents" in html.body
    assert "<script" not in html.body


# --- wrong requests ---

RERANK = {"query": "a", "documents": ["b"]}


@pytest.mark.parametrize(
    ("path", "body", "kind", "param", "message"),
    [
        ("/rerank", {"documents": []}, "missing_field", "query", "must have the field 'query'"),
        ("/rerank", {"query": "a"}, "missing_field", "documents", "got query"),
        ("/rerank", [], "invalid_field", None, "must be an object with query, documents"),
        ("/rerank", "a", "invalid_field", None, "the body must be an object"),
        ("/rerank", {**RERANK, "query": None}, "invalid_field", "query", "got null"),
        ("/rerank", {**RERANK, "query": " \n"}, "invalid_field", "query", "that is not blank"),
        ("/rerank", {**RERANK, "documents": "b"}, "invalid_field", "documents", "an array"),
        ("/rerank", {**RERANK, "documents": ["b", 3]}, "invalid_field", "documents[1]", "got 3"),
        ("/rerank", {**RERANK, "documents": [None]}, "invalid_field", "documents[0]", "a string"),
        ("/rerank", {**RERANK, "documents": [{"title": "b"}]}, "missing_field",
         "documents[0].text", "got title"),
        ("/rerank", {**RERANK, "documents": [{"text": 1}]}, "invalid_field", "documents[0].text",
         "must be a string; got 1"),
        ("/rerank", {**RERANK, "documents": ["b"] * 1001}, "invalid_field", "documents",
         "of at most 1000; got an array of 1001"),
        ("/rerank", {**RERANK, "top_n": 0}, "invalid_field", "top_n", "an integer or null >= 1"),
        ("/rerank", {**RERANK, "top_n": 1.5}, "invalid_field", "top_n", "got 1.5"),
        ("/rerank", {**RERANK, "top_n": True}, "invalid_field", "top_n", "got true"),
        ("/rerank", {**RERANK, "return_documents": "no"}, "invalid_field", "return_documents",
         'true or false; got "no"'),
        ("/rerank", {**RERANK, "topn": 3}, "unknown_field", "topn", "did you mean 'top_n'"),
        ("/rerank", {**RERANK, "model": 3}, "invalid_field", "model", "a string"),
        ("/embed", {"input": {}}, "invalid_field", "input", "a string or an array of at most"),
        ("/embed", {"input": "a", "input_type": "passage"}, "invalid_field", "input_type",
         'one of "document", "query"; got "passage"'),
        ("/search", {"query": "a", "top_k": 10**6}, "invalid_field", "top_k", "<= 1000"),
        ("/search", {"query": "a" * 99, "top_k": "a" * 99}, "invalid_field", "top_k",
         "a string of 101 characters"),
    ],
)  # fmt: skip
def test_fields(app: Any, path: str, body: Any, kind: str, param: str | None, message: str) -> None:
    answer = ask(app, path, body)
    assert (answer.status, answer.error["type"], answer.error["param"]) == (422, kind, param)
    assert message in answer.error["message"]
    assert answer.error["message"].endswith(".")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "Expecting value in line 1, column 1"),
        (b'{"query": "a",}', "in line 1, column 1"),
        (b'{"query": NaN}', "the number NaN"),
        (b'{"query": "\xff"}', "byte 11 that is no UTF-8"),
        (b'{"query": "\\ud800"}', "half a character"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"query": ' + b"9" * 5000 + b"}", "JSON in UTF-8"),
    ],
    ids=["empty", "comma", "nan", "utf8", "surrogate", "deep", "digits"],
)
def test_no_json(app: Any, raw: bytes, message: str) -> None:
    answer = ask(app, "/rerank", raw)
    assert (answer.status, answer.error["type"]) == (400, "invalid_json")
    assert message in answer.error["message"]


def test_whole_characters_from_escapes_pass(app: Any) -> None:
    raw = b'{"query": "\\ud83d\\ude00", "documents": ["\\u00e4"], "return_documents": true}'
    assert ask(app, "/rerank", raw).body["results"][0]["document"] == {"text": "ä"}


def test_other_media_type(app: Any) -> None:
    answer = ask(app, "/rerank", RERANK, content_type="text/plain")
    assert (answer.status, answer.error["type"]) == (415, "not_json")
    assert "Content-Type: application/json" in answer.error["message"]
    assert ask(app, "/rerank", RERANK, content_type=None).status == 200
    assert ask(app, "/rerank", RERANK, content_type="application/json; charset=utf-8").status == 200


@pytest.mark.parametrize(
    ("path", "method", "status", "message"),
    [
        ("/rerankk", "POST", 404, "did you mean '/rerank'?"),
        ("/", "GET", 404, "Known: /docs, /embed"),
        ("/rerank", "GET", 405, "/rerank takes POST; got GET"),
        ("/health", "POST", 405, "/health takes"),
    ],
)
def test_paths_and_methods(app: Any, path: str, method: str, status: int, message: str) -> None:
    answer = ask(app, path, method=method)
    assert answer.status == status
    assert message in answer.error["message"]
    assert ("allow" in answer.headers) == (status == 405)


def test_a_role_that_is_missing_names_the_option() -> None:
    app = create_app(index=BM25Index({"d": "a"}))
    answer = ask(app, "/rerank", RERANK)
    assert (answer.status, answer.error["type"]) == (501, "not_configured")
    assert "gossamer serve --model" in answer.error["message"]
    answer = ask(create_app(encoder=Letters()), "/search", {"query": "a"})
    assert "gossamer serve --index" in answer.error["message"]


def test_size_of_the_body() -> None:
    app = create_app(encoder=Letters(), limits=ServerLimits(max_body_bytes=100))
    answer = ask(app, "/embed", {"input": "a" * 100})
    assert (answer.status, answer.error["type"]) == (413, "too_large")
    assert "at most 100 bytes; got 113 or more" in answer.error["message"]
    # without a length it is counted, and what comes later is never read
    answer = ask(app, "/embed", chunks=[b" " * 60, b" " * 60, b"..."])
    assert "got 120 or more" in answer.error["message"]
    assert ask(app, "/embed", chunks=[b'{"input":', b' "a"}']).status == 200


def test_a_body_that_does_not_end() -> None:
    app = create_app(encoder=Letters(), timeout=0.05)
    answer = ask(app, "/embed", chunks=[b"..."])
    assert (answer.status, answer.error["type"]) == (408, "slow_body")


# --- faults of models ---


@pytest.mark.parametrize(
    ("role", "path", "body"),
    [
        ({"encoder": Letters()}, "/embed", {"input": ["a", "nan"]}),
        ({"encoder": Letters()}, "/rerank", {"query": "a", "documents": ["nan"]}),
        ({"ranker": Ranker()}, "/rerank", {"query": "nan", "documents": ["a", "b"]}),
    ],
)
def test_nan_is_never_sent(role: dict[str, Any], path: str, body: Any) -> None:
    answer = ask(create_app(**role), path, body)
    assert (answer.status, answer.error["type"]) == (500, "model_fault")
    assert "float32 or bfloat16" in answer.error["message"]


def test_faults_name_no_text(app: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gossamer.server"):
        answer = ask(app, "/embed", {"input": "fault"})
        ask(app, "/my secret text")
    assert (answer.status, answer.error["type"]) == (500, "internal_fault")
    assert "KeyError" in answer.error["message"]
    assert "secret" not in json.dumps(answer.body) + caplog.text
    assert "KeyError in " in caplog.text
    assert "_serving.py:" in caplog.text
    assert "POST /embed 500" in caplog.text


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [(ConfigError, 422, "refused_by_model"), (DataError, 500, "model_fault")],
)
def test_what_a_model_says_is_passed_on(error: Any, status: int, kind: str) -> None:
    class Strict(Ranker):
        def rank(self, query: str, documents: Any, top_k: int | None = None) -> Any:
            raise error("instruction must be short; got 9 tokens. Shorten the query.")

    answer = ask(create_app(ranker=Strict()), "/rerank", RERANK)
    assert (answer.status, answer.error["type"]) == (status, kind)
    assert answer.error["message"].startswith("instruction must be short")


def test_one_faulty_request_does_not_harm_others() -> None:
    encoder = Letters()
    app = create_app(encoder=encoder)

    async def together() -> list[Any]:
        encoder.gate.clear()
        first = asyncio.create_task(call(app, "/embed", {"input": "h"}))
        await asyncio.to_thread(encoder.running.wait)
        texts = ["a", "nan", "b", "fault", "c"]
        others = [asyncio.create_task(call(app, "/embed", {"input": text})) for text in texts]
        while ask_health(app)["waiting"] < len(texts):
            await asyncio.sleep(0.001)
        encoder.gate.set()
        return await asyncio.gather(first, *others)

    answers = asyncio.run(together())
    assert [answer.status for answer in answers] == [200, 200, 500, 200, 500, 200]
    rows = [answers[i].body["data"][0]["embedding"][:3] for i in (1, 3, 5)]
    assert rows == [[2, 0, 0], [0, 2, 0], [0, 0, 2]]
    assert encoder.batches[1] == ["a", "nan", "b", "fault", "c"]
    assert len(encoder.threads) == 1


def ask_health(app: Any) -> Any:
    import threading

    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(ask(app, "/health").body))
    thread.start()
    thread.join()
    return found[0]


# --- building ---


def test_bad_arguments(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="needs a ranker, an encoder or an index; got none"):
        create_app()
    with pytest.raises(ConfigError, match="ranker must have the method rank; got Letters"):
        create_app(ranker=Letters())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_batch must be >= 1; got 0"):
        create_app(ranker=Ranker(), max_batch=0)
    with pytest.raises(ConfigError, match="timeout must be > 0; got 0"):
        create_app(ranker=Ranker(), timeout=0.0)
    with pytest.raises(ConfigError, match="max_waiting must be >= 1"):
        ServerLimits(max_waiting=0)
    index = DenseIndex(tmp_path / "index")
    with pytest.raises(ConfigError, match="needs the encoder that made them"):
        create_app(index=index)
    with pytest.raises(ShapeError, match="the encoder's width, 8; got DenseIndex"):
        create_app(index=index, encoder=Letters())
    index.add(["a"], np.ones((1, 3)))
    with pytest.raises(ShapeError, match="1 vectors of 3 float32"):
        create_app(index=index, encoder=Letters())


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette", None)
    with pytest.raises(MissingDependencyError, match=r"gossamer\[serve\]"):
        create_app(ranker=Ranker())
