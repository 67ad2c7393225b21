"""Rows that a job brings back to the process that submitted it: ``stream.collect()``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

import pyarrow as pa
from typing_extensions import override

from penstock.errors import JobRejected, StreamError

FetchRows = Callable[[], Iterable[tuple[int, pa.RecordBatch]]]
"""The rows of one collect sink as (subtask index, batch), in order per subtask; ends with the job."""


class CollectedRow(dict[str, Any]):
    """A row: ``row["price"]`` and, where the name is free, ``row.price``."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"the row has no column {name!r}; it has {', '.join(self)}"
            ) from None


class CollectedRows(Sequence[CollectedRow]):
    """The rows of a collect sink.

    Reading them before the job was submitted runs the job; reading them while it runs waits for its end,
    or until there are as many as the limit says.

    Args:
        collect_id: names the sink within its job.
        schema: of the rows.
        limit: rows at most, 0 = all.
        run: runs the job that the sink belongs to.
    """

    def __init__(
        self, collect_id: str, schema: pa.Schema, limit: int, run: Callable[[], object]
    ) -> None:
        self.collect_id = collect_id
        self.schema = schema
        self._limit = limit
        self._run = run
        self._fetch: FetchRows | None = None
        self._drain_all: Callable[[], object] = bool
        self._check_ended: Callable[[], object] = bool
        self._lock = threading.Lock()
        self._table: pa.Table | None = None
        self._broken: StreamError | None = None
        self._rows: list[CollectedRow] | None = None

    def attach(
        self, fetch: FetchRows, drain_all: Callable[[], object], check_ended: Callable[[], object]
    ) -> None:
        """Says where the rows come from, once the job has been submitted.

        Args:
            fetch: gives the rows.
            drain_all: begins to take the rows of all sinks of the job: it would stand still if only
                some were taken.
            check_ended: called when they are all here; raises where the job did not end well.
        """
        self._fetch = fetch
        self._drain_all = drain_all
        self._check_ended = check_ended

    @property
    def is_drained(self) -> bool:
        """Whether all rows are here."""
        return self._table is not None

    def drain(self) -> None:
        """Takes all rows; returns when the job has ended, or with as many as the limit says.

        Harmless when it has been done.

        Raises:
            StreamError: they could not be fetched, now or before: what was taken is lost.
        """
        with self._lock:
            if self._table is not None:
                return
            if self._broken is not None:
                raise self._broken
            if self._fetch is None:
                raise JobRejected("these rows belong to no job that was submitted")
            parts: dict[int, list[pa.RecordBatch]] = {}
            rows = 0
            try:
                for subtask_index, batch in self._fetch():
                    parts.setdefault(subtask_index, []).append(batch)
                    rows += batch.num_rows
                    if self._has_limit_at(rows):
                        break  # the job may be endless, and no more rows of it are sent
            except StreamError as error:
                self._broken = error
                raise
            batches = [batch for index in sorted(parts) for batch in parts[index]]
            table = pa.Table.from_batches(
                batches, schema=batches[0].schema if batches else self.schema
            )
            self._table = table.slice(0, self._limit) if self._limit else table

    def to_arrow(self) -> pa.Table:
        """The rows as a table."""
        if self._table is None and self._fetch is None:
            self._run()
        self._drain_all()
        self.drain()
        assert self._table is not None
        if not self._has_limit_at(self._table.num_rows):
            self._check_ended()
        return self._table

    def _has_limit_at(self, rows: int) -> bool:
        """Whether so many rows are all that were asked for, whatever becomes of the job."""
        return bool(self._limit) and rows >= self._limit

    def to_pylist(self) -> list[CollectedRow]:
        """The rows as a list."""
        if self._rows is None:
            self._rows = [CollectedRow(row) for row in self.to_arrow().to_pylist()]
        return self._rows

    @override
    def __len__(self) -> int:
        return int(self.to_arrow().num_rows)

    @overload
    def __getitem__(self, index: int) -> CollectedRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[CollectedRow]: ...
    @override
    def __getitem__(self, index: int | slice) -> CollectedRow | list[CollectedRow]:
        return self.to_pylist()[index]

    @override
    def __iter__(self) -> Iterator[CollectedRow]:
        return iter(self.to_pylist())

    @override
    def __repr__(self) -> str:
        state = "not fetched" if self._table is None else f"{self._table.num_rows} rows"
        return f"CollectedRows({state})"
