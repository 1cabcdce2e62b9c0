"""Sentences about restaurants for sets of slots and values: e2e_nlg, or generated ones."""

from __future__ import annotations

import csv
import gzip
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gossamer.errors import DataError
from gossamer.recipes._outside import outside_data
from gossamer.tasks import split_words

__all__ = ["GUARD", "Texts", "load_texts"]

FILES = ("devset.csv.gz", "testset_w_refs.csv.gz")
PLACEHOLDERS = ("name", "near")
CHECKED = ("name", "near", "food", "area")
HELD_OUT = 150
"""Inputs for validation, and as many for tests."""

# what a sentence says of its input: a neighbour must say the same
GUARD = (
    r"x-name|x-near|\b(?:chinese|english|indian|japanese|french|italian|fast food|restaurant|pub|"
    r"coffee shop|riverside|river|city|centre|center|cheap|inexpensive|moderate|moderately|"
    r"expensive|low|high|average|not|\d+)\b"
)

Input = tuple[tuple[str, str], ...]
"""Slots with their values, sorted: a set."""


@dataclass(frozen=True)
class Texts:
    """Inputs and their sentences; no input is in two parts.

    Args:
        pairs: One training pair for each training input.
        corpus: All distinct sentences of the training inputs.
        test: Test inputs with all their sentences.
        generated: Whether they are the stand-in.
    """

    pairs: list[tuple[Input, str]]
    corpus: list[str]
    test: list[tuple[Input, list[str]]]
    generated: bool

    @property
    def values(self) -> list[list[str]]:
        """Return for each test input the values that a text must name."""
        return [[v for k, v in source if k in CHECKED] for source, _ in self.test]


@cache
def load_texts(name: str) -> Texts:
    """Return the texts of a folder like e2e_nlg, or generated ones where there is none.

    Both files are pooled and split by input, since the inputs of the test file hold values that
    the other one never has.

    Raises:
        DataError: If a file is malformed.
    """
    try:
        folder = outside_data(name)
    except DataError:
        rows = list(generated_rows())
    else:
        rows = [row for file in FILES for row in read_rows(folder / file)]
        name = ""
    known: dict[Input, list[str]] = {}
    for source, text in rows:
        known.setdefault(source, []).append(text)
    inputs = sorted(known)
    draw = random.Random(0)
    draw.shuffle(inputs)
    train, test = inputs[2 * HELD_OUT :], inputs[:HELD_OUT]
    return Texts(
        pairs=[(source, draw.choice(known[source])) for source in train],
        corpus=list(dict.fromkeys(text for source in train for text in known[source])),
        test=[(source, known[source]) for source in test],
        generated=bool(name),
    )


def read_rows(path: Path) -> Iterator[tuple[Input, str]]:
    """Read inputs and sentences, names replaced by placeholders.

    Raises:
        DataError: If the file is missing, or a row has no slot or no text.
    """
    if not path.is_file():
        raise DataError(f"{path.parent} must hold {path.name}; got no such file. Put it there.")
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            slots = re.findall(r"([\w ]+)\[([^\]]*)\]", row.get("mr") or "")
            if not slots or not row.get("ref"):
                raise DataError(
                    f"{path}, row {number}: expected columns mr, such as name[Aromi], and ref; "
                    f"got {row}. Get the file again."
                )
            yield with_placeholders([(k.strip(), v.strip()) for k, v in slots], row["ref"])


def with_placeholders(slots: list[tuple[str, str]], text: str) -> tuple[Input, str]:
    """Return an input and its sentence as words, names replaced.

    Example:
        >>> with_placeholders([("name", "Aromi"), ("food", "French")], "Aromi is French.")
        ((('food', 'french'), ('name', 'x-name')), 'x-name is french .')
    """
    text = text.lower()
    found = []
    for slot, value in slots:
        value = value.lower()
        if slot in PLACEHOLDERS:
            text = text.replace(value, f" x-{slot} ")
            value = f"x-{slot}"
        found.append((slot, value))
    return tuple(sorted(found)), " ".join(split_words(text))


# --- the stand-in ---

SLOTS = {
    "eatType": ("restaurant", "pub", "coffee shop"),
    "food": ("chinese", "english", "indian", "japanese", "french", "italian", "fast food"),
    "priceRange": ("cheap", "moderate", "high"),
    "customer rating": ("low", "average", "5 out of 5"),
    "area": ("riverside", "city centre"),
    "familyFriendly": ("yes", "no"),
}
PHRASES = {
    "food": ("serving {} food", "that serves {} food", "with {} dishes", "offering {} meals"),
    "priceRange": ("with {} prices", "in the {} price range", "whose prices are {}"),
    "customer rating": ("with a {} customer rating", "rated {}", "that customers rate {}"),
    "area": ("in the {}", "located in the {} area", "by the {}"),
    "near": ("near {}", "close to {}", "not far from {}"),
}
ENDINGS = {
    "yes": ("it is family friendly", "children are welcome", "families can come"),
    "no": ("it is not family friendly", "children are not welcome", "it is for adults"),
}
FEWEST = 2 * HELD_OUT + 400


def generated_rows() -> Iterator[tuple[Input, str]]:
    """Make inputs with several sentences each, from phrases in changing order."""
    draw = random.Random(1)
    inputs: set[Input] = set()
    while len(inputs) < FEWEST:
        chosen = {k: draw.choice(v) for k, v in SLOTS.items() if draw.random() < 0.7}
        chosen |= {"name": "x-name"} | ({"near": "x-near"} if draw.random() < 0.7 else {})
        inputs.add(tuple(sorted(chosen.items())))
    for source in sorted(inputs):
        for _ in range(6):
            yield source, sentence(dict(source), draw)


def sentence(slots: dict[str, str], draw: random.Random) -> str:
    """Return one sentence that names all slots."""
    kind = slots.get("eatType", "place")
    head = draw.choice((f"x-name is a {kind}", f"there is a {kind} called x-name", f"a {kind}"))
    parts = [
        draw.choice(PHRASES[slot]).format(value) for slot, value in slots.items() if slot in PHRASES
    ]
    draw.shuffle(parts)
    words = [head, *parts]
    if not head.endswith("x-name") and "x-name" not in head:
        words.append("is x-name")
    if "familyFriendly" in slots:
        words += [draw.choice((".", ", and")), draw.choice(ENDINGS[slots["familyFriendly"]])]
    return " ".join(" ".join([*words, "."]).split())
