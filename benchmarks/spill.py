"""Files of kept exchanges: how fast rows are written and read again, in either format.

    python -m benchmarks.spill [--directory DIR] [--mb N] [--batch-rows N]

Calls what slots call, on one thread: five columns (integers, floats, times, text) in files of 8 MB, with checksums. Prints
one JSON object; rates are MB of Arrow rows per second of the process's CPU time (``_core``) and by the clock.
``plain`` writes and reads the same number of bytes without a format and a checksum, in the same run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from taskmanager.partitions.exchange_cache import RUN_BYTES_MAX
from taskmanager.partitions.spill_files import read_spill_file, write_spill_files
from taskmanager.partitions.spill_format import FormatChoice, SpillFormat
from taskmanager.partitions.spill_layout import SpillFile

_ROUNDS = 3
_FORMATS = SpillFormat.ARROW, SpillFormat.PARQUET


def batch_of(rows: int, seed: int) -> pa.RecordBatch:
    """Columns as jobs have them."""
    generator = np.random.default_rng(seed)
    words = generator.integers(0, 100_000, rows)
    return pa.record_batch(
        {
            "id": generator.integers(0, 1 << 40, rows),
            "small": generator.integers(0, 1000, rows),
            "price": generator.random(rows),
            "at": pa.array(np.arange(rows) + seed * rows, pa.timestamp("us")),
            "user": pa.array([f"user-{word}" for word in words]),
        }
    )


def rates(size_bytes: int, work: Callable[[], object]) -> tuple[float, float]:
    """MB per second of CPU time and by the clock, of the best of some rounds."""
    best_core = best = float("inf")
    for _ in range(_ROUNDS):
        core_s, started_s = time.process_time(), time.perf_counter()
        work()
        best_core = min(best_core, time.process_time() - core_s)
        best = min(best, time.perf_counter() - started_s)
    return round(size_bytes / 1e6 / best_core, 1), round(size_bytes / 1e6 / best, 1)


def measure_format(
    directory: Path, spill_format: SpillFormat, batches: list[pa.RecordBatch], file_count: int
) -> dict[str, float]:
    """Writes so many files and reads them again."""
    choice = FormatChoice(spill_format)
    written: list[SpillFile] = []

    def write() -> None:
        written.clear()
        for number in range(file_count):
            found = write_spill_files(directory, number, 0, batches, choice)
            written.extend(file for file, _ in found)

    def read() -> None:
        for file in written:
            for batch in read_spill_file(directory / file.name, file):
                for column in batch.columns:
                    column.validate()

    size_bytes = file_count * sum(batch.nbytes for batch in batches)
    name = spill_format.value
    write_core, write_clock = rates(size_bytes, write)
    read_core, read_clock = rates(size_bytes, read)
    return {
        f"{name}_write_mb_per_s_core": write_core,
        f"{name}_write_mb_per_s": write_clock,
        f"{name}_read_mb_per_s_core": read_core,
        f"{name}_read_mb_per_s": read_clock,
        f"{name}_size_ratio": round(sum(file.size_bytes for file in written) / size_bytes, 3),
    }


def measure_plain(directory: Path, content: bytes, file_count: int) -> dict[str, float]:
    """The same with bytes that nobody looks at."""
    paths = [directory / f"{number}.plain" for number in range(file_count)]
    size_bytes = file_count * len(content)
    write_core, write_clock = rates(
        size_bytes, lambda: [path.write_bytes(content) for path in paths]
    )
    read_core, read_clock = rates(size_bytes, lambda: [len(path.read_bytes()) for path in paths])
    return {
        "plain_write_mb_per_s_core": write_core,
        "plain_write_mb_per_s": write_clock,
        "plain_read_mb_per_s_core": read_core,
        "plain_read_mb_per_s": read_clock,
    }


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, help="on the disk to measure; a temporary one")
    parser.add_argument("--mb", type=int, default=400)
    parser.add_argument("--batch-rows", type=int, default=8192)
    args = parser.parse_args()
    one = batch_of(args.batch_rows, 0)
    batches = [
        batch_of(args.batch_rows, seed) for seed in range(max(1, RUN_BYTES_MAX // one.nbytes))
    ]
    size_bytes = sum(batch.nbytes for batch in batches)
    file_count = max(1, args.mb * 1_000_000 // size_bytes)
    directory = Path(tempfile.mkdtemp(prefix="penstock-spill-", dir=args.directory))
    found: dict[str, float] = {"file_bytes": size_bytes, "files": file_count}
    try:
        found |= measure_plain(directory, b"x" * size_bytes, file_count)
        for spill_format in _FORMATS:
            found |= measure_format(
                directory / spill_format.value, spill_format, batches, file_count
            )
    finally:
        shutil.rmtree(directory)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
