"""What becomes of jobs, without a database: the rules of docs/jobs.md as plain assignments."""

from __future__ import annotations

import dataclasses

FINAL = {"completed", "failed", "cancelled"}
WAITING = {"ready", "scheduled"}
TERMINAL_RECORDS = "CFX"
"""Letters of the records that end a job; see `LETTERS`."""

LETTERS = {
    "enqueued": "E",
    "started": "S",
    "retrying": "R",
    "stalled": "L",
    "cancel_requested": "Q",
    "completed": "C",
    "failed": "F",
    "cancelled": "X",
}
"""One letter for each record that the log has of a job."""


@dataclasses.dataclass(slots=True, kw_only=True)
class ModelJob:
    """One job."""

    id: str
    max_attempts: int
    backoff: float
    state: str
    attempt: int = 0
    fence: int = 0
    begun: bool = False
    """Whether the handler of the last claim began."""
    holder: int | None = None
    """The worker that has it."""
    request: str | None = None
    """The reason of a committed request to cancel it."""
    reason: str = ""
    errors: int = 0
    lives: int = 1
    """How often it may end: once, and once more for each retry by hand."""
    story: str = "E"
    """Its records, but for the requests to cancel."""
    requests: int = 0
    """How many records tell of such a request."""

    @property
    def final(self) -> bool:
        return self.state in FINAL

    @property
    def waiting(self) -> bool:
        return self.state in WAITING

    @property
    def claimable(self) -> bool:
        return self.state == "ready" and self.request is None

    def claim(self, worker: int) -> None:
        assert self.claimable
        self.state, self.holder = "running", worker
        self.fence += 1
        self.begun = False

    def begin(self) -> None:
        """The handler begins: only now the attempt counts, and the log tells of it."""
        assert self.state == "running" and not self.begun
        self.begun = True
        self.attempt += 1
        self.story += "S"

    def returned(self) -> None:
        self._finish("completed", "C", self.request or "")

    def raised(self) -> None:
        """An error counts, and is final after a request and after the last attempt."""
        self.errors += 1
        if self.request is not None or self.attempt >= self.max_attempts:
            self._finish("failed", "F", self.request or "")
        else:
            self._again("scheduled" if self.backoff else "ready")

    def stopped(self, reason: str, *, by_worker: bool) -> None:
        if by_worker and self.request is None:
            self.handed_back()
        else:
            self._finish("cancelled", "X", reason if self.request is None else self.request)

    def handed_back(self) -> None:
        """The attempt doesn't count; the fence is never given back."""
        if self.begun:
            self.attempt -= 1
            self._again("ready")
        else:
            self.state, self.holder = "ready", None

    def abandoned(self) -> None:
        if not self.begun:
            if self.request is not None:
                self._finish("cancelled", "X", self.request)
            else:
                self.handed_back()
            return
        self.errors += 1
        self.story += "L"
        if self.request is not None:
            self._finish("cancelled", "X", self.request)
        elif self.attempt >= self.max_attempts:
            self._finish("failed", "F", "")
        else:
            self._again("ready")

    def cancel(self, reason: str, *, held: bool) -> str:
        """Somebody asks; `held`: somebody else has the row right now."""
        if self.waiting and not held:
            self.swept(reason)
            return "cancelled"
        if self.final:
            return "finished"
        if self.request is None:
            self.request = reason
            self.requests += 1
        return "requested"

    def swept(self, reason: str = "") -> None:
        """A job that waits is cancelled; the first reason stays."""
        self._finish("cancelled", "X", reason if self.request is None else self.request)
        self.holder = None

    def retry(self) -> str:
        if not self.final:
            return "unfinished"
        if self.state == "completed":
            return "completed"
        self.state, self.reason, self.request, self.holder = "ready", "", None, None
        self.max_attempts = max(self.max_attempts, self.attempt + 1)
        self.lives += 1
        self.story += "R"
        return "retried"

    def _finish(self, state: str, letter: str, reason: str) -> None:
        self.state, self.reason, self.request = state, reason, None
        self.story += letter

    def _again(self, state: str) -> None:
        self.state, self.holder = state, None
        self.story += "R"


@dataclasses.dataclass(slots=True, kw_only=True)
class ModelLease:
    """A worker's lease. Running out is one thing, being declared lost another."""

    left: float
    lost: bool = False
    stopped: bool = False

    @property
    def held(self) -> bool:
        return not (self.lost or self.stopped)

    def renew(self, seconds: float) -> bool:
        if self.held:
            self.left = seconds
        return self.held
