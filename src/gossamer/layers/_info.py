"""The methods of this theme; torch-free."""

from gossamer.registry import MethodInfo, Paper

METHODS = (
    MethodInfo(
        name="scale-invariant-sgd",
        theme="layers",
        title="Scale-invariant networks trained by SGD without state",
        paper=Paper(
            "Li et al.",
            "Robust Training of Neural Networks Using Scale Invariant Architectures",
            2022,
            "ICML",
            "2202.00980",
        ),
        symbols=(
            "ExactNorm",
            "ScaleInvariantAttention",
            "ScaleInvariantEncoderLayer",
            "ScaleInvarianceReport",
            "check_scale_invariance",
            "homogeneity_degrees",
            "split_parameters",
        ),
        recipes=("scale-invariant-sgd",),
        status="checked",
        deviations=(
            "norms have no epsilon at all: each row is divided by its largest entry first",
            "a query of which no score is positive gives 0",
            "the input block reaches degree 2 as it must; the paper's figure of it was not at hand",
            "the check is a small causal character model, and the head is trained by AdamW "
            "(authors: BERT, LAMB)",
        ),
    ),
)
