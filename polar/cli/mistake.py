"""What the command refuses by itself."""

from __future__ import annotations


class UserMistake(Exception):
    """One line: what, where, and what to do."""
