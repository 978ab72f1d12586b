"""Session tokens: what lets a sandbox make model calls, and for which attempt of which session.

A token is a JWT (HS256) with the claims ``sid``, ``att`` and ``exp``, and, where the task says more than the defaults,
``smp`` (what it fixes for each call's sampling) and ``bud`` (what the session may use). So the gateway needs to ask
nobody about a task. The token stands in the URL path, which every agent program leaves as it is. Neither the secret nor
a token goes to a topic or a log.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import jwt
import msgspec

from polar.settings import Settings
from schemas.tasks import Budget, SamplingSpec, Spec

ALGORITHM = "HS256"
HIDDEN = "[token]"
KNOWN = 4096
"""Tokens whose signature is remembered; each is up to 6 KiB."""

R = TypeVar("R", bound=msgspec.Struct)


class InvalidToken(ValueError):
    """Not a token of ours, or one that has expired."""


class SessionToken(msgspec.Struct, frozen=True):
    """``expires`` is unix seconds; ``raw`` is the token as it stands in the URL."""

    session_id: str
    attempt: int
    expires: float
    raw: str
    sampling: SamplingSpec = SamplingSpec()
    budget: Budget = Budget()


class Claims(msgspec.Struct, frozen=True):
    """What a token's middle part holds."""

    sid: str
    att: int
    exp: float
    smp: SamplingSpec = SamplingSpec()
    bud: Budget = Budget()


def sign(
    secret: str,
    session_id: str,
    attempt: int,
    ttl_s: float,
    *,
    sampling: SamplingSpec = SamplingSpec(),  # noqa: B008 - frozen
    budget: Budget = Budget(),  # noqa: B008 - frozen
) -> str:
    """A token that is valid for ``ttl_s`` seconds from now."""
    claims = {"sid": session_id, "att": attempt, "exp": int(time.time() + ttl_s)}
    said = {"smp": _said(sampling), "bud": _said(budget)}
    return jwt.encode(claims | {name: spec for name, spec in said.items() if spec}, secret, algorithm=ALGORITHM)


def verify(secret: str, token: str) -> SessionToken:
    """Raises InvalidToken, saying why. A token that was seen before costs microseconds."""
    session = _signed(secret, token)
    if session.expires <= time.time():
        raise InvalidToken("the session token has expired")
    return session


@lru_cache(maxsize=KNOWN)
def _signed(secret: str, token: str) -> SessionToken:
    """The token's claims, whether expired or not. What is no token of ours is not remembered."""
    options: Any = {"require": ["exp", "sid", "att"], "verify_exp": False}
    try:
        claims = msgspec.convert(jwt.decode(token, secret, algorithms=[ALGORITHM], options=options), Claims)
    except jwt.InvalidTokenError as error:
        raise InvalidToken(f"not a valid session token ({error})") from None
    except msgspec.ValidationError:
        raise InvalidToken("not a valid session token (wrong claims)") from None
    return SessionToken(claims.sid, claims.att, claims.exp, token, claims.smp, claims.bud)


def _said(spec: Spec) -> dict[str, Any]:
    """The fields that are not the default."""
    default = msgspec.structs.asdict(type(spec)())
    return {name: value for name, value in msgspec.structs.asdict(spec).items() if value != default[name]}


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
