"""The seismic replay, and the page's plain HTTP."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import pytest
from django.http import HttpResponse
from django.test import Client

from echomq_app.core.ids import new_job_id
from echomq_app.jobs import control
from echomq_app.models import Job, Record
from echomq_app.stream import Stream
from project.seismic.quakes import FASTEST, QUAKE, QUEUE, REASON_MAX, STREAM, TOTAL, week
from project.seismic.tasks import replay
from tests import jobtasks
from tests.acceptance.workers import starting_workers, wait_for_state
from tests.integration.jobs import finished, hearing, running_worker
from tests.wait import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def positions_and_ids() -> list[tuple[int, str]]:
    return [(record.position, record.data["id"]) for record in Stream(STREAM).replay()]


EVERY_QUAKE_ONCE = list(enumerate(quake["id"] for quake in week()))


def test_the_week_is_whole_and_in_order() -> None:
    quakes = list(week())
    assert len(quakes) == len({quake["id"] for quake in quakes}) == TOTAL
    assert [quake["time"] for quake in quakes] == sorted(quake["time"] for quake in quakes)


def test_replay_fills_the_log_once_and_announces_what_it_added() -> None:
    with running_worker(queues=(QUEUE,)), hearing(QUEUE) as heard:
        first = finished(replay.enqueue(speed=FASTEST).id, timeout=60)
        told = [event.data for event in heard.so_far() if event.event == QUAKE]
        heard.clear()
        second = finished(replay.enqueue(speed=FASTEST).id, timeout=60)
        told_again = [event for event in heard.so_far() if event.event == QUAKE]
    assert first.result == {"added": TOTAL, "duplicates": 0}
    assert second.result == {"added": 0, "duplicates": TOTAL}
    assert second.progress == 1
    assert positions_and_ids() == EVERY_QUAKE_ONCE
    assert [(data["position"], data["quake"]["id"]) for data in told] == EVERY_QUAKE_ONCE
    assert told_again == []
    record = Stream(STREAM).read(limit=1).records[0]
    assert (record.type, record.key) == ("earthquake", "uw")
    assert told[0]["id"] == str(record.id)
    assert told[0]["epoch"] == record.epoch


def test_killed_worker_is_followed_by_another_that_adds_nothing_twice(
    subprocess_env: dict[str, str],
) -> None:
    with starting_workers(subprocess_env) as start:
        worker = start("--queue", QUEUE)
        job_id = replay.enqueue(speed=300).id
        wait_until(
            lambda: Record.objects.filter(stream__name=STREAM).count() >= 100, 30, "100 records"
        )
        worker.kill()
        assert Record.objects.filter(stream__name=STREAM).count() < TOTAL
        start("--queue", QUEUE)
        job = wait_for_state(job_id, "completed", timeout=90)
    assert job.attempt == 2
    result = cast(dict[str, int], job.result)
    assert result["duplicates"] >= 100
    assert sum(result.values()) == TOTAL
    assert positions_and_ids() == EVERY_QUAKE_ONCE


def test_cancelled_replay_stops_between_two_earthquakes_with_the_reason() -> None:
    with running_worker(queues=(QUEUE,)), hearing(QUEUE) as heard:
        # One a second: it stops in the middle of a pause, not at the next earthquake.
        job_id = replay.enqueue(speed=1).id
        wait_until(lambda: any(event.event == QUAKE for event in heard), 20, "it began")
        assert control.cancel(job_id, "seen enough") == "requested"
        job = finished(job_id)
    assert (job.state, job.cancel_reason) == ("cancelled", "seen enough")
    assert Stream(STREAM).info().count < 10


def test_a_speed_that_is_none_fails_the_job() -> None:
    with running_worker(queues=(QUEUE,)):
        job = finished(replay.enqueue(speed=0).id)
    assert job.state == "failed"
    assert "1 to 2000 a second" in job.errors[-1]["message"]


# HTTP

Post = Callable[..., HttpResponse]


@pytest.fixture
def post(client: Client) -> Post:
    """Give a function that posts JSON to one of the page's addresses."""

    def send(name: str, body: Any) -> Any:
        return client.post(f"/seismic/{name}", body, content_type="application/json")

    return send


def error_of(response: Any) -> str:
    return str(response.json()["error"])


def test_page_has_nothing_inline_and_forbids_it(client: Client) -> None:
    response = client.get("/")
    markup = response.content.decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]* src=)", markup)
    assert "default-src 'none'" in response["Content-Security-Policy"]
    assert "unsafe" not in response["Content-Security-Policy"]
    assert 'data-websocket="/ws/seismic/"' in markup


def test_page_says_when_there_is_no_broker(client: Client, settings: Any) -> None:
    notice = re.compile(r'id="no-broker" class="notice"(?P<hidden> hidden)?>')

    def hidden() -> bool:
        found = notice.search(client.get("/").content.decode())
        assert found
        return bool(found["hidden"])

    assert not hidden()  # the tests' settings have the layer in memory
    settings.CHANNEL_LAYERS = {
        "default": {"BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer"}
    }
    assert hidden()


@pytest.mark.parametrize("name", ["start", "cancel", "clear"])
def test_posts_need_the_csrf_token(name: str) -> None:
    client = Client(enforce_csrf_checks=True)
    response = client.post(f"/seismic/{name}", {}, content_type="application/json")
    assert response.status_code == 403
    assert not Job.objects.exists()


@pytest.mark.parametrize("name", ["start", "cancel", "clear"])
def test_posts_only(client: Client, name: str) -> None:
    assert client.get(f"/seismic/{name}").status_code == 405


@pytest.mark.parametrize(
    "speed", [0, 0.99, FASTEST + 1, -5, "fast", "20", None, True, [20], float("nan"), float("inf")]
)
def test_speed_out_of_range_is_refused(post: Post, speed: Any) -> None:
    response = post("start", {"speed": speed})
    assert response.status_code == 400
    assert error_of(response) == "speed is a number from 1 to 2000 (earthquakes a second)."
    assert not Job.objects.exists()


@pytest.mark.parametrize(
    ("body", "type", "message"),
    [
        ("{", "application/json", "no JSON"),
        ("[" * 100_000, "application/json", "no JSON"),
        ("\udcff".encode("utf-8", "surrogateescape"), "application/json", "no JSON"),
        ("[1]", "application/json", "no JSON object"),
        ("speed=20", "application/x-www-form-urlencoded", "Content-Type"),
    ],
)
def test_body_that_is_no_json_object_is_refused(
    client: Client, body: Any, type: str, message: str
) -> None:
    response = client.post("/seismic/start", body, content_type=type)
    assert response.status_code == 400
    assert message in error_of(response)


def test_start_status_and_cancel_of_a_job_that_waits(client: Client, post: Post) -> None:
    assert client.get("/seismic/status").json() == {"job": None}
    response: Any = post("start", {"speed": 20})
    assert response.status_code == 201
    job_id = response.json()["job_id"]
    status = client.get("/seismic/status").json()["job"]
    assert (status["id"], status["state"], status["attempt"]) == (job_id, "ready", 0)

    response = post("start", {"speed": 20})
    assert response.status_code == 409
    assert "under way" in error_of(response)
    assert post("clear", {}).status_code == 409

    response = post("cancel", {"job_id": job_id, "reason": " wrong speed "})
    assert response.json()["answer"] == "cancelled"
    status = client.get("/seismic/status").json()["job"]
    assert (status["state"], status["reason"]) == ("cancelled", "wrong speed")
    response = post("cancel", {"job_id": job_id, "reason": "again"})
    assert response.json()["answer"] == "finished"


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("x" * 20_000, f"at most {REASON_MAX} characters"),
        (7, f"at most {REASON_MAX} characters"),
        ("a\0b", "NUL"),
        ("\ud800", "surrogate"),
    ],
)
def test_reason_that_cannot_be_kept_is_refused(post: Post, reason: Any, message: str) -> None:
    job_id = replay.enqueue(speed=20).id
    response = post("cancel", {"job_id": job_id, "reason": reason})
    assert response.status_code == 400
    assert message in error_of(response)
    assert Job.objects.get(pk=job_id).state == "ready"


def test_cancel_of_what_is_no_replay_is_refused(post: Post) -> None:
    for wrong in (None, 5, "x", "EVT" + "0" * 26):
        assert post("cancel", {"job_id": wrong}).status_code == 400
    assert post("cancel", {"job_id": str(new_job_id())}).status_code == 404
    other = jobtasks.add.enqueue(1, 2).id
    assert post("cancel", {"job_id": other}).status_code == 404
    assert Job.objects.get(pk=other).state == "ready"


def test_clear_begins_another_life_of_the_log(post: Post) -> None:
    assert post("clear", {}).status_code == 200  # nothing there yet
    stream = Stream(STREAM)
    before = stream.append({"id": "a"}, idempotency_key="a").epoch
    assert post("clear", {}).status_code == 200
    again = stream.append({"id": "a"}, idempotency_key="a")
    assert (again.position, again.duplicate) == (0, False)
    assert again.epoch != before
