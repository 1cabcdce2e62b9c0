"""The models of transformers that can be changed, and where their positions are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gossamer.errors import UnsupportedError

__all__ = ["Family", "base_and_family", "turn_off"]


@dataclass(frozen=True)
class Family:
    """Where models of one kind keep what has to be changed.

    Args:
        layers: Path from the base model to its list of layers.
        attention: Path from a layer to its self-attention.
        own: Path to the module that adds or rotates by positions.
        segments: Path to the table of token types, or empty.
    """

    layers: str
    attention: str
    own: str
    segments: str = ""

    @property
    def looks_up_ids(self) -> bool:
        """Whether the embeddings index a table of token types by position ids."""
        return bool(self.segments)


_GPT2 = Family("h", "attn", "wpe")
_LLAMA = Family("layers", "self_attn", "rotary_emb")
_BERT = Family(
    "encoder.layer",
    "attention.self",
    "embeddings.position_embeddings",
    "embeddings.token_type_embeddings",
)
FAMILIES = {
    "gpt2": _GPT2,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta"), _BERT),
}


class _NoEmbedding(nn.Module):
    """Stands in for a table of positions or token types, and adds nothing."""

    zero: Tensor

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.register_buffer("zero", like.new_zeros(1), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.zero


class _NoRotation(nn.Module):
    """Stands in for a rotary embedding, and turns nothing: cosine 1, sine 0."""

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x.new_ones(1, 1, 1), x.new_zeros(1, 1, 1)


def base_and_family(model: nn.Module) -> tuple[Any, Family]:
    """Return the part of a model that holds its layers, and what is known about its kind.

    Raises:
        UnsupportedError: If the model is of another type; the message names those that work.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in FAMILIES or not hasattr(model, "base_model"):
        raise UnsupportedError(
            f"model must be one of transformers' types {', '.join(sorted(FAMILIES))}; got "
            f"{kind or type(model).__name__!r}. Use the encoding's hooks in your own attention."
        )
    return model.base_model, FAMILIES[kind]


def turn_off(base: nn.Module, family: Family, *, segments: bool) -> None:
    """Put modules that add nothing in the place of a model's own positions.

    Args:
        base: The part that holds the layers.
        family: Where its positions are.
        segments: Whether its table of token types goes as well.
    """
    for path in (family.own, family.segments if segments else ""):
        if path:
            old = base.get_submodule(path)
            weight = getattr(old, "weight", None)
            new = _NoRotation() if weight is None else _NoEmbedding(weight)
            base.set_submodule(path, new)
