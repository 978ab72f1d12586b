"""Who may ask. With a key: whoever sends it. Without: only what comes to a loopback address, by no foreign web page."""

from __future__ import annotations

import hmac
import ipaddress
from typing import Any
from urllib.parse import urlsplit

from litestar.connection import ASGIConnection
from litestar.exceptions import NotAuthorizedException, PermissionDeniedException
from litestar.handlers.base import BaseRouteHandler
from litestar.types import Guard

from polar.settings import Settings, SettingsError


def is_loopback(host: str) -> bool:
    """Whether ``host`` (a name or an address, IPv6 without brackets) means this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_binding(settings: Settings) -> None:
    """Raises SettingsError when the API would listen beyond loopback without a key."""
    if not settings.admin_key and not is_loopback(settings.admin_host):
        raise SettingsError(
            f"POLAR_ADMIN_HOST={settings.admin_host} is reachable from outside: set POLAR_ADMIN_KEY, or use 127.0.0.1"
        )


def guard(admin_key: str | None) -> Guard:
    """A guard that raises 401 for a missing or wrong key; without a key, 403 for a foreign Host or Origin."""

    def check(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        if admin_key:
            _check_key(connection, admin_key)
        else:
            _check_local(connection)

    return check


def _check_key(connection: ASGIConnection[Any, Any, Any, Any], admin_key: str) -> None:
    scheme, _, bearer = connection.headers.get("authorization", "").partition(" ")
    given = bearer if scheme.lower() == "bearer" else connection.headers.get("x-admin-key", "")
    if not hmac.compare_digest(given.strip().encode(), admin_key.encode()):
        raise NotAuthorizedException(
            "the admin key is missing or wrong: send 'Authorization: Bearer KEY' or 'X-Admin-Key: KEY'"
        )


def _check_local(connection: ASGIConnection[Any, Any, Any, Any]) -> None:
    """A web page on another site, or a name that was rebound to 127.0.0.1, must not reach a keyless API."""
    for header, text in (
        ("Host", f"//{connection.headers.get('host', '')}"),
        ("Origin", connection.headers.get("origin")),
    ):
        if text is not None and not is_loopback(urlsplit(text).hostname or ""):
            raise PermissionDeniedException(
                f"{header} {text.removeprefix('//')!r} is not this machine: set POLAR_ADMIN_KEY to use another name"
            )
