"""The methods of this theme; torch-free."""

from gossamer.registry import MethodInfo, Paper

METHODS = (
    MethodInfo(
        name="spark",
        theme="attention",
        title="Spark: 8 % of the hidden units and few keys, found by a statistical top-k",
        paper=Paper(
            "You et al.",
            "Spark Transformer: Reactivating Sparsity in FFN and Attention",
            2025,
            "NeurIPS",
            "2506.06644",
        ),
        symbols=("SparkAttention", "StatisticalTopK", "expected_count", "statistical_top_k"),
        recipes=("spark",),
        status="checked",
        deviations=(
            "the deviation of a row is the population's unless `unbiased` is set (the paper's form "
            "is unconfirmed; the released Gemma 3n takes the population's)",
            "attention scales 1 / sqrt(r) and 1 / sqrt(D - r) are ours, the paper names none",
            "the calibrated threshold is ours",
        ),
    ),
)
