"""Encoders of texts: a hashed bag that trains in seconds, and models of transformers."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.checks import check_choice, check_range
from gossamer.errors import DataError, MissingDependencyError
from gossamer.models.packaged import model_folder
from gossamer.models.saving import PretrainedModel

__all__ = ["BagEncoder", "TextEncoder", "check_texts"]

# their first token stands behind the position of padding
_COUNTED_FROM_PADDING = ("camembert", "mpnet", "roberta", "xlm-roberta")
_WORD = re.compile(r"\w+")


class BagEncoder(PretrainedModel):
    r"""The mean of learned vectors of a text's words and character n-grams, and one residual block.

    $$h = \frac{1}{|g|} \sum_{g} E[\mathrm{hash}(g)], \qquad y = h + W_2\,\mathrm{gelu}(W_1 h)$$

    Words are lower-cased; the n-grams are those of `<word>`, so that beginnings and ends differ.
    Hashes are the same on every machine. There is no vocabulary and no tokenizer, and no order of
    words.

    Args:
        dim: Width of the embeddings. Range: >= 1.
        num_buckets: Rows of the table; grams with one hash share a row. Range: >= 1. Default 16384.
        ngram: Characters of an n-gram; 0 for words alone. Range: >= 0. Default 4.

    Shape:
        - input: n texts; output: `(n, dim)`, zeros pushed through the block for a text without any
          word.

    Raises:
        ConfigError: If a number is out of its range.
        DataError: If an input is no text.

    Example:
        >>> BagEncoder(8)(["a small test", "another"]).shape
        torch.Size([2, 8])

    Source: Bojanowski et al., *Enriching Word Vectors with Subword Information*, TACL 2017, for the
        n-grams.
    Deviations: words and n-grams share one table, which starts from N(0, 0.02); the residual block.
    """

    def __init__(self, dim: int, *, num_buckets: int = 16384, ngram: int = 4) -> None:
        super().__init__()
        check_range(dim, "dim", low=1, integer=True)
        check_range(num_buckets, "num_buckets", low=1, integer=True)
        check_range(ngram, "ngram", low=0, integer=True)
        self.config = {"dim": dim, "num_buckets": num_buckets, "ngram": ngram}
        self.num_buckets = num_buckets
        self.ngram = ngram
        self.table = nn.EmbeddingBag(num_buckets, dim, mode="mean")
        # small: rows that start at norm sqrt(dim) hardly move in the few steps that a bag needs
        nn.init.normal_(self.table.weight, std=0.02)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, texts: Sequence[str]) -> Tensor:
        """Encode texts."""
        check_texts(texts, "texts")
        bags = [_buckets(text, self.num_buckets, self.ngram) for text in texts]
        sizes = torch.tensor([0, *(len(bag) for bag in bags)], dtype=torch.long)
        grams = torch.tensor([gram for bag in bags for gram in bag], dtype=torch.long)
        begins = sizes.cumsum(0)[:-1]
        x = self.table(grams.to(self.device), begins.to(self.device))
        return x + self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


@lru_cache(maxsize=200_000)
def _buckets(text: str, num_buckets: int, ngram: int) -> tuple[int, ...]:
    grams: list[str] = []
    for word in _WORD.findall(text.lower()):
        grams.append(word)
        if ngram:
            marked = f"<{word}>"
            grams += [marked[n : n + ngram] for n in range(len(marked) - ngram + 1)]
    return tuple(zlib.crc32(gram.encode()) % num_buckets for gram in grams)


class TextEncoder(nn.Module):
    """A model of transformers with its tokenizer, pooled to one vector for each text.

    Args:
        folder: A folder with a model and a tokenizer, as `save_pretrained` writes, or
            `"packaged:minilm"`; nothing is ever downloaded.
        pooling: `"mean"` over the tokens of the text, or `"cls"`, the first token.
            Default `"mean"`.
        normalize: Divide by the norm. Default true.
        max_length: Tokens of a text that are read, at most the positions of the model; the rest is
            cut off. Range: >= 1. Default 128.

    Shape:
        - input: n texts; output: `(n, hidden_size)`.

    Raises:
        MissingDependencyError: Without transformers (extra `hf`).
        DataError: If the folder holds no model or no tokenizer, or an input is no text.
        ConfigError: If an option is out of its range.

    Example:
        >>> from gossamer.models import TextEncoder
        >>> encoder = TextEncoder("packaged:minilm")  # doctest: +SKIP
        >>> encoder(["a text"]).shape  # doctest: +SKIP
        torch.Size([1, 384])

    Source: Reimers and Gurevych, *Sentence-BERT*, EMNLP 2019, section 3.
    Deviations: none
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        pooling: str = "mean",
        normalize: bool = True,
        max_length: int = 128,
    ) -> None:
        super().__init__()
        check_choice(pooling, ("mean", "cls"), "pooling")
        check_range(max_length, "max_length", low=1, integer=True)
        self.config = {"pooling": pooling, "normalize": normalize}
        self.pooling = pooling
        self.normalize = normalize
        self.model, self.tokenizer = _load(model_folder(folder))
        self.set_max_length(max_length)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], **options: Any) -> TextEncoder:
        """Load model and tokenizer as the constructor does, in evaluation mode.

        Args:
            folder: As there.
            options: As there; `save_pretrained` does not keep them.
        """
        return cls(folder, **options).eval()

    def set_max_length(self, max_length: int) -> None:
        """Read at most so many tokens of a text from now on, and no more than the model can.

        Raises:
            ConfigError: If the number is out of its range.
        """
        check_range(max_length, "max_length", low=1, integer=True)
        most = _positions(self.model.config)
        self.max_length = max_length if most is None else min(max_length, most)
        self.config["max_length"] = self.max_length

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write model and tokenizer as transformers does; pooling is not among it."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def forward(self, texts: Sequence[str]) -> Tensor:
        """Encode texts."""
        check_texts(texts, "texts")
        if not texts:
            return torch.zeros((0, self.model.config.hidden_size), device=self.model.device)
        tokens = self.tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=self.max_length,
            return_tensors="pt",
        ).to(self.model.device)
        hidden = self.model(**tokens).last_hidden_state
        if self.pooling == "cls":
            pooled = hidden[:, 0]
        else:
            weights = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            pooled = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)
        return F.normalize(pooled, dim=-1) if self.normalize else pooled


def _positions(config: Any) -> int | None:
    """Return how many tokens a model can read, `None` if there is no limit."""
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if positions is None or config.model_type not in _COUNTED_FROM_PADDING:
        return positions
    return positions - int(config.pad_token_id) - 1


def _load(folder: Path) -> tuple[Any, Any]:
    try:
        from transformers import AutoModel, AutoTokenizer
    except ImportError:
        raise MissingDependencyError("transformers", "hf") from None
    if not (folder / "config.json").is_file():
        raise DataError(
            f"{folder} must hold a model of transformers with config.json; it does not. Give the "
            "folder of a model on this machine."
        )
    try:
        model = AutoModel.from_pretrained(folder, local_files_only=True)
        return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise DataError(
            f"{folder} must hold a model and its tokenizer; got: {first} Copy all files of the "
            "model."
        ) from None


def check_texts(texts: Any, name: str) -> None:
    """Check that a sequence holds texts alone.

    Raises:
        DataError: If it is a single text, or an entry is none.
    """
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise DataError(
            f"{name} must be a list of texts; got {type(texts).__name__}. Put a single text in a "
            "list."
        )
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(
                f"{name} must hold texts; got {type(text).__name__} at index {number}. Convert or "
                "drop it."
            )
