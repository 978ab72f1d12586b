"""A client of the admin API, which turns what can go wrong into one line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from polar.settings import Settings

T = TypeVar("T")
TIMEOUT = httpx.Timeout(30.0, connect=5.0)
STREAM_TIMEOUT = httpx.Timeout(30.0, connect=5.0, read=None)
LATEST = Path("runs/latest")


class ApiError(Exception):
    """One line: what, where, and what to do."""


def find_url(latest: Path = LATEST) -> str:
    """The admin API of the run that was started last from this folder, else the default one."""
    try:
        ports = json.loads((latest / "ports.json").read_text())
        return f"http://127.0.0.1:{ports['admin']}"
    except (OSError, ValueError, KeyError, TypeError):
        return Settings().admin_url


class AdminApi:
    """The admin API at ``url``. Every method raises ApiError when it cannot be reached or refuses."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def get(self, path: str, type: type[T], **query: Any) -> T:
        """The answer to GET, as ``type``. Queries that are None are left out."""
        answer = self._request("GET", path, params=_given(query))
        try:
            return msgspec.json.decode(answer, type=type)
        except msgspec.DecodeError as error:
            raise ApiError(f"{self.url}{path} is no admin API of this version ({error}): check --url") from None

    def post(self, path: str, body: Any) -> Any:
        """``body`` is encoded as JSON, bytes are sent as they are."""
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        return msgspec.json.decode(self._request("POST", path, content=content, headers=headers))

    def delete(self, path: str) -> Any:
        return msgspec.json.decode(self._request("DELETE", path))

    def lines(self, path: str, **query: Any) -> Iterator[bytes]:
        """The lines of a streamed answer, as they come."""
        with (
            self._errors(),
            httpx.stream(
                "GET", self.url + path, params=_given(query), headers=self._headers, timeout=STREAM_TIMEOUT
            ) as response,
        ):
            if response.is_error:
                raise ApiError(_detail(response.status_code, response.read()))
            for line in response.iter_lines():
                yield line.encode()

    def _request(self, method: str, path: str, headers: dict[str, str] | None = None, **options: Any) -> bytes:
        with self._errors():
            response = httpx.request(
                method, self.url + path, headers={**self._headers, **(headers or {})}, timeout=TIMEOUT, **options
            )
        if response.is_error:
            raise ApiError(_detail(response.status_code, response.content))
        return response.content

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.TimeoutException:
            raise ApiError(f"the admin API at {self.url} does not answer: see its log") from None
        except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ApiError(f"no admin API at {self.url} ({error}): start one with 'polar up', or give --url") from None


def _given(query: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in query.items() if value is not None}


def _detail(status: int, body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["detail"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"the admin API answered {status}: {body[:200].decode(errors='replace')}"
