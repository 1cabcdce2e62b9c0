"""Where the normalisation stands around a sublayer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from gossamer.checks import check_choice

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

    Shape:
        - x and output: `(..., dim)`.

    Example:
        >>> import torch
        >>> Residual(4, "pre")(torch.ones(1, 4), lambda x: 0 * x).tolist()
        [[1.0, 1.0, 1.0, 1.0]]

    Source: pre: Xiong et al., ICML 2020; pre_post: public code of Cho et al., NeurIPS 2024.
    Deviations: none
    """

    def __init__(self, dim: int, norm: str, *, kind: str = "rms", eps: float = 1e-6) -> None:
        super().__init__()
        check_choice(norm, ("pre", "post", "pre_post"), "norm")
        check_choice(kind, ("rms", "layer"), "kind of norm")
        build = nn.RMSNorm if kind == "rms" else nn.LayerNorm
        self.before = build(dim, eps=eps) if norm != "post" else nn.Identity()
        self.after = build(dim, eps=eps) if norm != "pre" else nn.Identity()

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the normalised sum of `x` and the sublayer's output."""
        return self.after(x + sublayer(self.before(x)))  # type: ignore[no-any-return]
