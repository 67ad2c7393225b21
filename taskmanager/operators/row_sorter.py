"""Puts rows in order, more of them than fit into memory.

Rows are held up to a number of bytes, sorted, and written to a file: a run. Runs are merged a batch of each at a time; when
there are too many for that, so many of them become one first. Nulls come last, NaN right before them, and
rows that are equal come in no fixed order.

    >>> import tempfile, pathlib
    >>> sorter = RowSorter(["n"], pathlib.Path(tempfile.mkdtemp()) / "runs", memory_bytes=1)
    >>> for numbers in ([5, 1], [4, None], [3, 2]):
    ...     sorter.add(pa.record_batch({"n": numbers}))
    >>> [n for batch in sorter.ordered() for n in batch["n"].to_pylist()]
    [1, 2, 3, 4, 5, None]
    >>> sorter.close()
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from penstock.errors import TaskFailure
from penstock.rows.ordering import sorted_rows

FAN_IN: Final = 64
"""Runs that are merged at a time."""

_BATCH_BYTES: Final = 1 << 20
"""Of one run in memory while runs are merged."""

_BATCH_ROWS_MAX: Final = 65_536


class RowSorter:
    """The rows of one subtask. One thread uses an instance.

    Args:
        columns: to sort by, the first one first.
        directory: takes runs; its parent is there, or is made.
        memory_bytes: of rows that wait to be sorted.
        fan_in: runs that are merged at a time, 2 at least.
    """

    def __init__(
        self, columns: Sequence[str], directory: Path, memory_bytes: int, fan_in: int = FAN_IN
    ) -> None:
        assert columns, "rows are sorted by something"
        assert fan_in >= 2, "runs become fewer"
        self._columns = tuple(columns)
        self._directory = directory
        self._memory_bytes = memory_bytes
        self._fan_in = fan_in
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._levels: list[list[Path]] = []
        """Runs by how often their rows were merged."""
        self._run_count = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Takes rows.

        Raises:
            TaskFailure: there is no room on disk for them.
        """
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes >= self._memory_bytes:
            self._keep(0, iter([self._sorted_waiting()]))

    def ordered(self) -> Iterator[pa.RecordBatch]:
        """All rows that were added, in order; to be called once, in the end."""
        if not self._levels:
            if self._waiting:
                yield from self._sorted_waiting().to_batches(max_chunksize=_BATCH_ROWS_MAX)
            return
        if self._waiting:
            self._keep(0, iter([self._sorted_waiting()]))
        runs = [run for level in reversed(self._levels) for run in level]
        while len(runs) > self._fan_in:
            first, runs = runs[: self._fan_in], runs[self._fan_in :]
            runs.append(self._write(merged([_batches_of(run) for run in first], self._columns)))
            _remove(first)
        yield from merged([_batches_of(run) for run in runs], self._columns)

    def close(self) -> None:
        """Removes the runs."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _sorted_waiting(self) -> pa.Table:
        table = pa.Table.from_batches(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        return _sorted(table, self._columns)

    def _keep(self, level: int, rows: Iterator[pa.Table | pa.RecordBatch]) -> None:
        """Makes a run of rows in order, and one of many where there are enough of them."""
        while len(self._levels) <= level:
            self._levels.append([])
        self._levels[level].append(self._write(rows))
        if len(self._levels[level]) == self._fan_in:
            runs, self._levels[level] = self._levels[level], []
            self._keep(level + 1, merged([_batches_of(run) for run in runs], self._columns))
            _remove(runs)

    def _write(self, rows: Iterator[pa.Table | pa.RecordBatch]) -> Path:
        path = self._directory / f"{self._run_count:08d}.arrow"
        self._run_count += 1
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            first = next(rows)
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, first.schema) as out:
                for some in chain((first,), rows):
                    _write_rows(out, some)
        except OSError as error:
            raise TaskFailure(
                f"rows that do not fit into memory cannot be sorted: {path.parent} cannot be written to: {error}; "
                "make room on the disk of the TaskManager's work directory, or sort by Spark (--spark)"
            ) from error
        return path


@dataclass(slots=True)
class _Head:
    """What is in memory of a run; ``rows`` has at least one row."""

    rows: pa.Table
    rest: Iterator[pa.RecordBatch]


def merged(
    runs: Sequence[Iterator[pa.RecordBatch]], columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """The rows of runs, each of which is in order, in order.

    Of what is in memory those rows are given out that come no later than the last row in memory of any run: whatever
    is still to be read comes behind them.
    """
    heads = [head for run in runs if (head := _next_head(run)) is not None]
    while heads:
        table = pa.concat_tables([head.rows for head in heads])
        order = sorted_rows(table, _sort_keys(columns))
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        ends = np.cumsum([head.rows.num_rows for head in heads])
        count = 1 + int(rank[ends - 1].min())
        yield from table.take(pa.array(order[:count])).combine_chunks().to_batches()
        heads = _left(heads, rank >= count)


def _left(heads: Sequence[_Head], is_left: np.ndarray) -> list[_Head]:
    """What is in memory behind the rows that were given out, of each run in its order."""
    left: list[_Head] = []
    start = 0
    for head in heads:
        end = start + head.rows.num_rows
        places = np.flatnonzero(is_left[start:end])
        start = end
        if len(places):
            head.rows = head.rows.take(pa.array(places))
            left.append(head)
        elif (more := _next_head(head.rest)) is not None:
            left.append(more)
    return left


def _next_head(run: Iterator[pa.RecordBatch]) -> _Head | None:
    """The next rows of a run; None where it has ended."""
    batch = next((batch for batch in run if batch.num_rows), None)
    return None if batch is None else _Head(pa.Table.from_batches([batch]), run)


def _sorted(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    return table.take(pa.array(sorted_rows(table, _sort_keys(columns)))).combine_chunks()


def _sort_keys(columns: Sequence[str]) -> list[tuple[str, str]]:
    return [(column, "ascending") for column in columns]


def _write_rows(out: pa.ipc.RecordBatchStreamWriter, rows: pa.Table | pa.RecordBatch) -> None:
    """In batches of a size that many runs can have in memory."""
    row_bytes = max(1, rows.nbytes // max(1, rows.num_rows))
    chunk_rows = min(_BATCH_ROWS_MAX, max(1, _BATCH_BYTES // row_bytes))
    for start in range(0, rows.num_rows, chunk_rows):
        chunk = rows.slice(start, chunk_rows)
        out.write(chunk)


def _batches_of(run: Path) -> Iterator[pa.RecordBatch]:
    with pa.OSFile(str(run), "rb") as source, pa.ipc.open_stream(source) as reader:
        yield from reader


def _remove(runs: Sequence[Path]) -> None:
    for run in runs:
        run.unlink(missing_ok=True)
