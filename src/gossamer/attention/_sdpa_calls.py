"""Sees every call of PyTorch's attention inside a model, with the module that made it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gossamer.attention.core import causal_mask
from gossamer.errors import UnsupportedError

__all__ = ["AttentionCall", "CallWatcher", "check_can_watch"]

# below this an additive mask hides a key: libraries write -1e9 or the lowest number of a dtype,
# which for float16 is -65504
HIDDEN = -1e4


class AttentionCall(NamedTuple):
    """What one call of `scaled_dot_product_attention` was given, and what it returned."""

    layer: str
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    causal: bool
    scale: float
    out: Tensor

    def scores(self, begin: int, end: int, q: Tensor, k: Tensor) -> Tensor:
        """Return the scores of some queries, -inf for hidden keys, for prepared q and k."""
        scores = q[:, :, begin:end] @ k.mT * self.scale
        if self.bias is not None:
            bias = self.bias
            if bias.dim() >= 2 and bias.shape[-2] > 1:
                bias = bias[..., begin:end, :]
            if bias.dtype == torch.bool:
                scores = scores.masked_fill(~bias, -math.inf)
            else:
                scores = (scores + bias.float()).masked_fill(bias < HIDDEN, -math.inf)
        if self.causal:
            # PyTorch counts from the first key, `causal_mask` from the last
            length, keys = q.shape[2], k.shape[2]
            square = causal_mask(max(length, keys), max(length, keys), device=q.device)
            scores = scores.masked_fill(~square[begin:end, :keys], -math.inf)
        return scores


class CallWatcher:
    """Between `start` and `stop`, hands every attention call inside a model to a function.

    Args:
        model: Any module.
        on_call: Receives an `AttentionCall`; runs before the model goes on.
    """

    def __init__(self, model: nn.Module, on_call: Callable[[AttentionCall], object]) -> None:
        self.model = model
        self.on_call = on_call
        self.num_calls = 0
        self.unseen: list[str] = []
        self._stack: list[tuple[str, int]] = []
        self._handles: list[Any] = []
        self._mode = _Mode(self._look)

    def start(self) -> None:
        """Begin to look."""
        self.num_calls, self.unseen, self._stack = 0, [], [("", 0)]
        for name, module in self.model.named_modules():
            if name:
                self._handles += _track(module, name, self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """End, and leave no hook behind."""
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def check(self) -> None:
        """Check that there was anything to see.

        Raises:
            UnsupportedError: If no call was seen; the message names the attention classes.
        """
        if not self.num_calls:
            raise _unsupported(self.model, "never called it in this pass")

    def enter(self, name: str) -> None:
        """Note that a module begins."""
        self._stack.append((name, self.num_calls))

    def leave(self, module: nn.Module) -> None:
        """Note that a module ends, and whether it is attention that could not be seen."""
        name, before = self._stack.pop()
        if _is_attention(module) and self.num_calls == before:
            self.unseen.append(f"{name} ({type(module).__name__})")

    def _look(self, arguments: Mapping[str, Any], out: Tensor) -> None:
        q, k, v = (arguments[name] for name in ("query", "key", "value"))
        if q.dim() != 4:
            return
        self.num_calls += 1
        scale = arguments.get("scale")
        self.on_call(
            AttentionCall(
                self._stack[-1][0],
                q,
                k,
                v,
                arguments.get("attn_mask"),
                bool(arguments.get("is_causal", False)),
                q.shape[-1] ** -0.5 if scale is None else float(scale),
                out,
            )
        )


def _track(module: nn.Module, name: str, watcher: CallWatcher) -> tuple[Any, Any]:
    def before(*_: Any) -> None:
        watcher.enter(name)

    def after(module: nn.Module, *_: Any) -> None:
        watcher.leave(module)

    # one hook must be told of errors too, or the stack would lean for ever
    return (
        module.register_forward_pre_hook(before),
        module.register_forward_hook(after, always_call=True),
    )


class _Mode(TorchFunctionMode):
    """Hands the arguments and the result of each attention call on."""

    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

    def __init__(self, look: Callable[[Mapping[str, Any], Tensor], None]) -> None:
        super().__init__()
        self.look = look

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            given = dict(zip(self.names, args, strict=False)) | (kwargs or {})
            self.look(given, out)
        return out


def check_can_watch(model: nn.Module) -> None:
    """Check what can be known before a pass: that some attention of the model can be seen.

    Raises:
        UnsupportedError: If not; the message names the classes.
    """
    found = [m for m in model.modules() if _is_attention(m)]
    if found and all(isinstance(m, nn.MultiheadAttention) for m in found):
        raise _unsupported(model, "does not call it as a function that can be seen")
    for module in model.modules():
        kind = getattr(getattr(module, "config", None), "_attn_implementation", "sdpa")
        if kind not in (None, "sdpa"):
            raise _unsupported(model, f"runs with attn_implementation={kind!r}")


def _is_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower()


def _unsupported(model: nn.Module, reason: str) -> UnsupportedError:
    names = sorted({type(m).__name__ for m in model.modules() if _is_attention(m)})
    classes = ", ".join(names) or f"{type(model).__name__}, which holds no attention class"
    return UnsupportedError(
        "the model must compute its attention by torch.nn.functional.scaled_dot_product_attention; "
        f"got {classes}: it {reason}. Load a transformers model with attn_implementation='sdpa', "
        "or use gossamer.attention.MultiHeadAttention, and do not compile the model."
    )
