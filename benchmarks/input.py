"""Input of the benchmarks: Arrow in memory, generated before any clock starts.

Each part is an Arrow IPC file on tmpfs that readers map into memory; part i of p holds every p-th
row, so that event time advances in all parts alike. Event times are slightly out of order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

BATCH_ROWS = 8192
ROWS_PER_MS = 1000
OUT_OF_ORDERNESS_MS = 100
SCHEMA = pa.schema(
    [
        ("auction", pa.int64()),
        ("bidder", pa.int64()),
        ("price", pa.int64()),
        ("ts", pa.int64()),
        ("extra", pa.string()),
    ]
)
_EXTRAS = pa.array([f"extra-{number:06d}" for number in range(1000)])
_BATCHES_PER_CHUNK = 128


def write_parts(
    directory: Path,
    rows: int,
    keys: int,
    parts: int,
    skew: float,
    rows_per_ms: int = ROWS_PER_MS,
    seed: int = 7,
) -> list[Path]:
    """Writes the input; returns one file per part."""
    paths = []
    for part in range(parts):
        path = directory / f"part-{part}.arrow"
        part_rows = rows // parts + (part < rows % parts)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:
            for batch in _batches(part_rows, keys, part, parts, skew, rows_per_ms, seed):
                writer.write_batch(batch)
        paths.append(path)
    return paths


def _batches(
    rows: int, keys: int, part: int, parts: int, skew: float, rows_per_ms: int, seed: int
) -> Iterator[pa.RecordBatch]:
    random = np.random.default_rng(seed + part)
    chosen = _keys(keys, skew, random)
    chunk_rows = BATCH_ROWS * _BATCHES_PER_CHUNK
    for start in range(0, rows, chunk_rows):
        count = min(chunk_rows, rows - start)
        position = np.arange(start, start + count, dtype=np.int64) * parts + part
        jitter = random.integers(0, OUT_OF_ORDERNESS_MS, count)
        columns = [
            chosen(count),
            random.integers(0, 1_000_000, count),
            random.integers(1, 10_000, count),
            position // rows_per_ms - jitter + OUT_OF_ORDERNESS_MS,
        ]
        extra = _EXTRAS.take(pa.array(random.integers(0, len(_EXTRAS), count)))
        chunk = pa.RecordBatch.from_arrays([*map(pa.array, columns), extra], schema=SCHEMA)
        for offset in range(0, count, BATCH_ROWS):
            yield chunk.slice(offset, BATCH_ROWS)


def _keys(
    keys: int, skew: float, random: np.random.Generator
) -> Callable[[int], np.ndarray[Any, Any]]:
    """Draws keys: uniform, or Zipf distributed with exponent ``skew``."""
    if skew == 0:
        return lambda count: random.integers(0, keys, count)
    weights = np.arange(1, keys + 1, dtype=np.float64) ** -skew
    cumulative = np.cumsum(weights / weights.sum())
    labels = random.permutation(keys)
    return lambda count: labels[
        np.minimum(np.searchsorted(cumulative, random.random(count)), keys - 1)
    ]


def input_batches(rows: int, keys: int, seed: int = 7) -> Iterator[pa.RecordBatch]:
    """The rows of one part that is all of the input."""
    return _batches(rows, keys, 0, 1, 0.0, ROWS_PER_MS, seed)


def as_parquet(paths: list[Path]) -> list[Path]:
    """Writes the parts as Parquet in their places."""
    written = []
    for path in paths:
        target = path.with_suffix(".parquet")
        with pq.ParquetWriter(target, SCHEMA) as writer:
            batches = read_batches([path])
            while group := list(itertools.islice(batches, _BATCHES_PER_CHUNK)):
                writer.write_table(pa.Table.from_batches(group))
        path.unlink()
        written.append(target)
    return written


def read_parquet(paths: list[Path]) -> Iterator[pa.RecordBatch]:
    """The batches of Parquet files, read in the calling thread."""
    for path in paths:
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(BATCH_ROWS, use_threads=False)


def read_batches(paths: list[Path]) -> Iterator[pa.RecordBatch]:
    """The batches of all parts, mapped into memory, one part after the other."""
    for path in paths:
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index)
