"""Session tokens: what lets a sandbox make model calls, and for which attempt of which session.

A token is a JWT (HS256) with the claims ``sid``, ``att`` and ``exp``. It stands in the URL path, which every agent
program leaves as it is. Neither the secret nor a token goes to a topic or a log.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path
from typing import TypeVar

import jwt
import msgspec

from polar.settings import Settings

ALGORITHM = "HS256"
HIDDEN = "[token]"

R = TypeVar("R", bound=msgspec.Struct)


class InvalidToken(ValueError):
    """Not a token of ours, or one that has expired."""


class SessionToken(msgspec.Struct, frozen=True):
    """``expires`` is unix seconds; ``raw`` is the token as it stands in the URL."""

    session_id: str
    attempt: int
    expires: float
    raw: str


def sign(secret: str, session_id: str, attempt: int, ttl_s: float) -> str:
    """A token that is valid for ``ttl_s`` seconds from now."""
    claims = {"sid": session_id, "att": attempt, "exp": int(time.time() + ttl_s)}
    return jwt.encode(claims, secret, algorithm=ALGORITHM)


def verify(secret: str, token: str) -> SessionToken:
    """Raises InvalidToken, saying why."""
    try:
        claims = jwt.decode(token, secret, algorithms=[ALGORITHM], options={"require": ["exp", "sid", "att"]})
    except jwt.ExpiredSignatureError:
        raise InvalidToken("the session token has expired") from None
    except jwt.InvalidTokenError as error:
        raise InvalidToken(f"not a valid session token ({error})") from None
    if not isinstance(claims["sid"], str) or not isinstance(claims["att"], int):
        raise InvalidToken("not a valid session token (wrong claims)")
    return SessionToken(claims["sid"], claims["att"], float(claims["exp"]), token)


def without_token(record: R, token: SessionToken) -> R:
    """``record`` with HIDDEN wherever the token stands in its texts: an agent reads it in its environment."""
    content, raw = msgspec.json.encode(record), token.raw.encode()
    if raw not in content:
        return record
    return msgspec.json.decode(content.replace(raw, HIDDEN.encode()), type=type(record))


def load_secret(settings: Settings) -> str:
    """``settings.session_secret``, else the one in ``run_dir/session_secret``, made (mode 0600) if missing.

    Processes that start at once agree: the file appears whole, and the first one stays.
    """
    if settings.session_secret:
        return settings.session_secret
    path = settings.run_dir / "session_secret"
    if not path.exists():
        _create_secret(path)
    return path.read_text().strip()


def _create_secret(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
        file.flush()
        os.fsync(file.fileno())
    with contextlib.suppress(FileExistsError):
        path.hardlink_to(draft)
    draft.unlink()
