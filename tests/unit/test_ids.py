"""Branded ids: text form, order, the bits of an EVT id, and the wrong brand."""

from __future__ import annotations

import os
import threading
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echomq_app.core.ids import MAX_POSITION, EventId, JobId, event_id, new_job_id
from echomq_app.exceptions import WrongBrand

milliseconds = st.integers(0, (1 << 48) - 1)
positions = st.integers(0, MAX_POSITION)
random_bits = st.integers(0, (1 << 32) - 1)


@given(st.integers(0, (1 << 128) - 1))
def test_text_form_is_29_characters_and_comes_back(number: int) -> None:
    for kind in (JobId, EventId):
        text = str(kind.from_int(number))
        assert len(text) == 29 and text.startswith(kind.brand)
        assert kind.parse(text) == uuid.UUID(int=number)
        assert type(kind.parse(text)) is kind


@given(st.integers(0, (1 << 128) - 1), st.integers(0, (1 << 128) - 1))
def test_text_sorts_like_the_bytes(one: int, other: int) -> None:
    assert (str(JobId.from_int(one)) < str(JobId.from_int(other))) == (one < other)


@given(milliseconds, positions, random_bits)
def test_event_id_is_a_uuid7_that_carries_its_position(at: int, position: int, bits: int) -> None:
    id = event_id(at, position, bits)
    assert (id.version, id.variant) == (7, uuid.RFC_4122)
    assert id.int >> 80 == at
    assert id.position == position
    assert id.tail == f"{bits:08x}"


@given(milliseconds, positions, positions, random_bits, random_bits)
def test_id_order_is_position_order(at: int, a: int, b: int, x: int, y: int) -> None:
    if a != b:
        assert (event_id(at, a, x) < event_id(at, b, y)) == (a < b)


@pytest.mark.parametrize(
    "wrong",
    [
        "EVT" + "0" * 26,
        "JOB" + "0" * 25,
        "JOB" + "0" * 27,
        "JOB" + "Z" * 26,  # more than 128 bits
        "JOB" + "U" + "0" * 25,  # no letter of Crockford's
        "job" + "0" * 26,
        "",
        None,
        7,
        uuid.uuid4(),
        EventId.from_int(1),
    ],
)
def test_wrong_brand_is_refused(wrong: object) -> None:
    with pytest.raises(WrongBrand):
        JobId.parse(wrong)


def test_job_ids_of_a_process_are_ordered_and_unique_across_threads() -> None:
    minted: list[list[JobId]] = [[] for _ in range(8)]
    start = threading.Barrier(8)

    def mint(into: list[JobId]) -> None:
        start.wait()
        into.extend(new_job_id() for _ in range(2_000))

    threads = [threading.Thread(target=mint, args=(into,)) for into in minted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(ids == sorted(ids) for ids in minted)
    assert len({id for ids in minted for id in ids}) == 16_000


def test_forked_children_mint_different_ids() -> None:
    new_job_id()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, str(new_job_id()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(read, 29).decode()
    os.close(read)
    os.close(write)
    assert theirs != str(new_job_id())
