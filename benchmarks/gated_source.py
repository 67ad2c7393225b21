"""Input that a benchmark lets into its job step by step, and a sink that tells how far the job is.

Benchmark, readers and sinks share a ``Gate``: a small file of int64 words that all of them map into
memory. The benchmark moves the limit; readers go up to it and wait there.

Row ``n`` is a pure function of ``n``: the first ``keys`` rows have each key once, the next ones the keys
of a file, all others any keys.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from typing_extensions import override

import penstock as ps
from penstock.storage.key_loops import mix

SCHEMA = pa.schema([("key", pa.int64()), ("first", pa.float64()), ("second", pa.float64())])

_POLL_MS = 2
_COUNTED_ROWS = 1 << 22


class Gate:
    """What benchmark and job share.

    Args:
        path: of the file.
        parts: readers, and sinks.
    """

    def __init__(self, path: str, parts: int) -> None:
        self._words = np.memmap(path, np.int64, "r+", shape=1 + 2 * parts)
        self._parts = parts

    @classmethod
    def create(cls, path: Path, parts: int) -> Gate:
        """Makes the file; nothing may be read yet."""
        path.write_bytes(bytes(8 * (1 + 2 * parts)))
        return cls(str(path), parts)

    @property
    def limit(self) -> int:
        """Rows that may be read, of all parts together."""
        return int(self._words[0])

    @limit.setter
    def limit(self, rows: int) -> None:
        self._words[0] = rows

    def note_read(self, part: int, rows: int) -> None:
        """A reader has read its first ``rows`` rows."""
        self._words[1 + part] = rows

    def add_written(self, part: int, rows: int) -> None:
        """A sink has taken ``rows`` more."""
        self._words[1 + self._parts + part] += rows

    @property
    def rows_read(self) -> int:
        """By all readers."""
        return int(self._words[1 : 1 + self._parts].sum())

    @property
    def rows_written(self) -> list[int]:
        """By each sink, over all attempts."""
        written: list[int] = self._words[1 + self._parts :].tolist()
        return written


@dataclass(frozen=True)
class PartedSource(ps.Source):
    """As many splits as subtasks, without an end.

    Attributes:
        parts: parallelism.
    """

    parts: int
    bounded = False

    @override
    def discover(self, ctx: ps.SourceContext) -> list[ps.Split]:
        """One split per subtask."""
        return [ps.Split(f"{part:04d}", str(part).encode()) for part in range(self.parts)]


@dataclass(frozen=True)
class GatedSource(PartedSource):
    """Split i of p has every p-th row.

    Attributes:
        gate: file of the ``Gate``.
        keys: number of different keys.
        touched: a file (npy) of keys, "" = none.
    """

    gate: str
    keys: int
    touched: str = ""

    @property
    @override
    def schema(self) -> pa.Schema:
        """A key and two numbers."""
        return SCHEMA

    @override
    def open(self, split: ps.Split, position: bytes | None) -> ps.Reader:
        """A reader that waits at the gate."""
        start = 0 if position is None else int(position)
        return GatedReader(self, int(split.payload), start)


class GatedReader(ps.Reader):
    """Reads one split as far as the gate lets it."""

    def __init__(self, source: GatedSource, part: int, start: int) -> None:
        self._gate = Gate(source.gate, source.parts)
        self._source = source
        self._touched = np.load(source.touched, mmap_mode="r") if source.touched else None
        self._part = part
        self._next = start

    @override
    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """The next rows, None at the limit."""
        parts = self._source.parts
        count = min(max_rows, self._gate.limit // parts - self._next)
        if count <= 0:
            return None
        rows = np.arange(self._next, self._next + count, dtype=np.int64) * parts + self._part
        self._next += count
        self._gate.note_read(self._part, self._next)
        noise = mix(rows.view(np.uint64))
        numbers = noise.astype(np.float64)
        columns = [
            _keys_of(rows, noise, self._source.keys, self._touched),
            numbers,
            1.0 / (1.0 + numbers),
        ]
        return pa.RecordBatch.from_arrays([*map(pa.array, columns)], schema=SCHEMA)

    @override
    def next_read_at_ms(self) -> int:
        """Soon: nobody tells when the limit moves."""
        return time.time_ns() // 1_000_000 + _POLL_MS

    @override
    def position(self) -> bytes:
        """Rows of the split that have been read."""
        return str(self._next).encode()


def _keys_of(
    rows: npt.NDArray[np.int64],
    noise: npt.NDArray[np.uint64],
    keys: int,
    touched: npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.int64]:
    """Keys of ascending rows."""
    if rows[-1] < keys:
        return rows
    touched_stop = keys + (0 if touched is None else len(touched))
    found = (noise % np.uint64(keys)).astype(np.int64)
    if rows[0] < touched_stop:
        is_first = rows < keys
        found[is_first] = rows[is_first]
        is_touched = ~is_first & (rows < touched_stop)
        if touched is not None:
            found[is_touched] = touched[rows[is_touched] - keys]
    return found


def rows_per_key(rows: int, keys: int) -> npt.NDArray[np.int64]:
    """How often each key is among the first rows of a source that touches none on purpose."""
    found = np.zeros(keys, dtype=np.int64)
    for start in range(0, rows, _COUNTED_ROWS):
        numbers = np.arange(start, min(start + _COUNTED_ROWS, rows), dtype=np.int64)
        found += np.bincount(_keys_of(numbers, mix(numbers.view(np.uint64)), keys), minlength=keys)
    return found


class CountingSink(ps.Sink):
    """Adds up what it is given, in the gate.

    Args:
        gate: file of the ``Gate``.
    """

    def __init__(self, gate: str) -> None:
        self._path = gate

    @override
    def open(self, ctx: ps.SinkContext) -> None:
        """Maps the gate."""
        self._part = ctx.subtask_index
        self._gate = Gate(self._path, ctx.parallelism)

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        """Counts."""
        self._gate.add_written(self._part, batch.num_rows)

    @override
    def flush(self) -> None:
        """Nothing is held back."""


class Totals(ps.KeyedProcessFunction):
    """Keeps two values per key."""

    rows = ps.ValueState("rows", pa.int64(), default=0)
    total = ps.ValueState("total", pa.float64(), default=0.0)

    @override
    def process(self, row: Any, ctx: Any, out: ps.Collector) -> None:
        """Counts and adds."""
        rows = self.rows.value() + 1
        self.rows.update(rows)
        total = self.total.value() + row.first
        self.total.update(total)
        out.emit(key=row.key, rows=rows, total=total)


TOTALS_SCHEMA = pa.schema([("key", pa.int64()), ("rows", pa.int64()), ("total", pa.float64())])
