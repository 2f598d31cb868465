"""The worker in this process: handlers of all kinds, and a database that goes away."""

from __future__ import annotations

import datetime as dt
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import call_command
from django.db import OperationalError, connection, connections, transaction
from django.utils import timezone

from echomq_app.core.prefetch import Prefetch
from echomq_app.jobs import control
from echomq_app.jobs.backend import EchoMQBackend
from echomq_app.jobs.bulk import call, enqueue_many
from echomq_app.jobs.claims import ClaimedJob, Claims
from echomq_app.jobs.connections import service_connection
from echomq_app.jobs.housekeeping import SHORTEST, Housekeeper
from echomq_app.jobs.lease import Lease
from echomq_app.jobs.tasks_api import TaskResultStatus, task_finished, task_started
from echomq_app.jobs.wakeup import Wakeup
from echomq_app.jobs.worker_options import WorkerOptions
from echomq_app.models import CancelRequest, Job, Worker
from echomq_app.models.each import LONGEST_REST
from echomq_app.models.job import KIND_MAX
from echomq_app.stream import Stream
from tests import jobtasks
from tests.databases import refusing, session
from tests.integration.jobs import USING, finished, hearing, history, records, running_worker
from tests.jobtasks import marks
from tests.wait import wait_until

pytestmark = pytest.mark.django_db(transaction=True)
POOLED = bool(connections.settings["default"]["OPTIONS"].get("pool"))


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(tmp_path / "trace")


def drain(**options: Any) -> None:
    """Work until there is nothing to do."""
    with running_worker(drain=True, **options) as worker:
        wait_until(lambda: worker._stop.closed, 30, "the worker ends")


class TestHandlers:
    def test_sync_and_async_handlers_return(self) -> None:
        sync, async_ = jobtasks.add.enqueue(1, 2), jobtasks.aadd.enqueue(3, 4)
        nothing = jobtasks.echo.enqueue(None)
        drain()
        assert jobtasks.add.get_result(sync.id).return_value == 3
        assert jobtasks.echo.get_backend().get_result(async_.id).return_value == 7
        assert jobtasks.echo.get_result(nothing.id).return_value is None
        assert history(sync.id) == history(async_.id) == ["enqueued", "started", "completed"]

    def test_what_async_handlers_do_in_threads_goes_on_side_by_side(self) -> None:
        ids = [jobtasks.meet_in_a_thread.enqueue().id for _ in range(2)]
        with running_worker():
            assert [finished(id).state for id in ids] == ["completed"] * 2

    def test_failure_is_retried_until_max_attempts(self, trace: str) -> None:
        fails, succeeds = jobtasks.fail.enqueue(), jobtasks.fail_until.enqueue(3, trace)
        drain()
        failed = Job.objects.get(pk=fails.id)
        assert (failed.state, failed.attempt) == ("failed", 3)
        assert [error["attempt"] for error in failed.errors] == [1, 2, 3]
        result = jobtasks.fail.get_result(fails.id)
        assert result.status == TaskResultStatus.FAILED and len(result.errors) == 3
        assert result.attempts == 3
        assert "ValueError: no" in result.errors[0].traceback
        assert history(fails.id)[-1] == "failed"
        assert Job.objects.get(pk=succeeds.id).state == "completed"

    @pytest.mark.parametrize("message", ["a\0b", "\ud800", "x" * 200_000])
    def test_failure_with_a_text_that_no_database_holds_is_recorded(self, message: str) -> None:
        id = jobtasks.raise_text.enqueue(message.encode("utf-8", "surrogatepass").hex()).id
        drain()
        job = Job.objects.get(pk=id)
        assert job.state == "failed" and job.errors[0]["class"] == "builtins.ValueError"
        assert len(str(job.errors)) < 60_000

    @pytest.mark.parametrize(
        "path",
        [
            *("no.such.module.f", "tests.jobtasks.gone", "tests.jobtasks.not_a_task", "x"),
            "tests.script.task",
        ],
    )
    def test_path_that_is_no_task_is_failed_and_the_worker_goes_on(self, path: str) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        Job.objects.filter(pk=id).update(task_path=path, max_attempts=1)
        other = jobtasks.add.enqueue(1, 2).id
        drain()
        assert Job.objects.get(pk=id).state == "failed"
        assert jobtasks.add.get_backend().get_result(id).status == TaskResultStatus.FAILED
        assert Job.objects.get(pk=other).state == "completed"

    @pytest.mark.parametrize("name", ["exit_softly", "cancel_itself", "returns_a_set"])
    def test_any_way_to_end_is_an_end(self, name: str) -> None:
        id = getattr(jobtasks, name).enqueue().id
        Job.objects.update(max_attempts=1)
        drain()
        assert Job.objects.get(pk=id).state == "failed"

    @pytest.mark.parametrize(
        ("name", "state"),
        [
            ("cancel_itself_and_return", "failed"),
            ("cancel_itself_afterwards", "completed"),
            ("cancel_everything", "failed"),
            ("exit_in_a_task", "failed"),
            ("stop_the_loop", "failed"),
        ],
    )
    def test_async_handler_that_meddles_with_tasks_ends_and_the_loop_goes_on(
        self, name: str, state: str
    ) -> None:
        id = getattr(jobtasks, name).enqueue().id
        Job.objects.update(max_attempts=1)
        with running_worker():
            assert finished(id).state == state
            assert finished(jobtasks.aadd.enqueue(1, 2).id).result == 3

    @pytest.mark.parametrize("signal", [task_started, task_finished])
    def test_receiver_that_exits_ends_no_job(self, signal: Any) -> None:
        def leave(**kwargs: Any) -> None:
            raise SystemExit(3)

        signal.connect(leave)
        try:
            ids = [jobtasks.add.enqueue(1, 2).id, jobtasks.aadd.enqueue(1, 2).id]
            stopped = jobtasks.stops_by_itself.enqueue().id
            drain()
        finally:
            signal.disconnect(leave)
        assert [Job.objects.get(pk=id).result for id in ids] == [3, 3]
        assert Job.objects.get(pk=stopped).state == "cancelled"

    def test_options_that_nobody_can_read_fail_the_job(self) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        Job.objects.update(options=[1], max_attempts=1)
        drain()
        assert Job.objects.get(pk=id).state == "failed"

    def test_jobs_for_which_there_was_no_thread_are_handed_back(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        start = threading.Thread.start
        refused: list[threading.Thread] = []

        def refuse(thread: threading.Thread) -> None:
            if thread.name.startswith("echomq-job") and len(refused) < 3:
                refused.append(thread)
                raise RuntimeError("can't start new thread")
            start(thread)

        ids = [jobtasks.add.enqueue(1, n).id for n in range(3)]
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with running_worker():
            jobs = [finished(id) for id in ids]
        assert [(job.state, job.attempt) for job in jobs] == [("completed", 1)] * 3
        assert len(refused) == 3

    def test_handler_that_cancels_itself_is_cancelled(self) -> None:
        id = jobtasks.stops_by_itself.enqueue().id
        drain()
        job = Job.objects.get(pk=id)
        assert (job.state, job.cancel_reason, job.attempt) == ("cancelled", "nothing to do", 1)

    @pytest.mark.parametrize("what", [*jobtasks.ODD, "none"])
    def test_reason_that_no_database_holds_is_a_cancel_and_stops_nobody(self, what: str) -> None:
        ids = [jobtasks.stops_oddly.enqueue(what).id, jobtasks.add.enqueue(1, 2).id]
        with running_worker():
            odd, other = [finished(id) for id in ids]
        assert (odd.state, odd.attempt, other.state) == ("cancelled", 1, "completed")
        assert len(odd.cancel_reason) < 70_000 and 1 <= len(odd.cancel_kind) <= KIND_MAX

    def test_timeout_cancels_the_token_and_is_a_failure(self) -> None:
        id = jobtasks.times_out.enqueue().id
        drain()
        job = Job.objects.get(pk=id)
        assert job.state == "failed" and job.errors[0]["class"] == "builtins.TimeoutError"

    def test_delayed_job_runs_when_it_is_due(self, trace: str) -> None:
        due = timezone.now() + dt.timedelta(seconds=0.7)
        with running_worker(poll=30):
            id = jobtasks.note.using(run_after=due).enqueue(trace).id
            with running_worker(poll=30):  # it looks once when it begins, and then when it is due
                job = finished(id)
        assert job.started_at is not None and job.started_at >= due

    def test_each_job_has_its_own_context(self) -> None:
        ids = [jobtasks.activate_language.enqueue("de").id for _ in range(3)]
        drain(concurrency=1)
        assert [Job.objects.get(pk=id).result for id in ids] == ["en-us"] * 3

    def test_transaction_that_a_handler_left_open_is_nobody_elses(
        self,
    ) -> None:
        with running_worker(concurrency=1):
            left = finished(jobtasks.leave_a_transaction_open.enqueue().id)
            with transaction.atomic():  # SQLite's lock is free
                other = jobtasks.write.enqueue("done")
            finished(other.id)
        assert Worker.objects.filter(host="done").exists()
        assert left.max_attempts != 77
        assert left.state == "failed" and "was rolled back" in left.errors[0]["message"]

    def test_no_connection_of_a_handler_is_left_open(self) -> None:
        sync, async_ = jobtasks.query.enqueue().id, jobtasks.aquery.enqueue().id
        ours_or_older = "application_name LIKE 'echomq%%'"
        if connection.vendor == "postgresql":
            older = ",".join(map(str, [0, *_pids("true")]))
            ours_or_older += f" OR pid IN ({older})"
        with running_worker(concurrency=1):
            finished(sync)
            finished(async_)
            if POOLED:
                pool: Any = connection.pool  # type: ignore[attr-defined]
                connections.close_all()
                wait_until(
                    lambda: pool.get_stats()["pool_available"] == pool.get_stats()["pool_size"]
                )
            elif connection.vendor == "postgresql":
                wait_until(lambda: _others(f"NOT ({ours_or_older})") == 0)


def test_claim_whose_answer_was_lost_is_handed_back(monkeypatch: pytest.MonkeyPatch) -> None:
    take, lost = Claims.take, list[ClaimedJob]()

    def losing(self: Claims, queue: str, **more: Any) -> list[ClaimedJob]:
        claimed = take(self, queue, **more)
        if claimed and not lost:
            lost.extend(claimed)
            raise OperationalError("the answer is lost")
        return claimed

    monkeypatch.setattr(Claims, "take", losing)
    with running_worker(lease=60.0):  # nobody else takes it away
        job = finished(jobtasks.add.enqueue(1, 2).id)
    assert (job.state, job.attempt, job.fence) == ("completed", 1, 2)
    assert history(str(job.pk)) == ["enqueued", "started", "completed"]


def test_claim_during_which_the_lease_was_lost_is_handed_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take, told = Claims.take, list[ClaimedJob]()

    def losing(self: Claims, queue: str, **more: Any) -> list[ClaimedJob]:
        claimed = take(self, queue, **more)
        if claimed and not told:
            told.extend(claimed)
            worker._lease.generation += 1  # as the heartbeat does, which found nothing to tell
        return claimed

    monkeypatch.setattr(Claims, "take", losing)
    with running_worker() as worker:
        job = finished(jobtasks.stops_if_the_lease_is_lost.enqueue().id)
    assert (job.state, job.attempt, job.fence) == ("completed", 1, 2)
    # The first claim led to no attempt, and the log tells of none.
    assert history(str(job.pk)) == ["enqueued", "started", "completed"]


def test_nothing_is_claimed_while_the_lease_is_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[bool] = []
    doubt = True

    def in_doubt(self: Lease) -> bool:
        looks.append(doubt)
        return doubt

    monkeypatch.setattr(Lease, "in_doubt", property(in_doubt))
    with running_worker():
        id = jobtasks.add.enqueue(1, 2).id
        before = len(looks)
        wait_until(lambda: len(looks) > before + 3)
        assert Job.objects.get(pk=id).state == "ready"
        doubt = False
        finished(id)


def test_queues_share_a_worker_by_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prefetch, "ahead", lambda self, *rate: 0)
    for queue in ("a", "b"):
        enqueue_many(jobtasks.noop.using(queue_name=queue), [call(n) for n in range(20)])
    with running_worker(queues=("a", "b"), weights={"a": 8, "b": 2}, concurrency=1, max_jobs=10):
        done = Job.objects.filter(state="completed")
        wait_until(lambda: done.count() == 10)
    assert done.filter(queue="a").count() == 8


@pytest.mark.django_db(transaction=True, databases=["default", "other"])  # its checks
def test_the_command_takes_queues_with_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[WorkerOptions] = []

    def worker(options: WorkerOptions, on_started: object) -> Any:
        started.append(options)
        return SimpleNamespace(run=lambda: True, spent="", left_behind=0)

    monkeypatch.setattr("echomq_app.management.commands.echomq_worker.Worker", worker)
    call_command("echomq_worker", "--queue", "mail:8,rest", "--queue", "bulk:2")
    (options,) = started
    assert options.queues == ("mail", "rest", "bulk")
    assert options.weights == {"mail": 8, "bulk": 2}


class TestProgress:
    @pytest.mark.parametrize("name", ["until_cancelled", "until_cancelled_async"])
    def test_is_stored_and_published(self, trace: str, name: str) -> None:
        with hearing() as heard, running_worker():
            id = getattr(jobtasks, name).enqueue(trace).id
            wait_until(lambda: Job.objects.get(pk=id).progress == 0.5)
            assert Job.objects.get(pk=id).progress_note == "halfway"
            wait_until(lambda: "progress" in heard.names())
            control.cancel(id)
            finished(id)
            (event,) = [event for event in heard.so_far() if event.event == "progress"]
        assert event.data["fraction"] == 0.5 and event.data["note"] == "halfway"


class TestEvents:
    def test_terminal_ones_say_the_same_in_the_feed_and_in_the_log(self, trace: str) -> None:
        with hearing() as heard:
            pending = jobtasks.add.enqueue(1, 2).id
            assert control.cancel(pending, "pending") == "cancelled"
            with running_worker():
                running = jobtasks.until_cancelled.enqueue(trace).id
                wait_until(lambda: "start 1" in marks(trace))
                assert control.cancel(running, "running") == "requested"
                completed, failed = jobtasks.add.enqueue(1, 2).id, jobtasks.fail.enqueue().id
                for id in (running, completed, failed):
                    finished(id)
            told = {
                str(event.job_id): event
                for event in heard.so_far()
                if event.event in {"completed", "failed", "cancelled"}
            }
        for id, state, reason in (
            (pending, "cancelled", "pending"),
            (running, "cancelled", "running"),
            (completed, "completed", None),
            (failed, "failed", None),
        ):
            event, data = records(id)[-1]
            assert event == told[id].event == state
            assert data == told[id].data
            assert (data["id"], data["state"], data["reason"]) == (id, state, reason)
            assert "attempt" in data and data["finished_at"]

    def test_the_log_has_each_step_once_and_in_order(self) -> None:
        with running_worker(), running_worker():
            ids = [jobtasks.fail.enqueue().id for _ in range(30)]
            for id in ids:
                finished(id)
        steps = ["enqueued", *["started", "retrying"] * 2, "started", "failed"]
        for id in ids:
            assert history(id) == steps
        info = Stream("emq.default").info()
        assert info.write_cursor == 30 * len(steps)

    def test_signals_have_the_backend_class_as_their_sender(self) -> None:
        got: list[tuple[str, Any, str, Any]] = []

        def receive(sender: Any, task_result: Any, signal: Any, **kwargs: Any) -> None:
            name = "started" if signal is task_started else "finished"
            got.append((name, sender, task_result.id, task_result.status))

        task_started.connect(receive)
        task_finished.connect(receive)
        try:
            good, bad = jobtasks.add.enqueue(1, 2).id, jobtasks.fail.enqueue().id
            drain(concurrency=1)
            async_ = jobtasks.aadd.enqueue(1, 2).id
            drain()
        finally:
            task_started.disconnect(receive)
            task_finished.disconnect(receive)
        assert {sender for _, sender, _, _ in got} == {EchoMQBackend}
        assert [(name, status) for name, _, id, status in got if id == good] == [
            ("started", TaskResultStatus.RUNNING),
            ("finished", TaskResultStatus.SUCCESSFUL),
        ]
        assert [name for name, _, id, _ in got if id == bad] == ["started"] * 3 + ["finished"]
        assert [name for name, _, id, _ in got if id == async_] == ["started", "finished"]

    def test_receiver_that_raises_changes_nothing(self) -> None:
        def broken(**kwargs: Any) -> None:
            raise RuntimeError("a broken receiver")

        task_started.connect(broken)
        task_finished.connect(broken)
        try:
            id = jobtasks.add.enqueue(1, 2).id
            drain()
        finally:
            task_started.disconnect(broken)
            task_finished.disconnect(broken)
        assert Job.objects.get(pk=id).state == "completed"


class TestCancel:
    @pytest.mark.parametrize(
        ("then", "state"), [("stop", "cancelled"), ("raise", "failed"), ("return", "completed")]
    )
    def test_handler_decides_and_none_is_retried(self, trace: str, then: str, state: str) -> None:
        with running_worker():
            id = jobtasks.until_cancelled.enqueue(trace, then=then).id
            wait_until(lambda: "start 1" in marks(trace))
            assert control.cancel(id, "enough") == "requested"
            job = finished(id)
        assert (job.state, job.attempt, job.cancel_reason) == (state, 1, "enough")
        assert marks(trace) == ["start 1", "cancelled enough"]
        assert not CancelRequest.objects.exists()

    def test_is_not_written_before_the_handler_has_returned(self, trace: str) -> None:
        with running_worker(concurrency=1):
            id = jobtasks.holds_on.enqueue(trace).id
            wait_until(lambda: "start" in marks(trace))
            control.cancel(id)
            wait_until(lambda: "seen" in marks(trace))
            assert Job.objects.get(pk=id).state == "running"
            Path(f"{trace}.go").touch()
            assert finished(id).state == "cancelled"


@pytest.mark.postgres
class TestOutage:
    """Every connection of the worker is terminated: it recovers, and doesn't spin."""

    @pytest.fixture(autouse=True)
    def warnings(self, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
        with caplog.at_level(logging.WARNING, "echomq.jobs"):
            yield

    def test_while_idle(self, caplog: pytest.LogCaptureFixture) -> None:
        with running_worker():
            wait_until(lambda: _others("application_name LIKE 'echomq%%'") == 6)
            assert _terminate() >= 5
            id = jobtasks.add.enqueue(1, 2).id
            assert finished(id).state == "completed"
            wait_until(lambda: _others("application_name LIKE 'echomq%%'") == 6)
        assert caplog.text.count("worker_error") < 20

    def test_while_a_job_runs(self, trace: str) -> None:
        with running_worker():
            id = jobtasks.until_cancelled.enqueue(trace).id
            wait_until(lambda: "start 1" in marks(trace))
            _terminate()
            assert control.cancel(id, "still heard") == "requested"
            assert finished(id).state == "cancelled"
        assert marks(trace) == ["start 1", "cancelled still heard"]

    def test_again_and_again_under_load(self) -> None:
        with running_worker(), running_worker():
            ids = [jobtasks.sleep.enqueue(0.005).id for _ in range(150)]
            for _ in range(8):
                _terminate()
                time.sleep(0.1)
            for id in ids:
                assert finished(id, timeout=60).state == "completed"
        # A claim whose answer was lost is handed back, not counted against the job.
        assert all(job.attempt == 1 and not job.errors for job in Job.objects.all())

    @pytest.mark.parametrize(
        "thread", ["heartbeat", "starter", "completer", "worker", "housekeeper", "relayer"]
    )
    def test_server_that_does_not_answer_one_of_its_threads(
        self, thread: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The backend hangs, its socket stays open: the connection is cut and made anew."""
        where = f"application_name = 'echomq {thread}'"
        with running_worker(lease=3.0, heartbeat=0.5):
            wait_until(lambda: _others(where) == 1)
            hung = _pids(where)[0]
            os.kill(hung, signal.SIGSTOP)
            try:
                id = jobtasks.add.enqueue(1, 2).id
                assert finished(id).state == "completed"
                wait_until(lambda: _others(where) == 2)
            finally:
                os.kill(hung, signal.SIGCONT)
            assert f"connection_cut thread={thread}" in caplog.text
            assert Job.objects.get(pk=id).attempt == 1
            assert not Worker.objects.exclude(lost_at=None).exists()

    def test_outcomes_that_cannot_be_written_hold_up_claims(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All that has ended and isn't written would be run once more after a crash."""
        monkeypatch.setattr("echomq_app.jobs.completer.BACKLOG", 10)
        where = "application_name = 'echomq completer'"
        with running_worker(concurrency=2) as worker:
            wait_until(lambda: _others(where) == 1)
            (hung,) = _pids(where)
            os.kill(hung, signal.SIGSTOP)
            try:
                ids = [job.id for job in enqueue_many(jobtasks.noop, [call(n) for n in range(900)])]
                wait_until(lambda: worker._completer.is_behind and not worker._attempts)
                before = Job.objects.running().count()
                # Each turn of the worker would claim: it has been through some.
                for _ in range(20):
                    worker._waiter.set()
                    time.sleep(0.01)
                assert Job.objects.running().count() == before < 900
            finally:
                os.kill(hung, signal.SIGCONT)
            for id in ids:
                finished(id, timeout=60)

    @pytest.mark.skipif(POOLED, reason="the pool of the test itself would be full of dead ones")
    def test_database_that_refuses_for_a_while(self, caplog: pytest.LogCaptureFixture) -> None:
        name = connection.settings_dict["NAME"]
        admin = _admin()
        with running_worker():
            id = jobtasks.sleep.enqueue(0.2).id
            wait_until(lambda: Job.objects.get(pk=id).state == "running")
            connections.close_all()
            with admin.cursor() as cursor:
                cursor.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
                try:
                    # The worker's own: others belong to threads that other tests will use.
                    cursor.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                        " WHERE datname = %s AND application_name LIKE 'echomq%%'",
                        (name,),
                    )
                    wait_until(lambda: "doing=settle" in caplog.text)
                    refusals = caplog.text.count("worker_error")
                finally:
                    cursor.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
            assert finished(id).state == "completed"
        admin.close()
        assert refusals < 60  # five threads with growing pauses
        assert Worker.objects.filter(lost_at=None).exists()


def _pids(where: str) -> list[int]:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
            f" AND pid <> pg_backend_pid() AND {where}"
        )
        return [pid for (pid,) in cursor.fetchall()]


def _others(where: str) -> int:
    return len(_pids(where))


def _terminate() -> int:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " AND application_name LIKE 'echomq%%'"
        )
        count: int = cursor.fetchone()[0]
    return count


def _admin() -> Any:
    other = connections["default"].copy()
    other.settings_dict = {**other.settings_dict, "NAME": "postgres", "OPTIONS": {}}
    return other


def test_pauses_after_failures_grow_and_begin_anew_after_a_success() -> None:
    pauses: list[float] = []

    class Counting(Wakeup):
        def pause(self, seconds: float) -> None:
            pauses.append(seconds)

    def fail() -> str:
        raise OperationalError("no database")

    service = service_connection(USING, "test", Counting(), patience=30, longest_pause=0.3)
    with service as persistent:
        for call in (*[fail] * 5, lambda: "well", fail):
            persistent.attempt("work", call, default="")
    assert pauses == [0.05, 0.1, 0.2, 0.3, 0.3, 0.05]


def test_no_thread_is_left() -> None:
    def ours() -> set[threading.Thread]:
        return {
            t for t in threading.enumerate() if t.name.startswith("echomq-") and t not in before
        }

    before = set(threading.enumerate())
    drain()
    wait_until(lambda: not ours())


@pytest.mark.postgres
class TestOtherTransactions:
    def test_client_that_stays_in_a_transaction_that_enqueued_delays_nobody(self) -> None:
        entered, leave = threading.Event(), threading.Event()
        slow: list[str] = []

        def stopped_client() -> None:
            try:
                with transaction.atomic():
                    slow.append(jobtasks.add.enqueue(0, 0).id)
                    entered.set()
                    leave.wait(60)
            finally:
                connections.close_all()

        client = threading.Thread(target=stopped_client)
        client.start()
        try:
            assert entered.wait(20)
            with running_worker():
                ids = [jobtasks.add.enqueue(n, n).id for n in range(20)]
                assert [finished(id).state for id in ids] == ["completed"] * 20
                # The log goes on, too: the relay moves what is committed.
                log = Stream("emq.default")
                wait_until(lambda: log.info().write_cursor == 60)
                leave.set()
                client.join(20)
                assert finished(slow[0]).state == "completed"
        finally:
            leave.set()
            client.join(20)
        for id in [*ids, *slow]:
            assert history(id) == ["enqueued", "started", "completed"]

    def test_due_job_that_somebody_holds_keeps_nobody_busy(self) -> None:
        soon = timezone.now() + dt.timedelta(seconds=0.2)
        id = jobtasks.add.using(run_after=soon).enqueue(1, 2).id
        looks: list[float] = []
        with session() as other:
            other.execute("BEGIN")
            other.execute("SELECT 1 FROM echomq_job FOR UPDATE")
            wait_until(lambda: timezone.now() > soon)
            housekeeper = Housekeeper(USING, ["default"], interval=5, patience=30, on_ready=bool)
            looks.append(housekeeper._promote())
            other.execute("ROLLBACK")
        looks += [housekeeper._promote(), housekeeper._promote()]
        assert looks == [5, SHORTEST, 5]
        assert Job.objects.get(pk=id).state == "ready"

    def test_worker_works_in_a_serializable_project(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever the server's default and Django's option: its own connections aren't."""
        from django.db.backends.postgresql.psycopg_any import IsolationLevel

        options = connections.settings["default"]["OPTIONS"]
        monkeypatch.setitem(options, "isolation_level", IsolationLevel.SERIALIZABLE)
        level = r"-c default_transaction_isolation=serializable"
        monkeypatch.setitem(options, "options", level)
        connections.close_all()
        try:
            with running_worker(), running_worker():
                ids = [jobtasks.fail.enqueue().id for _ in range(10)]
                later = timezone.now() + dt.timedelta(seconds=0.3)
                ids.append(jobtasks.add.using(run_after=later).enqueue(1, 2).id)
                states = [finished(id).state for id in ids]
            assert states == ["failed"] * 10 + ["completed"]
            assert len(history(ids[0])) == 7
        finally:
            connections.close_all()


def test_project_without_time_zones(settings: Any) -> None:
    settings.USE_TZ = False
    settings.TIME_ZONE = "Asia/Tokyo"
    try:
        due = timezone.now() + dt.timedelta(seconds=0.5)
        assert due.tzinfo is None
        ids = [jobtasks.add.enqueue(1, 2).id, jobtasks.add.using(run_after=due).enqueue(3, 4).id]
        far = jobtasks.add.using(run_after=due + dt.timedelta(hours=1)).enqueue(1, 1)
        with running_worker():
            jobs = [finished(id) for id in ids]
        assert [job.state for job in jobs] == ["completed"] * 2
        assert jobs[1].started_at is not None and jobs[1].started_at >= due
        result = jobtasks.add.get_result(ids[0])
        assert result.started_at is not None and result.started_at.tzinfo is None
        assert abs(timezone.now() - result.started_at) < dt.timedelta(minutes=1)
        assert Job.objects.get(pk=far.id).state == "scheduled"
        assert records(ids[0])[0][1]["at"].endswith("+00:00")
        assert control.cancel(far.id, "enough") == "cancelled"
    finally:
        connections.close_all()


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_second_database_by_a_router(settings: Any, trace: str) -> None:
    settings.DATABASE_ROUTERS = ["tests.integration.jobs.OtherRouter"]
    id, pending = jobtasks.fail.enqueue().id, jobtasks.add.enqueue(1, 2).id
    assert control.cancel(pending) == "cancelled"
    with running_worker():
        running = jobtasks.until_cancelled.enqueue(trace).id
        wait_until(lambda: "start 1" in marks(trace))
        assert control.cancel(running) == "requested"
        assert [finished(id).state, finished(running).state] == ["failed", "cancelled"]
    assert history(id)[-1] == "failed"
    assert Job.objects.using("other").count() == 3
    assert Job.objects.using("default").count() == Worker.objects.using("default").count() == 0


def test_a_queue_that_cannot_be_claimed_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """And is left alone for a while: the others' jobs come quicker than it can fail."""
    task: Any = jobtasks.add
    stuck = task.using(queue_name="a").enqueue(1, 2).id
    with refusing("UPDATE", "echomq_job", "OLD.queue = 'a'") as allow:
        with running_worker(queues=("a", "b"), concurrency=1, lease=30.0):
            begun = time.monotonic()
            for number in range(100):
                finished(task.using(queue_name="b").enqueue(number, 2).id)
            seconds = time.monotonic() - begun
            assert Job.objects.get(pk=stuck).state == "ready"
            failures = caplog.text.count("doing=claim item=a")
            assert 1 <= failures < 10 + seconds / LONGEST_REST
            allow()
            assert finished(stuck).state == "completed"
    assert "event=worker_error" not in caplog.text
