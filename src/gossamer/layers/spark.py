"""Spark feed-forward: a slice of the input predicts which hidden units matter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from gossamer.attention import StatisticalTopK, check_top_k
from gossamer.checks import check_choice, check_range
from gossamer.errors import ConfigError
from gossamer.layers.feed_forward import ACTIVATIONS, GatedFeedForward

if TYPE_CHECKING:
    from gossamer.layers.spark_decode import PackedSparkFeedForward

__all__ = ["SparkFeedForward"]


class SparkFeedForward(nn.Module):
    r"""Feed-forward in which about a share k of the hidden units is active for a token.

    $$y = V\,\big[\sigma(\mathrm{top}_k(K_1 x_{:r})) \odot K_2 x_{r:}\big]$$

    The first r inputs give cheap scores; `statistical_top_k` keeps about k of them; the rest of the
    input and the output only meet the units that are kept. There is no further parameter and no
    second stage of training. This form computes every unit and masks, so that training costs what a
    dense block costs; `pack()` gives the form that gathers only the active units.

    Args:
        dim: Model width d.
        hidden_dim: Hidden units f. Twice `dim * f` parameters, so 1.5 times the width of a gated
            block has as many. Range: >= 2.
        predictor_dim: Inputs r that predict. Range: 1 to dim - 1. Default `dim // 2`.
        k: Active units: an int counts, a float is a share. Default 0.08.
        activation: Of the kept scores: `"gelu_tanh"`, `"gelu"`, `"relu"` or `"silu"`, all of which
            map 0 to 0. Default `"gelu_tanh"`.
        unbiased: Deviation with f - 1; as in `statistical_top_k`. Default false.
        calibrate: As in `StatisticalTopK`. Default false.

    Shape:
        - input and output: `(..., dim)`.

    Raises:
        ConfigError: If a size is out of its range or the activation unknown.

    Example:
        >>> import torch
        >>> SparkFeedForward(8, 48, k=4)(torch.zeros(2, 8)).shape
        torch.Size([2, 8])

    Source: You et al., *Spark Transformer*, NeurIPS 2025, section 2.
    Deviations: the calibration is ours.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        predictor_dim: int | None = None,
        k: int | float = 0.08,
        activation: str = "gelu_tanh",
        unbiased: bool = False,
        calibrate: bool = False,
    ) -> None:
        super().__init__()
        check_range(dim, "dim", low=2, integer=True)
        check_range(hidden_dim, "hidden_dim", low=2, integer=True)
        check_choice(activation, ACTIVATIONS, "activation")
        self.predictor_dim = dim // 2 if predictor_dim is None else predictor_dim
        check_range(self.predictor_dim, "predictor_dim", low=1, high=dim - 1, integer=True)
        check_top_k(k, hidden_dim)
        self.activation = activation
        self.predictor = nn.Linear(self.predictor_dim, hidden_dim, bias=False)
        self.up = nn.Linear(dim - self.predictor_dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)
        self.top_k = StatisticalTopK(k, unbiased=unbiased, calibrate=calibrate)

    def hidden(self, x: Tensor) -> Tensor:
        """Return the hidden units, `(..., hidden_dim)`, 0 where a unit is not active."""
        return self.units_of(self.top_k(self.scores(x)), x)

    def scores(self, x: Tensor) -> Tensor:
        """Return the predictor's scores, `(..., hidden_dim)`."""
        return self.predictor(x[..., : self.predictor_dim])  # type: ignore[no-any-return]

    def units_of(self, scores: Tensor, x: Tensor) -> Tensor:
        """Return the hidden units for given scores of an input; of all of them, none is dropped."""
        rest = self.up(x[..., self.predictor_dim :])
        return ACTIVATIONS[self.activation](scores) * rest  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to the last axis."""
        return self.down(self.hidden(x))  # type: ignore[no-any-return]

    def pack(self, *, engine: str = "auto") -> PackedSparkFeedForward:
        """Return the decoding form, with a copy of the weights; see `PackedSparkFeedForward`."""
        from gossamer.layers.spark_decode import PackedSparkFeedForward

        return PackedSparkFeedForward(self, engine=engine)

    @classmethod
    def like(
        cls, gated: nn.Module, *, k: int | float = 0.08, calibrate: bool = False
    ) -> SparkFeedForward:
        """Return a new layer with the parameter count and width of a gated block.

        Args:
            gated: A `GatedFeedForward`, or a block of a Hugging Face model with `gate_proj`,
                `up_proj` and `down_proj`.
            k: Active units. Default 0.08.
            calibrate: As in `StatisticalTopK`. Default false.

        Raises:
            ConfigError: If the block is none of these, or has biases.

        Example:
            >>> SparkFeedForward.like(GatedFeedForward(8, 32)).up.weight.shape
            torch.Size([48, 4])
        """
        names = ("gate", "up", "down") if isinstance(gated, GatedFeedForward) else _PROJECTIONS
        layers = [getattr(gated, name, None) for name in names]
        up = layers[1]
        if not isinstance(up, nn.Linear) or any(getattr(x, "weight", None) is None for x in layers):
            raise ConfigError(
                "expected a gated block with gate_proj, up_proj and down_proj; got "
                f"{type(gated).__name__}. Make a SparkFeedForward with sizes of your own."
            )
        if any(getattr(layer, "bias", None) is not None for layer in layers):
            raise ConfigError(
                "the gated block must have no biases; got some. Make a SparkFeedForward with sizes "
                "of your own."
            )
        layer = cls(up.in_features, 3 * up.out_features // 2, k=k, calibrate=calibrate)
        return layer.to(up.weight.device, up.weight.dtype)


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
