"""Chains of assignments in shuffled order: what is the value of every variable?"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.checks import check_choice, check_range
from gossamer.errors import ConfigError, DataError
from gossamer.tasks.base import EOS, PAD, Batch, GridCell
from gossamer.tasks.structured import Shape, StructuredTask

__all__ = ["LegoTask", "guess_from_minus_signs"]

_LETTERS = string.ascii_lowercase
_VOCAB = ("_", "$", *_LETTERS, *"=+-1;>")
_EQUALS, _PLUS, _MINUS, _ONE, _END, _ANSWERS = range(2 + len(_LETTERS), len(_VOCAB))
_PLACES = 6
"""Places of a clause: name, `=`, sign, name or 1, `;`, and its value in the answer."""
_ROOT = _ONE - 2
_CLAUSE = re.compile(r"([a-z])\s*=\s*([+-])\s*([a-z1])")


@dataclass(frozen=True)
class _Clauses:
    """Clauses in the order of the text, `(B, n)` each; letters from 0, `_ROOT` stands for 1."""

    names: Tensor
    parents: Tensor
    minus: Tensor
    values: Tensor  # True = -1
    positions: Tensor  # in the chain, from 1


class LegoTask(StructuredTask):
    """Chains such as `$b=-a;a=+1;c=+b;>-+-$`: signs of variables, each from the one before it.

    The clauses stand in random order; the answer has the value of each clause's variable, + or -,
    in the order of the text. Level 1 of the ids is the number of the clause in the text (clause k
    and its value s + k, the `>` s), level 2 the place in the clause: name 1, `=` 2, sign 3, name or
    `1` 4, `;` 5, value (and `>`) 6. The `$` at both ends have 0.

    In training the values of the first `num_supervised` variables of the chain are scored, and the
    end token. Values that are not scored hold token 0 in every batch, so that no model reads an
    answer that it was not trained to give.

    Args:
        num_variables: Variables of a chain. Range: 1 to 26. Default 12.
        num_supervised: Variables whose values are trained, from the root on; more than there are
            means all. Range: >= 1. Default 6.
        position: The one place in the chain, from 1, whose value tests score. Default `None`: all.
        max_position: Largest id of each level's table, one number or two. Ids then start at random
            in training, and in the middle of the table in tests. Default `None`: ids start at 1.

    Raises:
        ConfigError: If a number is out of range, or ids beyond `max_position` are needed.

    Example:
        >>> task = LegoTask()
        >>> task.symbols(task.example("b=-a;a=+1;c=+b").tokens)
        '$b=-a;a=+1;c=+b;>-+-$'
        >>> task.position_ids("a=-1").tolist()
        [[0, 0], [2, 1], [2, 2], [2, 3], [2, 4], [2, 5], [1, 6], [2, 6], [0, 0]]

    Source: Zhang et al., *Unveiling Transformers with LEGO*, 2022, section 2.
    Deviations: values are tokens of an answer, for encoders and decoders alike (authors: a head
        with 2 classes at each clause of an encoder); ids of two levels are ours.
    """

    vocab = _VOCAB
    levels = 2

    def __init__(
        self,
        num_variables: int = 12,
        *,
        num_supervised: int = 6,
        position: int | None = None,
        max_position: Any = None,
    ) -> None:
        check_range(num_variables, "num_variables", low=1, high=len(_LETTERS), integer=True)
        check_range(num_supervised, "num_supervised", low=1, integer=True)
        if position is not None:
            check_range(position, "position", low=1, high=num_variables, integer=True)
        self.num_variables = num_variables
        self.num_supervised = num_supervised
        self.position = position
        self._set_max_position(max_position)
        self._check_fits((num_variables,), ConfigError)

    @property
    def config(self) -> dict[str, Any]:
        """Name and options."""
        scored = {} if self.position is None else {"position": self.position}
        return {
            "name": "lego",
            "num_variables": self.num_variables,
            "num_supervised": self.num_supervised,
            **scored,
            **self._plain_max_position,
        }

    def grid(  # type: ignore[override]
        self,
        *,
        num_variables: Iterable[int] | None = None,
        position: Iterable[int] | None = None,
    ) -> list[GridCell]:
        """Return one cell for each length of the chain and place in it.

        A cell scores the value at its place alone; the other values are blank, also for a decoder,
        which therefore cannot read them off its own earlier answers.

        Args:
            num_variables: Lengths of the chain. Default the trained one, and twice it or 26.
            position: Places in the chain, from 1. Default all; those beyond a chain are left out.
        """
        if num_variables is None:
            both = sorted({self.num_variables, min(2 * self.num_variables, len(_LETTERS))})
            num_variables = [n for n in both if self._fits((n,))]
        places = None if position is None else list(position)
        return [
            GridCell({"num_variables": n, "position": p}, self._only(n, p))
            for n in num_variables
            for p in (range(1, n + 1) if places is None else places)
            if p <= n
        ]

    def _only(self, num_variables: int, position: int) -> LegoTask:
        options = {"num_supervised": self.num_supervised, **self._plain_max_position}
        return LegoTask(num_variables, position=position, **options)

    def sample(self, batch_size: int, *, generator: torch.Generator, split: str = "train") -> Batch:
        """Draw chains; which values are scored depends on the split."""
        check_choice(split, ("train", "test"), "split")
        train = split == "train"
        shape, clauses = self._draw(batch_size, generator)
        tokens = self._tokens(clauses, shape)
        ids = self._placed(shape, self._starts(batch_size, shape, generator if train else None))
        answer = self._mask(tokens, shape)
        scored = answer.clone()
        values = scored[:, -shape[0] - 1 : -1]
        if train:
            values &= clauses.positions <= self.num_supervised
        elif self.position is not None:
            values &= clauses.positions == self.position
            scored[:, -1] = False
        return Batch(torch.where(answer & ~scored, PAD, tokens), ids, scored)

    def _answer_length(self, shape: Shape) -> int:
        return shape[0] + 1

    def _largest_ids(self, shape: Shape) -> Shape:
        return shape[0] + 1, _PLACES

    def _describe(self, shape: Shape) -> str:
        return f"chains of {shape[0]} variables"

    def _smaller(self, shape: Shape) -> Shape | None:
        return (shape[0] - 1,) if shape[0] > 1 else None

    def _draw(self, batch_size: int, generator: torch.Generator) -> tuple[Shape, _Clauses]:
        n = self.num_variables

        def orders(count: int) -> Tensor:
            return torch.rand((batch_size, count), generator=generator).argsort(1)

        names = orders(len(_LETTERS))[:, :n]  # along the chain
        minus = torch.randint(0, 2, (batch_size, n), generator=generator).bool()
        parents = torch.cat((torch.full((batch_size, 1), _ROOT), names[:, :-1]), dim=1)
        values = minus.cumsum(1) % 2 == 1
        order = orders(n)  # of the text
        names, parents, minus, values = (
            column.gather(1, order) for column in (names, parents, minus, values)
        )
        return (n,), _Clauses(names, parents, minus, values, order + 1)

    def _tokens(self, contents: _Clauses, shape: Shape) -> Tensor:
        names = contents.names

        def fill(token: int) -> Tensor:
            return torch.full_like(names, token)

        signs = torch.where(contents.minus, _MINUS, _PLUS)
        parts = (names + 2, fill(_EQUALS), signs, contents.parents + 2, fill(_END))
        clauses = torch.stack(parts, dim=-1).flatten(1)
        values = torch.where(contents.values, _MINUS, _PLUS)
        end, answers = fill(EOS)[:, :1], fill(_ANSWERS)[:, :1]
        return torch.cat((end, clauses, answers, values, end), dim=1)

    def _ids(self, shape: Shape) -> Tensor:
        number = torch.arange(2, shape[0] + 2)
        place = torch.arange(1, _PLACES)
        clauses = torch.stack(torch.meshgrid(number, place, indexing="ij"), dim=-1).flatten(0, 1)
        values = torch.stack((number, torch.full_like(number, _PLACES)), dim=-1)
        end = torch.zeros(1, 2, dtype=torch.long)
        return torch.cat((end, clauses, torch.tensor([[1, _PLACES]]), values, end))

    def _parse(self, query: str) -> tuple[Shape, _Clauses]:
        parts = [part.strip() for part in query.strip().strip(">; ").split(";")]
        names: list[str] = []
        minus: list[bool] = []
        parents: list[str] = []
        for number, part in enumerate(parts, start=1):
            match = _CLAUSE.fullmatch(part)
            if match is None:
                raise DataError(
                    "query must hold clauses such as a=+1;b=-a (a sign, then 1 or a variable); "
                    f"got {part!r} as clause {number}. Rewrite it."
                )
            if match[1] in names:
                raise DataError(
                    f"query must set each variable once; got {match[1]!r} in clauses "
                    f"{names.index(match[1]) + 1} and {number}. Remove one of them."
                )
            names.append(match[1])
            minus.append(match[2] == "-")
            parents.append(match[3])
        shape = (len(names),)
        self._check_fits(shape, DataError)
        values, positions = _follow(names, minus, parents)
        letters = [[_LETTERS.index(name) for name in names]]
        sources = [[_ROOT if p == "1" else _LETTERS.index(p) for p in parents]]
        columns = (letters, sources, [minus], [values], [positions])
        return shape, _Clauses(*map(torch.tensor, columns))


def _follow(
    names: list[str], minus: list[bool], parents: list[str]
) -> tuple[list[bool], list[int]]:
    """Return value (true for -1) and distance from 1 of each clause's variable."""
    if "1" not in parents:
        raise DataError(
            f"query must set one variable to 1, such as {names[0]}=+1; got none in "
            f"{len(names)} clauses. Add that clause."
        )
    for name, parent in zip(names, parents, strict=True):
        if parent != "1" and parent not in names:
            raise DataError(
                f"query must set every variable that it uses; got {name!r} from {parent!r}, "
                f"which no clause sets. Add a clause for {parent!r}."
            )
    values, positions = [], []
    for start in range(len(names)):
        value, place, steps = minus[start], start, 1
        while parents[place] != "1":
            place = names.index(parents[place])
            value ^= minus[place]
            steps += 1
            if steps > len(names):
                raise DataError(
                    f"query must lead every variable back to 1; got a circle from "
                    f"{names[start]!r}. Set one variable of the circle to 1."
                )
        values.append(value)
        positions.append(steps)
    return values, positions


def guess_from_minus_signs(tokens: Tensor) -> Tensor:
    """Guess values by the number of minus signs in all clauses: the shortcut to compare with.

    It is always right for the last variable of a chain and right by chance for the others, so a
    model that has found only this does not follow the chain.

    Args:
        tokens: Samples of `LegoTask`.

    Shape:
        - tokens: `(B, T)`.
        - output: `(B,)`, the token of `+` or `-`, the same guess for every variable.

    Example:
        >>> task = LegoTask()
        >>> guess = guess_from_minus_signs(task.example("b=-a;a=-1").tokens[None])
        >>> task.vocab[int(guess)]
        '+'

    Source: Zhang et al., *Unveiling Transformers with LEGO*, 2022, section 4 (shortcut solution).
    Deviations: none
    """
    clauses = (tokens == _ANSWERS).cumsum(1) == 0
    count = ((tokens == _MINUS) & clauses).sum(1)
    return torch.where(count % 2 == 1, _MINUS, _PLUS)
