"""The methods of this theme; torch-free."""

from gossamer.registry import MethodInfo, Paper

METHODS = (
    MethodInfo(
        name="blockrank",
        theme="retrieval",
        title="BlockRank: rank the documents of one prompt by the attention of one layer",
        paper=Paper(
            "Gupta et al.",
            "Scalable In-context Ranking with Generative Models",
            2025,
            "NeurIPS",
            "2510.05396",
        ),
        symbols=(
            "AttentionReader",
            "BlockRanker",
            "LayerReport",
            "RankResult",
            "RankerFitConfig",
            "RankingRow",
            "fit_ranker",
            "length_bias",
            "read_ranking_rows",
            "select_layer",
            "write_ranking_rows",
        ),
        recipes=("blockrank", "blockrank-text", "retrieve-rerank"),
        status="checked",
        deviations=(
            "the check trains a small decoder from nothing on random tokens, with two losses that "
            "stand in for pre-training and weight 1.0 of the ranking loss (authors: Mistral-7B, "
            "weight 0.1)",
            "ranking takes three passes over the prompt, exact (official code: one padded pass)",
            "plain AdamW in fine-tuning (authors: Adafactor, or 8-bit AdamW)",
            "scores are the mean over signal tokens, as in the official code (paper: their sum)",
        ),
    ),
)
