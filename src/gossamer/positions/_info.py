"""The methods of this theme; torch-free."""

from gossamer.registry import MethodInfo, Paper

METHODS = (
    MethodInfo(
        name="position-coupling",
        theme="positions",
        title="Position coupling: tokens that play the same role share a position id",
        paper=Paper(
            "Cho et al.",
            "Position Coupling: Improving Length Generalization of Arithmetic Transformers "
            "Using Task Structure",
            2024,
            "NeurIPS",
            "2405.20671",
        ),
        symbols=(
            "CoupledPositions",
            "CoupledRelativePositions",
            "couple_groups",
            "shift_ids",
            "abacus_ids",
        ),
        recipes=(
            "position-coupling",
            "position-coupling-table",
            "minesweeper",
            "nx2-multiplication",
        ),
        status="checked",
        deviations=(
            "the default is a relative bias with a gain of 10 and a length scale by the "
            "query's index, "
            "which the paper does not have; the paper's learned table is the recipe "
            "position-coupling-table",
            "one operand width for each batch in place of padding",
            "with a table, tests start in the middle of it (authors: at 1)",
            "the last step is reported (authors: the checkpoint with the best loss on long "
            "validation data)",
        ),
    ),
    MethodInfo(
        name="multilevel-addition",
        theme="positions",
        title="Several position ids for each token: addition and multiplication with working",
        paper=Paper(
            "Cho et al.",
            "Arithmetic Transformers Can Length-Generalize in Both Operand Length and Count",
            2025,
            "ICLR",
            "2410.15787",
        ),
        symbols=("CoupledPositions", "CoupledRelativePositions"),
        recipes=("multilevel-addition", "multilevel-multiplication"),
        status="checked",
        deviations=(
            "the default is a sum of one relative bias for each level, with a gain of 10 and a "
            "length scale; the paper adds one learned table for each level",
            "one shape for each batch in place of padding",
            "with a table, tests start in the middle of it (authors: at 1)",
            "the last step is reported",
        ),
    ),
    MethodInfo(
        name="fire",
        theme="positions",
        title="FIRE: functional relative positions with progressive interpolation",
        paper=Paper(
            "Li et al.",
            "Functional Interpolation for Relative Positions Improves Long Context Transformers",
            2024,
            "ICLR",
            "2310.04418",
        ),
        symbols=("FirePositions",),
        recipes=("fire",),
        status="checked",
        deviations=(
            "the bidirectional form is our convention; the paper's for encoders is unconfirmed",
            "ids above random_max_position are an error in training (public code: plain positions)",
        ),
    ),
    MethodInfo(
        name="kerple-positions",
        theme="positions",
        title="Kerple: a learned logarithmic or power decay with distance",
        paper=Paper(
            "Chi et al.",
            "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation",
            2022,
            "NeurIPS",
            "2205.09921",
        ),
        symbols=("KerpleLogPositions", "KerplePowerPositions"),
        recipes=(),
        status="partial",
        deviations=(
            "softplus and sigmoid keep the coefficients in their ranges (authors: clamped at 0.01)",
        ),
    ),
    MethodInfo(
        name="t5-positions",
        theme="positions",
        title="T5 bias: one number for each logarithmic bucket of distances",
        paper=Paper(
            "Raffel et al.",
            "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer",
            2020,
            "JMLR",
            "1910.10683",
        ),
        symbols=("T5Positions",),
        recipes=(),
        status="partial",
        deviations=(
            "T5 does not scale its logits by 1 / sqrt(D); here that is the attention's option "
            "scale=1.0",
        ),
    ),
    MethodInfo(
        name="diet",
        theme="positions",
        title="DIET: positions and segments as terms of their own on the logits",
        paper=Paper(
            "Chen et al.",
            "A Simple and Effective Positional Encoding for Transformers",
            2021,
            "EMNLP",
            "2104.08698",
        ),
        symbols=("DietAbsolutePositions", "DietRelativePositions"),
        recipes=("diet",),
        status="checked",
        deviations=(
            "the paper gives no start: absolute tables from N(0, 0.02), offsets and segments at 0",
            "the content is scaled by 1 / sqrt(D) of the head (paper: prints 1 / sqrt(d))",
            "the relative form clips offsets beyond its length, for which the paper has no rule",
        ),
    ),
    MethodInfo(
        name="rope",
        theme="positions",
        title="RoPE: rotary position encoding, for any integer ids",
        paper=Paper(
            "Su et al.",
            "RoFormer: Enhanced Transformer with Rotary Position Embedding",
            2021,
            "Neurocomputing",
            "2104.09864",
        ),
        symbols=("RopePositions",),
        recipes=("diet",),
        status="checked",
        deviations=("none",),
    ),
    MethodInfo(
        name="alibi",
        theme="positions",
        title="ALiBi: a fixed bias that falls linearly with distance",
        paper=Paper(
            "Press et al.",
            "Train Short, Test Long: Attention with Linear Biases Enables Input Length "
            "Extrapolation",
            2022,
            "ICLR",
            "2108.12409",
        ),
        symbols=("AlibiPositions", "alibi_slopes"),
        recipes=(),
        status="partial",
        deviations=("none",),
    ),
    MethodInfo(
        name="learned-positions",
        theme="positions",
        title="Learned absolute positions, with a random start in training",
        paper=Paper("Vaswani et al.", "Attention Is All You Need", 2017, "NeurIPS", "1706.03762"),
        symbols=("LearnedPositions",),
        recipes=(),
        status="partial",
        deviations=("with a random start, evaluation begins at max_position // 4 (authors: at 0)",),
    ),
    MethodInfo(
        name="no-positions",
        theme="positions",
        title="NoPE: no position encoding, a causal mask is the only order",
        paper=Paper(
            "Kazemnejad et al.",
            "The Impact of Positional Encoding on Length Generalization in Transformers",
            2023,
            "NeurIPS",
            "2305.19466",
        ),
        symbols=("NoPositions",),
        recipes=(),
        status="partial",
        deviations=("none",),
    ),
)
