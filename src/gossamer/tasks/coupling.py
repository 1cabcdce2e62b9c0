"""Where the ids of a user's own rows come from: no rule, the rows' groups, or a function."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gossamer.checks import check_choice
from gossamer.errors import ConfigError, DataError
from gossamer.positions import couple_groups
from gossamer.tasks.fields import FieldCoupling, Ids, Placement
from gossamer.tasks.rows import Row

__all__ = ["Coupling", "FunctionCoupling", "GroupCoupling", "PlainCoupling", "build_coupling"]


class Coupling(Protocol):
    """What a task asks of a coupling."""

    @property
    def levels(self) -> int:
        """Ids for each token."""

    def place(self, query: str) -> Placement:
        """Return a query as the model reads it, and the ids of query and answer."""

    def write(self, query: str, answer: str) -> str:
        """Return an answer as the model produces it."""

    def read(self, produced: str) -> str:
        """Return what the model produced as people write it."""


class _AsItStands:
    """Base of couplings that leave every text as it stands in the file."""

    levels = 1

    def write(self, query: str, answer: str) -> str:
        """Return the answer itself."""
        return answer

    def read(self, produced: str) -> str:
        """Return the text itself."""
        return produced


class PlainCoupling(_AsItStands):
    """No coupling: characters are counted 1..T.

    Args:
        longest: Characters of the longest answer known; one may be as much longer as its query is.

    Example:
        >>> PlainCoupling(1).place("ab").query_ids
        [(1,), (2,), (3,)]
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def place(self, query: str) -> Placement:
        """Count."""
        begin = len(query) + 1
        end = begin + len(query) + self.longest
        count = [(n,) for n in range(1, end + 1)]
        return Placement(query, count[:begin], count[begin:])


class GroupCoupling(_AsItStands):
    """Ids from the groups that the rows of a file name; it knows no other query.

    The n-th character of every group has the id n + 2, characters outside all groups have 0. The
    mark where the answer begins continues the ids of the answer backwards.

    Args:
        rows: Rows, all with groups.

    Raises:
        DataError: If a row has no groups.

    Example:
        >>> rows = [Row("12+3", "51", ((1, 0), (3,), (4, 5)), 1)]
        >>> GroupCoupling(rows).place("12+3")
        Placement(text='12+3', query_ids=[(3,), (2,), (0,), (2,), (1,)], answer_ids=[(2,), (3,)])
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row.groups is None:
                raise DataError(
                    "with the coupling 'groups' every row must have the key 'groups'; the one on "
                    f"line {row.line} has none. Add it, or take another coupling."
                )
        self.rows = {row.query: row for row in rows}

    def place(self, query: str) -> Placement:
        """Return the ids of a row of the file."""
        row = self.rows.get(query)
        if row is None or row.groups is None:
            raise DataError(
                "query must be one of the file's own, since groups give ids to these rows only; "
                f"got the new query {query!r}. To answer new queries a rule is needed: train again "
                "with --coupling fields, which proposes one, or with --coupling module:function, "
                "your own rule from a query to the ids of query and answer."
            )
        begin = len(query)
        ids = couple_groups(row.groups, begin + len(row.answer), start=2).tolist()
        first, *others = ids[begin:]
        step = others[0] - first if others and others[0] and abs(others[0] - first) == 1 else 1
        mark = first - step if first else 0
        places = [(n,) for n in ids]
        return Placement(query, [*places[:begin], (mark,)], places[begin:])


class FunctionCoupling(_AsItStands):
    """A user's own rule: a function from a query to the ids of query and answer.

    `rule(query)` returns two lists. The first has one id for each character of the query, and one
    more for the mark that begins the answer; the second has one for each character that the answer
    may have, in their order, and may be longer than the answer. An id is an integer >= 0, with 0
    for no position, or a tuple of them, one for each level.

    Args:
        rule: The function.
        query: Any query, from which the number of levels is read.

    Raises:
        DataError: If it fails, or returns something else.

    Example:
        >>> def count_on(query):
        ...     begin = len(query) + 2
        ...     return range(1, begin), range(begin, begin + len(query))
        >>> FunctionCoupling(count_on, "ab").place("ab").answer_ids
        [(4,), (5,)]

    Source: the library's own.
    Deviations: none
    """

    def __init__(self, rule: Callable[[str], Any], query: str) -> None:
        self.rule = rule
        name = getattr(rule, "__qualname__", type(rule).__name__)
        self.spec = f"{rule.__module__}:{name}"
        self.levels = 0
        self.levels = len(self.place(query).query_ids[0])

    def place(self, query: str) -> Placement:
        """Ask the function, and check what it returns."""
        try:
            given = self.rule(query)
        except Exception as error:
            raise DataError(
                f"the coupling {self.spec} must return ids for every query; for {query!r} it "
                f"raised {type(error).__name__}: {error}. Mend the function, or the query."
            ) from error
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise self._wrong("two lists, the ids of the query and of the answer", given, query)
        query_ids = self._ids(given[0], "the query", query)
        answer_ids = self._ids(given[1], "the answer", query)
        if len(query_ids) != len(query) + 1:
            wanted = f"{len(query) + 1} ids for the query, one for each character and one for the "
            raise self._wrong(f"{wanted}mark that begins the answer", len(query_ids), query)
        if not answer_ids:
            raise self._wrong("at least one id for the answer", "none", query)
        return Placement(query, query_ids, answer_ids)

    def _ids(self, values: Any, name: str, query: str) -> Ids:
        plain = values.tolist() if hasattr(values, "tolist") else values  # arrays and tensors
        if not isinstance(plain, list | tuple | range):
            raise self._wrong(f"a list of ids for {name}", plain, query)
        ids = [tuple(v) if isinstance(v, tuple | list) else (v,) for v in plain]
        levels = self.levels or (len(ids[0]) if ids else 1)
        for number, levels_of_one in enumerate(ids, start=1):
            if len(levels_of_one) != levels or not levels:
                wanted = f"{levels or 'one or more'} level(s) in every id"
                raise self._wrong(wanted, f"{plain[number - 1]!r} as id {number} of {name}", query)
            for one in levels_of_one:
                if isinstance(one, bool) or not isinstance(one, int) or one < 0:
                    raise self._wrong(
                        "integers >= 0 as ids", f"{one!r} as id {number} of {name}", query
                    )
        return ids

    def _wrong(self, expected: str, got: Any, query: str) -> DataError:
        return DataError(
            f"the coupling {self.spec} must return {expected}; got {got} for the query {query!r}. "
            "Change the function."
        )


def build_coupling(value: Any, rows: Callable[[], Sequence[Row]], facts: Mapping[str, Any]) -> Any:
    """Build a coupling as `FileTask` takes it, but for `"auto"` and `"fields"`.

    Args:
        value: `"none"`, `"groups"`, `"module:function"`, a function, or the plain values of a
            `FieldCoupling`.
        rows: Returns the rows of the file, where the coupling needs them.
        facts: What is known of the file, with `longest_answer` and `example`.

    Example:
        >>> build_coupling("none", list, {"longest_answer": 4, "example": "ab"}).levels
        1
    """
    if isinstance(value, Mapping):
        return FieldCoupling.from_dict(value, "[task.coupling]")
    if callable(value):
        return FunctionCoupling(value, facts["example"])
    if not isinstance(value, str):
        raise ConfigError(
            f"coupling must be a name, module:function or a table; got {value!r}. Give "
            "'auto', 'none', 'groups' or your own rule."
        )
    if ":" in value:
        return FunctionCoupling(import_rule(value), facts["example"])
    known = ("auto", "fields", "groups", "none", "module:function")
    check_choice(value, known, "coupling")
    return GroupCoupling(rows()) if value == "groups" else PlainCoupling(facts["longest_answer"])


def import_rule(spec: str) -> Callable[[str], Any]:
    """Import a function named `"module:function"`; the module may lie in the current folder.

    Raises:
        ConfigError: If there is none.

    Example:
        >>> import_rule("gossamer.tasks:propose_coupling").__name__
        'propose_coupling'
    """
    module_name, _, name = spec.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)
    importlib.invalidate_caches()  # the file may have been written a moment ago
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"coupling {spec!r} needs the module {module_name!r}, in the current folder {here} or "
            f"installed; importing it raised {type(error).__name__}: {error}. Check the name, or "
            "change into its folder."
        ) from error
    finally:
        sys.path.remove(here)
    rule = getattr(module, name, None)
    if not callable(rule):
        raise ConfigError(
            f"coupling {spec!r} needs a function {name!r} in {module_name!r}; got "
            f"{type(rule).__name__}. Check the name."
        )
    found: Callable[[str], Any] = rule
    return found
