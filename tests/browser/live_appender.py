"""A process that appends: `python -m tests.browser.live_appender STREAM WRITER SEED FILE`.

It goes on until it is stopped. FILE says how many there may be by now.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import django


def main(stream: str, writer: str, seed: int, file: Path) -> None:
    """Append {"writer", "n"} from 0 on, some at a time, in no hurry."""
    from echomq_app.stream import Stream

    rng = random.Random(seed)
    done = 0
    while True:
        some = min(int(file.read_text()) - done, rng.randint(1, 40))
        Stream(stream).append_many(
            [{"data": {"writer": writer, "n": done + i}} for i in range(some)]
        )
        done += some
        time.sleep(0.02 * rng.random())


if __name__ == "__main__":
    django.setup()
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
