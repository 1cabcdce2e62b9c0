"""No position encoding (NoPE): a causal mask is the only order a model sees."""

from __future__ import annotations

from gossamer.positions.base import Positions

__all__ = ["NoPositions"]


class NoPositions(Positions):
    """Adds nothing; the three hooks keep their neutral defaults.

    A causal model can still tell positions apart beyond its first layer. In one layer it cannot:
    permuting the query tokens leaves the logits of the next token unchanged.

    Example:
        >>> import torch
        >>> NoPositions().embed(torch.ones(1, 3, dtype=torch.long)) is None
        True

    Source: Kazemnejad et al., *The Impact of Positional Encoding on Length Generalization in
        Transformers*, NeurIPS 2023.
    Deviations: none
    """
