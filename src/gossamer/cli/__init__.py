"""The command line; `main` is the entry point."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

OK, NOT_SHOWN, USER_ERROR, MISSING_EXTRA, FAULT, INTERRUPTED = 0, 1, 2, 3, 4, 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code.

    0: done and held. 1: not held or not shown. 2: user error. 3: missing extra. 4: internal fault.
    130: interrupted.

    Args:
        arguments: Default those of the process.
    """
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(_run(tokens))


def _run(tokens: list[str]) -> int:
    from cyclopts import CycloptsError

    from gossamer.cli._app import build_app
    from gossamer.errors import GossamerError, MissingDependencyError

    debug = "--debug" in tokens
    try:
        result = build_app()(
            tokens or ["--help"],
            exit_on_error=False,
            print_error=False,
            result_action="return_value",
        )
        return result if isinstance(result, int) else OK
    except CycloptsError as error:
        return _fail(str(error), USER_ERROR)
    except GossamerError as error:
        if debug:
            raise
        missing = isinstance(error, MissingDependencyError)
        return _fail(str(error), MISSING_EXTRA if missing else USER_ERROR)
    except KeyboardInterrupt:
        return _fail("interrupted; long work continues with --resume", INTERRUPTED)
    except BrokenPipeError:
        return OK
    except OSError as error:
        if debug:
            raise
        return _fail(f"{error.filename or 'a file'}: {error.strerror or error}", USER_ERROR)
    except Exception as error:
        if debug:
            raise
        return _fail(
            f"internal fault: {type(error).__name__}: {error}; run again with --debug for the "
            "traceback",
            FAULT,
        )


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"gossamer: {line}", file=sys.stderr)
    return code
