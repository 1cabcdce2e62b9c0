"""Margins of a classifier, and norms of its weights that bound what it can express."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from gossamer.checks import check_choice, check_range
from gossamer.errors import ConfigError, UnsupportedError
from gossamer.measures._batches import Batches, exact_copy, read_logits
from gossamer.measures._trace import Layer, Tracer
from gossamer.measures._tracers import PathTracer, SpectralTracer
from gossamer.measures.folding import fold_batchnorm

__all__ = ["frobenius_complexity", "output_margins", "path_norm", "spectral_complexity"]


def output_margins(model: nn.Module, loader: Any) -> Tensor:
    r"""Return the margin of each example: the logit of its label over the best other one.

    $$f(x)_y - \max_{j \ne y} f(x)_j$$

    Args:
        model: Gives logits `(B, C)`, C >= 2; computed in float64 and evaluation mode, on a copy.
        loader: Batches `(x, y)`, or one pair of arrays; read once, in its order.

    Shape:
        - output: `(m,)`, float64, on the CPU, in the order of the loader. Unit: logits.

    Raises:
        DataError: If there are no examples, labels are no classes, or logits are not finite.
        ShapeError: If logits or labels have other shapes; DtypeError: If labels are no integers.
        UnsupportedError: If the model cannot be copied.

    Example:
        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.eye(2))
        >>> output_margins(model, (torch.tensor([[3.0, 1.0]]), torch.tensor([0])))
        tensor([2.], dtype=torch.float64)

    Source: Neyshabur et al., *Exploring Generalization in Deep Learning*, NIPS 2017, section 2.
    Deviations: none
    """
    copy = exact_copy(model)
    return margins_of(copy, Batches(loader, next(copy.parameters()).device))


@torch.no_grad()
def margins_of(copy: nn.Module, batches: Batches) -> Tensor:
    """Return the margins of a model that is a copy already."""
    found = []
    for logits, labels in read_logits(copy, batches):
        own = logits.gather(1, labels[:, None])
        others = logits.scatter(1, labels[:, None], -math.inf)
        found.append((own[:, 0] - others.max(1).values).cpu())
    return torch.cat(found)


def margin_quantile_of(margins: Tensor, quantile: float) -> float:
    """Return the largest value below which at most ceil(quantile m) margins lie."""
    check_range(quantile, "margin_quantile", low=0.0, high=1.0, open_low=True)
    if quantile == 1:
        raise ConfigError("margin_quantile must be < 1; got 1. Use for example 0.05.")
    count = len(margins)
    if count * quantile < 1:
        warnings.warn(
            f"margin_quantile {quantile:g} of {count} examples is less than one example; the "
            "smallest margin is taken. Use more examples or a larger quantile.",
            stacklevel=3,
        )
        return float(margins.min())
    below = math.ceil(quantile * count - 1e-9)  # 0.07 * 100 is a little above 7
    return float(margins.sort().values[min(below, count - 1)])


def path_norm(
    model: nn.Module,
    input_shape: Sequence[int],
    *,
    p: int = 2,
    log: bool = True,
    approximate: bool = False,
) -> float:
    r"""Return the l1- or l2-path norm of a network, for a margin of 1.

    $$\Big(\sum_{\text{paths}} \prod_i |2 W_i|\Big)^2 \quad (p = 1), \qquad
      \sum_{\text{paths}} \prod_i 4 h_i W_i^2 \quad (p = 2)$$

    The sum over all paths from an input to an output unit is one forward pass with changed weights
    and an input of ones; it is made through the model's own layers with the real input shape, so
    that padding is no path and strides, groups and dilation count as they are. Unchanged when a
    unit's incoming weights are multiplied and its outgoing ones divided. Computed in float64, with
    the largest value kept as a logarithm: no depth overflows. BatchNorm counts as part of the layer
    before it. Divide by the squared margin (subtract 2 ln of it) to compare networks.

    Args:
        model: Linear layers, convolutions, ReLU, pooling, BatchNorm, dropout, sums and joins of
            branches; it is untouched. Biases are left out.
        input_shape: Of one input, without the batch.
        p: 1 or 2. Default 2.
        log: Return the natural logarithm. Default true; otherwise large values are infinite.
        approximate: Let pass what the theory has no rule for: LayerNorm and its kin count as their
            weights, other activations as ReLU, attention as an even average. Default false.

    Raises:
        ConfigError: If p is neither 1 nor 2.
        UnsupportedError: If a function has no rule; the message names it and its module.
        ShapeError: If the model does not take inputs of that shape.

    Warns:
        UserWarning: If one weight stands at several places.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> _ = model[0].weight.data.copy_(torch.tensor([[1.0, -2.0], [3.0, 0.0]]))
        >>> _ = model[2].weight.data.fill_(1.0)
        >>> round(path_norm(model, (2,), p=1, log=False))
        576

    Source: Neyshabur et al., *Exploring Generalization in Deep Learning*, NIPS 2017, section 2.1.
    Deviations: h counts the units of a convolution at all places, as its dense matrix has (other
        code takes channels: a constant for each architecture); max pooling counts as the sum over
        its window, an upper bound; average pooling as its weights; paths of residual networks add
        over branches, an extension.
    """
    if p not in (1, 2) or isinstance(p, bool):
        raise ConfigError(f"p must be 1 or 2; got {p!r}. Change p.")
    tracer = PathTracer(folded_copy(model), p, approximate=approximate)
    value = tracer.total(tracer.run(input_shape))
    _warn_shared(tracer)
    return of_log(value, log)


def spectral_complexity(
    model: nn.Module,
    input_shape: Sequence[int],
    *,
    convolution: str = "exact",
    log: bool = True,
    approximate: bool = False,
) -> float:
    r"""Return the product of h_i ||W_i||_2^2 over the layers, for a margin of 1.

    The norm of a convolution is that of the operator for the real input shape, padding and stride.

    Args:
        model: As in `path_norm`.
        input_shape: Of one input, without the batch.
        convolution: What counts as the norm of a convolution. `"exact"`, the default: of the
            operator. `"circular"`: of the operator whose borders wrap around, by Fourier transform;
            stride 1 only. `"reshaped"`: of the kernel as a matrix of `(out, in k k)`, another
            number, smaller by up to a factor k, which other code calls by the same name.
        log: As in `path_norm`.
        approximate: As in `path_norm`.

    Raises:
        ConfigError: If `convolution` is none of these.
        UnsupportedError: As in `path_norm`, and for a stride under `"circular"`.
        ShapeError: As in `path_norm`.

    Warns:
        UserWarning: If one weight stands at several places.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> _ = model[0].weight.data.copy_(torch.tensor([[1.0, -2.0], [3.0, 0.0]]))
        >>> _ = model[2].weight.data.fill_(1.0)
        >>> round(spectral_complexity(model, (2,), log=False), 6)
        42.422205

    Source: Neyshabur et al., *Exploring Generalization in Deep Learning*, NIPS 2017, section 2.1.
    Deviations: h counts the units of a convolution at all places, as in `path_norm`; pooling is
        left out of the product; BatchNorm that cannot be folded counts as its largest factor; a
        residual block counts as (1 + its branch), under the square, an extension.
    """
    check_choice(convolution, ("exact", "circular", "reshaped"), "norm of a convolution")
    tracer = SpectralTracer(folded_copy(model), convolution, approximate=approximate)
    value = 2 * tracer.run(input_shape).log_scale
    _warn_shared(tracer)
    return of_log(value, log)


def frobenius_complexity(model: nn.Module, *, log: bool = True, approximate: bool = False) -> float:
    r"""Return the product of 4 ||W_i||_F^2 over the weight layers, for a margin of 1.

    Args:
        model: Its weight layers are found in the module tree, whatever the forward pass does: each
            module counts once. The kernel of a convolution counts as it is stored.
        log: As in `path_norm`.
        approximate: Let pass modules whose role is not known: each parameter of two or more axes
            counts as a layer, LayerNorm and its kin as nothing. Default false.

    Raises:
        UnsupportedError: If a module with parameters is no known layer; the message names it.

    Warns:
        UserWarning: If one weight belongs to several modules.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> _ = model[0].weight.data.copy_(torch.tensor([[1.0, -2.0], [3.0, 0.0]]))
        >>> _ = model[2].weight.data.fill_(1.0)
        >>> round(frobenius_complexity(model, log=False))
        448

    Source: Neyshabur et al., *Exploring Generalization in Deep Learning*, NIPS 2017, section 2.1.
    Deviations: BatchNorm that cannot be folded is left out; of residual networks the plain product.
    """
    layers = []
    for name, module in folded_copy(model).named_modules(remove_duplicate=True):
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, nn.Linear | _ConvNd):
            layers.append(Layer(name, type(module).__name__, module.weight, 0))
        elif own and not isinstance(module, _BatchNorm | nn.PReLU):
            if not approximate:
                raise UnsupportedError(
                    "weights must belong to linear layers, convolutions or BatchNorm; got "
                    f"{type(module).__name__} at {name!r} with {', '.join(own)}. Pass "
                    "approximate=True to count each of its matrices as a layer."
                )
            layers += [
                Layer(f"{name}.{key}", type(module).__name__, value, 0)
                for key, value in own.items()
                if value.dim() >= 2
            ]
    pointers = [layer.weight.data_ptr() for layer in layers]
    shared = [layer.name for layer in layers if pointers.count(layer.weight.data_ptr()) > 1]
    if shared:
        warnings.warn(
            f"one weight belongs to several modules ({', '.join(shared)}); each counts as a layer.",
            stacklevel=2,
        )
    return of_log(frobenius_of(layers), log)


def frobenius_of(layers: Sequence[Layer]) -> float:
    """Return the logarithm of the product of 4 ||W||_F^2."""
    norms = [float(layer.weight.norm()) for layer in layers]
    if not all(norms):
        return -math.inf
    return sum(math.log(4.0) + 2 * math.log(norm) for norm in norms)


def folded_copy(model: nn.Module) -> nn.Module:
    """Return a copy in float64 and evaluation mode with BatchNorm folded where it can be."""
    return fold_batchnorm(exact_copy(model))


def of_log(value: float, log: bool) -> float:
    """Return a logarithm, or the number itself, infinite if it is too large."""
    if log:
        return value
    return math.exp(value) if value < 709.0 else math.inf


def _warn_shared(tracer: Tracer) -> None:
    for note in tracer.notes:
        if note.startswith("weights are used"):
            warnings.warn(note, stacklevel=3)
