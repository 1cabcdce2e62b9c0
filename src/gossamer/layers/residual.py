"""Where the normalisation stands around a sublayer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.checks import check_choice, check_range

__all__ = ["Residual"]


class Residual(nn.Module):
    r"""Residual connection around a sublayer, normalised before, after, or both.

    | `norm` | output |
    |---|---|
    | `pre` | $x + f(N_1(x))$ |
    | `post` | $N_2(x + f(x))$ |
    | `pre_post` | $N_2(x + f(N_1(x)))$ |

    Args:
        dim: Model width.
        norm: `"pre"`, `"post"` or `"pre_post"`.
        kind: `"rms"` or `"layer"`. Default `"rms"`.
        eps: In the denominator of the norm. Default 1e-6.
        dropout: On the sublayer's output, in training. Range: 0 to 1. Default 0.

    Shape:
        - x and output: `(..., dim)`.

    Example:
        >>> import torch
        >>> Residual(4, "pre")(torch.ones(1, 4), lambda x: 0 * x).tolist()
        [[1.0, 1.0, 1.0, 1.0]]

    Source: pre: Xiong et al., ICML 2020; pre_post: public code of Cho et al., NeurIPS 2024;
        dropout: Vaswani et al. 2017, section 5.4.
    Deviations: none
    """

    def __init__(
        self, dim: int, norm: str, *, kind: str = "rms", eps: float = 1e-6, dropout: float = 0.0
    ) -> None:
        super().__init__()
        check_choice(norm, ("pre", "post", "pre_post"), "norm")
        check_choice(kind, ("rms", "layer"), "kind of norm")
        check_range(dropout, "dropout", low=0.0, high=1.0)
        self.dropout = dropout
        build = nn.RMSNorm if kind == "rms" else nn.LayerNorm
        self.before = build(dim, eps=eps) if norm != "post" else nn.Identity()
        self.after = build(dim, eps=eps) if norm != "pre" else nn.Identity()

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the normalised sum of `x` and the sublayer's output."""
        out = F.dropout(sublayer(self.before(x)), self.dropout, self.training)
        return self.after(x + out)  # type: ignore[no-any-return]
