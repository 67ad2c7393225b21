"""``python -m benchmarks WORKLOAD [--rows N] [--keys K] [--parallelism P] ... --json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks import measure
from benchmarks.workloads import WORKLOADS

_ALL = [
    ("w0", 20_000_000, 1000, 1),
    ("w1", 20_000_000, 1000, 1),
    ("w2", 20_000_000, 1000, 1),
    ("w2", 20_000_000, 1000, 2),
    ("w2", 20_000_000, 1_000_000, 1),
    ("w2", 20_000_000, 1_000_000, 2),
    ("q1", 10_000_000, 1000, 1),
    ("q2", 10_000_000, 1000, 1),
    ("q5", 10_000_000, 1000, 1),
    ("q7", 10_000_000, 1000, 1),
]
_COLUMNS = ("workload", "rows", "keys", "parallelism", "seconds", "rows_per_s", "limit_rows_per_s")


@click.command()
@click.argument("workload", type=click.Choice([*WORKLOADS, "limit", "all"]))
@click.option("--rows", type=click.IntRange(1), default=20_000_000, show_default=True)
@click.option("--keys", type=click.IntRange(1), default=1000, show_default=True)
@click.option("--parallelism", type=click.IntRange(1), default=1, show_default=True)
@click.option("--skew", type=click.FloatRange(0), default=0.0, show_default=True)
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per run.")
def main(
    workload: str, rows: int, keys: int, parallelism: int, skew: float, repeat: int, as_json: bool
) -> None:
    """Measure a workload, or all those of docs/benchmarks.md."""
    results: list[dict[str, Any]] = []
    for result in _results(workload, rows, keys, parallelism, skew, repeat):
        if as_json:
            click.echo(json.dumps(result))
        results.append(result)
    if not as_json:
        table = Table(*_COLUMNS, "ratio", box=None)
        for result in results:
            cells = [_cell(result[name]) for name in _COLUMNS]
            table.add_row(*cells, f"{result['rows_per_s'] / result['limit_rows_per_s']:.2f}")
        Console(width=140).print(table)


def _results(
    workload: str, rows: int, keys: int, parallelism: int, skew: float, repeat: int
) -> Iterator[dict[str, Any]]:
    if workload == "limit":
        yield from measure.run_limit(
            WORKLOADS["w1"], rows=rows, keys=keys, skew=skew, repeat=repeat
        )
        return
    chosen = _ALL if workload == "all" else [(workload, rows, keys, parallelism)]
    for name, job_rows, job_keys, job_parallelism in chosen:
        yield from measure.run(
            WORKLOADS[name],
            rows=job_rows,
            keys=job_keys,
            parallelism=job_parallelism,
            skew=skew,
            repeat=repeat,
        )


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
