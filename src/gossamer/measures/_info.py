"""The methods of this theme; torch-free."""

from gossamer.registry import MethodInfo, Paper

METHODS = (
    MethodInfo(
        name="vanishing-variance",
        theme="measures",
        title="Vanishing variance: attention outputs shrink with length, a norm on them helps",
        paper=Paper(
            "Li et al.",
            "On Vanishing Variance in Transformer Length Generalization",
            2025,
            "SCOPE workshop at ICLR",
            "2504.02827",
        ),
        symbols=("VarianceReport", "variance_report"),
        recipes=("vanishing-variance",),
        status="checked",
        deviations=(
            "items are tokens of a causal decoder with residual connections (authors: vectors "
            "read by one attention layer)",
            "the norm acts on each head's output",
            "tests go to 2^10 items (authors: 2^14)",
        ),
    ),
)
