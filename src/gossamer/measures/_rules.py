"""The rule of each function that may stand in a model whose norms are measured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.errors import ShapeError
from gossamer.measures._operators import adaptive_counts, window_sum
from gossamer.measures._trace import Rule, Traced, Tracer

__all__ = ["RULES"]

SHAPES = (
    *("flatten", "view", "reshape", "permute", "transpose", "squeeze", "unsqueeze", "contiguous"),
    *("expand", "__getitem__", "narrow", "select", "chunk", "split", "unbind", "swapaxes"),
    *("movedim", "unflatten", "clone", "detach", "channel_shuffle", "pixel_shuffle", "t"),
    "pixel_unshuffle",
)
SAME = ("relu", "to", "float", "double", "type", "cpu", "cuda", "neg", "positive", "log_softmax")
FACTS = ("size", "dim", "numel", "nelement", "ndimension", "is_floating_point", "__len__")
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout")
# functions that are 0 at 0 or nearly, and no steeper than about 1
LIKE_RELU = (
    *("gelu", "silu", "tanh", "elu", "selu", "celu", "relu6", "hardtanh", "hardswish", "mish"),
    *("softplus", "sigmoid", "hardsigmoid", "softsign"),
)
MEANS = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)


def given(names: str, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return arguments by name."""
    return {**dict(zip(names.split(), args, strict=False)), **kwargs}


def fact(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Tell a fact of the shape."""
    return func(args[0].content, *args[1:], **kwargs)


def shape(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Change the shape."""
    x = args[0]
    out = func(x.content, *args[1:], **kwargs)
    if isinstance(out, tuple | list):
        return tuple(tracer.traced(part, x.log_scale) for part in out)
    return tracer.traced(out, x.log_scale)


def same(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Leave values that are not negative as they are."""
    return args[0]


def dropout(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Drop nothing."""
    if given("x p training", args, kwargs).get("training", True):
        raise tracer.refuse(func.__name__, "Pass training=self.training, so that it can be off")
    return args[0]


def activation(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Treat a function as ReLU, if that is asked for."""
    tracer.beyond(func.__name__, "treated as ReLU")
    return args[0]


def leaky_relu(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Scale by the steeper side."""
    slope = given("x negative_slope", args, kwargs).get("negative_slope", 0.01)
    return tracer.scale(args[0], args[0].content.new_tensor(max(1.0, abs(slope))))


def prelu(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Scale by the steeper side of each channel."""
    slope = given("x weight", args, kwargs)["weight"]
    return tracer.scale(args[0], channels(slope.abs().clamp(min=1.0), args[0].content))


def linear(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Apply a matrix from the right; the bias counts nothing."""
    x, weight = (given("x weight", args, kwargs)[name] for name in ("x", "weight"))
    return layer(tracer, func, x, weight, F.linear)


def matmul(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Multiply by a matrix from the right."""
    if not isinstance(args[1], Tensor) or args[1].dim() != 2:
        raise tracer.refuse(func.__name__)
    return layer(tracer, func, args[0], args[1], torch.matmul)


def convolution(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Apply a convolution as it moves; the bias counts nothing."""
    last = "output_padding groups dilation" if "transpose" in func.__name__ else "dilation groups"
    how = given(f"x weight bias stride padding {last}", args, kwargs)
    x, weight, how["bias"] = how.pop("x"), how.pop("weight"), None
    return layer(tracer, func, x, weight, lambda v, w: func(v, w, **how), **how)


def layer(tracer: Tracer, func: Any, x: Any, weight: Any, apply: Any, **how: Any) -> Traced:
    """Apply a layer whose weight is no activation."""
    if isinstance(weight, Traced) or not isinstance(x, Traced):
        raise tracer.refuse(func.__name__)
    return tracer.apply_layer(x, weight.detach(), apply, **how)


def batch_norm(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Scale the channels: what is left of BatchNorm where no layer precedes it."""
    found = given("x mean var weight bias training momentum eps", args, kwargs)
    if found.get("training") or found["var"] is None:
        raise tracer.refuse("batch_norm", "Keep running statistics, so that it is linear")
    factor = (found["var"] + found.get("eps", 1e-5)).rsqrt()
    if found.get("weight") is not None:
        factor = factor * found["weight"].detach()
    return tracer.scale(found["x"], channels(factor, found["x"].content))


def layer_norm(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Scale by the weights, if that is asked for."""
    tracer.beyond(func.__name__, "replaced by its weights, as if its inputs had variance 1")
    weight = given("x shape weight", args, kwargs).get("weight")
    return args[0] if weight is None else tracer.scale(args[0], weight.detach())


def group_norm(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Scale the channels by the weights, if that is asked for."""
    tracer.beyond(func.__name__, "replaced by its weights, as if its inputs had variance 1")
    names = "x groups weight" if func.__name__ == "group_norm" else "x mean var weight"
    weight = given(names, args, kwargs).get("weight")
    return args[0] if weight is None else tracer.scale(args[0], channels(weight, args[0].content))


def attention(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Average all values, if that is asked for."""
    query, _, value = (given("query key value", args, kwargs)[n] for n in ("query", "key", "value"))
    tracer.beyond(func.__name__, "an even average of its values; queries and keys count nothing")
    return average(tracer, value, -2, query.content.shape[-2])


def average(tracer: Tracer, x: Traced, dim: int, length: int) -> Traced:
    """Give every place the mean over all places."""
    mean = x.content.mean(dim, keepdim=True)
    sizes = [-1] * mean.dim()
    sizes[dim] = length
    return tracer.pool(x, mean.expand(sizes), mean.new_tensor(1.0 / x.content.shape[dim]))


def multi_head(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Average all values between their two projections, if that is asked for."""
    names = (
        "query key value dim heads in_weight in_bias bias_k bias_v add_zero dropout_p out_weight"
    )
    found = given(names, args, kwargs)
    tracer.beyond("attention", "an even average of its values; queries and keys count nothing")
    weight = found.get("v_proj_weight")
    weight = found["in_weight"].chunk(3)[2] if weight is None else weight
    value = tracer.apply_layer(found["value"], weight.detach(), F.linear)
    mixed = average(tracer, value, 0, found["query"].content.shape[0])
    return tracer.apply_layer(mixed, found["out_weight"].detach(), F.linear), None


def add(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Add branches, or a constant, which counts nothing as biases do."""
    x, y = args[:2]
    if isinstance(x, Traced) and isinstance(y, Traced):
        if kwargs.get("alpha", 1) != 1:
            raise tracer.refuse("add with alpha", "Multiply before the sum")
        tracer.note("branches are added: norms of residual networks are an extension of the paper")
        return tracer.add(x, y)
    one, other = (x, y) if isinstance(x, Traced) else (y, x)
    if not isinstance(other, Tensor):
        return one
    return tracer.traced(one.content + torch.zeros_like(other), one.log_scale)


def multiply(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Scale by a constant."""
    one, other = args[:2] if isinstance(args[0], Traced) else (args[1], args[0])
    if isinstance(other, Traced):
        raise tracer.refuse("mul of two activations")
    return tracer.scale(one, torch.as_tensor(other).detach().to(one.content))


def divide(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Scale by one over a constant."""
    if isinstance(args[1], Traced) or kwargs.get("rounding_mode"):
        raise tracer.refuse("division by an activation")
    return tracer.scale(args[0], 1.0 / torch.as_tensor(args[1]).detach().to(args[0].content))


def cat(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Put branches side by side."""
    found = given("parts dim", args, kwargs)
    parts = found["parts"] if "parts" in found else found["tensors"]
    if not all(isinstance(part, Traced) for part in parts):
        raise tracer.refuse("cat with constants")
    tracer.note("branches are joined: norms of such networks are an extension of the paper")
    return tracer.join(parts, found.get("dim", 0))


def pad(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Pad; a constant is no path."""
    found = given("x pad mode value", args, kwargs)
    x, sides, mode = found["x"], found["pad"], found.get("mode", "constant")
    if mode == "constant":
        return tracer.traced(F.pad(x.content, sides), x.log_scale)
    return tracer.pad(x, lambda v: F.pad(v, sides, mode=mode))


def mean(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Average over axes."""
    x = args[0]
    out = func(x.content, *args[1:], **kwargs)
    return tracer.pool(x, out, out.new_tensor(out.numel() / x.content.numel()))


def window(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Average over windows, or sum in place of the maximum, which bounds it from above."""
    averages = "avg" in func.__name__
    last = "ceil_mode count_include_pad" if averages else "dilation"
    found = given(f"x kernel_size stride padding {last}", args, kwargs)
    x, kernel, stride = found["x"], found["kernel_size"], found.get("stride")
    content = x.content
    out = func(content, *args[1:], **kwargs)
    if isinstance(out, tuple) or content.dim() != int(func.__name__[-2]) + 2:
        raise tracer.refuse(func.__name__, "Pool a batch, without return_indices")
    stride = kernel if stride is None or stride in ([], ()) else stride
    how = (kernel, stride, found.get("padding", 0), found.get("dilation", 1), out.shape[2:])
    if not averages:
        return tracer.pool(x, window_sum(content, *how), content.new_ones(()))
    ones = content.new_ones(1, 1, *content.shape[2:])
    counts = window_sum(ones, *how).clamp(min=1.0)
    return tracer.pool(x, out, func(ones, *args[1:], **kwargs) / counts)


def adaptive(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """Pool to a given size."""
    x = args[0]
    out = func(x.content, *args[1:], **kwargs)
    if isinstance(out, tuple):
        raise tracer.refuse(func.__name__, "Pool without return_indices")
    space = tuple(out.shape[2:])
    counts = adaptive_counts(x.content.shape[2:], space, out)
    averaged: Tensor = MEANS[len(space) - 1](x.content, space)
    if "avg" in func.__name__:
        return tracer.pool(x, averaged, 1.0 / counts)
    return tracer.pool(x, averaged * counts, out.new_ones(()))


def channels(factor: Tensor, like: Tensor) -> Tensor:
    """Return factors of the channels, shaped to multiply."""
    if factor.numel() not in (1, like.shape[1]):
        raise ShapeError(
            f"a norm must have one weight for each of {like.shape[1]} channels; got "
            f"{factor.numel()}. Put the batch first."
        )
    return factor.detach().reshape(1, -1, *(1,) * (like.dim() - 2))


RULES: dict[str, Rule] = {
    **dict.fromkeys(FACTS, fact),
    **dict.fromkeys(SHAPES, shape),
    **dict.fromkeys(SAME, same),
    **dict.fromkeys(DROPOUTS, dropout),
    **dict.fromkeys(LIKE_RELU, activation),
    **dict.fromkeys((f"conv{t}{n}d" for t in ("", "_transpose") for n in (1, 2, 3)), convolution),
    **dict.fromkeys((f"{kind}_pool{n}d" for kind in ("max", "avg") for n in (1, 2, 3)), window),
    **dict.fromkeys(
        (f"adaptive_{k}_pool{n}d" for k in ("max", "avg") for n in (1, 2, 3)), adaptive
    ),
    **dict.fromkeys(("add", "sub", "rsub", "__radd__", "__rsub__", "subtract"), add),
    **dict.fromkeys(("mul", "multiply", "__rmul__"), multiply),
    **dict.fromkeys(("div", "divide", "true_divide"), divide),
    **dict.fromkeys(("cat", "concat", "concatenate"), cat),
    **dict.fromkeys(("layer_norm", "rms_norm"), layer_norm),
    **dict.fromkeys(("group_norm", "instance_norm"), group_norm),
    **dict.fromkeys(("matmul", "mm", "__matmul__"), matmul),
    "linear": linear,
    "batch_norm": batch_norm,
    "leaky_relu": leaky_relu,
    "prelu": prelu,
    "pad": pad,
    "mean": mean,
    "scaled_dot_product_attention": attention,
    "multi_head_attention_forward": multi_head,
}
