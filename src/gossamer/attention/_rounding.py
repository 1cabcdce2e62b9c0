"""What bfloat16 does to one attention call, head by head."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gossamer.attention._sdpa_calls import AttentionCall

__all__ = ["HeadSums", "query_norms"]

UNIT = 2.0**-8  # the spacing of bfloat16 numbers just below 1
# scores in memory at a time: 64 MiB in float32
BLOCK_SIZE = 2**24


@dataclass
class HeadSums:
    """Sums over rows for each head of a layer; several calls of one layer add up."""

    values: dict[str, Tensor] = field(default_factory=dict)
    largest: Tensor | None = None
    grams: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, call: AttentionCall, *, keep: bool) -> Tensor | None:
        """Add one call; with `keep`, return the error of its output, `(B, H, T, D_v)`."""
        q, k, v = (x.detach().bfloat16().float() for x in (call.q, call.k, call.v))
        self._add_values(q, k, v)
        if k.shape[1] != q.shape[1]:
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        rows = max(1, BLOCK_SIZE // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
        errors = []
        for begin in range(0, q.shape[2], rows):
            error = self._add_rows(call.scores(begin, begin + rows, q, k), v)
            if keep:
                errors.append(error)
        return torch.cat(errors, dim=2) if keep else None

    def _add_values(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        group = q.shape[1] // k.shape[1]
        signs = v.sign().double().sum((0, 2)).repeat_interleave(group, dim=0)
        self._sum("signs", signs)
        self._sum("keys", torch.full_like(signs[:, 0], v.shape[0] * v.shape[2]))
        for name, x in (("q", q), ("k", k), ("v", v)):
            flat = x.transpose(0, 1).flatten(1, 2).double()  # (H, B x T, D)
            gram = flat.mT @ flat
            if len(gram) != q.shape[1]:
                gram = gram.repeat_interleave(group, dim=0)
            self.grams[name] = self.grams[name] + gram if name in self.grams else gram

    def _add_rows(self, scores: Tensor, v: Tensor) -> Tensor:
        top = scores.amax(-1, keepdim=True)
        largest = top.amax((0, 2, 3))
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        seen = top > -math.inf
        weights = torch.exp(scores - torch.where(seen, top, 0.0))
        exact = weights @ v / weights.sum(-1, keepdim=True).clamp(min=1.0)
        weights = weights.bfloat16().float()
        tied = (weights == 1).sum(-1, keepdim=True) > 1  # (B, H, T, 1)
        rounded = (weights @ v).bfloat16().float() / weights.sum(-1, keepdim=True).clamp(min=1.0)
        error = rounded - exact
        self._sum("rows", seen.double().sum((0, 2, 3)))
        self._sum("tied", tied.double().sum((0, 2, 3)))
        for name, part in (("all", torch.ones_like(tied)), ("tied", tied)):
            wide = torch.where(part, error, 0.0).double()
            self._sum(f"{name}_error", wide.sum((0, 2)))
            self._sum(f"{name}_square", wide.square().sum((0, 2)))
            self._sum(f"{name}_size", torch.where(part, exact, 0.0).double().abs().sum((0, 2)))
        return error

    def _sum(self, name: str, value: Tensor) -> None:
        self.values[name] = self.values[name] + value if name in self.values else value

    def figures(self) -> dict[str, list[float]]:
        """Return the figures of each head."""
        v = self.values
        bias, _ = _worst(v["all_error"], v["all_square"], v["all_size"], v["rows"])
        tied_bias, tied_z = _worst(v["tied_error"], v["tied_square"], v["tied_size"], v["tied"])
        found = {
            "tied_rows": v["tied"] / v["rows"].clamp(min=1),
            "sign_imbalance": (v["signs"].abs() / v["keys"][:, None]).amax(-1),
            "bias": bias,
            "tied_bias": tied_bias,
            "tied_bias_z": tied_z,
            "largest_logit": self.largest,
            **{f"{name}_stable_rank": _stable_rank(gram) for name, gram in self.grams.items()},
        }
        return {name: value.tolist() for name, value in found.items() if value is not None}


def _worst(error: Tensor, square: Tensor, size: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest mean error over features in units, and it over its standard error."""
    n = count[:, None].clamp(min=1)
    mean = error / n
    spread = (square / n - mean**2).clamp(min=0).sqrt() / n.sqrt()
    bias = error / size.clamp(min=1e-30) / UNIT
    z = mean / spread.clamp(min=1e-30)
    index = bias.abs().argmax(-1, keepdim=True)
    return bias.gather(-1, index)[:, 0], z.gather(-1, index)[:, 0]


def _stable_rank(gram: Tensor) -> Tensor:
    values = torch.linalg.eigvalsh(gram.cpu()).clamp(min=0)
    largest = values[:, -1]
    return torch.where(largest > 0, values.sum(-1) / largest.clamp(min=1e-300), 0.0)


@torch.no_grad()
def query_norms(layer: nn.Module, num_heads: int) -> list[float]:
    """Return the spectral norm of each head's query weights, NaN where they are not known."""
    weight = _query_weight(layer)
    if weight is None or weight.shape[0] % num_heads:
        return [math.nan] * num_heads
    heads = weight.detach().double().view(num_heads, -1, weight.shape[1])
    energies = torch.linalg.eigvalsh((heads @ heads.mT).cpu())[:, -1]
    norms: list[float] = energies.clamp(min=0).sqrt().tolist()
    return norms


def _query_weight(layer: nn.Module) -> Tensor | None:
    for name in ("to_q", "q_proj", "q_b_proj", "query"):
        weight = getattr(getattr(layer, name, None), "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2:
            return weight
    fused = getattr(getattr(layer, "c_attn", None), "weight", None)
    if isinstance(fused, Tensor) and fused.dim() == 2 and fused.shape[1] == 3 * fused.shape[0]:
        return fused[:, : fused.shape[0]].T.contiguous()  # GPT-2 keeps (in, out), queries first
    return None
