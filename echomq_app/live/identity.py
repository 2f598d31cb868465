"""Whose a connection is: by the session of its cookie, or by a signed token."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections.abc import Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Protocol, cast

from django.contrib.auth import get_user, get_user_model
from django.contrib.auth.base_user import AbstractBaseUser
from django.contrib.auth.models import AnonymousUser
from django.core import signing
from django.http import HttpRequest
from django.utils.crypto import constant_time_compare

from ..conf import current, project_setting
from ..exceptions import BadToken, InvalidArgument
from .logouts import just_ended
from .origin import is_ours, origin_allowed, request_of
from .visits import in_shared_visit

logger = logging.getLogger("echomq")

User = AbstractBaseUser | AnonymousUser

_SALT = "echomq.live.token"
_TOKEN_MAX = 2_000


class Proof(Protocol):
    """Why a connection is somebody's."""

    @property
    def expires_at(self) -> float | None:
        """When it ends by itself, as Unix time."""

    def load(self) -> User | None:
        """Return the user as the database has it now; `None` when this proves nothing more."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose a connection is.

    `user` is as of the time when the identity was made: at the start of the connection, or at
    the start of a round of questions (`refreshed`), which is what hooks are asked with.
    """

    user: User
    proof: Proof = dataclasses.field(repr=False)

    @property
    def authenticated(self) -> bool:
        """Tell whether it is somebody's."""
        return bool(self.user.is_authenticated)

    async def still_valid(self) -> bool:
        """Tell whether it is still that user's: a fresh look at the session, or the token.

        False once the user has logged out, was deleted or deactivated, has another password,
        or the token has expired. Nobody's connection stays nobody's.
        """
        return await self.reload() is not None

    async def reload(self) -> User | None:
        """Load the user anew, without cached permissions; `None` when no longer valid."""
        return await in_shared_visit(self.proof.load)

    async def refreshed(self) -> Identity | None:
        """Return this identity with the user as of now; `None` when no longer valid."""
        user = await self.reload()
        return None if user is None else dataclasses.replace(self, user=user)


async def identify(scope: Mapping[str, Any]) -> Identity:
    """Say whose session cookie the connection of an ASGI scope has.

    Nobody's if its page is of another site (see `origin_allowed`): a browser sends our
    cookies from there too.
    """
    request = request_of(scope)
    key = request.COOKIES.get(project_setting("SESSION_COOKIE_NAME"), "")
    if not key or not (key.isascii() and key.isprintable()):
        return NOBODY
    if not origin_allowed(scope):
        _log_foreign(request)
        return NOBODY
    proof = _Session(key)
    user = await in_shared_visit(proof.load)
    return NOBODY if user is None else Identity(user=user, proof=proof)


def identity_of(request: HttpRequest) -> Identity:
    """Say whose request this is that came through Django: `Authorization: Bearer`, or its user.

    Sync, for views. Raises `BadToken`.
    """
    token = bearer_token(request)
    if token is not None:
        proof = _read_token(token)
        return _identity(proof, proof.load())
    user = getattr(request, "user", None)
    if user is None or not user.is_authenticated:
        return NOBODY
    if not is_ours(request):
        _log_foreign(request)
        return NOBODY
    return Identity(user=user, proof=_Asked(user))


async def identify_token(token: str) -> Identity:
    """Say whose token this is; raise `BadToken` for one that isn't good, or no longer."""
    proof = _read_token(token)
    return _identity(proof, await in_shared_visit(proof.load))


def _read_token(token: str) -> _Token:
    if len(token) > _TOKEN_MAX:
        raise BadToken("That is no token.")
    try:
        claims = signing.loads(token, salt=_SALT)
    except signing.BadSignature:
        raise BadToken("The token was not made here; ask for a new one.") from None
    proof = _Token(claims["user"], claims["digest"], claims["expires"])
    if proof.expired:
        raise BadToken("The token has expired; ask for a new one.")
    return proof


def _identity(proof: _Token, user: User | None) -> Identity:
    if user is None:
        raise BadToken("The token's user may not log in, or has another password; ask for a new.")
    return Identity(user=user, proof=proof)


def make_token(user: AbstractBaseUser, *, max_age: float | None = None) -> str:
    """Make a token that stands for `user`, for clients without a session cookie.

    Good for `max_age` seconds (`TOKEN_MAX_AGE`), while the user is active and the password
    stays. What was opened with it ends with it. It is bound to no session: a logout leaves it
    good until it expires.
    """
    if user.pk is None or not user.is_active:
        raise InvalidArgument("A token is for a user who is stored and active.")
    age = current().TOKEN_MAX_AGE if max_age is None else max_age
    if not age > 0:
        raise InvalidArgument(f"max_age is a number of seconds above 0, not {max_age!r}.")
    claims = {"user": str(user.pk), "digest": _digests(user)[0], "expires": time.time() + age}
    return signing.dumps(claims, salt=_SALT)


def bearer_token(request: HttpRequest) -> str | None:
    """Return the token of an `Authorization: Bearer` header, if there is such a header."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _log_foreign(request: HttpRequest) -> None:
    origin = request.headers.get("Origin")
    logger.warning("event=foreign_origin origin=%.200r path=%.200r", origin, request.path)


class _Nobody:
    expires_at: float | None = None

    def load(self) -> User | None:
        return AnonymousUser()


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """A request that is being answered: Django has just loaded its user."""

    user: User
    expires_at: float | None = None

    def load(self) -> User | None:
        return self.user


@dataclasses.dataclass(frozen=True, slots=True)
class _Session:
    key: str
    expires_at: float | None = None

    def load(self) -> User | None:
        if just_ended(self.key):
            return None
        store = import_module(project_setting("SESSION_ENGINE")).SessionStore(self.key)
        request = SimpleNamespace(session=_SessionData(store.load()))
        user = get_user(cast(HttpRequest, request))
        return user if user.is_authenticated else None


class _SessionData(dict[str, Any]):
    """A session's content for Django's `get_user`, which ends or renews the session by the way.

    Here it must not: a socket can't be given another cookie, so a renewed session is a lost one.
    """

    def flush(self) -> None:
        self.clear()

    def cycle_key(self) -> None:
        pass


@dataclasses.dataclass(frozen=True, slots=True)
class _Token:
    pk: str
    digest: str
    expires_at: float | None

    @property
    def expired(self) -> bool:
        return self.expires_at is not None and time.time() >= self.expires_at

    def load(self) -> User | None:
        if self.expired:
            return None
        user = get_user_model()._default_manager.filter(pk=self.pk).first()
        if user is None or not user.is_active:
            return None
        same = any(constant_time_compare(self.digest, digest) for digest in _digests(user))
        return user if same else None


def _digests(user: AbstractBaseUser) -> list[str]:
    """Return what changes with the password, under the secret key and under its fallbacks."""
    if not hasattr(user, "get_session_auth_hash"):  # a user model of the project's own
        return [""]
    hashes = [user.get_session_auth_hash(), *user.get_session_auth_fallback_hash()]
    # Not the hash itself: sessions hold it.
    return [hashlib.sha256(f"{_SALT}:{text}".encode()).hexdigest()[:32] for text in hashes]


NOBODY = Identity(user=AnonymousUser(), proof=_Nobody())
