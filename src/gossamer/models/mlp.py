"""Layers of ReLU between rows of numbers and classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from gossamer.checks import check_range
from gossamer.errors import ConfigError, ShapeError
from gossamer.models.saving import PretrainedModel

__all__ = ["MultiLayerPerceptron"]


class MultiLayerPerceptron(PretrainedModel):
    """Fully connected classifier: linear layers with ReLU between them.

    Args:
        num_features: Numbers in a row; an image is read as one row. Range: >= 1.
        num_classes: Range: >= 2.
        hidden_dims: Widths of the hidden layers, each >= 1; empty for a linear classifier. Default
            (256, 256).

    Raises:
        ConfigError: If a size is out of range.
        ShapeError: In the call, if rows have another size.

    Example:
        >>> import torch
        >>> MultiLayerPerceptron(64, 10)(torch.zeros(2, 8, 8)).shape
        torch.Size([2, 10])

    Source: standard practice.
    Deviations: none
    """

    def __init__(
        self, num_features: int, num_classes: int, *, hidden_dims: Sequence[int] = (256, 256)
    ) -> None:
        super().__init__()
        check_range(num_features, "num_features", low=1, integer=True)
        check_range(num_classes, "num_classes", low=2, integer=True)
        if isinstance(hidden_dims, str | int) or not isinstance(hidden_dims, Sequence):
            raise ConfigError(
                f"hidden_dims must be a list of widths; got {hidden_dims!r}. Write (256, 256)."
            )
        for width in hidden_dims:
            check_range(width, "hidden_dims", low=1, integer=True)
        self.config = {
            "num_features": num_features,
            "num_classes": num_classes,
            "hidden_dims": [int(width) for width in hidden_dims],
        }
        sizes = [num_features, *hidden_dims]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.output = nn.Linear(sizes[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `(N, C)` of rows `(N, ...)`."""
        wanted = self.config["num_features"]
        if math.prod(x.shape[1:]) != wanted or x.dim() < 2:
            raise ShapeError(
                f"x must be (N, ...) with {wanted} numbers in a row; got {tuple(x.shape)}. Give "
                "rows as the model was trained on."
            )
        x = x.flatten(1)
        for layer in self.hidden:
            x = layer(x).relu()
        logits: Tensor = self.output(x)
        return logits
