"""What a harness is: a function from a task's options, its instruction and the model's base URL to a program.

The agent programs themselves are not modified; a harness only writes their configuration and command line.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import msgspec

from polar.runtimes.runtime import Program

Options = TypeVar("Options", bound=msgspec.Struct)

API_KEY = "polar"
"""The session's token is in the base URL; agent programs insist on a key as well."""


class HarnessError(Exception):
    """A harness cannot start: wrong options, or it is not installed. One line: what, where, what to do."""


class Harness(Protocol):
    def __call__(self, options: dict[str, Any], instruction: str, base_url: str) -> Program: ...


class Check(Protocol):
    """Raises HarnessError."""

    def __call__(self, options: dict[str, Any], instruction: str) -> object: ...


def read_options(options: dict[str, Any], kind: type[Options], name: str) -> Options:
    """``options`` as ``kind``. Raises HarnessError naming the field that is wrong."""
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        raise HarnessError(f"harness {name}: {error}") from None
