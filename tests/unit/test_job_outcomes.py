"""What becomes of a job: every ending, with and without a cancel request."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from echomq_app.core.ids import new_job_id
from echomq_app.jobs.outcomes import (
    ERRORS_MAX,
    MESSAGE_MAX,
    TRACEBACK_MAX,
    Ending,
    Outcome,
    Verdict,
    decide,
    error_record,
)

NOW = dt.datetime(2026, 11, 29, 12, 0, tzinfo=dt.UTC)
ERROR = error_record(ValueError("no"), attempt=2, worker="w", at=NOW)


def decided(ending: Ending, request: str | None = None, **given: Any) -> Verdict:
    fields: dict[str, Any] = {
        "id": new_job_id(),
        "queue": "default",
        "task_path": "a.b",
        "fence": 7,
        "attempt": 2,
        "max_attempts": 3,
        "ending": ending,
        "at": NOW,
        "claimed": None,
        **given,
    }
    return decide(Outcome(**fields), request=request, now=NOW, rnd=lambda: 0.5)


def what(verdict: Verdict) -> tuple[str, int, list[str]]:
    return verdict.state.value, verdict.attempt, [entry.event for entry in verdict.entries]


@pytest.mark.parametrize(
    ("ending", "request_", "more", "expected"),
    [
        (Ending.RETURNED, None, {}, ("completed", 2, ["completed"])),
        (Ending.RETURNED, "stop", {}, ("completed", 2, ["completed"])),
        (Ending.RAISED, None, {}, ("scheduled", 2, ["retrying"])),
        (Ending.RAISED, None, {"options": {"backoff": 0}}, ("ready", 2, ["retrying"])),
        (Ending.RAISED, None, {"attempt": 3}, ("failed", 3, ["failed"])),
        (Ending.RAISED, "stop", {}, ("failed", 2, ["failed"])),
        (Ending.UNSTORABLE, None, {}, ("failed", 2, ["failed"])),
        (Ending.UNSTORABLE, "stop", {}, ("failed", 2, ["failed"])),
        (Ending.STOPPED, None, {}, ("cancelled", 2, ["cancelled"])),
        (Ending.STOPPED, "stop", {}, ("cancelled", 2, ["cancelled"])),
        (Ending.STOPPED, None, {"by_worker": True}, ("ready", 1, ["retrying"])),
        (Ending.STOPPED, "stop", {"by_worker": True}, ("cancelled", 2, ["cancelled"])),
        (Ending.HANDED_BACK, None, {}, ("ready", 1, ["retrying"])),
        # Its handler may still run: not yet cancelled.
        (Ending.HANDED_BACK, "stop", {}, ("ready", 1, ["retrying"])),
        (Ending.ABANDONED, None, {}, ("ready", 2, ["stalled", "retrying"])),
        (Ending.ABANDONED, None, {"attempt": 3}, ("failed", 3, ["stalled", "failed"])),
        (Ending.ABANDONED, "stop", {}, ("cancelled", 2, ["stalled", "cancelled"])),
        (Ending.ABANDONED, "stop", {"attempt": 3}, ("cancelled", 3, ["stalled", "cancelled"])),
    ],
)
def test_verdict(
    ending: Ending, request_: str | None, more: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    assert what(decided(ending, request_, **more)) == expected


def test_final_entries_say_who_what_why_and_when() -> None:
    for ending, more in (
        (Ending.RETURNED, {}),
        (Ending.RAISED, {"attempt": 3, "error": ERROR}),
        (Ending.STOPPED, {}),
    ):
        verdict = decided(ending, "because", **more)
        data = verdict.entries[-1].data
        assert data["id"] == str(verdict.outcome.id) and data["state"] == verdict.state
        assert data["reason"] == "because" and data["attempt"] == verdict.attempt
        assert data["finished_at"] == "2026-11-29T12:00:00.000000+00:00"
        assert verdict.finished and verdict.reason == "because"


def test_reason_of_a_handler_that_stopped_by_itself() -> None:
    assert decided(Ending.STOPPED, reason="nothing to do").reason == "nothing to do"
    assert decided(Ending.STOPPED, "asked", reason="mine").reason == "asked"


def test_backoff_is_a_random_part_of_a_growing_ceiling_and_a_rescue_has_none() -> None:
    late = [
        decided(
            Ending.RAISED, attempt=n, max_attempts=99, options={"backoff": 10, "backoff_max": 35}
        )
        for n in (1, 2, 3, 9)
    ]
    waits = [(verdict.run_after - NOW).total_seconds() for verdict in late if verdict.run_after]
    assert waits == [5, 10, 17.5, 17.5]
    assert decided(Ending.ABANDONED).run_after is None  # it keeps its place


def test_options_that_nobody_understands_do_not_stop_a_verdict() -> None:
    assert decided(Ending.RAISED, options={"backoff": "soon", "of": "later"}).state == "scheduled"


def test_errors_are_kept_the_newest_of_them() -> None:
    verdict = decided(Ending.RAISED, error=ERROR, errors=[{"n": n} for n in range(ERRORS_MAX)])
    assert len(verdict.errors) == ERRORS_MAX and verdict.errors[-1] == ERROR
    assert verdict.errors[0] == {"n": 1}


class BrokenText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a\0b"),
        ValueError("\ud800"),
        ValueError("x" * 10_000_000),
        BrokenText(),
        SystemExit(1),
        ExceptionGroup("many", [ValueError("\0"), BrokenText()]),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    ],
)
def test_any_failure_can_be_recorded(error: BaseException) -> None:
    record = error_record(error, attempt=1, worker="w\0", at=NOW)
    text = repr(record)
    text.encode()
    assert "\\x00" not in text
    assert len(record["message"]) < MESSAGE_MAX + 100
    assert len(record["traceback"]) < TRACEBACK_MAX + 100
    assert record["class"].endswith(type(error).__qualname__)
