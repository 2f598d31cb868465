"""How our commands end: exit codes, and errors in one line.

0   done
1   failed: no such stream, the database refused, somebody else was in the way
2   usage: an option, a name, an id or data that can't be one
4   the reader's cursor is no place in the stream (any more): expired, ahead, diverged
130 interrupted by Ctrl-C

A reader that closes the pipe early (`| head`) is no failure.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from django.core.management.base import CommandError
from django.db import DatabaseError

from ..exceptions import (
    CursorError,
    CursorInvalid,
    EchoMQError,
    InvalidArgument,
    InvalidName,
    InvalidPayload,
    WrongBrand,
)

FAILURE = 1
USAGE = 2
CURSOR = 4
INTERRUPTED = 130

_USAGE_ERRORS = (InvalidName, InvalidPayload, InvalidArgument, WrongBrand)


def exit_code(error: Exception) -> int:
    """Return the code that a command ends with after this error."""
    if isinstance(error, CursorInvalid) and error.reason == "malformed":
        return USAGE
    if isinstance(error, CursorError):
        return CURSOR
    return USAGE if isinstance(error, _USAGE_ERRORS) else FAILURE


@contextlib.contextmanager
def ending_cleanly() -> Iterator[None]:
    """Turn errors into `CommandError` with our exit codes, and Ctrl-C into its own."""
    try:
        yield
    except BrokenPipeError:
        # Nobody reads: what is still buffered goes nowhere, also when Python flushes at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (EchoMQError, DatabaseError) as error:
        one_line = " ".join(str(error).split())
        raise CommandError(one_line, returncode=exit_code(error)) from error
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
