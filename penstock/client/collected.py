"""Rows that a job brings back to the process that submitted it: ``stream.collect()``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, overload

import pyarrow as pa
from typing_extensions import override

from penstock.errors import JobRejected, StreamError

FetchRows = Callable[[], Iterable[tuple[int, pa.RecordBatch]]]
"""The rows of one collect sink as (subtask index, batch), in order per subtask; ends with the job."""


_KEPT_BYTES_MAX = 64 * 1024 * 1024


class SubmittedJob(Protocol):
    """The job that was submitted for the sake of its rows."""

    def cancel(self) -> None:
        """Begins to cancel it."""

    def wait(self) -> object:
        """Waits for its end, or until nothing more is wanted of it."""


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
    or until there are as many as the limit says. A loop over them that is the first to read them is given
    each as it comes, and keeps them for later only as long as they are few; where it has submitted the job, the job
    ends with it.

    Args:
        collect_id: names the sink within its job.
        schema: of the rows.
        limit: rows at most, 0 = all.
        run: runs the job that the sink belongs to.
        submit: submits it; None where it has done more than that.
    """

    def __init__(
        self,
        collect_id: str,
        schema: pa.Schema,
        limit: int,
        run: Callable[[], object],
        submit: Callable[[], SubmittedJob | None],
    ) -> None:
        self.collect_id = collect_id
        self.schema = schema
        self.limit = limit
        self._run = run
        self._submit = submit
        self._fetch: FetchRows | None = None
        self._drain_all: Callable[[], object] = bool
        self._is_draining = False
        self._is_iterated = False
        self._is_cut = False
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

    def reject(self, error: StreamError) -> None:
        """Says that their job was rejected: reading them raises this."""
        self._broken = error

    @property
    def is_drained(self) -> bool:
        """Whether all rows are here."""
        return self._table is not None

    @property
    def is_iterated(self) -> bool:
        """Whether a loop takes them, or has taken them, as they come."""
        return self._is_iterated

    def drain(self) -> None:
        """Takes all rows; returns when the job has ended, or with as many as the limit says.

        Harmless when it has been done.

        Raises:
            StreamError: they could not be fetched, now or before: what was taken is lost.
        """
        with self._lock:
            if self._table is not None:
                return
            fetch = self._begin()
            self._is_draining = True
            parts: dict[int, list[pa.RecordBatch]] = {}
            rows = 0
            try:
                for subtask_index, batch in fetch():
                    parts.setdefault(subtask_index, []).append(batch)
                    rows += batch.num_rows
                    if self._has_limit_at(rows):
                        break  # the job may be endless, and no more rows of it are sent
            except StreamError as error:
                self._broken = error
                raise
            self._keep(parts)

    def _begin(self) -> FetchRows:
        if self._broken is not None:
            raise self._broken
        if self._is_iterated:
            raise JobRejected(
                "a loop over these rows takes them as they come, or was left before their end: each is sent once. "
                "Call to_pylist() or to_arrow() in its place to have them all"
            )
        if self._fetch is None:
            raise JobRejected("these rows belong to no job that was submitted")
        return self._fetch

    def _keep(self, parts: Mapping[int, Sequence[pa.RecordBatch]]) -> None:
        batches = [batch for index in sorted(parts) for batch in parts[index]]
        table = pa.Table.from_batches(batches, schema=batches[0].schema if batches else self.schema)
        self._table = table.slice(0, self.limit) if self.limit else table

    def to_arrow(self) -> pa.Table:
        """The rows as a table."""
        if self._table is None and self._fetch is None and self._broken is None:
            self._run()
        if not self._is_iterated:
            self._drain_all()
        self.drain()
        assert self._table is not None
        if not self._has_limit_at(self._table.num_rows):
            self._check_ended()
        return self._table

    def _has_limit_at(self, rows: int) -> bool:
        """Whether so many rows are all that were asked for, whatever becomes of the job."""
        return bool(self.limit) and rows >= self.limit

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
        is_small = (
            self.limit and self._fetch is not None
        )  # and a job that goes on: as before, subtask by subtask
        if is_small or self._table is not None or self._is_draining or self._broken is not None:
            return iter(self.to_pylist())
        return self._as_they_come()

    def _as_they_come(self) -> Iterator[CollectedRow]:
        own = self._submit() if self._fetch is None else None
        if self.is_drained or self._is_draining:
            yield from self.to_pylist()
            return
        fetch = self._begin()
        self._is_iterated = True
        self._drain_all()  # of the others: the job would stand still without
        try:
            for batch in self._kept_while_few(fetch):
                yield from map(CollectedRow, batch.to_pylist())
        except BaseException:
            if own is not None:
                own.cancel()
            raise
        if not self._is_cut:
            self._check_ended()
        elif own is not None:
            own.wait()

    def _kept_while_few(self, fetch: FetchRows) -> Iterator[pa.RecordBatch]:
        """The batches, cut at the limit; they stay readable where they are not too many."""
        parts: dict[int, list[pa.RecordBatch]] = {}
        rows = size_bytes = 0
        try:
            for subtask_index, received in fetch():
                left = self.limit - rows if self.limit else received.num_rows
                batch = received.slice(0, left)
                rows += batch.num_rows
                size_bytes += batch.nbytes
                if size_bytes <= _KEPT_BYTES_MAX:
                    parts.setdefault(subtask_index, []).append(batch)
                else:
                    parts.clear()
                yield batch
                if self._has_limit_at(rows):
                    self._is_cut = True
                    break
        except StreamError as error:
            self._broken = error
            raise
        if size_bytes <= _KEPT_BYTES_MAX:
            self._keep(parts)
            self._is_iterated = False

    @override
    def __repr__(self) -> str:
        state = "not fetched" if self._table is None else f"{self._table.num_rows} rows"
        return f"CollectedRows({state})"
