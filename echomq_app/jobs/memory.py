"""How much memory this process holds."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from ..exceptions import WorkerError

_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Return the resident set in bytes: now on Linux, elsewhere the largest so far."""
    try:
        return int(_STATM.read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return largest * (1 if sys.platform == "darwin" else 1024)


def check_at_start(most: int | None) -> None:
    """Raise `WorkerError` if a process that has done nothing yet holds more than `most` MiB.

    It would end in good order at once, and its supervisor would start the next one at once.
    """
    used = resident_bytes()
    if most is not None and used > most * 2**20:
        raise WorkerError(
            f"The worker holds {used // 2**20} MiB before its first job, and --max-rss is {most}: "
            "it would do nothing but end and be started again. Raise the limit."
        )
