"""FIRE: functional relative positions with progressive interpolation."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gossamer.checks import check_range
from gossamer.errors import ConfigError, DataError
from gossamer.positions._gather import bias_of_offsets
from gossamer.positions.base import Positions, check_ids, relative_ids

__all__ = ["FirePositions"]

_MOST_HIDDEN = 2**22
"""Numbers that the hidden layer may hold at once: 16 MiB in float32, as quick as more."""

_Learned = tuple[Tensor, ...]
"""c, the threshold |m| L0, and weight and bias of the network's two layers."""


class FirePositions(Positions):
    r"""A small network turns the normalised distance into one bias for each head.

    $$u_{ij} = \frac{\psi(p_i - p_j)}{\psi(\max(p_i, |m| L_0)) + \varepsilon}, \qquad
      \psi(x) = \log(|c|\,x + 1), \qquad b_{ij} = g \cdot \mathrm{MLP}(u_{ij})$$

    The input u stays in [0, 1] at any length: below the threshold `|m| L0` the bias is a plain
    function of the distance, above it distances are interpolated. Set `init_length` below the
    training length, otherwise nothing is interpolated. The MLP has biases: without them a ReLU
    network of one non-negative number is linear. Positions (id - 1) and the MLP are float32 under
    any autocast. A pair that contains id 0 gets bias 0.

    While all queries are below the threshold, the network runs once for each distance; beyond it,
    once for each pair, in blocks of queries that are computed again in the backward pass when
    their hidden layer would exceed 16 MiB. Both give the values and gradients of the formula.

    With `random_max_position`, training draws sorted distinct positions below it and puts them in
    the place of 0..n-1, so that far positions are trained on short sequences; evaluation uses the
    ids as they are. One draw (PyTorch's global generator, as dropout) serves all samples of a call,
    queries and keys alike; tokens with equal ids keep equal positions.

    Args:
        num_heads: Attention heads. Range: >= 1.
        hidden_dim: Width of the MLP. Range: >= 1. Default 32, the paper's.
        init_c: Start of the learned c. Range: not 0 (psi would be 0 everywhere). Default 0.1.
        init_length: L0, fixed; its multiplier m is learned from 1. Unit: tokens. Range: > 0.
        eps: Added to the denominator. Range: > 0. Default 1e-6.
        gain: Factor on the MLP's output. Range: > 0. Default 1.
        bidirectional: Use the absolute distance, and the larger position in the denominator.
        coupled: The ids are a task's coupled ids; distances below 0 count as 0. Default false.
        random_max_position: Positions drawn in training are below it; at least the largest id. 0:
            nothing is drawn. Unit: tokens. Range: >= 0. Default 0.

    Shape:
        - ids: `(B, T)` or `(1, T)`; output of `bias`: `(B or 1, H, T, S)`, float32.

    Raises:
        ConfigError: If an option is out of its range.
        DataError: If ids decrease and neither `coupled` nor `bidirectional` is set, or if in
            training an id is larger than `random_max_position`.

    Example:
        >>> ids = torch.arange(1, 5)[None]
        >>> FirePositions(2).bias(ids, ids, q_index=ids - 1).shape
        torch.Size([1, 2, 4, 4])

    Source: Li et al., *Functional Interpolation for Relative Positions*, ICLR 2024, eq. 2-3; random
        positions: McLeish et al., *Transformers Can Do Arithmetic with the Right Embeddings*,
        NeurIPS 2024, public code.
    Deviations: the bidirectional form is our convention; the paper's for encoders is unconfirmed.
        Sequences longer than `random_max_position` are an error in training (public code: plain
        positions).
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
        random_max_position: int = 0,
    ) -> None:
        super().__init__()
        check_range(num_heads, "num_heads", low=1, integer=True)
        check_range(hidden_dim, "hidden_dim", low=1, integer=True)
        check_range(init_length, "init_length", low=0.0, open_low=True)
        check_range(eps, "eps", low=0.0, open_low=True)
        check_range(gain, "gain", low=0.0, open_low=True)
        check_range(random_max_position, "random_max_position", low=0, integer=True)
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
        self.random_max_position = random_max_position
        self.c = nn.Parameter(torch.tensor(float(init_c)))
        self.multiplier = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("init_length", torch.tensor(float(init_length)))
        self.mlp = nn.Sequential(
            nn.Linear(1, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, num_heads)
        )

    @property
    def separate_rows(self) -> bool:
        """False while random positions are drawn for a whole call."""
        return not (self.training and self.random_max_position)

    def bias(self, q_ids: Tensor, k_ids: Tensor, *, q_index: Tensor) -> Tensor:
        """Return the bias of every pair of ids."""
        check_ids(q_ids, 1)
        if not (self.coupled or self.bidirectional):
            _check_increasing(k_ids)
        if self.random_max_position and self.training:
            q_ids, k_ids = self._redrawn(q_ids, k_ids)
        with torch.autocast(q_ids.device.type, enabled=False):
            learned = self._learned()
            if self._all_below(learned[1], q_ids, k_ids):
                offset, placed = relative_ids(q_ids, k_ids)
                columns = partial(self._columns, learned=learned)
                return bias_of_offsets(columns, self._distance(offset), placed)
            return self._by_blocks(q_ids, k_ids, learned)

    def _learned(self) -> _Learned:
        return self.c, (self.multiplier * self.init_length).abs(), *self.mlp.parameters()

    def _pairs(self, q_ids: Tensor, k_ids: Tensor, learned: _Learned) -> Tensor:
        """The formula as it stands; its hidden layer holds `(B, T, S, hidden_dim)` numbers."""
        offset, placed = relative_ids(q_ids, k_ids)
        u = self._normalised(self._distance(offset), self._reach(q_ids, k_ids), learned)
        out = self._network(u, learned)  # (B, T, S, H)
        return (out * placed.unsqueeze(-1)).permute(0, 3, 1, 2)

    def _columns(self, distance: Tensor, learned: _Learned) -> Tensor:
        """The same below the threshold, for distances `(N,)`: `(H, N)`."""
        u = self._normalised(distance, torch.zeros_like(distance), learned)
        return self._network(u, learned).T

    def _by_blocks(self, q_ids: Tensor, k_ids: Tensor, learned: _Learned) -> Tensor:
        batch, length = max(len(q_ids), len(k_ids)), q_ids.shape[1]
        one_query = batch * k_ids.shape[1] * len(learned[2])
        rows = max(1, _MOST_HIDDEN // max(1, one_query))
        if rows >= length:
            return self._pairs(q_ids, k_ids, learned)
        run = self._pairs
        if torch.is_grad_enabled():
            # the learned tensors are arguments: a block computed again must see those of its
            # forward pass, which functional_call may have replaced by then
            run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
        return torch.cat(
            [run(block, k_ids, learned) for block in torch.split(q_ids, rows, dim=1)], dim=2
        )

    def _all_below(self, threshold: Tensor, q_ids: Tensor, k_ids: Tensor) -> bool:
        if torch.compiler.is_compiling() or q_ids.shape[1] < 2:
            return False  # a graph cannot branch on data; one query needs every distance once
        # strictly: at equality the gradient of the maximum is shared between its arguments
        return bool(self._reach(q_ids, k_ids).max() < threshold)

    def _distance(self, offset: Tensor) -> Tensor:
        # clamped before the log: a mask afterwards cannot undo NaN in the gradient
        return offset.abs() if self.bidirectional else offset.clamp(min=0)

    def _reach(self, q_ids: Tensor, k_ids: Tensor) -> Tensor:
        """The position that the threshold is compared with, `(B, T, 1)` or `(B, T, S)`."""
        reach = (q_ids - 1).clamp(min=0).unsqueeze(2)
        if not self.bidirectional:
            return reach
        return torch.maximum(reach, (k_ids - 1).clamp(min=0).unsqueeze(1))

    def _normalised(self, distance: Tensor, reach: Tensor, learned: _Learned) -> Tensor:
        c, threshold = learned[:2]
        dtype = torch.promote_types(c.dtype, torch.float32)
        longest = torch.maximum(reach.to(dtype), threshold)
        return _psi(distance.to(dtype), c) / (_psi(longest, c) + self.eps)

    def _network(self, u: Tensor, learned: _Learned) -> Tensor:
        c, _, weight, bias, head_weight, head_bias = learned
        hidden = F.relu(F.linear(u.unsqueeze(-1).to(c.dtype), weight, bias))
        return self.gain * F.linear(hidden, head_weight, head_bias)

    def _redrawn(self, q_ids: Tensor, k_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Put sorted random positions in the place of 0..n-1, the same in queries and keys."""
        limit, device = self.random_max_position, q_ids.device
        largest = torch.maximum(q_ids.max(), k_ids.max())
        if not torch.compiler.is_compiling() and int(largest) > limit:
            raise DataError(
                "position_ids must be <= random_max_position in training, since each needs a drawn "
                f"position of its own; got {int(largest)} with random_max_position = {limit}. "
                "Shorten the input or raise random_max_position."
            )
        count = torch.arange(limit, device=device)
        chosen = torch.where(count < largest, torch.randperm(limit, device=device), limit)
        ids = F.pad(chosen.sort().values + 1, (1, 0))  # id 0 stays 0
        return ids[q_ids], ids[k_ids]

    def extra_repr(self) -> str:
        """Show the options."""
        return (
            f"init_length={float(self.init_length):g}, gain={self.gain:g}, "
            f"bidirectional={self.bidirectional}, coupled={self.coupled}, "
            f"random_max_position={self.random_max_position}"
        )


def _psi(x: Tensor, c: Tensor) -> Tensor:
    return torch.log(c.abs() * x + 1)


def _check_increasing(ids: Tensor) -> None:
    if torch.compiler.is_compiling() or ids.shape[1] < 2:
        return
    falls = (ids < ids.cummax(1).values) & (ids > 0)  # an id 0 between two hides no fall
    if bool(falls.any()):
        raise DataError(
            "position_ids must not decrease for causal FIRE, since a negative distance has no "
            "bias; "
            "got decreasing ids. Set coupled=True for a task's coupled ids."
        )
