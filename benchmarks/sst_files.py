"""Who makes the files that RocksDB takes in: ``python -m benchmarks.sst_files``.

Our writer (``sst_file``) is compared with RocksDB's (``rocksdict.SstFileWriter``) and with a write batch, which gets into
the files of the database by way of its memtable. Of each it prints how long 300,000 entries take, and how long batches of
an operator take on the mailbox thread while another thread writes 1 GB of entries: what is behind docs/adr/0011.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any, Final

import numpy as np
import pyarrow as pa
from rocksdict import IngestExternalFileOptions, Options, SstFileWriter, WriteBatch

from penstock.storage.entries.byte_strings import SstEntries
from penstock.storage.entries.row_values import encoded_values
from taskmanager.kernels import AccumulatorKind, RecordTable, Rows, encode_keys
from taskmanager.state.memory import ManagedMemory
from taskmanager.state.rocksdb.database_store import Database
from taskmanager.state.rocksdb.entry_batches import sorted_entries
from taskmanager.state.rocksdb.keyed_entries import keyed_entries
from taskmanager.state.rocksdb.slot_memory_store import SlotMemory

FILL: Final = 300_000
STALL_BYTES: Final = 1 << 30
BATCH_ROWS: Final = 4096
IDLE_SECONDS: Final = 5
_NUMBERS: Final = 7
_GROUPS: Final = 128


def numbers(first: int, count: int) -> SstEntries:
    """Seven numbers per key, as running aggregates have them."""
    keys = encode_keys([pa.array(np.arange(first, first + count) * 7919)])
    columns = [np.arange(count) + place for place in range(_NUMBERS)]
    rows = Rows(keys, columns, [None] * _NUMBERS)
    return next(sorted_entries(0, rows, _GROUPS))  # not so many that they come in parts


def objects(first: int, count: int) -> SstEntries:
    """Text of up to 60 bytes per key of text."""
    names = [f"user-{number:09d}" for number in range(first, first + count)]
    texts = pa.array(["x" * (number % 60) for number in range(count)])
    keys, gone = encode_keys([pa.array(names)]), np.zeros(count, np.bool_)
    return keyed_entries(0, keys, None, encoded_values([texts]), gone, _GROUPS)


class Target:
    """A database in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        memory = SlotMemory(ManagedMemory(512 << 20))
        self._database = Database(directory / "db", directory / "in", memory)
        self._rocks: Any = self._database._rocks

    def ours(self, entries: SstEntries) -> None:
        """Whole columns become a file."""
        self._database.ingest(entries)

    def rocksdict(self, entries: SstEntries) -> None:
        """Entry by entry becomes a file."""
        writer: Any = SstFileWriter(Options(raw_mode=True))
        path = str(self._directory / "in" / "incoming.sst")
        writer.open(path)
        for key, value in zip(entries.keys.to_list(), entries.values.to_list(), strict=True):
            writer[key] = value
        writer.finish()
        options = IngestExternalFileOptions()
        options.set_move_files(True)
        self._rocks.ingest_external_file([path], options)
        Path(path).unlink(missing_ok=True)

    def write_batch(self, entries: SstEntries) -> None:
        """Entry by entry gets into the memtable, which RocksDB writes."""
        batch: Any = WriteBatch(raw_mode=True)
        for key, value in zip(entries.keys.to_list(), entries.values.to_list(), strict=True):
            batch[key] = value
        self._rocks.write(batch)

    def close(self) -> None:
        """Closes the database."""
        self._database.close()


def fill(write: Callable[[SstEntries], None], make: Callable[[int, int], SstEntries]) -> float:
    """Milliseconds for ``FILL`` entries that are there already, the median of five."""
    taken = []
    for index in range(6):
        entries = make(index * FILL, FILL)
        started = time.perf_counter()
        write(entries)
        taken.append((time.perf_counter() - started) * 1000)
    return statistics.median(taken[1:])


def stalls(write: Callable[[SstEntries], None] | None) -> dict[str, float]:
    """How long batches take while a thread writes ``STALL_BYTES``; None = while nobody does."""
    done = [write is None]

    def work() -> None:
        assert write is not None
        written = 0
        while written < STALL_BYTES:
            entries = made[written % len(made)]
            write(entries)
            written += len(entries.keys.data) + len(entries.values.data)
        done[0] = True

    made = [numbers(index * FILL, FILL) for index in range(5)]
    thread = Thread(target=work)
    started = time.perf_counter()
    if write is not None:
        thread.start()
    until = started + IDLE_SECONDS if write is None else started
    taken = sorted(_batches(done, until))
    if write is not None:
        thread.join()
    return {
        "seconds": round(time.perf_counter() - started, 1),
        "batches_per_s": round(len(taken) / (time.perf_counter() - started)),
        "p50_ms": round(taken[len(taken) // 2], 2),
        "p99_ms": round(taken[len(taken) * 99 // 100], 2),
        "max_ms": round(taken[-1], 1),
    }


def _batches(done: list[bool], until: float) -> Iterator[float]:
    """Milliseconds of each batch of a running aggregate."""
    table = RecordTable((pa.int64(),), [AccumulatorKind.COUNT])
    random = np.random.default_rng(1)
    batches = [pa.array(random.integers(0, 100_000, BATCH_ROWS)) for _ in range(16)]
    index = 0
    while not done[0] or time.perf_counter() < until:
        started = time.perf_counter()
        table.accumulate(encode_keys([batches[index % 16]]), [None], [None])
        yield (time.perf_counter() - started) * 1000
        index += 1


def main() -> None:
    """Prints every figure."""
    numbers(0, FILL)
    print(json.dumps({"figure": "stall", "writer": "none", **stalls(None)}))
    for name in ("ours", "rocksdict", "write_batch"):
        with tempfile.TemporaryDirectory() as directory:
            target = Target(Path(directory))
            write = getattr(target, name)
            for make in (numbers, objects):
                row = {"figure": "fill", "writer": name, "state": make.__name__}
                print(json.dumps({**row, "ms": round(fill(write, make), 1)}), flush=True)
            print(json.dumps({"figure": "stall", "writer": name, **stalls(write)}), flush=True)
            target.close()


if __name__ == "__main__":
    main()
