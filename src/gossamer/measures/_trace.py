"""A forward pass in which every function has a rule: how norms walk through a user's model.

The model's own `forward` runs, so branches, functional calls and loops need no description. A
function without a rule is refused by name, with the module that called it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError, ShapeError, UnsupportedError
from gossamer.measures._batches import call_for_logits

__all__ = ["Layer", "Rule", "Traced", "Tracer"]

FIELDS = {"shape", "ndim", "dtype", "device", "is_nested", "is_cuda", "requires_grad", "layout"}


@dataclass(frozen=True)
class Layer:
    """One use of a weight.

    Args:
        name: Path of the module in the module tree.
        kind: The module's type.
        weight: As stored.
        units: Output units h for one input; of a convolution, channels times places.
        norm: Operator norm; NaN where it was not asked for.
    """

    name: str
    kind: str
    weight: Tensor
    units: int
    norm: float = math.nan


class Traced(Tensor):
    """What stands for a tensor: `content` times e to the power `log_scale`, and who walks."""

    content: Tensor
    log_scale: float
    tracer: Tracer

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = (*args, *(kwargs or {}).values())
        flat = [v for w in values for v in (w if isinstance(w, list | tuple) else (w,))]
        tracer = next(value.tracer for value in flat if isinstance(value, Traced))
        return tracer.call(func, args, kwargs or {})


Rule = Callable[["Tracer", Any, Any, Any], Any]
"""What is done in place of a function: `(tracer, function, args, kwargs)`."""


class Tracer:
    """Walks through a model; subclasses say what a layer, a sum and a pooling do.

    Args:
        model: In evaluation mode; nothing of it changes.
        approximate: Let layers pass for which the theory has no rule.
    """

    rules: ClassVar[Mapping[str, Rule]] = {}

    def __init__(self, model: nn.Module, *, approximate: bool = False) -> None:
        self.model = model
        self.approximate = approximate
        self.layers: list[Layer] = []
        self.notes: list[str] = []
        self._stack: list[tuple[str, nn.Module]] = [("", model)]

    def run(self, input_shape: Sequence[int]) -> Traced:
        """Walk from an input of ones to the output.

        Raises:
            UnsupportedError: If a function has no rule, or there is no layer on the way.
            ShapeError: If the model does not take such an input.
        """
        if not isinstance(input_shape, Sequence):
            raise ShapeError(
                f"input_shape must be a tuple, the shape of one input without the batch; got "
                f"{input_shape!r}. Write ({input_shape},)."
            )
        like = next(self.model.parameters())
        ones = torch.ones(1, *input_shape, dtype=like.dtype, device=like.device)
        try:
            with self._watched(), torch.no_grad():
                out = call_for_logits(self.model, self.traced(ones, 0.0))
        except GossamerError:
            raise
        except RuntimeError as error:  # torch's own, of sizes that do not fit
            raise ShapeError(
                f"the model must take an input of input_shape {tuple(input_shape)}, without the "
                f"batch; {type(self.model).__name__} says: {error}. Change input_shape."
            ) from error
        if not isinstance(out, Traced) or not self.layers:
            raise UnsupportedError(
                "the model must compute its output from its input by layers with weights; got "
                f"{type(self.model).__name__}, which does not. Pass the network itself."
            )
        shared = self._shared()
        if shared:
            self.note(
                f"weights are used more than once ({shared}): each path is counted once, with the "
                "weight at each of its places, and each use is a layer"
            )
        return out

    def _shared(self) -> str:
        by_weight: dict[int, list[str]] = {}
        for layer in self.layers:
            by_weight.setdefault(layer.weight.data_ptr(), []).append(layer.name)
        return "; ".join(" = ".join(names) for names in by_weight.values() if len(names) > 1)

    def traced(self, content: Tensor, log_scale: float) -> Traced:
        """Return a stand-in."""
        found = torch.empty(0).as_subclass(Traced)
        found.content, found.log_scale, found.tracer = content, log_scale, self
        return found

    def note(self, text: str) -> None:
        """Remember a remark, once."""
        if text not in self.notes:
            self.notes.append(text)

    def record(self, weight: Tensor, out: Tensor, norm: float = math.nan) -> Layer:
        """Remember a layer by the module that runs."""
        name, module = self._stack[-1]
        layer = Layer(name, type(module).__name__, weight.detach(), out[0].numel(), norm)
        self.layers.append(layer)
        return layer

    def refuse(self, name: str, remedy: str = "") -> UnsupportedError:
        """Return the error for a function without a rule."""
        return UnsupportedError(
            "norms have rules for linear layers, convolutions, ReLU, pooling, BatchNorm, dropout, "
            f"sums and changes of shape; got the function {name} in the layer {self._here}. "
            f"{remedy or 'Replace it, or leave the norms out of `measures`'}."
        )

    def beyond(self, name: str, what: str) -> None:
        """Refuse what the theory does not cover, or note that it is let pass."""
        if not self.approximate:
            raise self.refuse(name, f"Pass approximate=True to have it {what}")
        self.note(f"approximate: {name} in {self._here} is {what}")

    @property
    def _here(self) -> str:
        name, module = self._stack[-1]
        return f"{type(module).__name__} at {name!r}" if name else type(module).__name__

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                if module is self.model:
                    continue

                def enter(module: nn.Module, _: Any, name: str = name) -> None:
                    self._stack.append((name, module))

                def leave(*_: Any) -> None:
                    self._stack.pop()

                stack.callback(module.register_forward_pre_hook(enter).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            yield

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Apply the rule of a function."""
        name = getattr(func, "__name__", str(func))
        if not args and "input" in kwargs:
            args, kwargs = (kwargs["input"],), {k: v for k, v in kwargs.items() if k != "input"}
        if name == "__get__":
            return self._field(func.__self__.__name__, args[0])
        plain = name if name.startswith("__") else name.strip("_")
        if plain not in self.rules:
            raise self.refuse(name)
        out = self.rules[plain](self, func, args, kwargs)
        in_place = name.endswith("_") and not name.startswith("__")
        if in_place or kwargs.get("inplace"):  # x += y changes what x stands for, under any name
            args[0].content, args[0].log_scale = out.content, out.log_scale
            return args[0]
        if isinstance(out, Traced):  # a stand-in of its own, even where the values are the same
            return self.traced(out.content, out.log_scale)
        return out

    def _field(self, name: str, x: Traced) -> Any:
        if name in ("T", "mT", "data"):
            return self.traced(getattr(x.content, name), x.log_scale)
        if name not in FIELDS:
            raise self.refuse(name)
        return getattr(x.content, name)

    # what subclasses give

    def apply_layer(
        self, x: Traced, weight: Tensor, apply: Callable[[Tensor, Tensor], Tensor], **how: Any
    ) -> Traced:
        """Apply a layer: `apply(input, weight)`, linear in both; of a convolution, how it moves."""
        raise NotImplementedError

    def scale(self, x: Traced, factor: Tensor) -> Traced:
        """Multiply by known factors that broadcast."""
        raise NotImplementedError

    def add(self, x: Traced, y: Traced) -> Traced:
        """Add two branches."""
        raise NotImplementedError

    def join(self, parts: Sequence[Traced], dim: int) -> Traced:
        """Put branches side by side."""
        raise NotImplementedError

    def pool(self, x: Traced, out: Tensor, share: Tensor) -> Traced:
        """Pool: `out` is the weighted sum over windows, `share` the weight of one entry of each."""
        raise NotImplementedError

    def pad(self, x: Traced, apply: Callable[[Tensor], Tensor]) -> Traced:
        """Pad with entries of the input itself."""
        raise NotImplementedError
