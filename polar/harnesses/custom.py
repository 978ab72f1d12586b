"""A harness of your own: the function that ``options.import_path`` names, as ``package.module:function``.

It is called as ``function(options, instruction, root)`` with the task's other options, and returns a
``polar.runtimes.runtime.Program``; it may raise ``polar.harnesses.HarnessError`` to refuse them. How its program is
installed, pointed at ``root`` (``harness.addresses`` holds the usual variables) and kept from other network use is its
own business. It is imported from the node's own Python path, never from a task's files.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from polar.harnesses.harness import Preset, check_instruction
from polar.harnesses.packages import HarnessError
from polar.runtimes.runtime import Program

DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def checked(options: dict[str, Any], instruction: str) -> str:
    """The import path. It is imported only on the node, which has it. Raises HarnessError."""
    path = options.get("import_path")
    if not isinstance(path, str) or DOTTED.fullmatch(path) is None:
        raise HarnessError(f"harness custom: options.import_path must be like package.module:function, got {path!r}")
    check_instruction(instruction, "custom")
    return path


def program(options: dict[str, Any], instruction: str, root: str) -> Program:
    path = checked(options, instruction)
    module, name = path.split(":")
    own = {option: value for option, value in options.items() if option != "import_path"}
    try:
        function = getattr(importlib.import_module(module), name, None)
        if not callable(function):
            raise HarnessError(f"harness custom: {module} holds no function {name}: correct options.import_path")
        made = function(own, instruction, root)
    except HarnessError:
        raise
    except ImportError as error:
        raise HarnessError(
            f"harness custom: {module} cannot be imported: {_line(error)}: install it where the node runs"
        ) from None
    except Exception as error:
        # Whatever a task's own harness raises ends that session, not the node.
        raise HarnessError(f"harness custom: {path} failed: {type(error).__name__}: {_line(error)}") from error
    if not isinstance(made, Program):
        raise HarnessError(f"harness custom: {path} returned {type(made).__name__}, not polar.runtimes.runtime.Program")
    return made


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


PRESET = Preset(
    program=program,
    checked=checked,
    dialects=("openai.chat", "openai.responses", "anthropic.messages", "google.generate"),
    notes="a function of yours, by import path",
)
