"""Generation of transformers with position ids that follow a rule."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import ShapeError, UnsupportedError

__all__ = ["PositionedGeneration", "positioned_class"]


@dataclass(frozen=True)
class PositionRule:
    """Where the ids of generated tokens come from.

    Args:
        given: Ids `(B or 1, n[, levels])`, which go on by 1 beyond n; or a function from all
            tokens so far `(rows, t)` to the ids of all tokens so far.
        last_is_segment: Whether the last level is a segment, which goes on unchanged.
    """

    given: Tensor | Callable[[Tensor], Tensor]
    last_is_segment: bool

    def ids(self, tokens: Tensor, begin: int, end: int, rows: int) -> Tensor:
        """Return the ids of tokens `begin` to `end`, for all `rows` of beams and samples."""
        if callable(self.given):
            if tokens.shape[1] != end:
                raise UnsupportedError(
                    "a function for position_ids needs all tokens so far; got a part of "
                    f"{tokens.shape[1]} of {end}. Leave prefill_chunk_size out or pass ids."
                )
            ids = self.given(tokens)
            if ids.dim() < 2 or ids.shape[0] not in (1, rows) or ids.shape[1] != end:
                raise ShapeError(
                    "the function for position_ids must return one id for each token so far, "
                    f"({rows} or 1, {end}[, levels]); got {tuple(ids.shape)}. Change it."
                )
            return ids[:, begin:]
        ids = self.given.to(tokens.device)
        if rows % len(ids):
            raise ShapeError(
                f"position_ids must have one row for each sample, or one; got {len(ids)} rows "
                f"for {rows} sequences. Pass the ids of the prompts."
            )
        if len(ids) > 1:  # beams of one sample stand together
            ids = ids.repeat_interleave(rows // len(ids), dim=0)
        if end > ids.shape[1]:
            ids = torch.cat((ids, self._beyond(ids[:, -1:], end - ids.shape[1])), dim=1)
        return ids[:, begin:end]

    def _beyond(self, last: Tensor, count: int) -> Tensor:
        steps = torch.arange(1, count + 1, device=last.device, dtype=last.dtype)[None]
        if last.dim() == 2:
            return last + steps
        moving = torch.ones(last.shape[-1], dtype=last.dtype, device=last.device)
        if self.last_is_segment:
            moving[-1] = 0
        return last + steps[..., None] * moving


class PositionedGeneration:
    """What `add_positions` puts before a model's class: position ids in `generate`."""

    def generate(
        self,
        inputs: Tensor | None = None,
        *args: Any,
        position_ids: Tensor | Callable[[Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate as the model's class does, with position ids by a rule.

        Args:
            inputs: As in transformers.
            *args: As in transformers.
            position_ids: Ids of the prompts, `(B or 1, T[, levels])`; generated tokens go on by
                1. Ids of some generated tokens may follow them. Or a function from all tokens so
                far, `(rows, t)`, beams as rows, to the ids of all tokens so far. Or `None`:
                tokens are counted, padding left out.
            **kwargs: As in transformers.
        """
        rule = None
        if position_ids is not None:
            prompt = kwargs.get("input_ids") if inputs is None else inputs
            if isinstance(position_ids, Tensor):
                _check_given(position_ids, prompt)
            encoding = self.base_model.positions[0]  # type: ignore[attr-defined]
            rule = PositionRule(position_ids, encoding.num_segments > 0)
        return super().generate(inputs, *args, position_rule=rule, **kwargs)  # type: ignore[misc]

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        *,
        inputs_embeds: Tensor | None = None,
        position_rule: PositionRule | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Prepare as the model's class does, with ids by the rule in place of counted ones."""
        prepared: dict[str, Any] = super().prepare_inputs_for_generation(  # type: ignore[misc]
            input_ids, inputs_embeds=inputs_embeds, **kwargs
        )
        prepared.pop("position_ids", None)
        if position_rule is not None:
            tokens = prepared.get("input_ids")
            new = prepared["inputs_embeds"] if tokens is None else tokens
            cache = kwargs.get("cache", kwargs.get("past_key_values"))
            begin = 0 if cache is None else cache.get_seq_length()
            end = begin + new.shape[1]
            prepared["position_ids"] = position_rule.ids(input_ids, begin, end, len(new))
        return prepared

    def __reduce__(self) -> tuple[Any, ...]:
        # the class is made at run time, so a pickle names the one it was made from
        return _empty, (type(self).__mro__[2],), self.__dict__


def _check_given(ids: Tensor, prompt: Any) -> None:
    if ids.dim() not in (2, 3):
        raise ShapeError(
            f"position_ids must have the shape (B, T) or (B, T, levels); got {tuple(ids.shape)}. "
            "Add the batch axis with position_ids[None]."
        )
    if isinstance(prompt, Tensor) and ids.shape[1] < prompt.shape[1]:
        raise ShapeError(
            f"position_ids must cover the prompt, {prompt.shape[1]} tokens; got {ids.shape[1]}. "
            "Pass an id for each of its tokens."
        )


@functools.cache
def positioned_class(cls: type) -> type:
    """Return a class of the same name whose `generate` takes position ids by a rule."""
    names = {key: getattr(cls, key) for key in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (PositionedGeneration, cls), names)


def _empty(cls: type) -> Any:
    return object.__new__(positioned_class(cls))
