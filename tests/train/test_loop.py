"""The training loop: bit-equal resume, real kills, interruption, bad losses, several processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gossamer.errors import ConfigError, DataError, GossamerError
from gossamer.models import Decoder
from gossamer.optim import warmup_cosine, warmup_linear
from gossamer.tasks import AdditionTask
from gossamer.train import (
    FileLogger,
    TrainConfig,
    Trainer,
    answer_loss,
    load_checkpoint,
    save_checkpoint,
)
from gossamer.train.checkpoint import random_state, restore_random_state

CONFIG = TrainConfig(steps=30, lr=3e-3, log_every=4, checkpoint_every=7, device="cpu")


def model(dropout: float = 0.2) -> Decoder:
    torch.manual_seed(0)
    return Decoder(14, 16, 1, 2, positions="coupled_relative", attention={"dropout": dropout})


def fit(
    folder: Path | None, config: TrainConfig = CONFIG, *, resume: bool = False, stop: int = 0
) -> Decoder:
    """Train; with `stop`, break off by an exception before that step."""
    network = model()

    def loss(m: nn.Module, batch: object) -> torch.Tensor:
        loss.calls += 1
        if stop and loss.calls > stop:
            raise RuntimeError("broken off")
        return answer_loss(m, batch)

    loss.calls = 0
    logger = FileLogger(folder) if folder else None
    trainer = Trainer(network, loss, config, logger=logger, quiet=True)
    trainer.fit(AdditionTask((1, 3)).stream(4, seed=1), resume=resume)
    return network


def logged(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


# --- reference values ---


def test_one_step_is_adamw_by_hand() -> None:
    network = nn.Linear(3, 1)
    x = torch.randn(5, 3)
    weight = network.weight.detach().double().numpy().copy()
    config = TrainConfig(steps=1, lr=0.1, weight_decay=0.5, clip=0, warmup=0, device="cpu")
    Trainer(network, lambda m, b: m(b).sum(), config, quiet=True).fit([x])
    gradient = x.double().sum(0).numpy()
    expected = weight * (1 - 0.1 * 0.5) - 0.1 * gradient / (np.abs(gradient) + 1e-8)
    np.testing.assert_allclose(network.weight.detach().numpy(), expected, atol=1e-6)


def test_clipping_bounds_the_gradient() -> None:
    network = nn.Linear(3, 1, bias=False)
    norms = []
    config = TrainConfig(steps=1, clip=0.5, device="cpu")
    network.weight.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm().item()))
    Trainer(network, lambda m, b: 100 * m(b).sum(), config, quiet=True).fit([torch.ones(5, 3)])
    assert norms[0] > 100
    assert network.weight.grad.norm().item() == pytest.approx(0.5, rel=1e-4)


def test_schedule() -> None:
    schedule = warmup_cosine(100, warmup=0.1, floor=0.2)
    assert [schedule(s) for s in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    assert schedule(55) == pytest.approx(0.6)
    assert schedule(100) == schedule(1000) == pytest.approx(0.2)
    with pytest.raises(ConfigError, match="warmup"):
        warmup_cosine(10, warmup=2)


def test_schedule_falls_in_a_straight_line() -> None:
    schedule = warmup_linear(400, warmup=150 / 400, floor=0.2)
    assert [schedule(s) for s in (0, 74, 149, 150)] == pytest.approx([1 / 150, 0.5, 1.0, 1.0])
    # half-way down between 1 and the floor
    assert [schedule(s) for s in (275, 400, 500)] == pytest.approx([0.6, 0.2, 0.2])
    assert warmup_linear(10)(10) == 0.0
    with pytest.raises(ConfigError, match="warmup must be"):
        warmup_linear(10, warmup=2)


# --- resume ---


def test_training_is_reproducible_to_the_bit(tmp_path: Path) -> None:
    one, two = fit(tmp_path / "a"), fit(tmp_path / "b")
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))
    assert logged(tmp_path / "a") == logged(tmp_path / "b")


@pytest.mark.parametrize("stop", [3, 7, 18, 29])
def test_resume_is_bit_equal(tmp_path: Path, stop: int) -> None:
    """Also with dropout, and at a step that is neither a checkpoint nor a logged one."""
    whole = fit(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="broken off"):
        fit(tmp_path / "parts", stop=stop)
    parts = fit(tmp_path / "parts", resume=True)
    assert all(
        torch.equal(p, q) for p, q in zip(whole.parameters(), parts.parameters(), strict=True)
    )
    assert logged(tmp_path / "whole") == logged(tmp_path / "parts")


def test_resume_of_a_plain_iterable_replays_it(tmp_path: Path) -> None:
    data = [torch.full((2, 3), float(i)) for i in range(5)]

    def run(folder: Path, calls: int, *, resume: bool = False) -> nn.Module:
        torch.manual_seed(0)
        network = nn.Linear(3, 1)
        count = 0

        def loss(m: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            if count > calls:
                raise RuntimeError("broken off")
            return m(batch).square().mean()

        config = TrainConfig(steps=12, checkpoint_every=4, log_every=4, device="cpu")
        Trainer(network, loss, config, logger=FileLogger(folder), quiet=True).fit(
            data, resume=resume
        )
        return network

    whole = run(tmp_path / "whole", 99)
    with pytest.raises(RuntimeError):
        run(tmp_path / "parts", 6)
    parts = run(tmp_path / "parts", 99, resume=True)
    assert torch.equal(whole.weight, parts.weight)


def test_resume_with_other_settings_is_refused(tmp_path: Path) -> None:
    fit(tmp_path)
    with pytest.raises(ConfigError, match=r"lr was 0.003; got 0.01"):
        fit(tmp_path, TrainConfig(**{**CONFIG.__dict__, "lr": 0.01}), resume=True)
    fit(tmp_path, TrainConfig(**{**CONFIG.__dict__, "checkpoint_every": 5}), resume=True)


SCRIPT = """
import sys, torch
from tests.train.test_loop import CONFIG, fit
torch.set_num_threads(1)
from pathlib import Path
from gossamer.train import TrainConfig
fit(Path(sys.argv[1]), TrainConfig(**{**CONFIG.__dict__, "steps": 600}), resume=True)
print("done", flush=True)
"""


def run_script(folder: Path) -> subprocess.Popen:
    """Start the script in a process of its own; to be used as a context."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path) -> None:
    """Wait until a file is there, a minute at most: the import of torch may be slow."""
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def finish(folder: Path) -> str:
    """Run the script to its end; return what it printed."""
    with run_script(folder) as process:
        return process.communicate()[0].strip()


@pytest.mark.slow
@pytest.mark.timeout(240)  # three processes that import torch, on a machine that may be busy
def test_kill_and_resume_for_real(tmp_path: Path) -> None:
    """Two runs in processes of their own; one is killed twice with SIGKILL at any moment."""
    assert finish(tmp_path / "whole") == "done"
    target = tmp_path / "killed"
    for moment in (0.15, 0.35):
        with run_script(target) as process:
            wait_for(target / "checkpoint.safetensors")
            time.sleep(moment)
            process.kill()
        step = load_checkpoint(target)["step"]
        assert 0 < step < 600
    assert finish(target) == "done"
    one, two = (load_checkpoint(tmp_path / name) for name in ("whole", "killed"))
    assert one["step"] == two["step"] == 600
    assert all(torch.equal(one["model"][k], two["model"][k]) for k in one["model"])
    assert logged(tmp_path / "whole") == logged(target)
    left = [p.name for p in target.iterdir() if p.suffix == ".tmp"]
    assert len(left) <= 2  # at most one torn temporary file for each kill, never the checkpoint


@pytest.mark.slow
def test_interrupt_saves_and_exits(tmp_path: Path) -> None:
    with run_script(tmp_path) as process:
        wait_for(tmp_path / "metrics.jsonl")
        process.send_signal(signal.SIGINT)
    assert process.returncode != 0
    state = load_checkpoint(tmp_path)
    assert state["step"] < 600
    assert finish(tmp_path) == "done"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.slow
def test_two_processes_train_one_model(tmp_path: Path) -> None:
    """`accelerate launch` with two CPU processes gives the gradient of both halves of the batch."""
    script = tmp_path / "job.py"
    script.write_text(
        "import sys, torch\n"
        "from torch import nn\n"
        "from gossamer.train import FileLogger, TrainConfig, Trainer\n"
        "torch.manual_seed(0)\n"
        "net = nn.Linear(3, 1)\n"
        "data = [torch.full((2, 3), float(i % 7) / 7) for i in range(20)]\n"
        "config = TrainConfig(steps=5, lr=0.1, device='cpu', clip=0, log_every=1, "
        "checkpoint_every=5)\n"
        "Trainer(net, lambda m, b: m(b).square().mean(), config, "
        "logger=FileLogger(sys.argv[1])).fit(data)\n"
        "torch.save(net.weight.detach(), "
        "f'{sys.argv[1]}/weight-{torch.distributed.get_rank()}.pt')\n"
    )
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
        "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
        "--main_process_port", str(free_port()), str(script), str(tmp_path),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=55, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    weights = [torch.load(tmp_path / f"weight-{r}.pt", weights_only=True) for r in (0, 1)]
    assert torch.equal(*weights)
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    data = [torch.full((2, 3), float(i % 7) / 7) for i in range(20)]
    pairs = [torch.cat((data[2 * i], data[2 * i + 1])) for i in range(5)]
    config = TrainConfig(steps=5, lr=0.1, device="cpu", clip=0, log_every=1)
    Trainer(net, lambda m, b: m(b).square().mean(), config, quiet=True).fit(pairs)
    torch.testing.assert_close(weights[0], net.weight.detach(), atol=1e-6, rtol=1e-5)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5


# --- checkpoints and logs ---


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    state = {"step": 3, "a": {"b": torch.arange(4), "c": [1, None, "é"]}, "e": {}, "n": np.eye(2)}
    save_checkpoint(tmp_path, state)
    again = load_checkpoint(tmp_path)
    assert again["step"] == 3
    assert torch.equal(again["a"]["b"], torch.arange(4))
    assert again["a"]["c"] == [1, None, "é"]
    assert again["e"] == {}
    assert torch.equal(again["n"], torch.eye(2).double())
    assert load_checkpoint(tmp_path / "nothing") is None


def test_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, {"w": torch.ones(1000)})
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"checkpoint\.safetensors must be a checkpoint"):
        load_checkpoint(tmp_path)


def test_random_state_covers_every_generator() -> None:
    import random

    state = random_state()
    first = (random.random(), np.random.rand(), torch.rand(1).item())  # noqa: NPY002
    restore_random_state(state)
    assert first == (random.random(), np.random.rand(), torch.rand(1).item())  # noqa: NPY002


def test_rewind_drops_later_and_torn_lines(tmp_path: Path) -> None:
    logger = FileLogger(tmp_path)
    for step in (10, 20, 30):
        logger.log(step, {"loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "lo')
    logger.rewind(20)
    assert [row["step"] for row in logged(tmp_path)] == [10, 20]


# --- bad input ---


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_names_the_step(value: float) -> None:
    network = nn.Linear(2, 1)
    calls = []

    def loss(m: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return m(batch).sum() * (value if len(calls) == 3 else 1.0)

    config = TrainConfig(steps=9, device="cpu")
    before = network.weight.detach().clone()
    with pytest.raises(GossamerError, match=r"at step 3 of 9. Lower `lr`"):
        Trainer(network, loss, config, quiet=True).fit([torch.ones(1, 2)])
    assert torch.isfinite(network.weight).all()
    assert not torch.equal(before, network.weight)


def test_no_batches() -> None:
    with pytest.raises(ConfigError, match="must hold a batch each time"):
        Trainer(
            nn.Linear(1, 1), lambda m, b: m(b).sum(), TrainConfig(device="cpu"), quiet=True
        ).fit([])


@pytest.mark.parametrize(
    "options",
    [{"steps": 0}, {"lr": 0.0}, {"betas": (0.9, 1.5)}, {"clip": -1.0}, {"warmup": 1.5},
     {"precision": "int8"}, {"device": "tpu"}, {"log_every": 0}, {"lr": float("nan")}],
)  # fmt: skip
def test_bad_settings(options: dict) -> None:
    with pytest.raises(ConfigError):
        TrainConfig(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_a_device_that_is_not_here() -> None:
    config = TrainConfig(device="cuda")
    with pytest.raises(ConfigError, match="device 'cuda' needs that device"):
        Trainer(nn.Linear(1, 1), lambda m, b: m(b).sum(), config, quiet=True).fit(
            [torch.ones(1, 1)]
        )


@pytest.mark.parametrize("precision", ["bfloat16"])
def test_mixed_precision_trains(precision: str) -> None:
    network = model(0.0)
    config = TrainConfig(steps=3, precision=precision, device="cpu", log_every=1)
    before = {k: v.clone() for k, v in network.state_dict().items()}
    Trainer(network, answer_loss, config, quiet=True).fit(AdditionTask((1, 3)).stream(8, seed=0))
    assert any(not torch.equal(v, before[k]) for k, v in network.state_dict().items())
    batch = AdditionTask((1, 3)).stream(8, seed=0).batch(0)
    twin = model(0.0)
    twin.load_state_dict(network.state_dict())
    one, two = (m.eval()(batch.tokens, batch.position_ids) for m in (network, twin))
    assert torch.equal(one, two)  # nothing of mixed precision outlives the training
    assert all(p.dtype == torch.float32 for p in network.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_training_on_a_gpu(tmp_path: Path) -> None:
    fit(tmp_path, TrainConfig(**{**CONFIG.__dict__, "device": "cuda", "precision": "bfloat16"}))
    assert load_checkpoint(tmp_path)["step"] == CONFIG.steps
