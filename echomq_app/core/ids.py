"""Branded ids: a UUIDv7 whose text form says what it names.

`JOB` + 26 characters names a job, `EVT` + 26 characters a stream record. The 26
are the 128 bits in Crockford's base32, so the text sorts like the bytes. A wrong
brand is refused by type, before any I/O.

An EVT id is a UUIDv7 (RFC 9562, section 5.7) whose counter bits are the record's
position (section 6.2, method 1): 48 bits milliseconds of `recorded_at`, version,
12 + 30 bits position, variant between them, 32 random bits. Within a stream, id
order is position order, however many writers there are.
"""

from __future__ import annotations

import os
import struct
import threading
import time
import uuid
from collections.abc import Iterable
from functools import lru_cache
from typing import ClassVar, Self

from ..exceptions import WrongBrand

MAX_POSITION = (1 << 42) - 1
"""Largest position that fits into an EVT id."""

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_VALUE = {char: value for value, char in enumerate(_ALPHABET)}
_PAIRS = [a + b for a in _ALPHABET for b in _ALPHABET]
_TRIPLES = [pair + c for pair in _PAIRS for c in _ALPHABET]
_LOW = (1 << 60) - 1
_VERSION = 0x7 << 76
_VARIANT = 0b10 << 62

# A UUID refuses assignment. Its slots' own setters take it, in a third of the time of
# object.__setattr__: every record that is read or written makes an id.
_new = object.__new__
_set_int = uuid.UUID.__dict__["int"].__set__
_set_is_safe = uuid.UUID.__dict__["is_safe"].__set__
_UNKNOWN = uuid.SafeUUID.unknown


def base32(bits: int) -> str:
    """Return 128 bits as 26 characters."""
    # From two halves that are quick to shift: every record that goes to a page is written so.
    low = bits & _LOW
    return (
        f"{_high_base32(bits >> 60)}{_TRIPLES[low >> 45]}{_TRIPLES[low >> 30 & 32767]}"
        f"{_TRIPLES[low >> 15 & 32767]}{_TRIPLES[low & 32767]}"
    )


@lru_cache(maxsize=256)  # the time and the version: records of one append have them in common
def _high_base32(high: int) -> str:
    return (
        f"{_PAIRS[high >> 60]}{_TRIPLES[high >> 45 & 32767]}{_TRIPLES[high >> 30 & 32767]}"
        f"{_TRIPLES[high >> 15 & 32767]}{_TRIPLES[high & 32767]}"
    )


def tail_of(bits: int) -> str:
    """Return the random 32 bits of an EVT id in hexadecimal: what a resume token remembers."""
    return f"{bits & 0xFFFFFFFF:08x}"


class BrandedId(uuid.UUID):
    """A UUID that knows what it names. Equal to the plain UUID of the same bits."""

    brand: ClassVar[str] = ""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{self.brand}{base32(self.int)}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    @classmethod
    def parse(cls, value: object) -> Self:
        """Return `value` as an id of this brand, or raise `WrongBrand`.

        Takes an id of this class or its text. A plain UUID is refused: it doesn't
        say what it names.
        """
        if type(value) is cls:
            return value
        if isinstance(value, str):
            return cls._parse_text(value)
        raise WrongBrand(
            f"Expected an id that starts with {cls.brand!r}, not {type(value).__name__} "
            f"{str(value)[:60]!r}."
        )

    @classmethod
    def from_uuid(cls, value: uuid.UUID) -> Self:
        """Brand a UUID that came from the column of this kind."""
        return cls.from_int(value.int)

    @classmethod
    def from_int(cls, value: int) -> Self:
        """Brand 128 bits."""
        self = _new(cls)
        _set_int(self, value)
        _set_is_safe(self, _UNKNOWN)
        return self

    @classmethod
    def _parse_text(cls, text: str) -> Self:
        if not text.startswith(cls.brand):
            raise WrongBrand(f"Expected an id that starts with {cls.brand!r}, not {text[:60]!r}.")
        body = text[len(cls.brand) :]
        number = 0
        try:
            for char in body:
                number = number << 5 | _VALUE[char]
        except KeyError:
            raise WrongBrand(
                f"{text[:60]!r} has a character that is not in Crockford's base32 (capitals)."
            ) from None
        if len(body) != 26 or number >> 128:
            raise WrongBrand(f"{text[:60]!r} is not {cls.brand!r} and 26 characters.")
        return cls.from_int(number)


class JobId(BrandedId):
    """Names a job. A plain UUIDv7, minted where the job is enqueued."""

    brand = "JOB"
    __slots__ = ()


class EventId(BrandedId):
    """Names a stream record. Minted where its position is known."""

    brand = "EVT"
    __slots__ = ()

    @property
    def position(self) -> int:
        """The record's position in its stream."""
        return (self.int >> 64 & 0xFFF) << 30 | self.int >> 32 & 0x3FFFFFFF

    @property
    def tail(self) -> str:
        """See `tail_of`."""
        return tail_of(self.int)


def event_id(milliseconds: int, position: int, random_bits: int) -> EventId:
    """Put an EVT id together. `random_bits`: 32 of them."""
    return EventId.from_int(
        milliseconds << 80
        | _VERSION
        | (position >> 30) << 64
        | _VARIANT
        | (position & 0x3FFFFFFF) << 32
        | random_bits
    )


class _JobIds:
    """UUIDv7 with a counter (RFC 9562, section 6.2, method 1): monotonic in a process."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.Lock()
        self._milliseconds = 0
        self._counter = 0

    def mint(self, count: int) -> list[int]:
        entropy = os.urandom(5 + 4 * count)
        now = time.time_ns() // 1_000_000
        with self._lock:
            if now > self._milliseconds:
                self._milliseconds = now
                # The counter starts low enough that a millisecond can't use it up.
                self._counter = int.from_bytes(entropy[:5], "big")
            first = self._counter + 1
            self._counter += count
            high = self._milliseconds << 80 | _VERSION | _VARIANT
        return [
            high | (n >> 30) << 64 | (n & 0x3FFFFFFF) << 32 | random_bits
            for n, (random_bits,) in enumerate(struct.iter_unpack(">I", entropy[5:]), first)
        ]


_job_ids = _JobIds()
os.register_at_fork(after_in_child=_job_ids.reset)


def new_job_id() -> JobId:
    """Mint a JOB id; later ones of this process sort after earlier ones."""
    return JobId.from_int(_job_ids.mint(1)[0])


def new_job_numbers(count: int) -> list[int]:
    """Mint JOB ids, in ascending order, as 128 bits each; see `new_job_id`."""
    return _job_ids.mint(count)


def job_texts(numbers: Iterable[int]) -> list[str]:
    """Return the text forms of JOB ids."""
    return ["JOB" + base32(number) for number in numbers]
