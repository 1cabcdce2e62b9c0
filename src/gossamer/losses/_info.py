"""The methods of this theme; torch-free."""

from gossamer.registry import MethodInfo, Paper

METHODS = (
    MethodInfo(
        name="decoupled-softmax",
        theme="losses",
        title="Decoupled softmax and soft top-k: contrastive losses for several relevant labels",
        paper=Paper(
            "Gupta et al.",
            "Dual-Encoders for Extreme Multi-Label Classification",
            2024,
            "ICLR",
            "2310.10636",
        ),
        symbols=(
            "BinaryCrossEntropyLoss",
            "CoupledSoftmaxLoss",
            "DecoupledSoftmaxLoss",
            "GradientCache",
            "InBatchSoftmaxLoss",
            "SoftTopKLoss",
            "SummedSoftmaxLoss",
            "gather_with_grad",
            "sharded_loss",
            "soft_top_k",
            "streamed_logsumexp",
        ),
        recipes=("decoupled-softmax", "soft-top-k"),
        status="checked",
        deviations=(
            "divided by the number of relevant labels, as the official code does (the paper's "
            'formula sums; `normalize="sum"`)',
            "masked scores are -inf (official code: -100)",
            "bounds of the soft top-k search hold for any number of labels (official code: up to "
            "about k e^10)",
        ),
    ),
    MethodInfo(
        name="label-noise",
        theme="losses",
        title="Label smoothing and loss correction for labels that are partly wrong",
        paper=Paper(
            "Lukasik et al.",
            "Does label smoothing mitigate label noise?",
            2020,
            "ICML",
            "2003.02819",
        ),
        symbols=(
            "BackwardCorrectionLoss",
            "ForwardCorrectionLoss",
            "GeneralizedCrossEntropyLoss",
            "LabelSmoothingLoss",
            "SmearedLoss",
            "SymmetricCrossEntropyLoss",
            "SymmetricNoise",
            "estimate_transition",
            "inject_noise",
            "pair_noise",
        ),
        recipes=("label-noise",),
        status="checked",
        deviations=(
            "class weights count for whole rows (the framework's smoothing weighs every class "
            'term; here `weight_mode="class"`)',
            "what falls on a class with a logit of -inf is spread over the others",
            "anchors are the row at the percentile (the code of Patrini et al.: the next below it)",
        ),
    ),
    MethodInfo(
        name="semantic-smoothing",
        theme="losses",
        title="Semantic smoothing: a part of the loss of a target goes to real sentences near it",
        paper=Paper(
            "Lukasik et al.",
            "Semantic Label Smoothing for Sequence to Sequence Problems",
            2020,
            "EMNLP",
            "2010.07447",
        ),
        symbols=("SequenceSmoothingLoss",),
        recipes=("semantic-smoothing",),
        status="checked",
        deviations=(
            "encoder, pooling, numbers of neighbours, order of BLEU, alpha and normalisation by "
            "length of the paper are unconfirmed (here TF-IDF, 5 of 100, 4 words, 0.1, the mean "
            "over the tokens of each sequence)",
            "duplicates, held-out texts, neighbours below a BLEU of 0.2 and, if asked, those with "
            "other numbers or names are left out",
            "one neighbour is drawn in each step; in the replacement form it takes the place of "
            "the target",
        ),
    ),
)
