"""``penstock compact``: merges small output files, without a cluster."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from uuid import uuid4

import click

from penstock.cli.context import echo, print_json, print_table, reports_errors
from penstock.cli.describe import size_of
from penstock.errors import JobRejected
from penstock.storage.open_store import open_store
from penstock.storage.store_names import has_scheme, whole_name
from penstock.units import duration_ms, size_bytes

_RUN_DIGITS = 12


@click.command()
@click.argument("directory", metavar="DIR")
@click.option(
    "--target-size",
    default="64mb",
    show_default=True,
    help="Of merged files; files from half of it on are left as they are.",
)
@click.option(
    "--keep",
    default="7d",
    show_default=True,
    help="For how long files that were merged stay in _compacted/, for jobs that have found them before.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document with stable fields.")
@reports_errors
def compact(directory: str, target_size: str, keep: str, as_json: bool) -> None:
    """Merge the small files that sinks have written to DIR and the directories below it.

    DIR may be s3://bucket/prefix. Jobs may write there and read from there meanwhile: sources of Penstock read each
    row once. Killed or failed, it is repeated. Of two for one directory the one that began first is refused.
    """
    from penstock.connectors.compaction import Plan
    from penstock.connectors.compaction import compact as run

    whole = whole_name(directory)
    if "://" not in whole and not Path(whole).is_dir():
        raise JobRejected(f"{directory}: there is no such directory")
    if has_scheme(whole):
        open_store(whole).first_parts()  # or it is misspelt, and that is said
    target_bytes = size_bytes(target_size)
    if not target_bytes:
        raise click.UsageError("--target-size must be more than nothing")
    now_ms = time.time_ns() // 1_000_000
    plan = Plan(uuid4().hex[:_RUN_DIGITS], now_ms, target_bytes, duration_ms(keep))
    done = run(whole, plan)
    if as_json:
        print_json({"directory": whole, "directories": [asdict(one) for one in done]})
        return
    if not done:
        echo("nothing to merge")
        return
    rows = [
        [one.directory or ".", one.merged, one.into, size_of(one.bytes), one.ended, one.removed]
        for one in done
    ]
    print_table(["DIRECTORY", "MERGED", "INTO", "SIZE", "ENDED", "REMOVED"], rows)
