"""The methods of this theme; torch-free."""

from gossamer.registry import MethodInfo, Paper

METHODS = (
    MethodInfo(
        name="generalization-measures",
        theme="measures",
        title="Generalization measures: margin-normalised norms, sharpness, PAC-Bayes",
        paper=Paper(
            "Neyshabur et al.",
            "Exploring Generalization in Deep Learning",
            2017,
            "NIPS",
            "1706.08947",
        ),
        symbols=(
            "GeneralizationReport",
            "MeasureComparison",
            "compare_measures",
            "expected_sharpness",
            "fold_batchnorm",
            "frobenius_complexity",
            "generalization_report",
            "max_sharpness",
            "output_margins",
            "pac_bayes_bound",
            "path_norm",
            "spectral_complexity",
        ),
        recipes=("generalization-measures",),
        status="checked",
        deviations=(
            "the quantile of the margins (0.05) and the box of sharpness (5e-4) are not confirmed",
            "units of a convolution are counted at all places; biases are left out of the norms",
            "paths of residual networks add over branches, an extension",
            "the PAC-Bayes bound is on the error, its noise chosen on the training data",
            "checked on small bias-free networks (authors: VGG on CIFAR-10)",
        ),
    ),
    MethodInfo(
        name="distillation-deviations",
        theme="measures",
        title="Where a student deviates from its teacher, and whether it exaggerates",
        paper=Paper(
            "Nagarajan et al.",
            "On student-teacher deviations in distillation: does it pay to disobey?",
            2023,
            "NeurIPS",
            "2301.12923",
        ),
        symbols=(
            "Deviation",
            "DeviationReport",
            "EigenTracker",
            "EigenTrajectory",
            "MatchedProgress",
            "deviation_report",
            "eigen_progress",
            "matched_progress",
        ),
        recipes=("distillation-deviations",),
        status="checked",
        deviations=(
            "log-odds are exact (authors: clipped probabilities)",
            "a control run, the orthogonal slope and bootstrap intervals stand beside the slope",
            "optimiser, temperature and mixing weight of the authors are unconfirmed",
            "progress of networks is the norm of the distance from the start (unconfirmed)",
        ),
    ),
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
