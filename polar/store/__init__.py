"""The store: what the topics said, as tables in one DuckDB file, and the questions that people ask of it.

One process writes, and its threads read. May import `schemas` only.
"""

from polar.store import queries, rows
from polar.store.errors import StoreError
from polar.store.store import Store

__all__ = ["Store", "StoreError", "queries", "rows"]
