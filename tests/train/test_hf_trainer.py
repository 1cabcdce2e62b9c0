"""Losses as `compute_loss_func`: mean over a step, shift, soft labels, a real trainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gossamer.errors import ConfigError, ShapeError
from gossamer.losses import ForwardCorrectionLoss, LabelSmoothingLoss, SymmetricNoise
from gossamer.train import as_trainer_loss


def example() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (4, 6), generator=generator)
    labels[0, 2:] = labels[3, 1:] = -100
    return logits, labels


@pytest.mark.parametrize("shift", [False, True])
def test_parts_of_a_step_sum_to_its_mean(shift: bool) -> None:
    logits, labels = example()
    x, y = (logits[:, :-1], labels[:, 1:]) if shift else (logits, labels)
    count = (y != -100).sum()
    expected = F.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.2)
    compute = as_trainer_loss(LabelSmoothingLoss(0.2), shift=shift)
    parts = [
        compute(SimpleNamespace(logits=logits[i : i + 1]), labels[i : i + 1], count)
        for i in range(4)
    ]
    torch.testing.assert_close(torch.stack(parts).sum(), expected)
    torch.testing.assert_close(compute({"logits": logits}, labels), expected)


def test_the_loss_itself_is_left_alone() -> None:
    loss = LabelSmoothingLoss(0.2, reduction="none")
    compute = as_trainer_loss(loss)
    assert compute({"logits": torch.zeros(2, 3)}, torch.tensor([0, 1])).shape == ()
    assert loss.reduction == "none"


def test_soft_labels() -> None:
    logits = example()[0][:, 0]
    soft = logits.roll(1, 0).softmax(1)
    value = as_trainer_loss(LabelSmoothingLoss(0.0))({"logits": logits}, soft)
    torch.testing.assert_close(value, F.cross_entropy(logits, soft))


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="option reduction; got Identity"):
        as_trainer_loss(nn.Identity())
    compute = as_trainer_loss(LabelSmoothingLoss())
    with pytest.raises(ShapeError, match=r"\(4, 6, 5\).*got \(4, 5\)"):
        compute({"logits": example()[0]}, torch.zeros(4, 5, dtype=torch.long))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        return {"logits": self.layer(x)}


@pytest.mark.slow
def test_accumulated_batches_train_as_one(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    generator = torch.Generator().manual_seed(0)
    labels = [0, 1, -100, 2, 3, -100, -100, 1]  # two batches with 3 and 2 labels
    rows = [{"x": torch.randn(3, generator=generator), "labels": y} for y in labels]
    weights = []
    for size, steps in ((8, 1), (4, 2)):
        model = Classifier()
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=size, max_steps=1,
            gradient_accumulation_steps=steps, optim="sgd", learning_rate=1.0, max_grad_norm=0,
            lr_scheduler_type="constant", report_to=[], save_strategy="no", use_cpu=True,
            dataloader_pin_memory=False, disable_tqdm=True,
        )  # fmt: skip
        loss = as_trainer_loss(ForwardCorrectionLoss(SymmetricNoise(4, 0.2)))
        transformers.Trainer(model, arguments, train_dataset=rows, compute_loss_func=loss).train()
        weights.append(model.layer.weight.detach())
    start = Classifier().layer.weight.detach()
    assert (weights[0] - start).abs().max() > 1e-3
    torch.testing.assert_close(weights[0], weights[1])
