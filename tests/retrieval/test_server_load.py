"""Many requests at once: none lost, none mixed up, and what happens when time or room run out."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from gossamer.models import BagEncoder, DualEncoder
from gossamer.retrieval import BM25Index, ServerLimits, create_app
from gossamer.retrieval._batching import Kind, QueueClosed, QueueFull, QueueTimeout, Worker

from ._serving import Letters, post, post_all, served, wait_for

# --- over loopback ---


@pytest.mark.slow
def test_two_hundred_requests_at_once() -> None:
    torch.manual_seed(0)
    encoder = DualEncoder(BagEncoder(16))
    index = BM25Index({f"d{i}": f"word{i} of many" for i in range(200)})
    texts = [f"word{i} and word{i % 7}" for i in range(200)]
    expected = encoder.encode_documents(texts)
    scores = encoder.encode_queries(texts) @ expected.T

    def request(i: int) -> tuple[str, Any]:
        if i % 4 == 0:
            return "/search", {"query": f"word{i}", "top_k": 1}
        if i % 4 == 1:
            return "/rerank", {"query": texts[i], "documents": texts[i - 1 : i + 2]}
        return "/embed", {"input": [texts[i]] * (i % 3 + 1)}

    with served(create_app(encoder=encoder, index=index)) as port:
        answers = asyncio.run(post_all(port, [request(i) for i in range(200)]))
        health = post(port, "/health", b"", method="GET").body
    assert [answer.status for answer in answers] == [200] * 200
    assert (health["served"], health["refused"], health["failed"]) == (200, 0, 0)
    for i, answer in enumerate(answers):
        if i % 4 == 0:
            assert [r["id"] for r in answer.body["results"]] == [f"d{i}"]
        elif i % 4 == 1:
            found = {r["index"]: r["relevance_score"] for r in answer.body["results"]}
            wanted = scores[i, i - 1 : i + 2].tolist()
            assert [found[place] for place in range(3)] == pytest.approx(wanted, abs=1e-5)
        else:
            rows = torch.tensor([d["embedding"] for d in answer.body["data"]])
            torch.testing.assert_close(rows, expected[i].expand(i % 3 + 1, -1))


def test_requests_that_wait_share_batches() -> None:
    encoder = Letters()
    with served(create_app(encoder=encoder, max_batch=8)) as port, ThreadPoolExecutor(20) as pool:
        encoder.gate.clear()
        first = pool.submit(post, port, "/embed", {"input": "h"})
        encoder.running.wait(20)
        waiting = [pool.submit(post, port, "/embed", {"input": "ab"[i % 2]}) for i in range(16)]
        health = lambda: post(port, "/health", b"", method="GET").body  # noqa: E731
        wait_for(lambda: health()["waiting"] == 16)
        encoder.gate.set()
        answers = [future.result() for future in waiting]
        assert first.result().status == 200
        assert [len(batch) for batch in encoder.batches] == [1, 8, 8]
        assert health()["batches"] == 3
    for i, answer in enumerate(answers):
        assert answer.body["data"][0]["embedding"][:2] == [[2, 0], [0, 2]][i % 2]


def test_time_and_room() -> None:
    encoder = Letters()
    app = create_app(encoder=encoder, timeout=0.3, limits=ServerLimits(max_waiting=2))
    with served(app) as port, ThreadPoolExecutor(3) as pool:
        encoder.gate.clear()
        running = pool.submit(post, port, "/embed", {"input": "a"})
        encoder.running.wait(20)
        waiting = [pool.submit(post, port, "/embed", {"input": ["b", "c"]}) for _ in range(2)]
        health = lambda: post(port, "/health", b"", method="GET").body  # noqa: E731
        wait_for(lambda: health()["waiting"] == 2)
        full = post(port, "/embed", {"input": "d"})
        late = [future.result() for future in (running, *waiting)]
        assert health()["waiting"] == 0  # nobody is kept for a request that was given up
        encoder.gate.set()
        assert post(port, "/embed", {"input": "e"}).status == 200
    assert (full.status, full.error["type"]) == (503, "overloaded")
    assert "at most 2 requests may wait; 2 do" in full.error["message"]
    assert int(full.headers["retry-after"]) >= 1
    assert [answer.status for answer in late] == [504] * 3
    assert "in 0.3 s; 0 of 2 parts" in late[1].error["message"]
    assert encoder.batches == [["a"], ["e"]]  # what was given up was not encoded


def test_a_large_body_is_refused_before_it_is_sent() -> None:
    with served(create_app(encoder=Letters(), limits=ServerLimits(max_body_bytes=1000))) as port:
        answer = post(port, "/embed", {"input": "a" * 100_000})
        assert (answer.status, answer.error["type"]) == (413, "too_large")
        assert post(port, "/embed", {"input": "a"}).status == 200


# --- the queue ---


def test_a_large_request_lets_small_ones_through() -> None:
    calls: list[list[int]] = []
    gate, running = threading.Event(), threading.Event()

    def double(items: list[int]) -> list[int]:
        running.set()
        assert gate.wait(20)
        calls.append(items)
        return [2 * item for item in items]

    worker = Worker({"double": Kind(double, 2), "other": Kind(lambda items: items, 9)}, 9)

    async def together() -> list[Any]:
        large = asyncio.create_task(worker.submit("double", range(5), timeout=9))
        await asyncio.to_thread(running.wait)
        small = asyncio.create_task(worker.submit("double", [10], timeout=9))
        other = asyncio.create_task(worker.submit("other", "x", timeout=9))
        while worker.waiting < 3:
            await asyncio.sleep(0.001)
        gate.set()
        return await asyncio.gather(large, small, other)

    assert asyncio.run(together()) == [[0, 2, 4, 6, 8], [20], ["x"]]
    assert calls == [[0, 1], [2, 3], [10, 4]]
    assert (worker.num_batches, worker.num_items) == (4, 7)
    worker.close()


def test_a_closed_worker_finishes_and_refuses() -> None:
    gate, running = threading.Event(), threading.Event()

    def slow(items: list[int]) -> list[int]:
        running.set()
        assert gate.wait(20)
        return items

    worker = Worker({"slow": Kind(slow, 1)}, 5)

    async def together() -> None:
        tasks = [asyncio.create_task(worker.submit("slow", [i], timeout=9)) for i in range(3)]
        await asyncio.to_thread(running.wait)
        closing = asyncio.create_task(asyncio.to_thread(worker.close))
        await asyncio.sleep(0.02)
        with pytest.raises(QueueClosed):
            await worker.submit("slow", [9], timeout=9)
        gate.set()
        assert await asyncio.gather(*tasks) == [[0], [1], [2]]
        await closing
        worker.open()
        assert await worker.submit("slow", [4], timeout=9) == [4]
        worker.close()

    asyncio.run(together())


def test_a_time_out_tells_how_much_was_done() -> None:
    gate, calls = threading.Event(), []

    def slow(items: list[int]) -> list[int]:
        calls.append(items)
        assert len(calls) == 1 or gate.wait(20)
        return items

    worker = Worker({"slow": Kind(slow, 2)}, 1)

    async def late() -> QueueTimeout:
        task = asyncio.create_task(worker.submit("slow", range(6), timeout=0.2))
        while len(calls) < 2:
            await asyncio.sleep(0.001)
        with pytest.raises(QueueFull):  # four items are left, two of them wait
            await worker.submit("slow", [1], timeout=1)
        with pytest.raises(QueueTimeout) as caught:
            await task
        return caught.value

    error = asyncio.run(late())
    assert (error.done, error.total, worker.waiting) == (2, 6, 0)
    gate.set()
    worker.close()
    assert calls == [[0, 1], [2, 3]]


def test_results_must_be_as_many_as_items() -> None:
    worker = Worker({"short": Kind(lambda items: items[1:], 4)}, 1)
    with pytest.raises(RuntimeError, match="2 items gave 1 results"):
        asyncio.run(worker.submit("short", [1, 2], timeout=5))
    worker.close()
