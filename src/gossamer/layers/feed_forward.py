"""The plain and the gated feed-forward block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.checks import check_choice, check_range

__all__ = ["ACTIVATIONS", "FeedForward", "GatedFeedForward"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class FeedForward(nn.Module):
    r"""Two linear maps with an activation between: $W_2\,\sigma(W_1 x)$.

    Args:
        dim: Model width.
        hidden_dim: Inner width. Range: >= 1.
        activation: `"gelu"`, `"gelu_tanh"`, `"relu"` or `"silu"`. Default `"gelu"`.
        bias: Biases in both maps. Default false.

    Shape:
        - input and output: `(..., dim)`.

    Raises:
        ConfigError: If the activation is unknown.

    Example:
        >>> import torch
        >>> FeedForward(8, 32)(torch.zeros(2, 8)).shape
        torch.Size([2, 8])

    Source: Vaswani et al. 2017, eq. 2.
    Deviations: none
    """

    def __init__(
        self, dim: int, hidden_dim: int, *, activation: str = "gelu", bias: bool = False
    ) -> None:
        super().__init__()
        check_range(hidden_dim, "hidden_dim", low=1, integer=True)
        check_choice(activation, ACTIVATIONS, "activation")
        self.activation = activation
        self.up = nn.Linear(dim, hidden_dim, bias=bias)
        self.down = nn.Linear(hidden_dim, dim, bias=bias)

    def scores(self, x: Tensor) -> Tensor:
        """Return what the activation sees, `(..., hidden_dim)`."""
        return self.up(x)  # type: ignore[no-any-return]

    def hidden(self, x: Tensor) -> Tensor:
        """Return the hidden units, `(..., hidden_dim)`."""
        return ACTIVATIONS[self.activation](self.scores(x))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to the last axis."""
        return self.down(self.hidden(x))  # type: ignore[no-any-return]


class GatedFeedForward(nn.Module):
    r"""Feed-forward with a multiplicative gate: $W_2(\sigma(W_g x) \odot W_1 x)$.

    Args:
        dim: Model width.
        hidden_dim: Inner width; three matrices of it, so 2/3 of a plain block's width keeps the
            parameter count. Range: >= 1.
        activation: Of the gate; as in `FeedForward`. Default `"gelu"`.
        bias: Biases in the three maps. Default false.

    Shape:
        - input and output: `(..., dim)`.

    Raises:
        ConfigError: If the activation is unknown.

    Example:
        >>> import torch
        >>> GatedFeedForward(8, 32)(torch.zeros(2, 8)).shape
        torch.Size([2, 8])

    Source: Shazeer, *GLU Variants Improve Transformer*, 2020, eq. 6.
    Deviations: none
    """

    def __init__(
        self, dim: int, hidden_dim: int, *, activation: str = "gelu", bias: bool = False
    ) -> None:
        super().__init__()
        check_range(hidden_dim, "hidden_dim", low=1, integer=True)
        check_choice(activation, ACTIVATIONS, "activation")
        self.activation = activation
        self.gate = nn.Linear(dim, hidden_dim, bias=bias)
        self.up = nn.Linear(dim, hidden_dim, bias=bias)
        self.down = nn.Linear(hidden_dim, dim, bias=bias)

    def scores(self, x: Tensor) -> Tensor:
        """Return what the activation of the gate sees, `(..., hidden_dim)`."""
        return self.gate(x)  # type: ignore[no-any-return]

    def hidden(self, x: Tensor) -> Tensor:
        """Return the hidden units, `(..., hidden_dim)`."""
        return ACTIVATIONS[self.activation](self.scores(x)) * self.up(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to the last axis."""
        return self.down(self.hidden(x))  # type: ignore[no-any-return]
