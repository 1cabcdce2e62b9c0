"""Coupling by fields: a text is cut at its delimiters, fields that belong together share ids."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gossamer.checks import check_choice, check_given, check_keys, check_range, check_table
from gossamer.errors import ConfigError, DataError

__all__ = ["AnswerField", "FieldCoupling", "Ids", "Placement", "QueryField", "split_fields"]

# how a text is cut into fields; what lies between them is a delimiter
_FIELDS = {
    "numbers": re.compile(r"[0-9]+"),
    "words": re.compile(r"\w+"),
    "text": re.compile(r".+", re.DOTALL),
}
SPLITS = tuple(_FIELDS)

Ids = list[tuple[int, ...]]


@dataclass(frozen=True)
class Placement:
    """A query as the model reads it, with the ids of query and answer.

    Args:
        text: The characters of the query.
        query_ids: One tuple of levels for each of them, and one for the mark that begins the
            answer.
        answer_ids: One for each character that the answer may have, in the order of production.
    """

    text: str
    query_ids: Sequence[tuple[int, ...]]
    answer_ids: Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class QueryField:
    """How one field of a query is written.

    Args:
        pad: `"none"`: as it stands; `"own"`: a number with zeros in front up to `digits`;
            `"common"`: a number with zeros in front up to the widest such field of the query.
        digits: Fewest digits of a padded number.
    """

    pad: str = "none"
    digits: int = 1

    def __post_init__(self) -> None:
        check_choice(self.pad, ("none", "own", "common"), "pad")
        check_range(self.digits, "digits", low=1, integer=True)


@dataclass(frozen=True)
class AnswerField:
    """Which places one field of an answer takes.

    Args:
        relation: `"along"`: as long as its source, and character n has the place of character n
            there; `"reverse"`: the same from the other end; `"number"`: digits of equal
            significance have one place; `"free"`: places from the first on.
        source: Field of the query it belongs to, from 0; -1: none, or all padded numbers.
        digits: Fewest digits of a number, as people write it.
        extra: Digits a number has room for beyond the widest padded number of the query.
        length: Characters of a free field; the last one produced may be shorter.
    """

    relation: str
    source: int = -1
    digits: int = 1
    extra: int = 0
    length: int = 0

    def __post_init__(self) -> None:
        check_choice(self.relation, ("along", "reverse", "number", "free"), "relation")
        for name, low in (("source", -1), ("digits", 1), ("extra", 0), ("length", 0)):
            check_range(getattr(self, name), name, low=low, integer=True)


def split_fields(text: str, split: str) -> tuple[list[str], list[str]]:
    """Return the fields of a text, and what stands before, between and after them.

    Example:
        >>> split_fields("12 + 345", "numbers")
        (['12', '345'], ['', ' + ', ''])
    """
    fields, between, end = [], [], 0
    for match in _FIELDS[split].finditer(text):
        between.append(text[end : match.start()])
        fields.append(match.group())
        end = match.end()
    return fields, [*between, text[end:]]


@dataclass(frozen=True)
class FieldCoupling:
    """A rule from text to ids: characters of fields that belong together share a place.

    Level 1 of the ids is the place of a character in its field. It runs in the order in which the
    answer is produced: from the left, or with `order="backward"` from the right, so that carries
    run along. Level 2, where there is one, is the number of the field; a field of the answer has
    the number of its source. Delimiters of the query have id 0. Those of the answer, and the mark
    where it begins, count up to the field that follows.

    Args:
        split: `"numbers"` (runs of digits are fields), `"words"` (runs of letters and digits) or
            `"text"` (all of it is one field).
        order: `"forward"`, or `"backward"`: the answer is produced from its last character on.
        levels: 1, or 2 where several fields must be told apart.
        query: How each field of a query is written.
        answer: Where each field of an answer is placed.
        query_between: Texts known before, between and after the fields of a query.
        answer_between: The text before, between and after the fields of an answer.
        example: A query of this form, for messages.

    Raises:
        ConfigError: If the parts do not fit together.

    Example:
        >>> from gossamer.tasks import propose_coupling
        >>> pairs = (("7+15", "22"), ("99+1", "100"))
        >>> rule = propose_coupling([{"query": q, "answer": a} for q, a in pairs])
        >>> rule.write("7+15", "22"), rule.read("220"), rule.place("7+15").text
        ('220', '22', '07+15')

    Source: Cho et al., *Position Coupling*, NeurIPS 2024, section 3; levels: Cho et al., ICLR 2025.
    Deviations: delimiters of the query have id 0, which the relative bias sees at any distance.
    """

    split: str
    order: str
    levels: int
    query: tuple[QueryField, ...]
    answer: tuple[AnswerField, ...]
    query_between: tuple[tuple[str, ...], ...]
    answer_between: tuple[str, ...]
    example: str

    def __post_init__(self) -> None:
        check_choice(self.split, SPLITS, "split")
        check_choice(self.order, ("forward", "backward"), "order")
        check_range(self.levels, "levels", low=1, high=2, integer=True)
        sizes = (len(self.query_between), len(self.answer_between))
        if sizes != (len(self.query) + 1, len(self.answer) + 1) or not self.query:
            raise ConfigError(
                "a coupling needs one text more than fields, before, between and after them; got "
                f"{sizes[0]} and {sizes[1]} texts for {len(self.query)} and {len(self.answer)} "
                "fields of query and answer. Change query_between or answer_between."
            )
        for field in self.answer:
            if field.relation == "free":
                check_range(field.length, "length", low=1, integer=True)
            check_range(field.source, "source", low=-1, high=len(self.query) - 1, integer=True)
            if field.source < 0 and field.relation in ("along", "reverse"):
                raise ConfigError(
                    f"an answer field {field.relation!r} needs a source, a field of the query "
                    f"from 0; got {field.source}. Change source."
                )
            if field.source < 0 and field.relation == "number" and not self._common:
                raise ConfigError(
                    "an answer field 'number' without source needs a field of the query with "
                    "pad = 'common'; got none. Change pad or source."
                )

    @property
    def pads(self) -> bool:
        """Whether zeros are put in front of numbers."""
        numbers = any(field.relation == "number" for field in self.answer)
        return numbers or any(field.pad != "none" for field in self.query)

    @property
    def _common(self) -> list[int]:
        return [n for n, field in enumerate(self.query) if field.pad == "common"]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], name: str) -> FieldCoupling:
        """Build a rule from plain values, as `to_dict` returns them and TOML holds them.

        Args:
            values: One key for each argument.
            name: Where they come from, for messages.
        """
        fields = [field.name for field in dataclasses.fields(cls)]
        check_keys(values, fields, name)
        for key in fields:
            check_given(values, key, name)
        parts = dict(values)
        for key, kind in (("query", QueryField), ("answer", AnswerField)):
            options = [field.name for field in dataclasses.fields(kind)]
            for entry in _list(parts[key], f"{key} of {name}"):
                check_table(entry, f"{key} of {name}")
                check_keys(entry, options, f"{key} of {name}")
            parts[key] = tuple(kind(**entry) for entry in parts[key])
        between = _list(parts["query_between"], f"query_between of {name}")
        parts["query_between"] = tuple(_texts(t, f"query_between of {name}") for t in between)
        _texts([parts["example"]], f"example of {name}")
        parts["answer_between"] = _texts(parts["answer_between"], f"answer_between of {name}")
        return cls(**parts)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            **vars(self),
            "query": [_without_defaults(field) for field in self.query],
            "answer": [_without_defaults(field) for field in self.answer],
            "query_between": [list(texts) for texts in self.query_between],
            "answer_between": list(self.answer_between),
        }

    def place(self, query: str) -> Placement:
        """Return a query as the model reads it, and the ids of query and answer.

        Raises:
            DataError: If the query has not the fields of the rule.
        """
        fields, between = self._read(query)
        none = self._id(0, 0)
        text, ids = between[0], [none] * len(between[0])
        for number, (field, after) in enumerate(zip(fields, between[1:], strict=True), start=1):
            places = self._places(len(field), falling=self.order == "backward")
            text += field + after
            ids += [self._id(place, number) for place in places] + [none] * len(after)
        answer = self._answer_ids(self._lengths(fields))
        return Placement(text, [*ids, answer[0]], answer[1:])

    def write(self, query: str, answer: str) -> str:
        """Return an answer as the model produces it.

        Raises:
            DataError: If the answer has not the fields of the rule, or has no room in it.
        """
        fields, between = split_fields(answer, self.split)
        if len(fields) != len(self.answer) or tuple(between) != self.answer_between:
            raise DataError(
                f"answer must have the form {self._form()}; got {answer!r} for the query "
                f"{query!r}. Change the answer or the coupling."
            )
        lengths = self._lengths(self._read(query)[0])
        last = 0 if self.order == "backward" else len(fields) - 1
        for number, (rule, length) in enumerate(zip(self.answer, lengths, strict=True)):
            if rule.relation == "number":
                fields[number] = _plain_number(fields[number]).zfill(length)
            got = len(fields[number])
            if got > length or (got < length and (rule.relation != "free" or number != last)):
                raise DataError(
                    f"field {number + 1} of the answer must have {length} characters for the "
                    f"query {query!r}, by the coupling; got {fields[number]!r} in {answer!r}. "
                    "Change the answer, or choose another coupling."
                )
        whole = _join(fields, between)
        return whole if self.order == "forward" else whole[::-1]

    def read(self, produced: str) -> str:
        """Return what the model produced as people write it; unreadable text stays as it is."""
        text = produced if self.order == "forward" else produced[::-1]
        fields, between = split_fields(text, self.split)
        if len(fields) != len(self.answer):
            return text
        for number, rule in enumerate(self.answer):
            if rule.relation == "number":
                fields[number] = _plain_number(fields[number]).zfill(rule.digits)
        return _join(fields, between)

    def _form(self) -> str:
        gaps = [*(f"{text}..." for text in self.answer_between[:-1]), self.answer_between[-1]]
        return repr("".join(gaps)) + (" with numbers for ..." if self.split == "numbers" else "")

    def _read(self, query: str) -> tuple[list[str], list[str]]:
        """Return the fields of a query as they are written for the model, and the texts between."""
        fields, between = split_fields(query, self.split)
        like = f"query must have the form of {self.example!r}"
        if len(fields) != len(self.query):
            raise DataError(
                f"{like}, with {len(self.query)} {self.split}; got {len(fields)} in {query!r}. "
                "Change the query, or train on such queries."
            )
        column = 1
        for number, (text, known) in enumerate(zip(between, self.query_between, strict=True)):
            if text not in known:
                seen = " or ".join(map(repr, known[:4]))
                raise DataError(
                    f"{like}, with {seen} at column {column}; got {text!r} in {query!r}. Change "
                    "the query, or train on such queries."
                )
            column += len(text) + len(fields[number] if number < len(fields) else "")
        for number, (field, rule) in enumerate(zip(fields, self.query, strict=True)):
            if rule.pad != "none":
                if not (field.isascii() and field.isdigit()):
                    raise DataError(
                        f"{like}, with a number as its word {number + 1}; got {field!r} in "
                        f"{query!r}. Change the query."
                    )
                fields[number] = _plain_number(field).zfill(rule.digits)
        width = max((len(fields[n]) for n in self._common), default=0)
        for number in self._common:
            fields[number] = fields[number].zfill(width)
        return fields, between

    def _lengths(self, fields: Sequence[str]) -> list[int]:
        """Return the most characters of each field of the answer to a query with these fields."""
        width = max((len(fields[n]) for n in self._common), default=0)
        lengths = []
        for rule in self.answer:
            if rule.relation == "free":
                lengths.append(rule.length)
            elif rule.relation == "number" and rule.source < 0:
                lengths.append(max(width + rule.extra, rule.digits))
            elif rule.relation == "number":
                lengths.append(max(len(fields[rule.source]), rule.digits))
            else:
                lengths.append(len(fields[rule.source]))
        return lengths

    def _answer_ids(self, lengths: Sequence[int]) -> Ids:
        """Return the ids of the mark and of the answer's characters in the order of production."""
        numbers = list(range(len(self.answer)))
        between = list(self.answer_between)
        if self.order == "backward":
            numbers.reverse()
            between.reverse()
        ids: Ids = []
        level, end, step = 0, 0, 1
        for text, number in zip(between, numbers, strict=False):
            rule = self.answer[number]
            level = rule.source + 1 if rule.source >= 0 else len(self.query) + 1 + number
            places = self._places(lengths[number], falling=rule.relation == "reverse")
            end, step = places[-1], places.step
            # the mark stands before the text that may precede the first field
            before = len(text) + (not ids)
            ids += [self._id(places[0] - step * n, level) for n in range(before, 0, -1)]
            ids += [self._id(place, level) for place in places]
        ids += [self._id(max(0, end + step * n), level) for n in range(1, len(between[-1]) + 1)]
        return ids

    def _places(self, length: int, *, falling: bool) -> range:
        """Return the places of a field, above those of the texts that count up to it."""
        first = max(len(self.answer_between[0]), len(self.answer_between[-1])) + 1
        base = max(first, *map(len, self.answer_between))
        rising = range(base + 1, base + 1 + length)
        return rising[::-1] if falling else rising

    def _id(self, place: int, number: int) -> tuple[int, ...]:
        return (place,) if self.levels == 1 else (place, number)


def _without_defaults(field: QueryField | AnswerField) -> dict[str, Any]:
    options = dataclasses.fields(field)
    return {f.name: value for f in options if (value := getattr(field, f.name)) != f.default}


def _list(value: Any, name: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name} must be a list; got {value!r}. Write it in square brackets.")
    return value


def _texts(value: Any, name: str) -> tuple[str, ...]:
    if any(not isinstance(text, str) for text in _list(value, name)):
        raise ConfigError(f"{name} must be a list of texts; got {value!r}. Put them in quotes.")
    return tuple(value)


def _plain_number(digits: str) -> str:
    return digits.lstrip("0") or "0"


def _join(fields: Sequence[str], between: Sequence[str]) -> str:
    pairs = zip(fields, between[1:], strict=True)
    return between[0] + "".join(field + after for field, after in pairs)
