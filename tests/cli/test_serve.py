"""`gossamer serve` as a user runs it: a process, its models, its end."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gossamer.cli import main
from gossamer.cli._models import check_pair, load_model, open_index
from gossamer.cli.serve import listening
from gossamer.errors import ConfigError, DataError, UnsupportedError
from gossamer.models import BagEncoder, DualEncoder
from gossamer.retrieval import BM25Index, DenseIndex, index_texts

from ..models.test_packaged import needs_minilm
from ..retrieval._serving import post, wait_for

# an encoder that takes as long as its text says, or waits for the end of standard input
SLOW = """
import sys, time
from gossamer.cli import main
from gossamer.models import BagEncoder, DualEncoder
plain = BagEncoder.forward
def slow(self, texts):
    sys.stdin.readline() if texts[0] == "red" else time.sleep(float(texts[0]))
    return plain(self, texts)
BagEncoder.forward = slow
main(sys.argv[1:])
"""


@pytest.fixture
def bag(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    BagEncoder(8).save_pretrained(tmp_path / "bag")
    return tmp_path / "bag"


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    folder = tmp_path / "beir"
    folder.mkdir()
    rows = [{"_id": "d1", "text": "red wings"}, {"_id": "d2", "text": "boats", "title": "blue"}]
    (folder / "corpus.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


@contextmanager
def process(*arguments: str, code: str | None = None) -> Iterator[tuple[Any, int]]:
    start = ["-m", "gossamer.cli"] if code is None else ["-c", code]
    with subprocess.Popen(
        [sys.executable, *start, "serve", "--port", "0", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            line = server.stdout.readline()
            assert line.startswith("listening on http://127.0.0.1:"), line + server.stderr.read()
            yield server, int(line.rsplit(":", 1)[1])
        finally:
            server.kill()


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.slow
def test_sigterm_ends_it_when_requests_in_flight_are_answered(bag: Path, beir: Path) -> None:
    answers: list[Any] = []
    with process("--model", str(bag), "--index", str(beir), code=SLOW) as (server, port):
        assert post(port, "/search", {"query": "wings"}).body["results"][0]["id"] == "d1"

        def ask() -> None:
            answers.append(post(port, "/embed", {"input": "red"}))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        health = lambda: post(port, "/health", b"", method="GET").body  # noqa: E731
        wait_for(lambda: health()["in_flight"] == 3)
        server.send_signal(signal.SIGTERM)
        wait_for(lambda: refuses(port))
        assert answers == []
        server.stdin.close()
        for thread in threads:
            thread.join()
        assert server.wait(10) == 0
        log = server.stderr.read()
    assert [answer.status for answer in answers] == [200] * 3
    assert log.count("POST /embed 200") == 3
    assert log.count("POST /search 200") == 1
    assert "red" not in log


@pytest.mark.slow
def test_a_second_ctrl_c_ends_it_at_once(bag: Path) -> None:
    answers: list[Any] = []
    with process("--model", str(bag), code=SLOW) as (server, port):
        thread = threading.Thread(
            target=lambda: answers.append(post(port, "/embed", {"input": "50"}))
        )
        thread.start()
        wait_for(lambda: post(port, "/health", b"", method="GET").body["in_flight"] == 1)
        server.send_signal(signal.SIGINT)
        wait_for(lambda: refuses(port))
        server.send_signal(signal.SIGINT)
        assert server.wait(15) == 130
        assert "Traceback" not in server.stderr.read()
        thread.join()
    assert (answers[0].status, answers[0].error["type"]) == (503, "shutting_down")


@pytest.mark.slow
def test_ctrl_c_ends_it_with_its_own_code(beir: Path) -> None:
    with process("--index", str(beir), "--quiet") as (server, port):
        assert post(port, "/search", {"query": "boats"}).status == 200
        server.send_signal(signal.SIGINT)
        assert server.wait(10) == 130
        assert server.stderr.read() == ""


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["serve", *arguments])
    return int(stopped.value.code or 0)


def test_user_errors(bag: Path, beir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def message(*arguments: str) -> str:
        assert run(*arguments) == 2
        return capsys.readouterr().err

    assert "serve needs --model, --index or both; got neither" in message()
    assert "no folder. Check the path" in message("--model", "nothing", "--port", "0")
    twice = ("--model", str(bag), "--model", str(bag), "--port", "0")
    assert "is another encoder. Leave one out" in message(*twice)
    assert "--port must be >= 0 and <= 65535" in message("--index", str(beir), "--port", "70000")
    assert "--max-document-tokens must be >= 1" in message(
        "--model", str(bag), "--max-document-tokens", "0"
    )
    assert "--index must be a folder of DenseIndex" in message(
        "--index", str(bag.parent), "--port", "0"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "that is free; got 127.0.0.1" in message("--index", str(beir), "--port", port)


def test_answers_are_sent_at_once() -> None:
    with listening("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        found = []

        async def accept() -> None:
            class Protocol(asyncio.Protocol):
                def connection_made(self, transport: asyncio.BaseTransport) -> None:
                    connection = transport.get_extra_info("socket")
                    found.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

            loop = asyncio.get_running_loop()
            server = await loop.create_server(Protocol, sock=listener)
            _, writer = await asyncio.open_connection(*address)
            while not found:
                await asyncio.sleep(0.001)
            writer.close()
            await writer.wait_closed()
            server.close()
            await server.wait_closed()

        asyncio.run(accept())
    assert found == [1]


def test_without_the_extra(
    beir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert run("--index", str(beir)) == 3
    assert 'pip install "gossamer[serve]"' in capsys.readouterr().err


# --- what --model and --index name ---


def test_bag_and_indexes(bag: Path, beir: Path, tmp_path: Path) -> None:
    role, encoder = load_model(str(bag))
    assert role == "encoder"
    assert torch.equal(encoder.encoder.table.weight, BagEncoder.from_pretrained(bag).table.weight)
    index = open_index(beir)
    assert isinstance(index, BM25Index)
    assert list(index.search({"q": "blue"}, 1)["q"]) == ["d2"]
    DenseIndex(tmp_path / "vectors").add(["a"], np.ones((1, 8)))
    assert isinstance(open_index(tmp_path / "vectors"), DenseIndex)


def test_a_trained_retriever(bag: Path, tmp_path: Path) -> None:
    encoder = DualEncoder(BagEncoder.from_pretrained(bag), normalize=False)
    encoder.save_pretrained(tmp_path / "run")
    role, loaded = load_model(str(tmp_path / "run"), max_document_tokens=9)
    assert (role, loaded.normalize) == ("encoder", False)
    assert torch.equal(loaded.encode_queries(["red"]), encoder.encode_queries(["red"]))


def test_an_index_of_another_model(tmp_path: Path) -> None:
    one, other = DualEncoder(BagEncoder(8)), DualEncoder(BagEncoder(8))
    index = index_texts(one, {"d": "red"}, tmp_path / "index", name="one")
    check_pair(one, index)
    with pytest.raises(ConfigError, match=r"got those of one\. Give that model"):
        check_pair(other, index)
    check_pair(other, BM25Index({"d": "red"}))


def sentence_model(folder: Path, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    contents = {"config": {"architectures": ["BertModel"], "model_type": "bert"}, **files}
    for name, content in contents.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    return folder


MODULES = [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"}]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config": {"model": "Decoder"}}, "got 'Decoder'"),
        ({"config": {"architectures": ["T5Model"], "is_encoder_decoder": True}}, "got 'T5Model'"),
        ({"modules": [*MODULES, {"type": "a.Dense"}], "1_Pooling__config": {"pooling_mode": "cls"}},
         "have no further layers; got Transformer, Pooling, Dense"),
        ({"modules": MODULES, "1_Pooling__config": {"pooling_mode_max_tokens": True}},
         "must pool the mean or the first token"),
        ({"modules": MODULES, "1_Pooling__config": {"pooling_mode": "mean"},
          "config_sentence_transformers": {"prompts": {"query": "query: "}}},
         "asks for a prompt before each text"),
    ],
)  # fmt: skip
def test_models_that_would_give_other_scores_are_refused(
    tmp_path: Path, files: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        load_model(str(sentence_model(tmp_path / "model", **files)))


def test_broken_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json does not exist"):
        load_model(str(tmp_path))
    with pytest.raises(DataError, match="must be a list of modules"):
        load_model(str(sentence_model(tmp_path / "model", modules=3)))


def test_a_causal_model_is_a_ranker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def load(folder: Path, **options: Any) -> str:
        seen.append((folder, options["max_document_length"]))
        return "the ranker"

    monkeypatch.setattr("gossamer.retrieval.BlockRanker.from_pretrained", load)
    folder = sentence_model(tmp_path / "model", config={"architectures": ["LlamaForCausalLM"]})
    assert load_model(str(folder), max_document_tokens=99) == ("ranker", "the ranker")
    assert seen == [(folder, 99)]


@needs_minilm
@pytest.mark.slow
def test_options_of_a_sentence_encoder_are_those_of_its_folder() -> None:
    role, encoder = load_model("packaged:minilm")
    assert role == "encoder"
    assert (encoder.encoder.pooling, encoder.encoder.max_length) == ("mean", 256)
    _, short = load_model("packaged:minilm", max_document_tokens=8)
    assert short.encoder.max_length == 8
