"""``python -m benchmarks WORKLOAD [--rows N] [--keys K] [--parallelism P] ... --json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks import measure, state_benchmarks
from benchmarks.json_files import JSON_ROWS, run_json
from benchmarks.latency import LatencySettings, run_latency
from benchmarks.measure import JobSettings
from benchmarks.recovery import RecoverySettings, run_recovery
from benchmarks.rescale import run_rescale
from benchmarks.spark import ROWS as SPARK_ROWS
from benchmarks.spark import run_spark
from benchmarks.state_benchmarks import StateSettings
from benchmarks.store_restore import run_store_restore
from benchmarks.trickle import run_trickle
from benchmarks.workloads import WORKLOADS

_ALL = [
    ("w0", 20_000_000, 1000, JobSettings(1)),
    ("w1", 20_000_000, 1000, JobSettings(1)),
    ("w2", 20_000_000, 1000, JobSettings(1)),
    ("w2", 20_000_000, 1000, JobSettings(2)),
    ("w2", 20_000_000, 1_000_000, JobSettings(1)),
    ("w2", 20_000_000, 1_000_000, JobSettings(2)),
    ("w3", 40_000_000, 1_000_000, JobSettings(1)),
    ("w3", 40_000_000, 1_000_000, JobSettings(1, "hashmap", "1s")),
    ("w3", 10_000_000, 1_000_000, JobSettings(1, "rocksdb")),
    ("w3", 10_000_000, 1_000_000, JobSettings(1, "rocksdb", "1s")),
    ("w4", 5_000_000, 1000, JobSettings(2)),
    ("q1", 10_000_000, 1000, JobSettings(1)),
    ("q2", 10_000_000, 1000, JobSettings(1)),
    ("q5", 10_000_000, 1000, JobSettings(1)),
    ("q7", 10_000_000, 1000, JobSettings(1)),
    ("q8", 10_000_000, 1000, JobSettings(1)),
    ("q11", 10_000_000, 1000, JobSettings(1)),
]
_STATE_WORKLOADS = {
    "checkpoint": state_benchmarks.run_checkpoint,
    "restore": state_benchmarks.run_restore,
    "alignment": state_benchmarks.run_alignment,
    "rescale": run_rescale,
}
_ROWS = 20_000_000
_STATE_KEYS = {"numbers": 16_000_000, "objects": 4_000_000}
_ALIGNED_KEYS = 100_000
_COLUMNS = (
    "workload",
    "rows",
    "keys",
    "parallelism",
    "backend",
    "checkpoint_interval_s",
    "exchange",
    "pre_aggregation",
    "seconds",
    "rows_per_s",
    "limit_rows_per_s",
)


@click.command()
@click.argument(
    "workload",
    type=click.Choice(
        [
            *WORKLOADS,
            *_STATE_WORKLOADS,
            *("restore-s3", "recovery", "spark", "trickle", "latency", "json", "limit", "all"),
        ]
    ),
)
@click.option(
    "--rows", type=click.IntRange(1), help="20,000,000; of spark 50,000,000, of json 2,000,000."
)
@click.option(
    "--keys", type=click.IntRange(1), help="1000; of state, about 1 GB of it, of recovery 500 MB."
)
@click.option(
    "--parallelism",
    type=click.IntRange(1),
    help="1; checkpoint, restore, restore-s3, rescale, spark, trickle, latency 2; alignment, recovery 4.",
)
@click.option("--backend", type=click.Choice(["hashmap", "rocksdb"]), default="hashmap")
@click.option(
    "--checkpoint-interval", help='"1s", or "none" (alignment, recovery, trickle, latency: 1s).'
)
@click.option("--state", type=click.Choice(list(_STATE_KEYS)), default="numbers", show_default=True)
@click.option(
    "--load", type=click.FloatRange(0, 1), default=0.5, show_default=True, help="Of alignment."
)
@click.option("--skew", type=click.FloatRange(0), default=0.0, show_default=True)
@click.option(
    "--rate",
    type=click.IntRange(1),
    help="Rows/s: of recovery and latency 200,000, of trickle 500.",
)
@click.option(
    "--seconds", type=click.IntRange(1), default=600, show_default=True, help="Of latency."
)
@click.option(
    "--kill", is_flag=True, help="Of latency: a slot that no other depends on, in the middle."
)
@click.option(
    "--pipelines",
    type=click.IntRange(2),
    help="Of recovery: so many independent ones, instead of a keyed job with state.",
)
@click.option(
    "--functions",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Of trickle: so many keyed functions one behind another.",
)
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--exchange",
    type=click.Choice(["pipelined", "caching", "caching-memory"]),
    help="Type of the exchanges: pipelined; of recovery caching.",
)
@click.option(
    "--pairs",
    is_flag=True,
    help="Run each time without checkpoints, too; with --exchange, pipelined too, and both without"
    " pre-aggregation.",
)
@click.option(
    "--s3",
    default="s3://bench/restore",
    show_default=True,
    help="Of restore-s3: where; reached as AWS_ENDPOINT_URL and so on say.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per run.")
def main(
    workload: str,
    rows: int | None,
    keys: int | None,
    parallelism: int | None,
    backend: str,
    checkpoint_interval: str | None,
    state: str,
    load: float,
    skew: float,
    rate: int | None,
    seconds: int,
    kill: bool,
    pipelines: int | None,
    functions: int,
    repeat: int,
    exchange: str | None,
    pairs: bool,
    s3: str,
    as_json: bool,
) -> None:
    """Measure a workload, or all those of docs/benchmarks.md."""
    if workload in _STATE_WORKLOADS:
        is_aligned = workload == "alignment"
        settings = JobSettings(
            parallelism or (4 if is_aligned else 2), backend, checkpoint_interval or "1s"
        )
        of_state = keys or (_ALIGNED_KEYS if is_aligned else _STATE_KEYS[state])
        found = _STATE_WORKLOADS[workload](StateSettings(settings, of_state, state, load), repeat)
    elif workload == "restore-s3":
        settings = JobSettings(parallelism or 2, backend, "1h")
        of_state = keys or _STATE_KEYS["numbers"]
        found = run_store_restore(StateSettings(settings, of_state, "numbers"), s3, repeat)
    elif workload == "recovery":
        settings = JobSettings(
            pipelines or parallelism or 4,
            backend,
            checkpoint_interval or "1s",
            exchange or "caching",
        )
        found = run_recovery(RecoverySettings(settings, keys, rate or 200_000, pipelines), repeat)
    elif workload == "trickle":
        settings = JobSettings(parallelism or 2, backend, checkpoint_interval or "1s")
        found = run_trickle(settings, rate or 500, repeat, functions)
    elif workload == "latency":
        settings = JobSettings(parallelism or 2, backend, checkpoint_interval or "1s")
        found = run_latency(
            LatencySettings(settings, rate or 200_000, keys or 1000, seconds, kill=kill), repeat
        )
    elif workload == "json":
        settings = JobSettings(parallelism or 1, backend, checkpoint_interval or "none")
        found = run_json(settings, rows or JSON_ROWS, keys or 1000, repeat)
    elif workload == "spark":
        found = run_spark(rows or SPARK_ROWS, parallelism or 2, repeat)
    else:
        settings = JobSettings(
            parallelism or 1, backend, checkpoint_interval or "none", exchange or "pipelined"
        )
        found = _results(workload, rows or _ROWS, keys or 1000, settings, skew, repeat, pairs=pairs)
    results: list[dict[str, Any]] = []
    for result in found:
        if as_json:
            click.echo(json.dumps(result))
        results.append(result)
    if not as_json:
        _print_table(results)


def _print_table(results: list[dict[str, Any]]) -> None:
    """One line per result; results with fields of their own one line per field."""
    if results[0]["workload"] in {
        *_STATE_WORKLOADS,
        "restore-s3",
        "recovery",
        "spark",
        "trickle",
        "latency",
    }:
        table = Table("field", *(f"run {number + 1}" for number in range(len(results))), box=None)
        for name, first in results[0].items():
            if first is not None:
                table.add_row(name, *(_cell(result[name]) for result in results))
    else:
        table = Table(*_COLUMNS, "ratio", box=None)
        for result in results:
            ratio = f"{result['rows_per_s'] / result['limit_rows_per_s']:.2f}"
            table.add_row(*(_cell(result[name]) for name in _COLUMNS), ratio)
    Console(width=140).print(table)


def _results(
    workload: str,
    rows: int,
    keys: int,
    settings: JobSettings,
    skew: float,
    repeat: int,
    *,
    pairs: bool,
) -> Iterator[dict[str, Any]]:
    if workload == "limit":
        yield from measure.run_limit(
            WORKLOADS["w1"], rows=rows, keys=keys, skew=skew, repeat=repeat
        )
        return
    chosen = _ALL if workload == "all" else [(workload, rows, keys, settings)]
    for name, job_rows, job_keys, job_settings in chosen:
        yield from measure.run(
            WORKLOADS[name],
            rows=job_rows,
            keys=job_keys,
            settings=job_settings,
            skew=skew,
            repeat=repeat,
            pairs=pairs,
        )


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
