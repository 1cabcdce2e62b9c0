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
    MethodInfo(
        name="head-size",
        theme="attention",
        title="Head size of its own: what a head can express, and larger heads for trained layers",
        paper=Paper(
            "Bhojanapalli et al.",
            "Low-Rank Bottleneck in Multi-head Attention Models",
            2020,
            "ICML",
            "2002.07028",
        ),
        symbols=(
            "AttentionRankReport",
            "HeadRankReport",
            "HeadSizeReport",
            "attention_rank",
            "expand_heads",
            "min_head_dim",
            "rank_report",
            "realize_attention",
        ),
        recipes=("head-size",),
        status="checked",
        deviations=(
            "the claim is checked on fitted heads and a learned mixture (paper: BERT and LM1B)",
            "that one less than the length is enough for almost every pattern is an observation",
            "growing trained heads is an addition",
        ),
    ),
    MethodInfo(
        name="low-precision",
        theme="attention",
        title="Biased rounding of bfloat16 attention: monitors, and a shift that removes it",
        paper=Paper(
            "Qiu and Yao",
            "Why Low-Precision Transformer Training Fails: An Analysis on Flash Attention",
            2026,
            "ICLR",
            "2510.04212",
        ),
        symbols=(
            "MismatchMonitor",
            "MismatchReport",
            "RoundingMonitor",
            "RoundingReport",
            "low_precision_attention",
            "rounding_report",
            "softmax_shift",
        ),
        recipes=("low-precision",),
        status="checked",
        deviations=(
            "the mechanism is checked on drawn scores; the training run that fails is not repeated",
            "ties are looked for over whole rows, not inside a tile",
            "ties at or near 0 get a shift of 1, and shifts end at 64 (paper: no rule for either)",
            "row sums are never clamped (authors' code: at 1e-10), and are sums of rounded weights",
        ),
    ),
    MethodInfo(
        name="sparse-patterns",
        theme="attention",
        title="Sparse attention patterns, and a check of what they can express",
        paper=Paper(
            "Yun et al.",
            "O(n) Connections are Expressive Enough: Universal Approximability of Sparse "
            "Transformers",
            2020,
            "NeurIPS",
            "2006.04862",
        ),
        symbols=(
            "AttentionPattern",
            "PatternReport",
            "check_patterns",
            "SparseAttention",
            "pattern_attention",
            "TopKAttention",
            "top_k_attention",
        ),
        recipes=("sparse-patterns",),
        status="checked",
        deviations=(
            "logits are scaled, layers have norms and heads of the usual width (authors: two "
            "heads of size 1 in the theorem)",
            "the last token of an incomplete stretch of the fixed pattern is a summary token",
            "the copy of 12 digits is far smaller than the authors' tasks",
        ),
    ),
)
