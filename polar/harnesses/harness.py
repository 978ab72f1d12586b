"""What a harness is: a function from a task's options, its instruction and the model's root URL to a program.

The agent programs themselves are not modified; a harness only writes their configuration and command line.
The root URL, ``http://HOST:PORT/s/TOKEN``, names the session; below it stand ``/v1/chat/completions``,
``/v1/responses``, ``/v1/messages`` and ``/v1beta/models/…``, and each preset appends what its program wants.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeVar

import msgspec

from polar.harnesses.packages import HarnessError, Package
from polar.runtimes.runtime import Program

Options = TypeVar("Options", bound=msgspec.Struct)
DialectName = Literal["anthropic.messages", "openai.chat", "openai.responses", "google.generate"]

API_KEY = "polar"
"""The session's token is in the URL; agent programs insist on a key as well."""
MODEL = "policy"
"""The model's name, for programs that insist on one: a session has one policy, whatever a request says."""


class Harness(Protocol):
    """Raises HarnessError when the options are wrong, or when the agent program is not installed."""

    def __call__(self, options: dict[str, Any], instruction: str, root: str) -> Program: ...


class Check(Protocol):
    """Raises HarnessError for what cannot work on any machine, whether the agent program is installed or not."""

    def __call__(self, options: dict[str, Any], instruction: str) -> object: ...


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run an agent program. ``package`` is None when there is nothing to install."""

    program: Harness
    checked: Check
    package: Package | None = None
    dialects: tuple[DialectName, ...]
    """What it speaks; the first one unless the options say otherwise."""
    notes: str = ""


def read_options(options: dict[str, Any], kind: type[Options], name: str) -> Options:
    """``options`` as ``kind``. Raises HarnessError naming the field that is wrong."""
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        raise HarnessError(f"harness {name}: {error}") from None


def check_instruction(instruction: str, name: str) -> None:
    """Raises HarnessError for an instruction that no program can be given."""
    if not instruction.strip():
        raise HarnessError(f"harness {name}: the instruction is empty")
    if "\0" in instruction:
        raise HarnessError(f"harness {name}: the instruction must be without NUL characters")


def addresses(root: str) -> dict[str, str]:
    """The variables by which common programs and client libraries find a model and a key."""
    return {
        "POLAR_ROOT_URL": root,
        "POLAR_BASE_URL": f"{root}/v1",
        "OPENAI_BASE_URL": f"{root}/v1",
        "OPENAI_API_KEY": API_KEY,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": API_KEY,
        "GOOGLE_GEMINI_BASE_URL": root,
        "GEMINI_API_KEY": API_KEY,
    }
