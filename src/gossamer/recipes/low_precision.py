"""Tied maxima bias bfloat16 attention, and a larger softmax shift removes the bias.

Scores and values are drawn, not trained: the run that fails in the paper takes thousands of steps
of a GPT-2 on several GPUs. Every arm sees the same draws. The bars were fixed before the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gossamer.recipes._base import Arm, Claim, Column, Figure, Outcome, Recipe
from gossamer.train.logging import Logger

__all__ = ["RECIPE", "Config"]

TIES = (2, 3, 4)
UNIT = 2.0**-8
# keywords of `low_precision_attention`
SHIFTED: dict[str, dict[str, Any]] = {
    "float32": {"as_float32": True},
    "plain": {},
    "beta2": {"shift": "beta", "beta": 2.0},
    "beta4": {"shift": "beta", "beta": 4.0},
    "beta7": {"shift": "beta", "beta": 7.0},
    "bounded": {"shift": "bounded", "beta": 7.0},
    "running": {"accumulate": "bfloat16"},
    "running_beta7": {"accumulate": "bfloat16", "shift": "beta", "beta": 7.0},
}


@dataclass(frozen=True)
class Config:
    """Settings of the recipe.

    Args:
        num_rows: Rows of scores, each with values of its own.
        num_keys: Keys of a row.
        num_values: Width of a value.
        top: Score of the tied keys.
        tail: How far the other scores lie below it, least and most.
        wide_tail: The same for a tail so large that the mechanism does not act.
        values: Range of the values of one sign.
        symmetric: Range of the values of both signs.
    """

    num_rows: int = 3000
    num_keys: int = 64
    num_values: int = 8
    top: float = 3.0
    tail: tuple[float, float] = (14.0, 18.0)
    wide_tail: tuple[float, float] = (4.0, 8.0)
    values: tuple[float, float] = (-2.9, -2.1)
    symmetric: tuple[float, float] = (-1.0, 1.0)


def run(config: Config, arm: str, seed: int, log: Logger) -> Outcome:
    """Measure the mean signed error of one way to compute attention, by number of tied keys."""
    scalars: dict[str, float] = {}
    rows = []
    symmetric = []
    for ties in (1, *TIES):
        inputs = draw(config, ties, config.tail, config.values, seed)
        out, exact = compute(arm, *inputs), exactly(*inputs)
        plain = compute("plain", *inputs)
        bias = bias_of(out, exact)
        scalars[f"bias_{ties}"] = bias
        rows.append({"tail": "small", "ties": ties, "bias": bias})
        if ties == 1:
            scalars["changed_untied"] = float((out != plain).sum())
            continue
        scalars[f"fall_{ties}"] = abs(bias_of(plain, exact)) / max(abs(bias), 1e-9)
        inputs = draw(config, ties, config.tail, config.symmetric, seed)
        symmetric.append(abs(bias_of(compute(arm, *inputs), exactly(*inputs))))
    scalars["bias_symmetric"] = max(symmetric)
    wide = {}
    for ties in TIES:
        inputs = draw(config, ties, config.wide_tail, config.values, seed)
        wide[ties] = bias_of(compute(arm, *inputs), exactly(*inputs))
        rows.append({"tail": "large", "ties": ties, "bias": wide[ties]})
    scalars["least_bias_wide"] = min(map(abs, wide.values()))
    scalars["most_bias_wide"] = max(map(abs, wide.values()))
    scalars["delta_2"] = delta_bias(arm, draw(config, 2, config.tail, config.values, seed), seed)
    return Outcome(scalars, rows)


def draw(
    config: Config, ties: int, tail: tuple[float, float], values: tuple[float, float], seed: int
) -> tuple[Any, Any, Any]:
    """Return queries, keys and values; queries hold the scores, so that keys are unit vectors."""
    import torch

    generator = torch.Generator().manual_seed(1000 * ties + seed)
    shape = (config.num_rows, 1, 1, config.num_keys)
    scores = config.top - torch.empty(shape).uniform_(*tail, generator=generator)
    scores[..., :ties] = config.top
    v = torch.empty(config.num_rows, 1, config.num_keys, config.num_values)
    v.uniform_(*values, generator=generator)
    k = torch.eye(config.num_keys).expand(config.num_rows, 1, -1, -1)
    q = scores * config.num_keys**0.5
    return q.bfloat16().float(), k, v.bfloat16().float()


def exactly(q: Any, k: Any, v: Any) -> Any:
    """Return attention in float64."""
    from gossamer.attention import attend

    return attend(q.double(), k.double(), v.double())


def compute(arm: str, q: Any, k: Any, v: Any) -> Any:
    """Return attention as an arm computes it."""
    import torch

    from gossamer.attention import low_precision_attention, softmax_shift

    if arm in SHIFTED:
        options = dict(SHIFTED[arm])
        dtype = torch.float32 if options.pop("as_float32", False) else torch.bfloat16
        return low_precision_attention(q, k, v, dtype=dtype, **options)
    if arm == "delta_from_weights":  # its output is the plain one
        return low_precision_attention(q, k, v)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if arm == "unrounded_sums":
        weights = torch.exp(scores - softmax_shift(scores, beta=7.0))
        product = (weights.bfloat16().float() @ v).bfloat16().float()
        return product / weights.sum(-1, keepdim=True)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True)).bfloat16().float()
    product = weights @ v
    if arm == "stochastic":
        product = round_stochastically(product, torch.Generator().manual_seed(7))
    return product / weights.sum(-1, keepdim=True)


def round_stochastically(x: Any, generator: Any) -> Any:
    """Round to one of the two bfloat16 neighbours, with chances that keep the mean."""
    import torch

    bits = x.contiguous().view(torch.int32)
    noise = torch.randint(0, 2**16, bits.shape, generator=generator, dtype=torch.int32)
    return (((bits + noise) >> 16) << 16).view(torch.float32)


def bias_of(out: Any, exact: Any) -> float:
    """Return the mean signed error over the mean size, in units of 2^-8."""
    return float((out.double() - exact).sum() / exact.abs().sum()) / UNIT


def delta_bias(arm: str, inputs: tuple[Any, Any, Any], seed: int) -> float:
    """Return the bias of delta for output gradients of one sign, in the same units."""
    import torch

    q, k, v = inputs
    generator = torch.Generator().manual_seed(seed)
    grad = torch.empty(*q.shape[:3], v.shape[-1]).uniform_(0.5, 1.5, generator=generator)
    exact = (grad * exactly(q, k, v)).sum(-1)
    if arm == "delta_from_weights":
        weights = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1)
        return bias_of((weights * (grad @ v.mT)).sum(-1), exact)
    return bias_of((grad * compute(arm, q, k, v)).sum(-1), exact)


def _fall_claim(ties: int) -> Claim:
    return Claim(
        text=f"With beta = 7 the bias of rows with {ties} tied keys is at least 4 times smaller",
        metric=f"fall_{ties}",
        unit="times",
        ours="beta7",
        better="higher",
        rule="bar",
        bar=4.0,
        statistic="min",
    )


def _symmetric_claim(arm: str, words: str) -> Claim:
    return Claim(
        text=f"Values of both signs: no bias {words}, within .05 units for 2 to 4 tied keys",
        metric="bias_symmetric",
        unit="2^-8",
        ours=arm,
        better="lower",
        rule="bar",
        bar=0.05,
        statistic="max",
    )


RECIPE = Recipe(
    name="low-precision",
    method="low-precision",
    title="Low precision: tied maxima bias bfloat16 attention",
    what=(
        "Rows of 64 scores have 1 to 4 equal maxima and a small tail; values have one sign. "
        "Attention is computed with the roundings of a bfloat16 kernel, and its mean signed error "
        "is compared between the usual softmax shift, the larger one for tied rows, and other "
        "remedies. Units are 2^-8 of the output's size. The training run that fails is not part."
    ),
    claims=(
        *(_fall_claim(ties) for ties in TIES),
        Claim(
            text="Rows without ties are unchanged, bit by bit, with beta = 7",
            metric="changed_untied",
            unit="numbers",
            ours="beta7",
            better="lower",
            rule="bar",
            bar=0.0,
            statistic="max",
        ),
        _symmetric_claim("plain", "with the usual shift"),
        _symmetric_claim("beta7", "with beta = 7"),
        Claim(
            text="A running sum in bfloat16 over a large tail: the shift leaves a bias >= 4",
            metric="least_bias_wide",
            unit="2^-8",
            ours="running_beta7",
            better="higher",
            rule="bar",
            bar=4.0,
            statistic="min",
        ),
    ),
    arms=(
        Arm("beta7", "shift, beta = 7", "ours"),
        Arm("beta4", "shift, beta = 4", "ours"),
        Arm("beta2", "shift, beta = 2", "ours"),
        Arm("bounded", "shift of at most 16", "ours"),
        Arm("plain", "usual shift", "baseline"),
        Arm("float32", "all in float32", "baseline"),
        Arm("float32_product", "float32 product only", "baseline"),
        Arm("stochastic", "stochastic rounding of the product", "baseline"),
        Arm("delta_from_weights", "delta as rowsum(dP * P)", "baseline"),
        Arm("unrounded_sums", "beta = 7, sums of unrounded weights", "ours"),
        Arm("running", "running bfloat16 sum, usual shift", "baseline"),
        Arm("running_beta7", "running bfloat16 sum, beta = 7", "ours"),
    ),
    scales={"small": Config()},
    run=run,
    columns=(
        Column("bias_1", "Bias, no tie", "2^-8", in_domain=True),
        *(Column(f"bias_{ties}", f"Bias, {ties} tied keys", "2^-8") for ties in TIES),
        *(Column(f"fall_{ties}", f"Fall, {ties} tied keys", "times") for ties in TIES),
        Column("bias_symmetric", "Largest bias, both signs", "2^-8"),
        Column("least_bias_wide", "Least bias, large tail", "2^-8"),
        Column("most_bias_wide", "Largest bias, large tail", "2^-8"),
        Column("delta_2", "Bias of delta, 2 tied keys", "2^-8"),
        Column("changed_untied", "Changed without ties", "numbers"),
    ),
    figures=(
        Figure(
            "curve",
            "bias-by-ties",
            "Mean signed error by number of tied keys",
            "Mean signed error in units of 2^-8 against the number of equal maxima, one line for "
            "each way to compute attention that sums in float32.",
            "ties",
            "bias",
            {
                "where": {
                    "arm": ["plain", "beta2", "beta4", "beta7", "stochastic", "unrounded_sums"],
                    "tail": "small",
                },
                "x_label": "equal maxima in a row",
                "y_label": "bias, 2^-8",
            },
        ),
        Figure(
            "curve",
            "bias-of-running-sums",
            "Over a large tail, with a running sum in bfloat16",
            "Mean signed error in units of 2^-8 against the number of equal maxima, for running "
            "sums in bfloat16 and for sums in float32, with the usual and the larger shift.",
            "ties",
            "bias",
            {
                "where": {
                    "arm": ["plain", "beta7", "running", "running_beta7"],
                    "tail": "large",
                },
                "x_label": "equal maxima in a row",
                "y_label": "bias, 2^-8",
            },
        ),
    ),
    budget={"small": 6},
)
