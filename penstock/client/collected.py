"""Rows that a job brings back to the process that submitted it: ``stream.collect()``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, overload

import pyarrow as pa
from typing_extensions import override

from penstock.client.arrived_rows import MEMORY_BYTES_MAX, SEEN_BY_A_LOOP, ArrivedRows
from penstock.errors import JobRejected, RowsComeAgain, StreamError
from penstock.rows.decoded_values import dicts_of

FetchRows = Callable[[], Iterable[tuple[int, pa.RecordBatch]]]
"""The rows of one collect sink as (subtask index, batch), in order per subtask; ends with the job."""


class SubmittedJob(Protocol):
    """The job that was submitted for the sake of its rows."""

    def leave_loop(self) -> bool:
        """A loop was left before its end: ends the job, unless that would cut the output of its other sinks.

        Returns:
            Whether it goes on to its end, so that the rest of the rows must be taken.
        """

    def cancel(self) -> None:
        """Begins to cancel it."""

    def finish(self) -> None:
        """All rows of a loop are here: waits for the job's end, unless it is endless and others want more of it."""


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


def _rows_of(rows: pa.Table | pa.RecordBatch) -> list[CollectedRow]:
    """Rows as Python values.

    Raises:
        StreamError: a value is none of Python's (a time beyond its years, or of single nanoseconds).
    """
    remedy = "read the rows with .to_arrow(), or cast the column before .collect()"
    return [CollectedRow(row) for row in dicts_of(rows, remedy)]


class CollectedRows(Sequence[CollectedRow]):
    """The rows of a collect sink.

    Reading them before the job was submitted runs the job; reading them while it runs waits for its end,
    or until there are as many as the limit says. A loop over them is given each as it comes, and keeps them for
    later only as long as they are few; where a loop has submitted the job, the job ends with it.

    Args:
        collect_id: names the sink within its job.
        limit: rows at most, 0 = all.
        run: runs the job that the sink belongs to.
        submit: submits it, and tells its rows that it ends with their loops; or runs it.
    """

    def __init__(
        self,
        collect_id: str,
        schema: pa.Schema,
        limit: int,
        run: Callable[[], object],
        submit: Callable[[], object],
    ) -> None:
        self.collect_id = collect_id
        self.schema = schema
        self.limit = limit
        self._run = run
        self._submit = submit
        self._fetch: FetchRows | None = None
        self._drain_all: Callable[[], object] = bool
        self._own: SubmittedJob | None = None
        self._arrived: ArrivedRows | None = None
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

    def end_with_loop(self, job: SubmittedJob) -> None:
        """Says that a loop has submitted their job."""
        self._own = job

    def claim(self) -> bool:
        """Whether nobody has begun to take the rows; the caller has to ``drain`` them then."""
        with self._lock:
            if self._is_iterated or self._table is not None or self._arrived is not None:
                return False
            self._arrived = ArrivedRows(self.collect_id)
            return True

    def drain(self) -> None:
        """Takes all rows, once ``claim`` has said so; returns when the job has ended, or with as many as the limit says.

        Raises:
            StreamError: they could not be fetched: what was taken is lost.
        """
        arrived = self._arrived
        assert arrived is not None, "claimed before"
        try:
            while not self._has_drained(arrived):
                pass
        except StreamError as error:
            arrived.end(error)
            raise
        except BaseException:
            arrived.end(StreamError(f"fetching the rows of {self.collect_id!r} broke off"))
            raise
        arrived.end()

    def _has_drained(self, arrived: ArrivedRows) -> bool:
        """Takes all rows; False = another JobManager leads, and all of them are to be taken anew."""
        rows = 0
        try:
            for subtask_index, received in self._begin()():
                batch = self._cut(received, rows)
                rows += batch.num_rows
                arrived.put(subtask_index, batch)
                if self._has_limit_at(rows):
                    break  # the job may be endless, and no more rows of it are sent
        except RowsComeAgain as error:
            arrived.begin_again(error)
            return False
        return True

    def _cut(self, batch: pa.RecordBatch, rows_before: int) -> pa.RecordBatch:
        return batch.slice(0, self.limit - rows_before) if self.limit else batch

    def _begin(self) -> FetchRows:
        if self._broken is not None:
            raise self._broken
        if self._fetch is None:
            raise JobRejected("these rows belong to no job that was submitted")
        return self._fetch

    def _keep(self, batches: Sequence[pa.RecordBatch]) -> None:
        self._table = pa.Table.from_batches(
            batches, schema=batches[0].schema if batches else self.schema
        )

    def to_arrow(self) -> pa.Table:
        """The rows as a table."""
        if self._table is None:
            if self._fetch is None and self._broken is None:
                self._run()
            self._begin()
            self._drain_all()
            if self._is_iterated:
                raise JobRejected(SEEN_BY_A_LOOP)
            assert self._arrived is not None, "all that no loop takes are drained"
            self._arrived.wait()
            self._keep(list(self._arrived))
            self._arrived = None
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
            self._rows = _rows_of(self.to_arrow())
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
        if self._table is not None or self._broken is not None:
            return iter(self.to_pylist())
        return self._as_they_come()

    def _as_they_come(self) -> Iterator[CollectedRow]:
        if self._fetch is None:
            self._submit()
        batches = self._batches()
        own = self._own
        try:
            for batch in batches:
                yield from _rows_of(batch)
        except GeneratorExit:
            if own is not None and own.leave_loop():
                for _ in batches:  # the job would stand still without
                    pass
                own.finish()
            raise
        except BaseException:
            if own is not None:
                own.cancel()
            raise
        if own is not None:
            own.finish()
        if not self._is_cut:
            self._check_ended()

    def _batches(self) -> Iterator[pa.RecordBatch]:
        """The batches as they come, of whoever fetches them."""
        fetch = self._begin()
        with self._lock:
            if self._is_iterated:
                raise JobRejected(SEEN_BY_A_LOOP)
            if self._table is not None:
                return self._limited(self._table.to_batches())
            arrived = self._arrived
            self._is_iterated = arrived is None
        self._drain_all()  # of the others: the job would stand still without
        return self._limited(arrived) if arrived is not None else self._kept_while_few(fetch)

    def _limited(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = 0
        for batch in batches:
            rows += batch.num_rows
            self._is_cut = self._has_limit_at(rows)
            yield batch

    def _kept_while_few(self, fetch: FetchRows) -> Iterator[pa.RecordBatch]:
        """The batches, cut at the limit; they stay readable where they are not too many."""
        parts: dict[int, list[pa.RecordBatch]] = {}
        rows = size_bytes = 0
        try:
            for subtask_index, received in fetch():
                batch = self._cut(received, rows)
                rows += batch.num_rows
                size_bytes += batch.nbytes
                if size_bytes <= MEMORY_BYTES_MAX:
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
        if size_bytes <= MEMORY_BYTES_MAX:
            self._keep([batch for index in sorted(parts) for batch in parts[index]])
            self._is_iterated = False

    @override
    def __repr__(self) -> str:
        state = "not fetched" if self._table is None else f"{self._table.num_rows} rows"
        return f"CollectedRows({state})"
