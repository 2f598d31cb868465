"""Queues share a worker by their weights."""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections import Counter

import pytest

from echomq_app.core.shares import Shares
from echomq_app.exceptions import InvalidArgument, InvalidPayload
from echomq_app.jobs import supervisor
from echomq_app.jobs.supervisor import Supervisor, child_command
from echomq_app.jobs.worker_options import WorkerOptions


def test_with_room_for_one_the_order_follows_the_weights() -> None:
    shares = Shares({"a": 8, "b": 2})
    first = Counter(shares.turn(1)[0][0] for _ in range(1_000))
    assert first == {"a": 800, "b": 200}


def test_equal_queues_take_turns() -> None:
    shares = Shares({"a": 1, "b": 1, "c": 1})
    firsts = [shares.turn(1)[0][0] for _ in range(6)]
    assert firsts == ["a", "b", "c", "a", "b", "c"]


@pytest.mark.parametrize("room", [1, 3, 10, 500])
def test_parts_cover_the_room_and_no_queue_is_without(room: int) -> None:
    parts = dict(Shares({"a": 8, "b": 2}).turn(room))
    assert sum(parts.values()) >= room and min(parts.values()) >= 1
    if room % 10 == 0:
        assert parts == {"a": room * 8 // 10, "b": room * 2 // 10}


@pytest.mark.parametrize(
    "options",
    [
        *({"max_jobs": 0}, {"max_rss": 0}, {"weights": {"other": 1}}, {"weights": {"default": 0}}),
        *({"lease": float("inf")}, {"lease": 1e12}, {"poll": float("nan")}, {"grace": -1.0}),
        *({"concurrency": 10**10}, {"process_concurrency": 0}),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        WorkerOptions(queues=("default",), **options)  # type: ignore[arg-type]


def test_a_name_that_no_database_holds_is_refused() -> None:
    with pytest.raises(InvalidPayload, match="name"):
        WorkerOptions(queues=("default",), name="\ud800")


def test_a_worker_that_crashes_at_once_is_started_again_after_growing_pauses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "PAUSE", 0.2)
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE", 0.4)
    monkeypatch.setattr(supervisor, "LOOK", 0.01)
    monkeypatch.setattr("random.random", lambda: 1.0)
    crew = Supervisor([sys.executable, "-c", "raise SystemExit(3)"], 1)
    pauses: list[float] = []
    started: list[float] = []

    def heard(record: logging.LogRecord) -> bool:
        if "worker_process_failed" in record.getMessage():
            *_, pause = record.args  # type: ignore[misc]
            pauses.append(pause)  # type: ignore[arg-type]
            if len(pauses) == 4:
                crew.stop()
        elif "worker_process_started" in record.getMessage():
            started.append(time.monotonic())
        return True

    caplog.handler.addFilter(heard)
    try:
        with caplog.at_level(logging.INFO, "echomq.jobs"):
            crew.run()
    finally:
        caplog.handler.removeFilter(heard)
    assert pauses == [0.2, 0.4, 0.4, 0.4] and len(started) == 4
    between = [after - before for before, after in itertools.pairwise(started)]
    assert all(took >= pause for took, pause in zip(between, pauses, strict=False))


@pytest.mark.parametrize("words", [["--processes", "3"], ["--processes=3"]])
def test_a_child_runs_the_same_command_without_the_option(words: list[str]) -> None:
    command = ["python", "-X", "dev", "manage.py", "echomq_worker", "--queue", "a"]
    assert child_command([*command, *words, "--drain"]) == [*command, "--drain"]
