"""The feed's events: what is refused, the wire form, and the numbers of senders."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echomq_app.core.event import Event, Gap, from_wire, to_wire
from echomq_app.core.ids import EventId, JobId, new_job_id
from echomq_app.core.numbering import SenderNumbers
from echomq_app.exceptions import InvalidName, InvalidPayload, WrongBrand

JOB = new_job_id()


@pytest.mark.parametrize(
    "data",
    [None, 0, 2**80, -1.5, "ü", [], {"a": [1, None, True, {"b": "c"}]}, "\N{PILE OF POO}"],
)
def test_what_is_published_comes_back(data: Any) -> None:
    wire = to_wire("progress", JOB, data, limit=1000)
    message = json.loads(json.dumps({"queue": "q", "events": [wire]}))

    [event] = from_wire(message)

    assert event == Event(queue="q", event="progress", job_id=JOB, data=data)
    assert type(event.job_id) is JobId


def test_the_wire_form_is_three_texts_whatever_the_data() -> None:
    assert to_wire("x", str(JOB), {"n": 2**80}, limit=1000) == {
        "event": "x",
        "job_id": str(JOB),
        "data": '{"n":1208925819614629174706176}',
    }


@pytest.mark.parametrize(
    "job_id", [str(EventId.from_int(1)), EventId.from_int(1), "JOB", "", None, 7, "JOB" + "I" * 26]
)
def test_another_brand_is_refused(job_id: Any) -> None:
    with pytest.raises(WrongBrand):
        to_wire("progress", job_id, None, limit=1000)


@pytest.mark.parametrize("name", ["", "a b", "a\n", "ü", "x" * 101, None, 7, b"a", "a/b"])
def test_a_bad_event_name_is_refused(name: Any) -> None:
    with pytest.raises(InvalidName):
        to_wire(name, JOB, None, limit=1000)


@pytest.mark.parametrize(
    "data", [float("nan"), {1: 2}, "\0", "\ud800", object(), {"a": {1, 2}}, "x" * 1000]
)
def test_data_that_is_no_json_or_too_large_is_refused(data: Any) -> None:
    with pytest.raises(InvalidPayload):
        to_wire("progress", JOB, data, limit=1000)


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"queue": "q"},
        {"queue": "q", "events": 7},
        {"queue": "q", "events": [{}]},
        {"queue": "q", "events": [{"event": "a", "job_id": "EVT", "data": None}]},
        {"queue": "q", "events": [{"event": "a", "job_id": str(JOB), "data": "{"}]},
        {"queue": "q", "events": [{"event": "a", "job_id": str(JOB), "data": 7}]},
        {"queue": "a b", "events": []},
        {"queue": "q", "events": [None]},
    ],
)
def test_a_malformed_message_is_an_error_of_three_kinds(message: dict[str, Any]) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        from_wire(message)


def test_events_and_gaps_are_values() -> None:
    assert Gap(reason="lost") == Gap(reason="lost")
    with pytest.raises(AttributeError):
        Gap(reason="lost").reason = "x"  # type: ignore[misc]


# Numbers.


def test_the_first_number_sets_the_start_and_a_hole_is_counted() -> None:
    numbers = SenderNumbers()

    assert numbers.take("a", 17) == 0
    assert numbers.take("a", 18) == 0
    assert numbers.take("a", 22) == 3
    assert numbers.take("a", 23) == 0


def test_a_repeat_is_told_from_news_and_senders_apart() -> None:
    numbers = SenderNumbers()
    for number in range(3):
        numbers.take("a", number)

    assert numbers.take("a", 2) is None
    assert numbers.take("a", 0) is None
    assert numbers.take("b", 0) == 0
    assert numbers.take("a", 3) == 0


def test_a_forgotten_sender_starts_over() -> None:
    numbers = SenderNumbers(senders=2)
    for sender in "abc":
        numbers.take(sender, 5)

    assert numbers.take("a", 100) == 0
    numbers.forget()
    assert numbers.take("a", 7) == 0


@given(arrivals=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 30))))
def test_whatever_arrives_nothing_is_new_twice_and_every_hole_is_counted(
    arrivals: list[tuple[str, int]],
) -> None:
    numbers = SenderNumbers()
    new: dict[str, list[int]] = {"a": [], "b": []}
    missing = {"a": 0, "b": 0}
    for sender, number in arrivals:
        hole = numbers.take(sender, number)
        if hole is not None:
            new[sender].append(number)
            missing[sender] += hole
    for sender, seen in new.items():
        assert seen == sorted(set(seen))
        if seen:
            assert missing[sender] == seen[-1] - seen[0] + 1 - len(seen)
