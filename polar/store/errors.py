"""What can go wrong with the store's file, each as one line: what, where, what to do."""

from __future__ import annotations

import re
from pathlib import Path

import duckdb


class StoreError(Exception):
    """The store cannot be opened, read or written. The message is one line."""


def named(error: duckdb.Error, path: Path, doing: str) -> StoreError:
    """The named error for what DuckDB raised while ``doing`` something with the file at ``path``."""
    text = str(error)
    if "Could not set lock" in text or "already attached" in text or "being used by another process" in text:
        owner = re.search(r"PID (\d+)", text)
        by = f" (process {owner.group(1)})" if owner else ""
        return StoreError(f"{path}: another process has the store open{by}; stop it, or use another run folder")
    if re.search(r"No space left|File too large|disk quota|out of disk", text, re.IGNORECASE):
        return StoreError(f"{path}: {doing}: the disk is full; free some space, then start again")
    if "not a valid DuckDB database" in text:
        return StoreError(f"{path}: this is no DuckDB file; move it away, the store is then built anew from the topics")
    if "Permission denied" in text:
        return StoreError(f"{path}: {doing}: permission denied; make the file writable, or use another run folder")
    return StoreError(f"{path}: {doing}: {' '.join(text.split())}")
