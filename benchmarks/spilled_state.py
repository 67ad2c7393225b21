"""Running aggregates in RocksDB, of more and more keys: ``python -m benchmarks.spilled_state``.

One backend as a slot has it, without the job around it. For each number of keys, every key comes once in random order
(``fill``), then keys all over (``update``): CPU seconds per million rows, those of RocksDB's threads included, and how many
keys are in memory in the end. What counts is keys by memory; 1 M keys with 64 MB are as 16 M with 1 GB.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import pyarrow as pa

from common.clock import SystemClock
from taskmanager.kernels import AccumulatorKind, encode_keys
from taskmanager.state.backend import AggregateDescriptor, BackendEnvironment
from taskmanager.state.memory import ManagedMemory
from taskmanager.state.rocksdb.store import RocksDBStateBackend

BATCH_ROWS: Final = 8192
_KINDS: Final = (AccumulatorKind.SUM_INT64, AccumulatorKind.MIN_INT64, AccumulatorKind.MAX_INT64)


@dataclass
class _Inputs:
    values: list[Any]
    valid: list[Any]
    columns: list[Any] = field(default_factory=list)
    sequence: Any = None
    is_partial: bool = False


class _Operator:
    """What a running aggregate does with its state: a row in, the key's numbers out."""

    def __init__(self, backend: RocksDBStateBackend, numbers: int) -> None:
        kinds = [_KINDS[place % len(_KINDS)] for place in range(numbers - 1)]
        self.backend = backend
        self._numbers = numbers
        self._descriptor = AggregateDescriptor((pa.int64(),), (AccumulatorKind.COUNT, *kinds), list)

    def cpu_s_per_million(self, keys: Any) -> float:
        """Of rows with these keys."""
        began = time.process_time()
        for start in range(0, len(keys), BATCH_ROWS):
            self._handle(keys[start : start + BATCH_ROWS])
        return round((time.process_time() - began) / len(keys) * 1e6, 2)

    def _handle(self, batch: Any) -> None:
        keys = encode_keys([pa.array(batch)])
        values = [None, *[batch] * (self._numbers - 1)]
        table = self.backend.group_table("state", 0, self._descriptor)
        table.update(keys, _Inputs(values, [None] * self._numbers))
        table.rows(keys)

    def cached_keys(self) -> int:
        """Keys in memory."""
        return len(self.backend.group_table("state", 0, self._descriptor)._records)


def measure(keys: int, memory_mb: int, numbers: int, rows: int) -> dict[str, Any]:
    """The figures for so many keys."""
    random = np.random.default_rng(1)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        backend = RocksDBStateBackend(
            BackendEnvironment(
                operator_uid="state",
                operator_name="state",
                subtask_index=0,
                parallelism=1,
                max_parallelism=128,
                clock=SystemClock(),
                memory=ManagedMemory(memory_mb << 20),
                work_directory=Path(directory) / "state",
            )
        )
        operator = _Operator(backend, numbers)
        fill = operator.cpu_s_per_million(random.permutation(keys))
        operator.cpu_s_per_million(
            random.integers(0, keys, rows)
        )  # until what is cached is as usual
        update = operator.cpu_s_per_million(random.integers(0, keys, rows))
        cached = operator.cached_keys()
        backend.close()
    return {"keys": keys, "fill": fill, "update": update, "cached_keys": cached}


@click.command()
@click.option("--memory-mb", default=64, show_default=True, help="Managed memory of the slot.")
@click.option("--numbers", default=2, show_default=True, help="Per key.")
@click.option("--rows", default=500_000, show_default=True, help="Of updates that are measured.")
@click.argument("keys", nargs=-1, type=int)
def main(memory_mb: int, numbers: int, rows: int, keys: tuple[int, ...]) -> None:
    """One line for each number of KEYS."""
    measure(1000, memory_mb, numbers, 1000)
    for count in keys or [1 << shift for shift in range(16, 21)]:
        print(json.dumps(measure(count, memory_mb, numbers, rows)), flush=True)


if __name__ == "__main__":
    main()
