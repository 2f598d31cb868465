"""Child processes that are watched, logged to a file, and always ended.

Used by `make demo` and by the tests. `Child` starts a command in a process group of
its own (a Ctrl-C in the terminal reaches only the parent, which decides the order
of the end), through `guard.py`, so it dies with the parent.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

GUARD = str(Path(__file__).with_name("guard.py"))


class ChildFailed(Exception):
    """A child ended, or did not get ready in time; the message shows its last lines."""


class Child:
    """One running command.

    Output (stdout and stderr together) goes to `log`, a file: nothing has to drain
    a pipe. Give `log=None` for a temporary one, or `inherit_output=True` to let it
    write to the terminal. Usable as a context manager, which stops it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        log: Path | None = None,
        inherit_output: bool = False,
        user: str = "",
        death_signal: int = signal.SIGKILL,
        pass_fds: Sequence[int] = (),
        name: str = "",
    ) -> None:
        self.command = list(command)
        self.name = name or Path(command[0]).name
        self.log: Path | None = None
        self._log_start = 0  # the log may be that of an earlier run, continued
        guarded = [sys.executable, "-I", "-S", GUARD, str(os.getpid()), str(int(death_signal))]
        with contextlib.ExitStack() as stack:
            output = None
            if not inherit_output:
                self.log = log or _temporary_log(self.name)
                output = stack.enter_context(self.log.open("ab"))
                self._log_start = output.tell()
            self.process = subprocess.Popen(
                [*guarded, user, *command],
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output and subprocess.STDOUT,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        self._own_log = log is None and not inherit_output
        self._swept = False

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def output(self) -> str:
        """All it has written so far."""
        if self.log is None or not self.log.exists():
            return ""
        return self.log.read_bytes()[self._log_start :].decode(errors="replace")

    def check(self) -> None:
        """Raise `ChildFailed` when it has ended."""
        code = self.process.poll()
        if code is not None:
            raise ChildFailed(f"{self.name} ended {_ending(code)}.{self._last_lines()}")

    def wait_for_output(self, pattern: str, *, timeout: float = 60.0) -> re.Match[str]:
        """Wait until the output matches the regular expression, and return the match.

        Raises `ChildFailed` when it ends first or the time is up.
        """
        deadline = time.monotonic() + timeout
        while True:
            ended = not self.running  # before reading: its last words count
            found = re.search(pattern, self.output, re.MULTILINE)
            if found:
                return found
            if ended:
                self.check()
            if time.monotonic() > deadline:
                raise ChildFailed(
                    f"{self.name} did not print {pattern!r} in {timeout:g} s.{self._last_lines()}"
                )
            time.sleep(0.02)

    def wait(self, timeout: float = 60.0) -> int:
        """Wait for its end and return the exit code; `ChildFailed` when it goes on."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ChildFailed(
                f"{self.name} still runs after {timeout:g} s.{self._last_lines()}"
            ) from None

    def send_signal(self, number: int) -> None:
        """Signal the process itself (not its group)."""
        self.process.send_signal(number)

    def stop(self, *, grace: float = 10.0, ask: int = signal.SIGTERM) -> int:
        """Ask it to end, wait `grace` seconds, then kill its whole group; return the exit code.

        Safe to call again. A stopped (SIGSTOP) process is continued so that it can end.
        """
        try:
            if self.running:
                self.process.send_signal(ask)
                self.process.send_signal(signal.SIGCONT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(grace)
        finally:  # also when the wait is interrupted
            code = self.kill()
        return code

    def kill(self) -> int:
        """End its whole process group with SIGKILL, at once; return the exit code."""
        # Also when the leader has ended: it may have left others behind. But once
        # only, because with no member left the kernel may give the number away.
        if not self._swept:
            self._swept = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def _last_lines(self, count: int = 30) -> str:
        lines = self.output.splitlines()[-count:]
        return "\n  | " + "\n  | ".join(lines) if lines else " It printed nothing."

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
        if self._own_log and self.log:
            self.log.unlink(missing_ok=True)


def _temporary_log(name: str) -> Path:
    handle, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".log")
    os.close(handle)
    return Path(path)


def _ending(code: int) -> str:
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
