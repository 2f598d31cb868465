"""Become another program that dies with its parent: `python guard.py PARENT SIGNAL USER COMMAND…`

A server that a test or the demo started must not outlive it, even when the parent
is killed with SIGKILL and can clean up nothing. The kernel does that (Linux:
`PR_SET_PDEATHSIG`), but only for a process that asks for it itself, after any
change of user (which forgets the request). `preexec_fn` could ask, but it runs
Python between fork and exec in a process that has threads, where it may deadlock.
So this small program is started instead; it asks, and turns into the command.
The process id stays the same.

Two things to know. The kernel means the *thread* that started the process: start
from one that lives as long as the command should. And the exec of a set-user-ID
program forgets the request. Where there is no such call (macOS), the command runs
unguarded, and a killed parent leaves it behind.

Run with `-I -S`, so it starts in a few milliseconds; stdlib only.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import signal
import sys

PR_SET_PDEATHSIG = 1


def become(parent: int, death_signal: int, user: str, command: list[str]) -> None:
    """Change to `user` (empty: stay), ask for a signal at the parent's death, and exec."""
    if user:
        entry = pwd.getpwnam(user)
        os.setgroups([])
        os.setgid(entry.pw_gid)
        os.setuid(entry.pw_uid)
        os.environ["HOME"] = "/"
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
            sys.exit(f"prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before the request: nobody will send the signal
        sys.exit(1)
    try:
        os.execvp(command[0], command)  # noqa: S606  (no shell is wanted)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    # Whom a shell started in the background ignores Ctrl-C, and so would all that it starts.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    become(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
