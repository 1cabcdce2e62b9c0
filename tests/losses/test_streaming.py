"""Log-sum-exp by chunks against the whole matrix."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from gossamer.errors import ConfigError, ShapeError
from gossamer.losses import streamed_logsumexp


@pytest.mark.parametrize("chunk_size", [1, 7, 23, 100])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_whole_matrix(chunk_size: int, masked: bool) -> None:
    torch.manual_seed(0)
    q = (20 * torch.randn(5, 4, dtype=torch.float64)).requires_grad_()
    k = torch.randn(23, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(5, 23) < 0.5 if masked else None
    got = streamed_logsumexp(q, k, chunk_size=chunk_size, mask=mask)
    scores = q @ k.T
    expected = (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).logsumexp(1)
    torch.testing.assert_close(got, expected)
    weight = torch.randn(5, dtype=torch.float64)
    ours = torch.autograd.grad((got * weight).sum(), (q, k))
    theirs = torch.autograd.grad((expected * weight).sum(), (q, k))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_a_row_that_sees_nothing() -> None:
    q, k = torch.randn(2, 3, requires_grad=True), torch.randn(6, 3, requires_grad=True)
    mask = torch.tensor([[False] * 6, [True] * 6])
    out = streamed_logsumexp(q, k, chunk_size=4, mask=mask)
    assert out[0].item() == -torch.inf
    out[1].backward()
    assert q.grad is not None
    assert k.grad is not None
    assert not q.grad[0].any()
    assert k.grad.isfinite().all()


def test_half_precision_sums_in_float32() -> None:
    q, k = torch.randn(3, 8).bfloat16(), torch.randn(5000, 8).bfloat16()
    got = streamed_logsumexp(q, k, chunk_size=700)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, (q @ k.T).float().logsumexp(1))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_matrix() -> None:
    """512 queries x 400,000 keys would be 0.8 GB of scores; a few chunks are allowed."""
    code = (
        "import resource, torch\n"
        "from gossamer.losses import streamed_logsumexp\n"
        "q = torch.randn(512, 16, requires_grad=True); k = torch.randn(400_000, 16)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "streamed_logsumexp(q, k).sum().backward()\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200


def test_bad_input() -> None:
    q, k = torch.zeros(2, 3), torch.zeros(4, 3)
    with pytest.raises(ConfigError, match="chunk_size"):
        streamed_logsumexp(q, k, chunk_size=0)
    with pytest.raises(ShapeError, match="keys"):
        streamed_logsumexp(q, torch.zeros(4, 2))
    with pytest.raises(ShapeError, match="mask"):
        streamed_logsumexp(q, k, mask=torch.ones(2, 3, dtype=torch.bool))
