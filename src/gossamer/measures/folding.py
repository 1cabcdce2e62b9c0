"""A copy of a network with its BatchNorm layers folded into the layers before them."""

from __future__ import annotations

import copy
from collections import Counter

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gossamer.errors import UnsupportedError

__all__ = ["fold_batchnorm"]

FOLDABLE = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


def fold_batchnorm(model: nn.Module) -> nn.Module:
    r"""Return a copy in evaluation mode in which BatchNorm is part of the layer before it.

    $$W' = W \frac{g}{\sqrt{v + \epsilon}}, \qquad
      b' = (b - \mu) \frac{g}{\sqrt{v + \epsilon}} + \beta$$

    with the running mean $\mu$ and variance v of the layer, its weights g and biases $\beta$. Each
    folded BatchNorm is replaced by `nn.Identity`; the model itself is untouched. BatchNorm that
    follows no linear layer or convolution (as in networks that normalise first), or one that is
    used twice, stays as it is. Who follows whom is read from the forward pass by torch.fx, not from
    the order of the modules.

    Args:
        model: Any module; one without BatchNorm is only copied.

    Raises:
        UnsupportedError: If a BatchNorm has no running statistics, or the forward pass cannot be
            read because its course depends on the data.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        >>> fold_batchnorm(model)[1]
        Identity()

    Source: Neyshabur et al., *Exploring Generalization in Deep Learning*, NIPS 2017, define their
        measures for layers without normalisation; folding is exact in evaluation mode.
    Deviations: none
    """
    found = copy.deepcopy(model).eval()
    norms = {n: m for n, m in found.named_modules() if isinstance(m, _BatchNorm)}
    if not norms:
        return found
    for name, norm in norms.items():
        if norm.running_var is None:
            raise UnsupportedError(
                f"BatchNorm must keep running statistics to be folded; got none in {name!r}. Build "
                "it with track_running_stats=True."
            )
    try:
        graph = fx.symbolic_trace(found).graph
    except Exception as error:  # a user's forward pass may fail in any way on stand-ins
        raise UnsupportedError(
            "the forward pass must be readable by torch.fx, so that it is known which layer comes "
            f"before BatchNorm; got {type(model).__name__} and the error {error}. Take tests of "
            "values out of forward, or fold BatchNorm by hand."
        ) from error
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    weights = Counter(
        id(module.weight) for _, module in found.named_modules() if isinstance(module, FOLDABLE)
    )
    for node in graph.nodes:
        if node.op != "call_module" or node.target not in norms or calls[node.target] > 1:
            continue
        before = node.args[0] if node.args else None
        if not isinstance(before, fx.Node) or before.op != "call_module":
            continue
        layer = found.get_submodule(str(before.target))
        alone = calls[before.target] == 1 and len(before.users) == 1
        if alone and isinstance(layer, FOLDABLE) and weights[id(layer.weight)] == 1:
            _fold(layer, norms[node.target])
            _replace(found, node.target)
    return found


@torch.no_grad()
def _fold(layer: nn.Module, norm: _BatchNorm) -> None:
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    mean, variance = norm.running_mean.double(), norm.running_var.double()  # type: ignore[union-attr]
    factor = (variance + norm.eps).rsqrt()
    if norm.weight is not None:
        factor = factor * norm.weight.double()
    wide = weight.double()
    if "Transpose" in type(layer).__name__:  # (in, out / groups, ...)
        groups = int(layer.groups)  # type: ignore[arg-type]
        parts = wide.reshape(groups, -1, *weight.shape[1:])
        by_group = factor.reshape(groups, 1, -1, *(1,) * (weight.dim() - 2))
        folded = (parts * by_group).reshape(weight.shape)
    else:
        folded = wide * factor.reshape(-1, *(1,) * (weight.dim() - 1))
    old = layer.bias
    start = old.double() if isinstance(old, torch.Tensor) else torch.zeros_like(mean)
    bias = (start - mean) * factor
    if norm.bias is not None:
        bias = bias + norm.bias.double()
    needs = weight.requires_grad
    layer.weight = nn.Parameter(folded.to(weight.dtype), requires_grad=needs)
    layer.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=needs)


def _replace(model: nn.Module, name: str) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, nn.Identity())
