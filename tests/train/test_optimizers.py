"""Optimisers by name: each step by hand, resume to the bit, models that do not fit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.errors import ConfigError, DataError
from gossamer.layers import split_parameters
from gossamer.models import Decoder, ScaleInvariantTransformer
from gossamer.optim import ScaleInvariantSGD
from gossamer.tasks import CopyTask, TextTask
from gossamer.train import (
    AnswerLoss,
    FileLogger,
    TrainConfig,
    Trainer,
    TrainJob,
    answer_loss,
    load_checkpoint,
    save_checkpoint,
    train_task,
)

TASK = CopyTask((2, 4))


def invariant() -> ScaleInvariantTransformer:
    torch.manual_seed(0)
    return ScaleInvariantTransformer(TASK.vocab_size, 16, 1, 2, causal=True, max_length=16)


def settings(**values: Any) -> TrainConfig:
    return TrainConfig(
        **{"steps": 20, "device": "cpu", "log_every": 5, "checkpoint_every": 8, **values}
    )


def fit(model: nn.Module, config: TrainConfig, folder: Path | None = None, **options: Any) -> None:
    logger = FileLogger(folder) if folder else None
    trainer = Trainer(model, options.pop("loss", answer_loss), config, logger=logger, quiet=True)
    trainer.fit(TASK.stream(8, seed=0), **options)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_scale_invariant_sgd_trains_body_and_head_apart() -> None:
    config = settings(lr=0.2, weight_decay=0.1, optimizer="scale_invariant_sgd", clip=2.0)
    model, by_hand = invariant(), invariant()
    body, head = split_parameters(by_hand)
    optimizers = [
        ScaleInvariantSGD(body, 0.2, weight_decay=0.1),
        torch.optim.AdamW(head, 3e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    peaks = (0.2, 3e-3)
    stream = TASK.stream(8, seed=0)
    for step in range(20):
        loss = answer_loss(by_hand, stream.batch(step))
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.zero_grad()
            # a tenth at 60 % and at 90 % of the steps
            factor = 1.0 if step < 12 else 0.1 if step < 18 else 0.01
            optimizer.param_groups[0]["lr"] = peak * factor
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    fit(model, config)
    assert torch.allclose(weights(model), weights(by_hand), atol=1e-6)


def test_sgd_has_momentum_and_decays_matrices() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    by_hand = copy.deepcopy(model)
    config = TrainConfig(
        steps=3, lr=0.1, optimizer="sgd", betas=(0.5, 0.9), weight_decay=0.2, clip=0.0, warmup=0.0,
        floor=1.0, device="cpu",
    )  # fmt: skip
    x = torch.tensor([[1.0, 2.0], [0.5, -1.0]])
    Trainer(model, lambda m, b: m(b).square().mean(), config, quiet=True).fit([x])
    speed = {name: torch.zeros_like(p) for name, p in by_hand.named_parameters()}
    for _ in range(3):
        grads = torch.autograd.grad(by_hand(x).square().mean(), list(by_hand.parameters()))
        for (name, p), grad in zip(by_hand.named_parameters(), grads, strict=True):
            decayed = grad + 0.2 * p.detach() if p.dim() == 2 else grad
            speed[name] = 0.5 * speed[name] + decayed
            p.data -= 0.1 * speed[name]
    assert torch.allclose(weights(model), weights(by_hand), atol=1e-6)


@pytest.mark.parametrize("name", ["scale_invariant_sgd", "sgd", "adamw"])
def test_resumed_runs_are_equal_to_the_bit(tmp_path: Path, name: str) -> None:
    decay = 0.1 if name == "scale_invariant_sgd" else 0.0
    config = settings(lr=0.05, weight_decay=decay, optimizer=name, clip=2.0)
    whole, part = invariant(), invariant()
    fit(whole, config)
    calls = 0

    def broken(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise RuntimeError("broken off")
        return answer_loss(model, batch)

    with pytest.raises(RuntimeError, match="broken off"):
        fit(part, config, tmp_path, loss=broken)
    resumed = invariant()
    fit(resumed, config, tmp_path, resume=True)
    assert torch.equal(weights(resumed), weights(whole))


def test_a_checkpoint_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    fit(invariant(), settings(), tmp_path)
    state = load_checkpoint(tmp_path)
    assert state is not None
    state["optimizer"] = state.pop("optimizers")["0"]
    save_checkpoint(tmp_path, state)
    with pytest.raises(DataError, match="earlier version"):
        fit(invariant(), settings(), tmp_path, resume=True)


def test_bad_optimizers() -> None:
    with pytest.raises(ConfigError, match="did you mean 'adamw'"):
        settings(optimizer="adam")
    with pytest.raises(ConfigError, match="head_lr"):
        settings(head_lr=0.0)
    decoder = Decoder(TASK.vocab_size, 16, 1, 2)
    with pytest.raises(ConfigError, match=r"got Decoder\. Use model scale_invariant"):
        fit(decoder, settings(optimizer="scale_invariant_sgd", weight_decay=0.1))


def test_job_of_a_scale_invariant_model_has_its_own_defaults(tmp_path: Path) -> None:
    path = tmp_path / "song.txt"
    path.write_text("la li la lo li " * 200)
    tables = {
        "task": {"name": "text", "path": str(path), "length": 200},
        "model": {"name": "scale_invariant", "dim": 8},
        "train": {"optimizer": "scale_invariant_sgd", "steps": 60, "device": "cpu"},
    }
    job = TrainJob.from_dict(tables, "test")
    assert dict(job.model) == {
        "name": "scale_invariant", "dim": 8, "num_layers": 2, "num_heads": 2, "causal": True,
        "max_length": 201,
    }  # fmt: skip
    assert job.train.lr * job.train.weight_decay * job.train.steps == pytest.approx(6.0)
    result = train_task(job, tmp_path / "run", num_samples=5, quiet=True)
    # text of period 15: far below the loss of guessing among 5 characters
    assert result.rows()[0]["cross_entropy"] < 1.2
    job.check(TextTask(path, length=200))


def test_answer_loss_of_any_loss_on_classes() -> None:
    from gossamer.losses import LabelSmoothingLoss

    model, batch = invariant(), TASK.stream(4, seed=1).batch(0)
    logits = model(batch.tokens[:, :-1]).detach().double().log_softmax(-1)
    total, count = 0.0, 0
    for row in range(4):
        for place in range(batch.tokens.shape[1] - 1):
            if batch.loss_mask[row, place + 1]:
                log_p = logits[row, place]
                token = batch.tokens[row, place + 1]
                total += float(-0.8 * log_p[token] - 0.2 * log_p.mean())
                count += 1
    found = AnswerLoss(LabelSmoothingLoss(0.2))(model, batch)
    assert found.item() == pytest.approx(total / count, abs=1e-5)
