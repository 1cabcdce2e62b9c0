"""Characters of a text file with blanks: a masked language model to train on any writing."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.checks import check_choice, check_range
from gossamer.tasks.base import PAD, Batch, Example
from gossamer.tasks.text import TextTask

__all__ = ["MaskedTextTask"]

_BLANK = "_"


class MaskedTextTask(TextTask):
    """Masked characters of a file: an encoder fills the blanks in from both sides.

    A sample is a window of `length` characters from a random place; each is a blank with
    probability `rate`, and one of them always. The first 90 % of the file are for training, the
    last 10 % for tests. A query is a text in which `_` stands for a blank; there is no true answer
    to it.

    With `num_texts` = 2 or more a window mixes texts from places of their own: at each place one
    of them, drawn evenly, goes on by one character. Ids then have a second level, the number of
    the text from 1, which is what encodings with segments read. No token says where a text is left
    or taken up again, so a model without segments cannot tell the texts apart.

    Args:
        path: A UTF-8 text file.
        length: Characters of a window. Unit: tokens. Range: >= 1. Default 64.
        rate: Share of blanks. Range: > 0, <= 1. Default 0.15.
        num_texts: Texts mixed in a window. Range: >= 1. Default 1.

    Raises:
        ConfigError: If an option is out of range.
        DataError: If the file is missing, empty, not UTF-8, or too short for `length`.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/song.txt"
        >>> with open(path, "w") as file:
        ...     _ = file.write("la la li la " * 20)
        >>> task = MaskedTextTask(path, length=8)
        >>> task.sample(4, generator=torch.Generator().manual_seed(0)).tokens.shape
        torch.Size([4, 8])
        >>> task.encode("la l_").tolist()
        [5, 3, 2, 5, 0]

    Source: Devlin et al., *BERT*, NAACL 2019, section 3.1, on characters; the mixed texts are the
        library's own.
    Deviations: every blank is the blank token (authors: 80 %, the rest kept or replaced at random).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        length: int = 64,
        rate: float = 0.15,
        num_texts: int = 1,
    ) -> None:
        super().__init__(path, length=length)
        check_range(rate, "rate", low=0.0, high=1.0, open_low=True)
        check_range(num_texts, "num_texts", low=1, integer=True)
        self.rate = rate
        self.num_texts = num_texts
        self.levels = 1 if num_texts == 1 else 2

    @property
    def config(self) -> dict[str, Any]:
        """Name and options."""
        options = {"rate": self.rate, "num_texts": self.num_texts}
        return {**super().config, "name": "masked_text", **options}

    def sample(self, batch_size: int, *, generator: torch.Generator, split: str = "train") -> Batch:
        """Draw windows from random places of the first 90 % or the last 10 %, and their blanks."""
        check_choice(split, ("train", "test"), "split")
        size = (batch_size, self.length)
        part = self._parts[split]
        last = len(part) - self.length + 1
        begins = torch.randint(last, (batch_size, self.num_texts), generator=generator)
        turns = torch.randint(self.num_texts, size, generator=generator)
        # how far each text has come when it is its turn
        place = F.one_hot(turns, self.num_texts).cumsum(1).gather(2, turns[..., None])[..., 0] - 1
        tokens = part[begins.gather(1, turns) + place]
        draws = torch.rand(size, generator=generator)
        # a sample without a blank would have no loss
        mask = (draws < self.rate) | (draws == draws.amin(1, keepdim=True))
        return Batch(tokens, self._with_texts(turns), mask)

    def encode(self, query: str) -> Tensor:
        """Return the tokens of a text, 0 for each `_` in it."""
        known = super().encode(query.replace(_BLANK, self.vocab[-1]))
        blank = torch.tensor([character == _BLANK for character in query])
        return torch.where(blank, PAD, known)

    def position_ids(self, query: str, *, start: int | None = None) -> Tensor:
        """Return the ids of a text; it counts as the first one of a mixture."""
        begin = 1 if start is None else start
        check_range(begin, "start", low=1, integer=True)
        ids = self._with_texts(torch.zeros(1, len(self.encode(query)), dtype=torch.long))[0]
        return ids + (begin - 1) * torch.tensor([1, 0] if self.levels == 2 else 1)

    def example(self, query: str, *, start: int | None = None) -> Example:
        """Return a text with its blanks, which are scored; what belongs there is not known."""
        tokens = self.encode(query)
        return Example(tokens, self.position_ids(query, start=start), tokens == PAD)

    def _with_texts(self, turns: Tensor) -> Tensor:
        """Return places 1..T, and with several texts the number of the text, from 1."""
        places = self._count(turns.shape[1]).expand_as(turns)
        return places if self.levels == 1 else torch.stack((places, turns + 1), dim=-1)
