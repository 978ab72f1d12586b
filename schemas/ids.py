"""Identities. Tasks, groups, sessions and calls are UUIDv7, sortable by time; trace ids are derived."""

from __future__ import annotations

import os
import time
import uuid

TRACE_NAMESPACE = uuid.UUID("7b1f4a52-6d0e-5c7e-9a3d-1f2e3d4c5b6a")


def new_id() -> str:
    """A UUIDv7 (RFC 9562 §5.7): 48 bits of unix milliseconds, then random bits."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    digits = f"{value:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def derived_id(*parts: str | int) -> str:
    """A UUIDv5 of ``parts``: the same parts always give the same id."""
    return str(uuid.uuid5(TRACE_NAMESPACE, "/".join(map(str, parts))))


def trace_id(session_id: str, attempt: int, builder: str, branch: int) -> str:
    """Building a session again gives its traces the same ids."""
    return derived_id("trace", session_id, attempt, builder, branch)
