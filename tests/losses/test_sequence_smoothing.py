"""Smoothing over sentences against a loop over tokens, the plain loss, and its own parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gossamer.errors import ConfigError, DataError, DtypeError, ShapeError
from gossamer.losses import SequenceSmoothingLoss

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def labels_of(lengths: list[int], width: int, vocab: int, generator: Any) -> torch.Tensor:
    labels = torch.randint(vocab, (len(lengths), width), generator=generator)
    for row, length in enumerate(lengths):
        labels[row, length:] = -100
    return labels


def example(k: int = 3, seed: int = 0, vocab: int = 7) -> Batch:
    """Return four pairs; the second has no neighbour, the third one, the others k and k - 1."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 5, vocab, generator=generator, dtype=torch.float64)
    labels = labels_of([5, 2, 4, 1], 5, vocab, generator)
    neighbor_logits = torch.randn(4, k, 6, vocab, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, 7, (4 * k,), generator=generator).tolist()
    neighbors = labels_of(lengths, 6, vocab, generator).reshape(4, k, 6)
    neighbors[1] = -100
    neighbors[2, 1:] = -100
    neighbors[3, -1] = -1
    return logits, labels, neighbor_logits, neighbors


def mean_nll(logits: Any, labels: Any, token_alpha: float = 0.0) -> float:
    """Return the mean loss of the tokens of one sequence, token by token in NumPy."""
    losses = []
    for row, label in zip(np.asarray(logits), np.asarray(labels), strict=True):
        if label >= 0:
            log_p = row - np.log(np.exp(row).sum())
            losses.append(-(1 - token_alpha) * log_p[label] - token_alpha * log_p.mean())
    return float(np.mean(losses)) if losses else 0.0


def naive(batch: Batch, alpha: float, token_alpha: float = 0.0) -> float:
    """Return the loss pair by pair."""
    logits, labels, neighbor_logits, neighbors = batch
    total, tokens = 0.0, 0
    for b in range(len(labels)):
        size = int((labels[b] >= 0).sum())
        found = [
            mean_nll(neighbor_logits[b, j], neighbors[b, j], token_alpha)
            for j in range(neighbors.shape[1])
            if (neighbors[b, j] >= 0).any()
        ]
        own = mean_nll(logits[b], labels[b], token_alpha)
        mixed = (1 - alpha) * own + alpha * np.mean(found) if found else own
        total += size * mixed
        tokens += size
    return total / tokens


# --- reference values ---


@pytest.mark.parametrize("token_alpha", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("k", [1, 3])
def test_equal_to_a_loop(k: int, alpha: float, token_alpha: float) -> None:
    batch = example(k)
    loss = SequenceSmoothingLoss(alpha=alpha, sample=False, token_alpha=token_alpha)
    assert float(loss(*batch)) == pytest.approx(naive(batch, alpha, token_alpha), abs=1e-12)


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_one_neighbour_is_the_sum_over_one(alpha: float) -> None:
    logits, labels, neighbor_logits, neighbors = example(1)
    one = SequenceSmoothingLoss(alpha=alpha)(logits, labels, neighbor_logits[:, 0], neighbors[:, 0])
    every = SequenceSmoothingLoss(alpha=alpha, sample=False)(
        logits, labels, neighbor_logits, neighbors
    )
    assert torch.equal(one, every)


def test_hand_value() -> None:
    """Two tokens of loss log 2 and a neighbour of four tokens of loss log 4, alpha 0.25."""
    logits = torch.zeros(1, 2, 4)
    logits[..., 2:] = -1e9  # two of four tokens are possible
    loss = SequenceSmoothingLoss(alpha=0.25)
    found = loss(logits, torch.tensor([[0, 1]]), torch.zeros(1, 4, 4), torch.tensor([[0, 1, 2, 3]]))
    assert float(found) == pytest.approx(0.75 * np.log(2) + 0.25 * np.log(4))


@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 5, 11), (16, 24, 100), (7, 63, 33)])
def test_without_smoothing_it_is_the_plain_loss_to_the_bit(
    shape: tuple[int, int, int], generator: torch.Generator
) -> None:
    logits = torch.randn(shape, generator=generator)
    labels = torch.randint(shape[2], shape[:2], generator=generator)
    labels[torch.rand(shape[:2], generator=generator) < 0.2] = -100
    labels[0, 0] = 1
    plain, zero, one, unused = (logits.clone().requires_grad_() for _ in range(4))
    expected = F.cross_entropy(plain.flatten(0, 1), labels.flatten())
    nan = torch.full_like(logits, float("nan"))
    losses = (
        SequenceSmoothingLoss(alpha=0.0)(zero, labels, nan, labels),
        SequenceSmoothingLoss(alpha=1.0)(unused, labels, one, labels),
    )
    for found in (expected, *losses):
        found.backward()
    assert torch.equal(losses[0], expected)
    assert torch.equal(losses[1], expected)
    assert torch.equal(zero.grad, plain.grad)
    assert torch.equal(one.grad, plain.grad)
    assert not unused.grad.any()


def test_token_smoothing_alone_is_that_of_the_framework() -> None:
    logits, labels, neighbor_logits, neighbors = example(3)
    loss = SequenceSmoothingLoss(alpha=0.0, sample=False, token_alpha=0.1)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(loss(logits, labels, neighbor_logits, neighbors), expected)


# --- limits and invariances ---


def test_the_sum_is_the_mean_of_one_sample_losses() -> None:
    """All pairs have k neighbours here: the mean over j of the losses with neighbour j."""
    logits, labels, neighbor_logits, _ = example(3, seed=4)
    generator = torch.Generator().manual_seed(5)
    neighbors = labels_of(torch.randint(1, 7, (12,), generator=generator).tolist(), 6, 7, generator)
    neighbors = neighbors.reshape(4, 3, 6)
    logits.requires_grad_()
    neighbor_logits.requires_grad_()
    full = SequenceSmoothingLoss(alpha=0.3, sample=False)(
        logits, labels, neighbor_logits, neighbors
    )
    one = SequenceSmoothingLoss(alpha=0.3)
    mean = sum(one(logits, labels, neighbor_logits[:, j], neighbors[:, j]) for j in range(3)) / 3
    torch.testing.assert_close(full, mean, atol=1e-12, rtol=0)
    both = [torch.autograd.grad(x, (logits, neighbor_logits)) for x in (full, mean)]
    torch.testing.assert_close(both[0], both[1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("sample", [True, False])
def test_padding_changes_neither_loss_nor_gradients(sample: bool) -> None:
    logits, labels, neighbor_logits, neighbors = example(3)
    if sample:
        neighbor_logits, neighbors = neighbor_logits[:, 0], neighbors[:, 0]
    loss = SequenceSmoothingLoss(alpha=0.3, sample=sample, token_alpha=0.1)

    def run(pad: int) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (logits, neighbor_logits)]
        padded = [F.pad(x, (0, 0, 0, pad), value=3.0) for x in leaves]
        rows = [F.pad(x, (0, pad), value=-100) for x in (labels, neighbors)]
        value = loss(padded[0], rows[0], padded[1], rows[1])
        value.backward()
        return [value.detach(), *(leaf.grad for leaf in leaves)]

    for one, two in zip(run(0), run(9), strict=True):
        torch.testing.assert_close(one, two, atol=1e-15, rtol=1e-14)


def test_order_of_pairs_and_of_neighbours_changes_nothing() -> None:
    logits, labels, neighbor_logits, neighbors = example(3)
    loss = SequenceSmoothingLoss(alpha=0.3, sample=False)
    expected = loss(logits, labels, neighbor_logits, neighbors)
    order, inner = torch.tensor([2, 0, 3, 1]), torch.tensor([2, 0, 1])
    found = loss(
        logits[order], labels[order], neighbor_logits[order][:, inner], neighbors[order][:, inner]
    )
    torch.testing.assert_close(found, expected, atol=1e-14, rtol=0)


@pytest.mark.parametrize("sizes", [(1, 3), (2, 2), (1, 1, 1, 1)])
def test_micro_batches_add_up(sizes: tuple[int, ...]) -> None:
    batch = example(3)
    loss = SequenceSmoothingLoss(alpha=0.3, sample=False)
    leaves = [x.clone().requires_grad_() for x in (batch[0], batch[2])]
    whole = loss(leaves[0], batch[1], leaves[1], batch[3])
    expected = torch.autograd.grad(whole, leaves)
    tokens, total, begin = int((batch[1] != -100).sum()), torch.zeros(()), 0
    for size in sizes:
        part = slice(begin, begin + size)
        part_loss = loss(
            leaves[0][part], batch[1][part], leaves[1][part], batch[3][part], num_tokens=tokens
        )
        part_loss.backward()
        total = total + part_loss.detach()
        begin += size
    torch.testing.assert_close(total, whole.detach(), atol=1e-13, rtol=0)
    for leaf, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, atol=1e-14, rtol=0)


def test_a_pair_without_neighbours_keeps_its_plain_loss_and_changes_no_other() -> None:
    """The summed loss of a batch is that of its pairs, each alone."""
    batch = example(3)
    loss = SequenceSmoothingLoss(alpha=0.3, sample=False)
    sums = [
        float(loss(*(x[b : b + 1] for x in batch))) * int((batch[1][b] >= 0).sum())
        for b in range(4)
    ]
    assert sums[1] == pytest.approx(2 * mean_nll(batch[0][1], batch[1][1]), abs=1e-12)
    tokens = int((batch[1] >= 0).sum())
    assert float(loss(*batch)) * tokens == pytest.approx(sum(sums), abs=1e-12)


def test_no_neighbours_at_all() -> None:
    logits, labels, neighbor_logits, neighbors = example(3)
    plain = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss = SequenceSmoothingLoss(alpha=0.3, sample=False)
    none = torch.full_like(neighbors, -100)
    assert torch.equal(loss(logits, labels, neighbor_logits, none), plain)
    assert torch.equal(loss(logits, labels, neighbor_logits, none - none - 1), plain)
    assert torch.equal(loss(logits, labels, None, None), plain)


def test_no_tokens_at_all() -> None:
    logits, labels, neighbor_logits, neighbors = example(1)
    logits.requires_grad_()
    found = SequenceSmoothingLoss(sample=False)(
        logits, torch.full_like(labels, -100), neighbor_logits, neighbors
    )
    found.backward()
    assert float(found.detach()) == 0
    assert not logits.grad.any()


def test_alpha_may_change_between_steps() -> None:
    batch = example(3)
    loss = SequenceSmoothingLoss(alpha=0.0, sample=False)
    loss.alpha = 0.2
    assert float(loss(*batch)) == pytest.approx(naive(batch, 0.2), abs=1e-12)
    loss.alpha = 1.5
    with pytest.raises(ConfigError, match="alpha must be"):
        loss(*batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    logits, labels, neighbor_logits, neighbors = example(3)
    x, y = logits.to(dtype), neighbor_logits.to(dtype)
    loss = SequenceSmoothingLoss(alpha=0.3, sample=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = loss(x, labels, y, neighbors)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(
        naive((x.double(), labels, y.double(), neighbors), 0.3), abs=1e-6
    )


# --- gradients ---


@pytest.mark.parametrize("token_alpha", [0.0, 0.2])
def test_gradients(token_alpha: float) -> None:
    logits, labels, neighbor_logits, neighbors = example(2)
    loss = SequenceSmoothingLoss(alpha=0.3, sample=False, token_alpha=token_alpha)

    def of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss(x, labels, y, neighbors)

    leaves = (logits.requires_grad_(), neighbor_logits.requires_grad_())
    assert torch.autograd.gradcheck(of, leaves)
    value = of(*leaves)
    value.backward()
    assert not leaves[0].grad[labels == -100].any()
    assert not leaves[1].grad[neighbors < 0].any()


# --- bad input ---


def test_bad_options() -> None:
    for options in ({"alpha": -0.1}, {"alpha": 1.1}, {"token_alpha": 2.0}, {"alpha": float("nan")}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))} must be >= 0 and <= 1"):
            SequenceSmoothingLoss(**options)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x, y, u, v: (x[0], y, u, v), ShapeError, r"logits must have the shape \(B, T, V\)"),
        (lambda x, y, u, v: (x, y[:, 1:], u, v), ShapeError, "labels must have the shape.*shifted"),
        (lambda x, y, u, v: (x, y, u[:, 0], v[:, 0]), ShapeError, "sample=False takes all neigh"),
        (lambda x, y, u, v: (x, y, u, v[:, 0]), ShapeError, "neighbor_labels must have the shape"),
        (lambda x, y, u, v: (x, y, u[:3], v[:3]), ShapeError, "must have the pairs"),
        (lambda x, y, u, v: (x, y, u[..., :6], v % 6), ShapeError, "and the vocabulary of logits"),
        (lambda x, y, u, v: (x, y, u, None), ShapeError, "given together; got no neighbor_labels"),
        (lambda x, y, u, v: (x.long(), y, u, v), DtypeError, "logits must be floating point"),
        (lambda x, y, u, v: (x, y.double(), u, v), DtypeError, "labels must be token ids"),
        (lambda x, y, u, v: (x, y.clamp(max=9) + 7, u, v), DataError, "labels must lie in 0 to 6"),
        (lambda x, y, u, v: (x, y, u, v + 7), DataError, "neighbor_labels must lie.*tokenizer"),
        (lambda x, y, u, v: (x, y.clamp(min=-1), u, v), DataError, "got -1"),
        (lambda x, y, u, v: (x * float("nan"), y, u, v), DataError, "no NaN"),
        (lambda x, y, u, v: (x, y, u * float("nan"), v), DataError, "no NaN"),
    ],
)
def test_bad_input(change: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SequenceSmoothingLoss(sample=False)(*change(*example(3)))


def test_all_neighbours_for_a_loss_of_one() -> None:
    with pytest.raises(ShapeError, match="sample=True takes one neighbour"):
        SequenceSmoothingLoss()(*example(3))
