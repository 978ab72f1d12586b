"""The DuckDB file: rows and the topics' offsets change together, or not at all.

Delivered again, a record adds nothing: new rows go in by an anti-join on their key. There are no indexes, since one
writer and the anti-join keep keys unique, at several times the speed. DuckDB lets one process open the file: within it,
one thread at a time writes, and any thread reads with a cursor of its own, seeing what was last committed.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from polar.store.errors import StoreError, named
from polar.store.tables import KEYS, REPLACED, Row, rows
from schemas.record import Record

Partition = tuple[str, int]

CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "memory_limit": "1GB",
    "threads": 2,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
}
"""Beyond its memory DuckDB spills beside the file. It fetches nothing from outside."""


class Store:
    """An open store. Raises StoreError, in one line, when the file cannot be opened, read or written."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._writing = threading.Lock()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._database = duckdb.connect(str(self._path), config=CONFIG)
        except duckdb.Error as error:
            raise named(error, self._path, "opening the store") from error
        except OSError as error:
            raise StoreError(f"{self._path.parent}: {error.strerror}; choose another run folder") from error
        try:
            self._migrate()
            self._schemas = {table: self._schema(table) for table in KEYS}
        except StoreError:
            self._database.close()
            raise

    @property
    def path(self) -> Path:
        return self._path

    def close(self) -> None:
        """Closes the file; what was applied is in it."""
        self._database.close()

    def apply(
        self,
        received: Iterable[tuple[str, int, int, Record]],
        positions: Mapping[Partition, int] | None = None,
    ) -> None:
        """Adds the rows of (topic, partition, offset, record)s and moves the offsets behind them, in one transaction.

        ``positions`` are next offsets of a reader that has passed over more than it returned.
        """
        new: dict[str, list[Row]] = {}
        ends = dict(positions or {})
        for topic, partition, offset, record in received:
            ends[topic, partition] = max(ends.get((topic, partition), 0), offset + 1)
            for table, row in rows(record, offset):
                new.setdefault(table, []).append(row)
        if not ends:
            return
        with self._writing, self._transaction() as cursor:
            for table, table_rows in new.items():
                self._insert(cursor, table, table_rows)
            self._move(cursor, ends)

    def offsets(self) -> dict[Partition, int]:
        """The next offset to read, by (topic, partition)."""
        return {(row[0], row[1]): row[2] for row in self.read('SELECT topic, "partition", next_offset FROM offsets')}

    def read(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """The rows that ``sql`` gives. Values go in by ``parameters`` only. Any thread may call it."""
        return self._read(sql, parameters)[1]

    def records(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[Row]:
        """As ``read``, each row by column name; times are UTC."""
        names, found = self._read(sql, parameters)
        return [dict(zip(names, map(_utc, row), strict=True)) for row in found]

    def _read(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any]) -> tuple[list[str], list[tuple[Any, ...]]]:
        try:
            with self._database.cursor() as cursor:
                cursor.execute(sql, parameters)
                return [column[0] for column in cursor.description or []], cursor.fetchall()
        except duckdb.Error as error:
            raise named(error, self._path, "reading the store") from error

    @contextmanager
    def _transaction(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A cursor; what it does is committed at the end, or undone if the block raises."""
        try:
            with self._database.cursor() as cursor:
                cursor.begin()
                yield cursor
                cursor.commit()
        except duckdb.Error as error:
            raise named(error, self._path, "writing the store") from error

    def _insert(self, cursor: duckdb.DuckDBPyConnection, table: str, new: list[Row]) -> None:
        """Table, key and column names are ours; values go in as Arrow."""
        keys = ", ".join(f'"{key}"' for key in KEYS[table])
        order = [{**row, "ordinal": ordinal} for ordinal, row in enumerate(new)]
        schema = self._schemas[table]
        cursor.register("new_rows", pa.Table.from_pylist(order, schema.append(pa.field("ordinal", pa.int64()))))
        keep, join = "ASC", f'ANTI JOIN "{table}" USING ({keys})'
        if table in REPLACED:
            keep, join = "DESC", ""
            same = " AND ".join(f't."{key}" = n."{key}"' for key in KEYS[table])
            cursor.execute(f'DELETE FROM "{table}" t USING new_rows n WHERE {same}')
        columns = ", ".join(f'"{name}"' for name in schema.names)
        cursor.execute(
            f'INSERT INTO "{table}" ({columns}) SELECT {columns} FROM new_rows {join}'
            f" QUALIFY row_number() OVER (PARTITION BY {keys} ORDER BY ordinal {keep}) = 1"
        )
        cursor.unregister("new_rows")

    def _move(self, cursor: duckdb.DuckDBPyConnection, ends: Mapping[Partition, int]) -> None:
        """Offsets only go forward."""
        known = {(t, p): n for t, p, n in cursor.execute("FROM offsets").fetchall()}
        for (topic, partition), end in sorted(ends.items()):
            if end > known.get((topic, partition), -1):
                cursor.execute('DELETE FROM offsets WHERE topic = ? AND "partition" = ?', [topic, partition])
                cursor.execute("INSERT INTO offsets VALUES (?, ?, ?)", [topic, partition, end])

    def _schema(self, table: str) -> pa.Schema:
        try:
            with self._database.cursor() as cursor:
                schema: pa.Schema = cursor.sql(f'SELECT * FROM "{table}" LIMIT 0').to_arrow_table().schema
        except duckdb.Error as error:
            raise named(error, self._path, "opening the store") from error
        return schema

    def _migrate(self) -> None:
        """Brings the tables to the newest schema, then makes the views."""
        migrations = _migrations()
        with self._transaction() as cursor:
            cursor.execute("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER)")
            found = cursor.execute("SELECT coalesce(max(version), 0) FROM schema_version").fetchone()
            version = found[0] if found else 0
            if version > len(migrations):
                raise StoreError(
                    f"{self._path}: written by a newer program (schema {version}, this one knows {len(migrations)}); "
                    "update this one, or use another run folder"
                )
            for number, script in enumerate(migrations[version:], start=version + 1):
                cursor.execute(script)
                cursor.execute("INSERT INTO schema_version (version) VALUES (?)", [number])
            cursor.execute(_script("views.sql"))


def _utc(value: Any) -> Any:
    return value.astimezone(UTC) if isinstance(value, datetime) else value


def _migrations() -> list[str]:
    """The scripts schema_0001.sql, schema_0002.sql, …: each brings the schema one version on."""
    names = sorted(
        f.name for f in resources.files("polar.store").iterdir() if re.fullmatch(r"schema_\d{4}\.sql", f.name)
    )
    return [_script(name) for name in names]


def _script(name: str) -> str:
    return resources.files("polar.store").joinpath(name).read_text(encoding="utf-8")
