"""Attention by blocks gives what the whole mask gives, in time linear in the documents.

One attention layer on random numbers, without a model around it. The bars were fixed before the
run on record. Times are seconds of one CPU thread, which other programs on the machine disturb
less than wall time; what is compared runs in turn in one process.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gossamer.recipes._base import Arm, Claim, Column, Figure, Outcome, Recipe
from gossamer.recipes._timing import cpu_seconds
from gossamer.train.logging import Logger

__all__ = ["RECIPE", "Config"]

MERGE, CALLS, FULL, DENSE = "merge", "sdpa", "full", "dense"


@dataclass(frozen=True)
class Config:
    """Settings of the recipe.

    Args:
        tokens: Of each block.
        documents: Sizes at which the block form is timed; it is compared with full causal
            attention at the last but one.
        full_documents: Sizes at which full causal attention is timed.
        dense_documents: Sizes at which attention under the whole mask is timed.
        heads: Of the layer.
        head_dim: Width of a head.
        repeats: Timed passes of the block form; full attention runs once between them.
        checked_documents: Documents of the prompt whose results are compared, of 1 to `tokens`
            tokens each.
        kv_heads: Key heads in that comparison.
    """

    tokens: int = 160
    documents: tuple[int, ...] = (12, 25, 50, 100, 200)
    full_documents: tuple[int, ...] = (12, 25, 50, 100)
    dense_documents: tuple[int, ...] = (12, 25)
    heads: int = 8
    head_dim: int = 128
    repeats: int = 3
    checked_documents: int = 8
    kv_heads: int = 2


def run(config: Config, arm: str, seed: int, log: Logger) -> Outcome:
    """Measure one form: how far it is off the whole mask, and how long it takes."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    if arm in (MERGE, CALLS):
        scalars = errors_of(arm, config, generator)
        sizes = config.documents
    else:
        scalars = {}
        sizes = config.full_documents if arm == FULL else config.dense_documents
    with torch.no_grad():
        seconds, speedup = times_of(arm, config, sizes, generator)
    rows = [{"documents": n, "seconds": seconds[n]} for n in sizes]
    scalars["growth"] = seconds[sizes[-1]] / seconds[sizes[-2]]
    if speedup is not None:
        scalars["speedup"] = speedup
    return Outcome(scalars, rows)


def errors_of(arm: str, config: Config, generator: Any) -> dict[str, float]:
    """Return the largest distances from the whole mask, on documents of mixed lengths.

    The block form that learns is compared in gradients as well, of a sum over outputs and scores.
    """
    import torch

    from gossamer.attention import BlockLayout, block_attention, block_scores

    high = (config.checked_documents + 2,)
    lengths = torch.randint(1, config.tokens + 1, high, generator=generator).tolist()
    layout = BlockLayout(lengths)
    shapes = [(heads, layout.num_tokens, config.head_dim) for heads in (config.heads,) * 2]
    shapes += [(config.kv_heads, layout.num_tokens, config.head_dim)] * 2
    weight, q, k, v = (torch.randn(1, *shape, generator=generator) for shape in shapes)
    learns = arm == CALLS
    found: dict[str, list[Any]] = {}
    for name in (arm, DENSE):
        inputs = [x.clone().requires_grad_(learns) for x in (q, k, v)]
        if name == DENSE:
            out, scores = oracle(inputs[0], inputs[1], inputs[2], layout)
        else:
            out, logits = block_attention(
                inputs[0], inputs[1], inputs[2], layout, engine=arm, return_signal_logits=True
            )
            scores = block_scores(logits, layout)
        found[name] = [out.detach(), scores.detach()]
        if learns:
            steps = torch.arange(1.0, 1.0 + scores.shape[-1])
            loss = (weight * out).sum() + (steps * scores).sum()
            found[name] += torch.autograd.grad(loss, inputs)
    off = [float((a - b).abs().max()) for a, b in zip(found[arm], found[DENSE], strict=True)]
    errors = {"output_error": off[0], "score_error": off[1], "error": max(off)}
    return {**errors, "gradient_error": max(off[2:])} if learns else errors


def oracle(q: Any, k: Any, v: Any, layout: Any) -> tuple[Any, Any]:
    """Return outputs and scores by the whole mask, as the formulas stand."""
    import torch
    from torch.nn import functional as F

    size = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(size, dim=1) for x in (k, v))
    real, block = layout.real(), layout.block_ids()
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=layout.mask() | ~real[:, None])
    out = torch.where(real[:, None], out, 0.0)
    logits = q[:, :, -2:] @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    documents = (block > 0) & (block < layout.num_blocks - 1)
    weights = logits.masked_fill(~documents, -torch.inf).softmax(-1)
    shares = [weights[..., block == n].sum(-1) for n in range(1, layout.num_blocks - 1)]
    return out, torch.stack(shares, dim=-1).mean((1, 2))


def times_of(
    arm: str, config: Config, sizes: tuple[int, ...], generator: Any
) -> tuple[dict[int, float], float | None]:
    """Return the seconds at each size, and full attention's over it where both are measured."""
    passes = {n: passes_of(arm, config, n, generator) for n in sizes}
    if arm == FULL:
        return {n: cpu_seconds(one) for n, (one, _) in passes.items()}, None
    compared = sizes[-2] if arm in (MERGE, CALLS) else sizes[-1]
    times: dict[int, list[float]] = {n: [] for n in sizes}
    full = 0.0
    for one, _ in passes.values():
        one()  # warm-up
    for repeat in range(config.repeats):
        for n, (one, whole) in passes.items():
            times[n].append(cpu_seconds(one))
            if n == compared and repeat == config.repeats // 2:
                full = cpu_seconds(whole)
    seconds = {n: statistics.median(values) for n, values in times.items()}
    return seconds, full / seconds[compared]


def passes_of(
    arm: str, config: Config, documents: int, generator: Any
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return a pass of the arm and one of full causal attention, on the same random numbers."""
    import torch
    from torch.nn import functional as F

    from gossamer.attention import BlockLayout, block_attention

    layout = BlockLayout([config.tokens] * (documents + 2))
    shape = (1, config.heads, layout.num_tokens, config.head_dim)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))

    def full() -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def blocks() -> Any:
        return block_attention(q, k, v, layout, engine=arm)

    return (full if arm == FULL else blocks), full


def _claims(arm: str, what: str, compared: str) -> tuple[Claim, ...]:
    def claim(text: str, metric: str, unit: str, better: Any, bar: float, **more: Any) -> Claim:
        return Claim(text, metric, unit, arm, better, "bar", bar, **more)

    return (
        claim(
            f"{what}: within 1e-5 of the whole mask in {compared}, float32",
            "error",
            "largest distance",
            "lower",
            1e-5,
            statistic="max",
        ),
        claim(
            f"{what}: at 100 documents of 160 tokens at least 8 times faster than full causal "
            "attention",
            "speedup",
            "times faster",
            "higher",
            8.0,
            paper={"whole model, 100 documents": 4.7},
        ),
        claim(
            f"{what}: 200 documents take at most 2.4 times as long as 100",
            "growth",
            "times as long",
            "lower",
            2.4,
        ),
    )


RECIPE = Recipe(
    name="block-attention",
    method="block-attention",
    title="Block attention: the same result as the whole mask, in time linear in documents",
    what=(
        "A prompt holds an instruction, many documents and a question. Each document sees the "
        "instruction and itself, the question sees everything. Is attention computed block by "
        "block the same as attention under the whole mask, how much faster is it than full causal "
        "attention, and does its time grow with the number of documents or with its square? "
        "One layer on random numbers, one CPU thread."
    ),
    claims=(
        *_claims(MERGE, "Shared and own keys apart", "outputs and scores"),
        *_claims(CALLS, "Three calls", "outputs, scores and gradients"),
    ),
    arms=(
        Arm(MERGE, "Blocks, shared and own keys apart (inference)", "ours", cost=1.5),
        Arm(CALLS, "Blocks, three calls", "ours", cost=1.5),
        Arm(FULL, "Full causal attention", "baseline", max_seeds=1),
        Arm(DENSE, "The whole mask", "baseline", max_seeds=1),
    ),
    scales={
        "small": Config(),
        "medium": Config(documents=(25, 50, 100, 200, 400), full_documents=(25, 50, 100, 200)),
    },
    run=run,
    columns=(
        Column("output_error", "Outputs, off the whole mask", "largest distance", in_domain=True),
        Column("score_error", "Scores, off the whole mask", "largest distance"),
        Column("gradient_error", "Gradients, off the whole mask", "largest distance"),
        Column("error", "All of them", "largest distance"),
        Column("speedup", "Faster than full causal attention", "times faster"),
        Column("growth", "Twice the documents", "times as long"),
    ),
    figures=(
        Figure(
            "curve",
            "time-by-documents",
            "Time of one layer by the number of documents",
            "CPU seconds of one attention layer against the number of documents of 160 tokens, "
            "one line for each form; both axes are logarithmic.",
            "documents",
            "seconds",
            {
                "log_x": True,
                "log_y": True,
                "x_label": "documents",
                "y_label": "CPU time (s)",
            },
        ),
    ),
    budget={"small": 6, "medium": 30},
)
