"""How much memory this process holds."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Return the resident set in bytes: now on Linux, elsewhere the largest so far."""
    try:
        return int(_STATM.read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return largest * (1 if sys.platform == "darwin" else 1024)
