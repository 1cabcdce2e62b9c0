"""Queries and documents as vectors whose inner product is their score."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.checks import check_range
from gossamer.errors import ConfigError, DataError, ShapeError
from gossamer.models.saving import PretrainedModel
from gossamer.models.text_encoder import BagEncoder, TextEncoder
from gossamer.progress import progress

__all__ = ["DualEncoder"]


_KINDS: dict[str, type[BagEncoder] | type[TextEncoder]] = {
    "BagEncoder": BagEncoder,
    "TextEncoder": TextEncoder,
}


class DualEncoder(PretrainedModel):
    r"""One or two text encoders; the score of a query and a document is an inner product.

    $$s_{ij} = f(q_i) \cdot g(d_j)$$

    Args:
        encoder: Maps a list of texts to `(n, D)`, such as `BagEncoder` or `TextEncoder`.
        document_encoder: Of the documents; the same as that of the queries by default.
        normalize: Divide vectors by their norm, so that scores are cosines. Default true.

    Shape:
        - queries, documents: lists of B and L texts; output: `(B, L)`.

    Raises:
        ShapeError: If the two encoders differ in width.

    Example:
        >>> from gossamer.models import BagEncoder
        >>> DualEncoder(BagEncoder(8))(["red shoes"], ["shoes in red", "a lamp"]).shape
        torch.Size([1, 2])

    Source: Gupta et al., *Dual-Encoders for Extreme Multi-Label Classification*, ICLR 2024,
        section 2.
    Deviations: none
    """

    def __init__(
        self,
        encoder: nn.Module,
        *,
        document_encoder: nn.Module | None = None,
        normalize: bool = True,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        # one module under two names could not be saved
        self.document_encoder = None if document_encoder is encoder else document_encoder
        self.normalize = normalize

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write `config.json` and the encoders, each in its own form.

        A bag is in `model.safetensors`; a model of transformers has a folder of its own, which
        other libraries read.

        Raises:
            ConfigError: If an encoder is of another class.
        """
        self.config = self.describe()
        for name in ("encoder", "document_encoder"):
            encoder = getattr(self, name)
            if isinstance(encoder, TextEncoder):
                encoder.save_pretrained(Path(folder) / name)
        super().save_pretrained(folder)

    def describe(self) -> dict[str, Any]:
        """Return what `config.json` holds.

        Raises:
            ConfigError: If an encoder is of a class that cannot be saved.
        """
        config: dict[str, Any] = {"normalize": self.normalize}
        for name in ("encoder", "document_encoder"):
            encoder = getattr(self, name)
            if isinstance(encoder, (BagEncoder, TextEncoder)):
                config[name] = {"model": type(encoder).__name__, **encoder.config}
            elif encoder is not None:
                raise ConfigError(
                    f"an encoder that is saved must be one of {', '.join(_KINDS)}; got "
                    f"{type(encoder).__name__}. Save its weights yourself."
                )
        return config

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> Self:
        """Build the model from a folder that `save_pretrained` wrote, in evaluation mode.

        Raises:
            DataError: If a file is missing, broken, or of another model.
        """
        path = Path(folder)
        config = cls._read_config(path / "config.json")
        parts = {
            name: _build(config[name], path / name)
            for name in ("encoder", "document_encoder")
            if name in config
        }
        if "encoder" not in parts:
            raise DataError(
                f"{path / 'config.json'} must describe an encoder; got none. Copy all files of "
                "one run."
            )
        model = cls(**parts, normalize=config.get("normalize", True))
        model._load_weights(path / "model.safetensors")
        return model.eval()

    def embed_queries(self, texts: Sequence[str]) -> Tensor:
        """Return the vectors of queries, `(n, D)`, with a graph where gradients are asked for."""
        return self._vectors(self.encoder, texts)

    def embed_documents(self, texts: Sequence[str]) -> Tensor:
        """Return the vectors of documents, `(n, D)`, with a graph where gradients are asked for."""
        return self._vectors(self.document_encoder or self.encoder, texts)

    def encode_queries(
        self, texts: Sequence[str], *, batch_size: int = 256, quiet: bool = True
    ) -> Tensor:
        """Return the vectors of many queries on the CPU, in evaluation and without gradients.

        Args:
            texts: Any number.
            batch_size: Texts at a time. Range: >= 1. Default 256.
            quiet: Show no progress. Default true.
        """
        return self._encode(self.encoder, texts, batch_size, quiet)

    def encode_documents(
        self, texts: Sequence[str], *, batch_size: int = 256, quiet: bool = True
    ) -> Tensor:
        """Return the vectors of many documents, as `encode_queries`."""
        return self._encode(self.document_encoder or self.encoder, texts, batch_size, quiet)

    def forward(self, queries: Sequence[str], documents: Sequence[str]) -> Tensor:
        """Return the score of every query with every document."""
        q, d = self.embed_queries(queries), self.embed_documents(documents)
        if q.shape[-1] != d.shape[-1]:
            raise ShapeError(
                "the encoders of queries and documents must have one width; got "
                f"{q.shape[-1]} and {d.shape[-1]}. Change one of them."
            )
        return q @ d.T

    def _kept_elsewhere(self) -> dict[str, Tensor]:
        """Return the weights that lie in folders of their own."""
        own = {
            name
            for name in ("encoder", "document_encoder")
            if isinstance(getattr(self, name), TextEncoder)
        }
        state = self.state_dict()
        return {key: value for key, value in state.items() if key.partition(".")[0] in own}

    def _vectors(self, encoder: nn.Module, texts: Sequence[str]) -> Tensor:
        vectors: Tensor = encoder(texts)
        return F.normalize(vectors, dim=-1) if self.normalize else vectors

    @torch.no_grad()
    def _encode(
        self, encoder: nn.Module, texts: Sequence[str], batch_size: int, quiet: bool
    ) -> Tensor:
        check_range(batch_size, "batch_size", low=1, integer=True)
        training = encoder.training
        encoder.eval()
        # texts of one length together: less padding to encode; the longest first, so that the
        # share that is done is never too good
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
        parts: list[Tensor] = []
        try:
            with progress("encoding", len(texts), quiet=quiet or not texts) as bar:
                for begin in range(0, len(texts), batch_size):
                    chosen = [texts[number] for number in order[begin : begin + batch_size]]
                    parts.append(self._vectors(encoder, chosen).cpu())
                    bar.update(begin + len(chosen))
        finally:
            encoder.train(training)
        if not parts:
            return self._vectors(encoder, []).cpu()
        sorted_vectors = torch.cat(parts)
        return torch.empty_like(sorted_vectors).index_copy_(0, torch.tensor(order), sorted_vectors)


def _build(entry: Mapping[str, Any], folder: Path) -> nn.Module:
    """Build an encoder as `describe` wrote it."""
    options = dict(entry)
    name = options.pop("model", None)
    if name not in _KINDS:
        raise DataError(
            f"{folder.parent / 'config.json'} must name an encoder, {' or '.join(_KINDS)}; got "
            f"{name!r}. Copy the file from the run again."
        )
    return TextEncoder(folder, **options) if name == "TextEncoder" else BagEncoder(**options)
