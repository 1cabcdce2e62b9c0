"""Files that are whole or not there: written to a temporary name, then renamed."""

from __future__ import annotations

import codecs
import gzip
import json
import math
import os
import tomllib
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gossamer.errors import DataError

__all__ = [
    "begin_folder",
    "choose_folder",
    "newest_run",
    "packaged_data",
    "read_json",
    "read_lines",
    "read_text",
    "read_toml",
    "replacing",
    "without_nan",
    "write_json",
    "write_text",
]


_REMEDY = "Check the path, or mend the file."


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` when the block ends well.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "a.txt"
        >>> with replacing(target) as temporary:
        ...     _ = temporary.write_text("whole")
        >>> target.read_text()
        'whole'
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file as UTF-8, line ends as given, atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write JSON, indented, atomically; keys keep their order, NaN and infinity become null."""
    text = json.dumps(without_nan(value), indent=2, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def read_text(path: str | os.PathLike[str], remedy: str = "Check the path.") -> str:
    """Read UTF-8 text; line ends are kept as they are, `.gz` is unpacked.

    Raises:
        DataError: If the file is missing, no gzip or no UTF-8; the message ends with `remedy`, and
            names line and column of a bad byte.
    """
    try:
        raw = Path(path).read_bytes()
        if str(path).endswith(".gz"):
            raw = gzip.decompress(raw)
        raw = raw.removeprefix(codecs.BOM_UTF8)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist. {remedy}") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: expected a whole gzip file; got: {error}. {remedy}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. {remedy}") from None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8")
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise DataError(
            f"{path}, line {line}, column {column}: expected UTF-8 text; got the byte "
            f"0x{raw[error.start]:02x}. {remedy}"
        ) from None


def read_json(path: str | os.PathLike[str], remedy: str = _REMEDY) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        DataError: If the file is missing or malformed; the message names file, line and column.
    """
    text = read_text(path, remedy)
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 20) : error.pos + 20].strip()
        raise DataError(
            f"{path}, line {error.lineno}, column {error.colno}: not valid JSON ({error.msg}), "
            f"near {near!r}. {remedy}"
        ) from None
    if not isinstance(data, dict):
        raise DataError(f"{path} must hold a JSON object; got a {type(data).__name__}. {remedy}")
    return data


def read_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read JSON objects, one a line, up to a line that an interruption cut short."""
    rows = []
    for line in read_text(path).splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def without_nan(value: Any) -> Any:
    """Return nested plain values with NaN and infinity, which JSON lacks, as `None`."""
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_toml(path: str | os.PathLike[str], remedy: str = _REMEDY) -> dict[str, Any]:
    """Read TOML.

    Raises:
        DataError: If the file is missing or malformed; the message names the file and the place.
    """
    try:
        return tomllib.loads(read_text(path, remedy))
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{path}: not valid TOML, {error}. {remedy}") from None


def choose_folder(
    default: str, out: str | os.PathLike[str] | None, *, resume: bool = False
) -> Path:
    """Return the folder of a run: a new one, made, or with `resume` the one to go on with.

    Args:
        default: Path used when `out` is not given; `-2`, `-3`, ... is added when it is taken.
        out: What the user asked for, or `None`.
        resume: Take the newest existing one instead.

    Raises:
        DataError: If `out` holds another run already and `resume` is false.

    Example:
        >>> import tempfile
        >>> choose_folder(f"{tempfile.mkdtemp()}/run", None).name
        'run'
    """
    if out is not None:
        folder = Path(out)
        if folder.is_file():
            raise DataError(f"--out must name a folder; {folder} is a file. Choose another.")
        if not resume and folder.exists() and any(folder.iterdir()):
            raise DataError(
                f"--out must name a new or empty folder; {folder} has content. "
                "Choose another, or continue that run with --resume."
            )
        return folder
    number = 1
    newest = newest_run(default) if resume else None
    if newest is not None:
        return newest
    while True:
        folder = _numbered_path(default, number)
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()  # two runs that start together never get the same one
        except FileExistsError:
            number += 1
        else:
            return folder


def newest_run(default: str) -> Path | None:
    """Return the newest numbered folder in which a run was begun, or `None`.

    Example:
        >>> newest_run("runs/none-of-this-name")
    """
    paths = (_numbered_path(default, number) for number in range(1, 10_000))
    begun = [path for path in paths if (path / "config.toml").exists()]
    return begun[-1] if begun else None


def begin_folder(folder: Path, settings: str, *, resume: bool) -> None:
    """Write the settings of a run to its `config.toml`; a resumed run must have the same ones.

    Raises:
        DataError: If the folder was begun with other settings.
    """
    path = folder / "config.toml"
    if resume and path.exists() and path.read_text(encoding="utf-8") != settings:
        raise DataError(
            f"{folder} was begun with other settings, kept in {path}; a run resumes only with "
            "its own. Give the same options, or another --out."
        )
    write_text(path, settings)


def _numbered_path(path: str, number: int) -> Path:
    return Path(path if number == 1 else f"{path}-{number}")


def packaged_data(name: str) -> Path:
    """Return the path of a data file that is installed with the library.

    Args:
        name: Below `gossamer/data`, such as `"tiny_shakespeare/input.txt"`.

    Raises:
        DataError: If there is none of that name.

    Example:
        >>> packaged_data("tiny_shakespeare/input.txt").name
        'input.txt'
    """
    path = Path(__file__).parent / "data" / name
    if not path.is_file():
        raise DataError(
            f"expected the packaged data file {name}; it is not installed at {path}. Install "
            "gossamer again."
        )
    return path
