"""Which names a task may give: to files in the work folder, and to environment variables."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

LONGEST_PART, LONGEST_PATH = 255, 1024
"""Bytes. Linux takes no longer file name; of a path it takes 4096, with the run folder before it."""
INSIDE = f"a relative path inside the work folder, of at most {LONGEST_PATH} bytes, {LONGEST_PART} a part"
VARIABLE = "letters, digits and _, and no name that acts on the sandbox itself (LD_…)"


def wrong_path(name: str) -> bool:
    """Whether ``name`` is anything but ``INSIDE``."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        return True
    return len(name.encode()) > LONGEST_PATH or any(len(part.encode()) > LONGEST_PART for part in path.parts)


def wrong_variable(name: str) -> bool:
    """Whether ``name`` is anything but ``VARIABLE``: the dynamic loader would obey LD_… outside the sandbox too."""
    return name.startswith("LD_") or re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None
