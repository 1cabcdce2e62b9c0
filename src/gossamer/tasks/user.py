"""A task from a user's own file of questions and answers."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.checks import check_choice, check_given, check_keys, check_range, check_table
from gossamer.errors import ConfigError, DataError, UnsupportedError
from gossamer.tasks.base import EOS, Batch, Example, GridCell, Task
from gossamer.tasks.coupling import Coupling, FunctionCoupling, build_coupling
from gossamer.tasks.fields import FieldCoupling, Placement
from gossamer.tasks.packed import PackedExamples
from gossamer.tasks.propose import propose_coupling
from gossamer.tasks.rows import Row, checksum, held_out, read_rows

__all__ = ["FileTask"]

_FACTS = {
    "alphabet": str,
    "longest_answer": int,
    "example": str,
    "checksum": str,
}
# pad, both ends and the begin of the answer are the first three of these that no row has
_MARKS = (*"_$>#^~|@", "<pad>", "<end>", "<answer>")
_MARK, _FIRST = 2, 3
_MOST_CELLS = 4
_PARTS = ("train", "held out", "test")


class FileTask(Task):
    """Questions and answers from a JSONL file, one character for each token.

    A row is `{"query": "12+34", "answer": "46"}`; `"groups"` may name indices into query + answer
    that play the same role. About 10 % of the rows, by a hash of the query, are held out; another
    file may hold longer rows to test on. To answer new queries the coupling must be a rule.

    A batch holds rows of one form where the file has enough of that form, so that they share their
    ids, and else rows of mixed lengths, padded on the right; every row is equally likely.

    Args:
        path: The file.
        coupling: `"auto"`, `"fields"` (the rule of `propose_coupling`), `"groups"`, `"none"`
            (1..T), `"module:function"` or a function (see `FunctionCoupling`), or the plain values
            of a `FieldCoupling`. Default `"auto"`: the groups where the rows have them, else the
            proposed rule, else 1..T.
        test: Another file of such rows, never trained on. Default `None`.
        facts: What an earlier reading found, as `config` keeps it. The file is then read for rows
            to train on and for known answers only, and need not be there to answer new queries.

    Raises:
        DataError: If a file is missing or malformed, or a row does not fit the coupling; the
            message names file and line.
        ConfigError: If the coupling is unknown.

    Example:
        >>> import tempfile
        >>> path = f"{tempfile.mkdtemp()}/my.jsonl"
        >>> rows = [f'{{"query": "{n}+{2 * n}", "answer": "{3 * n}"}}' for n in range(20)]
        >>> with open(path, "w") as file:
        ...     _ = file.write(chr(10).join(rows))
        >>> task = FileTask(path)
        >>> task.symbols(task.example("7+14").tokens)
        '$07+14>120$'
        >>> task.position_ids("7+14").tolist()
        [0, 3, 2, 0, 3, 2, 1, 2, 3, 4, 0]

    Source: the library's own; ids as in Cho et al., *Position Coupling*, NeurIPS 2024.
    Deviations: none
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        coupling: Any = "auto",
        test: str | os.PathLike[str] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = str(path)
        self.test = None if test is None else str(test)
        self._read: list[Row] | None = None
        self._packed: PackedExamples | None = None
        self._cell: Tensor | None = None
        self._answers: dict[str, str] | None = None
        self.repeated = 0
        """Rows of the test file that are left out, since the file to train on has them too."""
        self.facts = self._find_facts() if facts is None else _checked(facts)
        if isinstance(coupling, str) and coupling in ("auto", "fields"):
            coupling = self._choose(coupling)
        self.coupling: Coupling = build_coupling(coupling, self._known_rows, self.facts)
        self._name = coupling
        self.levels = self.coupling.levels
        if isinstance(self.coupling, FieldCoupling) and self.coupling.pads:
            # zeros in front must have a token even where no row holds one
            self.facts["alphabet"] = "".join(sorted({*self.facts["alphabet"], "0"}))
        alphabet = self.facts["alphabet"]
        self.vocab = (*[mark for mark in _MARKS if mark not in alphabet][:3], *alphabet)
        self._token = {character: n for n, character in enumerate(alphabet, start=_FIRST)}
        if facts is None:
            self._pack()

    @property
    def config(self) -> dict[str, Any]:
        """Name, options and facts: all that answering a new query needs."""
        if isinstance(self.coupling, FieldCoupling):
            coupling: Any = self.coupling.to_dict()
        elif isinstance(self.coupling, FunctionCoupling):
            coupling = self.coupling.spec
        else:
            coupling = self._name
        test = {} if self.test is None else {"test": self.test}
        return {
            "name": "file",
            "path": self.path,
            **test,
            "coupling": coupling,
            "facts": dict(self.facts),
        }

    def sample(self, batch_size: int, *, generator: torch.Generator, split: str = "train") -> Batch:
        """Draw rows: of the training part, or with `split="test"` of the cell, else held out.

        A test takes every row equally often, as far as the batch size allows.
        """
        check_choice(split, ("train", "test"), "split")
        check_range(batch_size, "batch_size", low=1, integer=True)
        packed = self._pack()
        if split == "train":
            first = self._draw(self._members(0), 1, generator)
            form = self._forms[int(packed.forms[first])]
            pool = form if len(form) >= batch_size else self._in_small_forms(batch_size)
            return packed.batch(self._draw(pool, batch_size, generator))
        rows = self._members(1) if self._cell is None else self._cell
        times = -(-batch_size // len(rows))
        order = [rows[torch.randperm(len(rows), generator=generator)] for _ in range(times)]
        return packed.batch(torch.cat(order)[:batch_size])

    def encode(self, query: str) -> Tensor:
        """Return the tokens of a query up to the mark where the answer begins."""
        return self.prompt(query)[0]

    def position_ids(self, query: str, *, start: int | None = None) -> Tensor:
        """Return the ids of a query and of the longest answer that it may have."""
        return self.prompt(query, start=start)[1]

    def prompt(self, query: str, *, start: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the tokens of a query, and the ids of query and answer."""
        self._check_characters(query, "query")
        placed = self.coupling.place(query)
        tokens = [EOS, *self._tokens(placed.text), _MARK]
        return torch.tensor(tokens), self._ids(placed, len(placed.answer_ids), start)

    def answer(self, query: str) -> str:
        """Return the answer that the file has.

        Raises:
            UnsupportedError: If the file has no such query, or is not there any more.
        """
        if self._answers is None:
            rows = (*self._known_rows(test=True), *self._known_rows())
            self._answers = {row.query: row.answer for row in rows}
        if query in self._answers:
            return self._answers[query]
        raise UnsupportedError(
            f"the answer to a query is known only where {self.path} has it; got {query!r}. Ask a "
            "model for it."
        )

    def check(self, query: str, text: str) -> bool | None:
        """Whether `text` is the file's answer to `query`; `None` where the file has none."""
        try:
            return text.strip() == self.answer(query).strip()
        except UnsupportedError:
            return None

    def decode(self, tokens: Tensor | Sequence[int]) -> str:
        """Return produced answer tokens, up to the end token, as the file writes answers."""
        produced = [int(token) for token in tokens]
        return self.coupling.read(
            self.symbols(produced[: produced.index(EOS)] if EOS in produced else produced)
        )

    def example(self, query: str, *, start: int | None = None) -> Example:
        """Return a query of the file and its answer as one sequence."""
        answer = self.answer(query)
        placed = self.coupling.place(query)
        tokens, length = self._sequence(placed, query, answer)
        mask = torch.arange(len(tokens)) >= len(tokens) - length - 1
        return Example(torch.tensor(tokens), self._ids(placed, length, start), mask)

    def grid(  # type: ignore[override]
        self, *, length: Iterable[int] | None = None
    ) -> list[GridCell]:
        """Return cells by the length of the query, of the rows held out and of the test file.

        Args:
            length: Unit: characters. A cell holds the rows whose queries are at most that long and
                longer than in the cell before. Default up to four cells of about equally many rows
                for each of the two parts.
        """
        self._pack()
        cells = []
        for part in (1, 2):
            members = self._members(part)
            lengths = self._query_lengths[members]
            limits = _even_limits(lengths) if length is None else sorted(length)
            for low, high in zip([0, *limits], limits, strict=False):
                rows = members[(lengths > low) & (lengths <= high)]
                if len(rows):
                    cell = copy.copy(self)
                    cell._cell = rows
                    names = {"length": int(high), "part": _PARTS[part], "rows": len(rows)}
                    cells.append(GridCell(names, cell))
        return cells

    def count(self, part: str) -> int:
        """Return the number of rows in a part: `"train"`, `"held out"` or `"test"`."""
        check_choice(part, _PARTS, "part")
        self._pack()
        return len(self._members(_PARTS.index(part)))

    def rows(self) -> list[Row]:
        """Return the rows of the file to train on.

        Raises:
            DataError: If it is gone, or has changed since it was first read.
        """
        if self._read is None:
            rows = read_rows(self.path)
            if checksum(rows) != self.facts["checksum"]:
                raise DataError(
                    f"{self.path} must hold the rows that this run began with; it has changed. "
                    "Bring the old file back, or begin a new run with --task."
                )
            self._read = rows
        return self._read

    def _known_rows(self, *, test: bool = False) -> list[Row]:
        """Return the rows of a file as it is now, none where it cannot be read any more."""
        if not test and self._read is not None:
            return self._read
        try:
            path = self.test if test else self.path
            return [] if path is None else read_rows(path)
        except DataError:
            return []

    def _find_facts(self) -> dict[str, Any]:
        self._read = rows = read_rows(self.path)
        texts = "".join(row.query + row.answer for row in rows)
        return {
            "alphabet": "".join(sorted(set(texts))),
            "longest_answer": max(len(row.answer) for row in rows),
            "example": rows[0].query,
            "checksum": checksum(rows),
        }

    def _choose(self, coupling: str) -> Any:
        """Return what `"auto"` and `"fields"` stand for in this file."""
        rows = self.rows()
        if coupling == "auto" and any(row.groups is not None for row in rows):
            return "groups"
        found = propose_coupling([{"query": row.query, "answer": row.answer} for row in rows])
        if found is None and coupling == "fields":
            raise DataError(
                f"the coupling 'fields' needs a rule that holds in all rows; got none from "
                f"{self.path}. Give --coupling module:function, or none."
            )
        return "none" if found is None else found.to_dict()

    def _pack(self) -> PackedExamples:
        """Return all rows as tokens and ids, made once."""
        if self._packed is not None:
            return self._packed
        own = self.rows()
        kept = held_out(own, self.path)
        known = {row.query: row.answer for row in own}
        others = [] if self.test is None else read_rows(self.test)
        new = [row for row in others if row.query not in known]
        self.repeated = len(others) - len(new)
        for row in others:
            if known.get(row.query, row.answer) != row.answer:
                raise DataError(
                    f"{self.test}, line {row.line}: a query must have one answer; got "
                    f"{row.answer!r} for {row.query!r}, which has {known[row.query]!r} in "
                    f"{self.path}. Remove one of the rows."
                )
        places = [(self.path, row) for row in own] + [(str(self.test), row) for row in new]
        tokens, ids, begins = [], [], []
        for path, row in places:
            sequence, placed, length = self._read_row(path, row)
            tokens.append(sequence)
            ids.append(self._places(placed, length))
            begins.append(len(sequence) - length - 1)
        self._packed = PackedExamples(tokens, ids, begins)
        self._part = torch.tensor([*map(int, kept), *[2] * len(new)])
        self._query_lengths = torch.tensor([len(row.query) for _, row in places])
        train = self._members(0)
        forms, order = self._packed.forms[train].sort(stable=True)
        sizes = forms.bincount()
        parts = torch.split(train[order], sizes[sizes > 0].tolist())
        self._forms = dict(zip(sizes.nonzero().flatten().tolist(), parts, strict=True))
        self._pools: dict[int, Tensor] = {}
        return self._packed

    def _read_row(self, path: str, row: Row) -> tuple[list[int], Placement, int]:
        try:
            self._check_characters(row.query, "query")
            self._check_characters(row.answer, "answer")
            placed = self.coupling.place(row.query)
            tokens, length = self._sequence(placed, row.query, row.answer)
        except DataError as error:
            raise DataError(f"{path}, line {row.line}: {error}") from error
        return tokens, placed, length

    def _sequence(self, placed: Placement, query: str, answer: str) -> tuple[list[int], int]:
        """Return a whole sequence, and the number of the answer's characters in it."""
        written = self.coupling.write(query, answer)
        if len(written) > len(placed.answer_ids):
            raise DataError(
                f"answer must have at most {len(placed.answer_ids)} characters, for which the "
                f"coupling gives ids; got {len(written)} in {answer!r}. Change the coupling."
            )
        text, answer_tokens = self._tokens(placed.text), self._tokens(written)
        return [EOS, *text, _MARK, *answer_tokens, EOS], len(written)

    def _places(self, placed: Placement, length: int) -> list[tuple[int, ...]]:
        none = (0,) * self.levels
        return [none, *placed.query_ids, *placed.answer_ids[:length], none]

    def _ids(self, placed: Placement, length: int, start: int | None) -> Tensor:
        begin = 1 if start is None else start
        check_range(begin, "start", low=1, integer=True)
        ids = torch.tensor(self._places(placed, length))
        moved = torch.where(ids > 0, ids + begin - 1, 0)
        return moved.squeeze(-1) if self.levels == 1 else moved

    def _tokens(self, text: str) -> list[int]:
        return [self._token[character] for character in text]

    def _check_characters(self, text: str, name: str) -> None:
        for column, character in enumerate(text, start=1):
            if character not in self._token:
                raise DataError(
                    f"{name} must hold characters of {self.path} only; got {character!r} at "
                    f"column {column} of {text!r}. Remove it, or train on rows that have it."
                )

    def _members(self, part: int) -> Tensor:
        return (self._part == part).nonzero().flatten()

    def _in_small_forms(self, batch_size: int) -> Tensor:
        if batch_size not in self._pools:
            parts = [rows for rows in self._forms.values() if len(rows) < batch_size]
            self._pools[batch_size] = torch.cat(parts)
        return self._pools[batch_size]

    @staticmethod
    def _draw(rows: Tensor, size: int, generator: torch.Generator) -> Tensor:
        return rows[torch.randint(len(rows), (size,), generator=generator)]


def _checked(facts: Mapping[str, Any]) -> dict[str, Any]:
    check_table(facts, "[task.facts]")
    check_keys(facts, _FACTS, "[task.facts]")
    for key, kind in _FACTS.items():
        check_given(facts, key, "[task.facts]")
        if not isinstance(facts[key], kind):
            raise ConfigError(
                f"{key} in [task.facts] must be {kind.__name__}; got {facts[key]!r}. Leave the "
                "table out: it is found again from the file."
            )
    return dict(facts)


def _even_limits(lengths: Tensor) -> list[int]:
    """Return the upper limits of up to four ranges that hold about equally many lengths."""
    if len(lengths) == 0:
        return []
    shares = torch.arange(1, _MOST_CELLS + 1) / _MOST_CELLS
    ordered = lengths.sort().values
    places = (shares * len(ordered)).ceil().long() - 1
    return sorted(set(ordered[places].tolist()))
