"""The classic sets' files: topics and documents between tags."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Literal

from gossamer.checks import check_choice
from gossamer.errors import DataError
from gossamer.retrieval._streams import PathLike, line_error, named, stream_lines

__all__ = ["read_documents", "read_topics"]

_TAG = re.compile(r"<[/!?]?[A-Za-z][^<>]*>|<!--.*?-->", re.DOTALL)
_FIELD = re.compile(r"<(num|title|desc|narr)>(.*?)(?=<(?:num|title|desc|narr)>|\Z)", re.I | re.S)
# what the first word of a field may say again
_LABELS = {
    "num": re.compile(r"\s*Number\s*:", re.I),
    "title": re.compile(r"\s*Topic\s*:", re.I),
    "desc": re.compile(r"\s*Description\s*:", re.I),
    "narr": re.compile(r"\s*Narrative\s*:", re.I),
}
_TITLES = ("title", "headline", "head", "ttl")


def read_topics(
    path: PathLike,
    *,
    field: Literal["title", "desc", "narr"] = "title",
    encoding: str = "utf-8",
) -> dict[str, str]:
    r"""Read TREC topics: `<top>` blocks with `<num>`, `<title>`, `<desc>`, `<narr>`.

    Fields may be closed or not, and may repeat their name (`Number: 301`, `Topic: ...`), which is
    left out. Numbers stay as they are written.

    Args:
        path: A file; `.gz` is unpacked; `-` is standard input.
        field: The field that is the query. Default `"title"`.
        encoding: Of the file; the oldest ones are `"latin-1"`. Default `"utf-8"`.

    Returns:
        Topic number -> text.

    Raises:
        ConfigError: If the field is unknown.
        DataError: If the file is missing, has no topic, or a topic lacks its end, number or
            field, or comes twice; the message names the place.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp()) / "topics"
        >>> _ = path.write_text("<top><num> Number: 301\n<title> Organized Crime\n</top>")
        >>> read_topics(path)
        {'301': 'Organized Crime'}

    Source: TREC ad hoc topics, NIST.
    Deviations: none
    """
    check_choice(field, ("title", "desc", "narr"), "field of a topic")
    topics: dict[str, str] = {}
    for number, block in _blocks(path, "top", encoding):
        fields = {
            match[1].lower(): _plain(_LABELS[match[1].lower()].sub("", match[2], count=1))
            for match in _FIELD.finditer(block)
        }
        for key in ("num", field):
            if not fields.get(key):
                raise line_error(
                    path, number, 1, f"expected a topic with <num> and <{field}>; got none or an "
                    f"empty <{key}>. Mend the topic, or choose another field.",
                )  # fmt: skip
        if fields["num"] in topics:
            raise _again(path, number, "topic", fields["num"])
        topics[fields["num"]] = fields[field]
    return topics


def read_documents(path: PathLike, *, encoding: str = "utf-8") -> dict[str, str]:
    """Read TREC documents: `<DOC>` blocks with `<DOCNO>`, one block after the other.

    A text is the title (`TITLE`, `HEADLINE`, `HEAD` or `TTL`) and all `TEXT` elements; where a
    document has no `TEXT`, it is all but the number. Tags are left out, entities resolved, white
    space is made single.

    Args:
        path: A file; `.gz` is unpacked; `-` is standard input.
        encoding: Of the file; the oldest ones are `"latin-1"`. Default `"utf-8"`.

    Returns:
        Document number -> text.

    Raises:
        DataError: If the file is missing, has no document, or a document lacks its end or
            number, or comes twice; the message names the place.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp()) / "docs"
        >>> text = "<DOC><DOCNO> A-1 </DOCNO><TEXT>Fish &amp; <b>chips</b></TEXT></DOC>"
        >>> _ = path.write_text(text)
        >>> read_documents(path)
        {'A-1': 'Fish & chips'}

    Source: TREC document collections, NIST.
    Deviations: none
    """
    documents: dict[str, str] = {}
    for number, block in _blocks(path, "doc", encoding):
        names = _elements(block, "docno")
        if not names or not _plain(names[0]):
            raise line_error(
                path, number, 1, "expected a document with <DOCNO>; got none or an empty one. Add "
                "its number.",
            )  # fmt: skip
        name = _plain(names[0])
        if name in documents:
            raise _again(path, number, "document", name)
        texts = _elements(block, "text")
        if texts:
            titles = (title for tag in _TITLES for title in _elements(block, tag))
            documents[name] = _plain(" ".join([*titles, *texts]))
        else:
            documents[name] = _plain(re.sub(r"(?is)<docno>.*?</docno>", " ", block))
    return documents


def _blocks(path: PathLike, tag: str, encoding: str) -> Iterator[tuple[int, str]]:
    """Yield what stands between `<tag>` and `</tag>`, with the line on which it begins."""
    border = re.compile(rf"</?{tag}>", re.I)
    block: list[str] | None = None
    start = found = 0
    for number, line in stream_lines(path, encoding=encoding):
        rest = 0
        for match in border.finditer(line):
            closes = match[0].startswith("</")
            if closes != (block is not None):
                raise line_error(
                    path, number, match.start() + 1,
                    f"expected <{tag}> and </{tag}> in turn; got {match[0]} "
                    + (f"after that of line {start}" if start else "first")
                    + ". Add the missing tag.",
                )  # fmt: skip
            if block is None:
                block, start = [], number
            else:
                yield start, "\n".join([*block, line[rest : match.start()]])
                block, found = None, found + 1
            rest = match.end()
        if block is not None:
            block.append(line[rest:])
    if block is not None:
        raise line_error(
            path, start, 1, f"expected </{tag}> before the end of the file; got none. The file "
            "may be cut short: copy it again.",
        )  # fmt: skip
    if not found:
        raise DataError(f"{named(path)} must hold <{tag}> ... </{tag}>; got none. Check the path.")


def _elements(block: str, tag: str) -> list[str]:
    return re.findall(rf"(?is)<{tag}>(.*?)</{tag}>", block)


def _plain(text: str) -> str:
    return " ".join(html.unescape(_TAG.sub(" ", text)).split())


def _again(path: PathLike, number: int, what: str, name: str) -> DataError:
    return line_error(
        path, number, 1, f"expected each {what} once; got {name!r} a second time. Remove one of "
        "them.",
    )  # fmt: skip
