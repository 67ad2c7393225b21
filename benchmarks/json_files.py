"""The workload ``json``: what most jobs in Python do. JSON lines -> map -> key_by -> function with state -> Parquet.

The limit is the same in one loop of plain Python: ``json.loads``, a dict of states, lists of columns, ``pyarrow.parquet``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import override

import penstock as ps
from benchmarks.function_workloads import to_euro
from benchmarks.input import BATCH_ROWS, input_batches
from benchmarks.measure import JobSettings, bench_cluster, memory_directory, result, run_job
from benchmarks.workload import RATE

JSON_ROWS = 2_000_000
OUTPUT = pa.schema([("auction", pa.int64()), ("bids", pa.int64()), ("total", pa.float64())])


class RunningTotals(ps.KeyedProcessFunction):
    """Count and sum per key; the new ones for every row."""

    bids = ps.ValueState("bids", pa.int64(), default=0)
    total = ps.ValueState("total", pa.float64(), default=0.0)

    @override
    def process(self, row: Any, ctx: Any, out: ps.Collector) -> None:
        bids = self.bids.value() + 1
        total = self.total.value() + row.euro
        self.bids.update(bids)
        self.total.update(total)
        out.emit(auction=row.auction, bids=bids, total=total)


def run_json(settings: JobSettings, rows: int, keys: int, repeat: int) -> Iterator[dict[str, Any]]:
    """One result per repetition, with the limit measured before each.

    Args:
        settings: of the job.
        rows: of the input, in two files for each subtask.
        keys: different ones.
        repeat: how often.
    """
    with memory_directory() as directory, bench_cluster(settings.parallelism) as cluster:
        source, target = directory / "in", directory / "out"
        paths = write_lines(source, rows, keys, 2 * settings.parallelism)

        def build(env: ps.Environment) -> None:
            totals = env.read_json(str(source)).map(to_euro).key_by("auction")
            totals.process(RunningTotals(), schema=OUTPUT).uid("totals").write_parquet(
                str(target / str(time.monotonic_ns()))
            )

        run_job("json", build, cluster, settings)  # warms the cluster
        for number in range(repeat):
            cpu_before = time.process_time()
            limit_s = in_plain_python(paths, directory / f"plain-{number}.parquet")
            limit_cpu_s = time.process_time() - cpu_before
            measured = run_job("json", build, cluster, settings)
            cpu_s_per_million = measured.cpu_s / rows * 1e6
            yield {
                **result("json", settings, rows, keys, measured.seconds, cpu_s_per_million),
                "checkpoints": measured.checkpoints,
                "limit_rows_per_s": round(rows / limit_s),
                "limit_cpu_s_per_million": round(limit_cpu_s / rows * 1e6, 4),
            }


def write_lines(directory: Path, rows: int, keys: int, files: int) -> list[Path]:
    """Writes the input as JSON lines; returns the files."""
    directory.mkdir()
    paths = [directory / f"part-{number}.json" for number in range(files)]
    opened = [path.open("w") for path in paths]
    for number, batch in enumerate(input_batches(rows, keys)):
        lines = map(json.dumps, batch.to_pylist())
        opened[number % files].write("\n".join(lines) + "\n")
    for file in opened:
        file.close()
    return paths


def in_plain_python(paths: list[Path], target: Path) -> float:
    """Seconds that one loop takes for the same, Parquet included."""
    started = time.perf_counter()
    states: dict[int, tuple[int, float]] = {}
    columns: tuple[list[Any], ...] = ([], [], [])
    auctions, counts, totals = columns
    with pq.ParquetWriter(target, OUTPUT) as writer:
        for path in paths:
            with path.open() as file:
                for line in file:
                    bid = json.loads(line)
                    auction = bid["auction"]
                    bids, total = states.get(auction, (0, 0.0))
                    state = states[auction] = bids + 1, total + bid["price"] * RATE
                    auctions.append(auction)
                    counts.append(state[0])
                    totals.append(state[1])
                    if len(auctions) == BATCH_ROWS:
                        _write(writer, columns)
        _write(writer, columns)
    return time.perf_counter() - started


def _write(writer: pq.ParquetWriter, columns: tuple[list[Any], ...]) -> None:
    writer.write_table(pa.table([pa.array(column) for column in columns], schema=OUTPUT))
    for column in columns:
        column.clear()
