"""FIRE: functional relative positions with progressive interpolation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gossamer.checks import check_range
from gossamer.errors import ConfigError, DataError
from gossamer.positions.base import Positions, check_ids, relative_ids

__all__ = ["FirePositions"]


class FirePositions(Positions):
    r"""A small network turns the normalised distance into one bias for each head.

    $$u_{ij} = \frac{\psi(p_i - p_j)}{\psi(\max(p_i, |m| L_0)) + \varepsilon}, \qquad
      \psi(x) = \log(|c|\,x + 1), \qquad b_{ij} = g \cdot \mathrm{MLP}(u_{ij})$$

    The input u stays in [0, 1] at any length: below the threshold `|m| L0` the bias is a plain
    function of the distance, above it distances are interpolated. Set `init_length` below the
    training length, otherwise nothing is interpolated. The MLP has biases: without them a ReLU
    network of one non-negative number is linear. Positions (id - 1) and the MLP are float32 under
    any autocast. A pair that contains id 0 gets bias 0.

    Args:
        num_heads: Attention heads. Range: >= 1.
        hidden_dim: Width of the MLP. Range: >= 1. Default 32, the paper's.
        init_c: Start of the learned c. Range: not 0 (psi would be 0 everywhere). Default 0.1.
        init_length: L0, fixed; its multiplier m is learned from 1. Unit: tokens. Range: > 0.
        eps: Added to the denominator. Range: > 0. Default 1e-6.
        gain: Factor on the MLP's output. Range: > 0. Default 1.
        bidirectional: Use the absolute distance, and the larger position in the denominator.
        coupled: The ids are a task's coupled ids; distances below 0 count as 0. Default false.

    Shape:
        - ids: `(B, T)` or `(1, T)`; output of `bias`: `(B or 1, H, T, S)`, float32.

    Raises:
        ConfigError: If an option is out of its range.
        DataError: If ids decrease and neither `coupled` nor `bidirectional` is set.

    Example:
        >>> ids = torch.arange(1, 5)[None]
        >>> FirePositions(2).bias(ids, ids, q_index=ids - 1).shape
        torch.Size([1, 2, 4, 4])

    Source: Li et al., *Functional Interpolation for Relative Positions*, ICLR 2024, eq. 2-3.
    Deviations: the bidirectional form is our convention; the paper's for encoders is unconfirmed.
    """

    per_layer = True
    init_length: Tensor

    def __init__(
        self,
        num_heads: int,
        *,
        hidden_dim: int = 32,
        init_c: float = 0.1,
        init_length: float = 512.0,
        eps: float = 1e-6,
        gain: float = 1.0,
        bidirectional: bool = False,
        coupled: bool = False,
    ) -> None:
        super().__init__()
        check_range(num_heads, "num_heads", low=1, integer=True)
        check_range(hidden_dim, "hidden_dim", low=1, integer=True)
        check_range(init_length, "init_length", low=0.0, open_low=True)
        check_range(eps, "eps", low=0.0, open_low=True)
        check_range(gain, "gain", low=0.0, open_low=True)
        check_range(init_c, "init_c")
        if init_c == 0:
            raise ConfigError(
                "init_c must not be 0, since psi(x) = log(|c| x + 1) would be 0 everywhere; got 0. "
                "Use the default 0.1."
            )
        self.eps = eps
        self.gain = gain
        self.bidirectional = bidirectional
        self.coupled = coupled
        self.c = nn.Parameter(torch.tensor(float(init_c)))
        self.multiplier = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("init_length", torch.tensor(float(init_length)))
        self.mlp = nn.Sequential(
            nn.Linear(1, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, num_heads)
        )

    def bias(self, q_ids: Tensor, k_ids: Tensor, *, q_index: Tensor) -> Tensor:
        """Return the bias of every pair of ids."""
        check_ids(q_ids, 1)
        if not (self.coupled or self.bidirectional):
            _check_increasing(k_ids)
        with torch.autocast(q_ids.device.type, enabled=False):
            difference, placed = relative_ids(q_ids, k_ids)
            u = self._normalised(difference, q_ids, k_ids)
            out: Tensor = self.gain * self.mlp(u.unsqueeze(-1).to(self.c.dtype))  # (B, T, S, H)
            return (out * placed.unsqueeze(-1)).permute(0, 3, 1, 2)

    def _normalised(self, difference: Tensor, q_ids: Tensor, k_ids: Tensor) -> Tensor:
        dtype = torch.promote_types(self.c.dtype, torch.float32)
        threshold = (self.multiplier * self.init_length).abs()
        reach = (q_ids - 1).clamp(min=0).to(dtype).unsqueeze(2)
        if self.bidirectional:
            difference = difference.abs()
            reach = torch.maximum(reach, (k_ids - 1).clamp(min=0).to(dtype).unsqueeze(1))
        # clamped before the log: a mask afterwards cannot undo NaN in the gradient
        distance = difference.clamp(min=0).to(dtype)
        return self._psi(distance) / (self._psi(torch.maximum(reach, threshold)) + self.eps)

    def _psi(self, x: Tensor) -> Tensor:
        return torch.log(self.c.abs() * x + 1)

    def extra_repr(self) -> str:
        """Show the options."""
        return (
            f"init_length={float(self.init_length):g}, gain={self.gain:g}, "
            f"bidirectional={self.bidirectional}, coupled={self.coupled}"
        )


def _check_increasing(ids: Tensor) -> None:
    if torch.compiler.is_compiling() or ids.shape[1] < 2:
        return
    falls = (ids[:, 1:] < ids[:, :-1]) & (ids[:, 1:] > 0)
    if bool(falls.any()):
        raise DataError(
            "position_ids must not decrease for causal FIRE, since a negative distance has no "
            "bias; "
            "got decreasing ids. Set coupled=True for a task's coupled ids."
        )
