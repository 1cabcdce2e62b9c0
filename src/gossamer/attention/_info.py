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
    MethodInfo(
        name="block-attention",
        theme="attention",
        title="Block attention: documents of a prompt see the instruction and themselves",
        paper=Paper(
            "Gupta et al.",
            "Scalable In-context Ranking with Generative Models",
            2025,
            "NeurIPS",
            "2510.05396",
        ),
        symbols=("BlockLayout", "block_attention", "block_scores"),
        recipes=("block-attention",),
        status="checked",
        deviations=(
            "each block is padded to its own multiple of 16 tokens (official code: all blocks to "
            "the longest)",
            "every engine scales the signal logits (official code: one of its back-ends does not)",
            "scores are the mean over signal tokens, as in the official code (paper: their sum)",
            "one attention layer on random numbers is timed on one CPU core (authors: a whole "
            "model on TPUs)",
        ),
    ),
)
