"""``penstock nexmark``: writes Nexmark events as Parquet."""

from __future__ import annotations

import time
from pathlib import Path

import click

from penstock.cli.context import print_json, reports_errors
from penstock.nexmark.generator import write_nexmark


@click.command()
@click.option("--events", type=click.IntRange(0), required=True, help="Events of all kinds.")
@click.option("--out", "directory", type=click.Path(path_type=Path), required=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--files", type=click.IntRange(1), default=4, show_default=True, help="Files of bids."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@reports_errors
def nexmark(events: int, directory: Path, seed: int, files: int, as_json: bool) -> None:
    """Write Nexmark events as Parquet into bids/, auctions/ and persons/."""
    started = time.monotonic()
    rows = write_nexmark(events, directory, seed=seed, files=files)
    seconds = time.monotonic() - started
    if as_json:
        written = sorted(str(path) for path in directory.rglob("*.parquet"))
        print_json(
            {
                "events": events,
                "directory": str(directory),
                "rows": rows,
                "files": written,
                "seconds": round(seconds, 3),
            }
        )
    else:
        kinds = ", ".join(f"{count:,} {kind}s" for kind, count in rows.items())
        click.echo(f"wrote {kinds} to {directory} in {seconds:.1f} s")
