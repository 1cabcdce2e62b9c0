"""Text files line by line: gzip by extension, `-` for standard input and output."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TextIO, cast

from gossamer.errors import ConfigError, DataError
from gossamer.files import replacing
from gossamer.progress import progress

__all__ = [
    "PathLike",
    "column_of",
    "existing",
    "line_error",
    "named",
    "stream_lines",
    "whole_number",
    "writing",
]

PathLike = str | os.PathLike[str]

_LONG_FILE = 2**26  # bytes; below that reading takes a few seconds and needs no progress
_LINES_PER_UPDATE = 2**15


def named(path: PathLike) -> str:
    """Return what messages call a file."""
    return "standard input" if str(path) == "-" else str(path)


def column_of(line: str, field: int) -> int:
    """Return the column, from 1, at which a white-space separated field begins."""
    starts = [match.start() + 1 for match in re.finditer(r"\S+", line)]
    return starts[field] if field < len(starts) else len(line) + 1


def line_error(path: PathLike, number: int, column: int, text: str) -> DataError:
    """Return the error for one place of a file; very long words of it are cut."""
    text = re.sub(r"\S{80,}", lambda match: match[0][:40] + "...", text)
    return DataError(f"{named(path)}, line {number}, column {column}: {text}")


def whole_number(text: str) -> int | None:
    """Return a whole number >= 0 of at most 18 digits; `None` for any other text."""
    return int(text) if text.isdecimal() and len(text) <= 18 else None


def existing(path: Path) -> Path | None:
    """Return a file or its `.gz` twin, whichever is there; `None` if neither is."""
    twin = path.with_name(path.name + ".gz")
    return next((file for file in (path, twin) if file.is_file()), None)


def stream_lines(path: PathLike, *, encoding: str = "utf-8") -> Iterator[tuple[int, str]]:
    r"""Yield the lines of a text file with their numbers, from 1, without their ends.

    A byte order mark and carriage returns at the ends of lines are left out. Only `\n` ends a
    line, so that other separators of Unicode stay part of the text.

    Args:
        path: A file; `.gz` is unpacked; `-` is standard input.
        encoding: Of the text.

    Raises:
        ConfigError: If there is no such encoding.
        DataError: If the file is missing, cut short, or not in that encoding.
    """
    try:
        codecs.lookup(encoding)
    except LookupError:
        raise ConfigError(
            f"encoding must be one that Python knows, such as utf-8 or latin-1; got {encoding!r}. "
            "Change it."
        ) from None
    with (
        _opened(path) as (file, raw, size),
        progress(f"read {named(path)}", size, quiet=size < _LONG_FILE) as bar,
    ):
        lines = enumerate(file, start=1)
        while True:
            try:
                number, line = next(lines)
            except StopIteration:
                return
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(
                    f"{named(path)} must be a whole file, unpacked or gzip as its name says; got "
                    f"{error}. Copy it again."
                ) from None
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if number % _LINES_PER_UPDATE == 0:
                bar.update(min(raw.tell(), size - 1))
            yield number, _decoded(line, path, number, encoding).rstrip("\r\n")


def _decoded(line: bytes, path: PathLike, number: int, encoding: str) -> str:
    try:
        return line.decode(encoding)
    except UnicodeDecodeError as error:
        column = len(line[: error.start].decode(encoding)) + 1
        raise line_error(
            path, number, column, f"expected {encoding} text; got the byte "
            f"0x{line[error.start]:02x}. Convert the file.",
        ) from None  # fmt: skip


@contextmanager
def _opened(path: PathLike) -> Iterator[tuple[IO[bytes], IO[bytes], int]]:
    """Yield the bytes to read, the file they come from, and its size."""
    if str(path) == "-":
        yield sys.stdin.buffer, sys.stdin.buffer, 0
        return
    with _open(path) as raw:
        size = os.fstat(raw.fileno()).st_size
        if str(path).endswith(".gz"):
            with gzip.open(raw) as unpacked:
                yield cast("IO[bytes]", unpacked), raw, size
        else:
            yield raw, raw, size


def _open(path: PathLike) -> IO[bytes]:
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise DataError(
            f"expected a readable file; {path} cannot be read: {error.strerror}. Check the path."
        ) from None


@contextmanager
def writing(path: PathLike) -> Iterator[TextIO]:
    """Yield a text file to write to; it appears whole under its name when the block ends well.

    Args:
        path: A file; `.gz` is packed, the same text to the same bytes; `-` is standard output.
    """
    if str(path) == "-":
        yield sys.stdout
        return
    with replacing(path) as temporary, temporary.open("wb") as raw:
        if not str(path).endswith(".gz"):
            with io.TextIOWrapper(raw, encoding="utf-8", newline="") as text:
                yield text
            return
        with (
            gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed,
            io.TextIOWrapper(cast("IO[bytes]", packed), encoding="utf-8", newline="") as text,
        ):
            yield text
