"""``penstock partitions``: what finished subtasks have left on the disks of TaskManagers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from penstock.cli.context import (
    client_security,
    common_options,
    connected,
    echo,
    jobmanager_addresses,
    print_json,
    print_table,
    reports_errors,
)
from penstock.cli.describe import partition_fields, size_of
from penstock.client.client import Client
from penstock.config import parse_override

if TYPE_CHECKING:
    from penstock.streams.compaction import Compaction


@click.command()
@click.option("--promoted", is_flag=True, help="Only those that outlive their job.")
@click.option("--drop", "dropped", metavar="NAME", help="Drop what was promoted under this name.")
@click.option(
    "--compact",
    "compacted",
    metavar="NAME",
    help="Make a new set of what was promoted under this name, which takes the name when it is whole.",
)
@click.option(
    "--sort-by",
    multiple=True,
    metavar="COL",
    help="With --compact: put the rows of each partition in order; may be repeated.",
)
@click.option("--spark", "on_spark", is_flag=True, help="With --compact: have Spark do it.")
@click.option(
    "--partitions",
    "count",
    type=click.IntRange(1),
    help="With --compact: how many partitions; default: of about 1 GB each.",
)
@click.option(
    "-D", "overrides", multiple=True, metavar="KEY=VALUE", help="With --compact: of its job."
)
@common_options
@reports_errors
def partitions(
    promoted: bool,
    dropped: str | None,
    compacted: str | None,
    sort_by: tuple[str, ...],
    on_spark: bool,
    count: int | None,
    overrides: tuple[str, ...],
    jobmanager: str | None,
    as_json: bool,
) -> None:
    """List the complete result partitions that TaskManagers hold."""
    says_how = bool(sort_by or on_spark or count or overrides)
    _check(promoted, dropped, compacted, says_how, on_spark and count)
    with connected(jobmanager) as client:
        if dropped is not None:
            _drop(client, dropped, as_json)
        elif compacted is not None:
            from penstock.streams.compaction import Compaction

            wanted = Compaction(compacted, sort_by, on_spark, count)
            _compact(client, wanted, dict(map(parse_override, overrides)), jobmanager, as_json)
        else:
            _list(client, promoted, as_json)


def _check(
    promoted: bool,
    dropped: str | None,
    compacted: str | None,
    has_compact_options: bool,
    is_counted_on_spark: object,
) -> None:
    """Refuses options that do not go together."""
    problem = ""
    if promoted + (dropped is not None) + (compacted is not None) > 1:
        problem = "--promoted, --drop and --compact are three things to do: choose one"
    elif compacted is None and has_compact_options:
        problem = "--sort-by, --spark, --partitions and -D say how to --compact a NAME: give it"
    elif is_counted_on_spark:
        problem = "with --spark there is one partition: leave --partitions out"
    if problem:
        raise click.UsageError(problem)


def _drop(client: Client, name: str, as_json: bool) -> None:
    count = client.drop_partitions(name)
    if as_json:
        print_json({"name": name, "dropped": count})
    else:
        echo(f"dropped {count} partitions of {name}")


def _compact(
    client: Client,
    wanted: Compaction,
    config: dict[str, str],
    jobmanager: str | None,
    as_json: bool,
) -> None:
    from penstock.streams.compaction import compact
    from penstock.streams.environment import Environment

    name = wanted.name
    before = client.find_persisted(name)
    address = jobmanager_addresses(jobmanager)
    compact(
        wanted,
        before,
        client.cluster().slots_total,
        lambda own: Environment(address, config={**own, **config, **client_security()}),
    )
    after = client.find_persisted(name)
    if as_json:
        fields = {
            key: {
                "job_id": one.job_id,
                "partitions": one.partition_count,
                "rows": one.rows,
                "size_bytes": one.size_bytes,
            }
            for key, one in (("before", before), ("after", after))
        }
        print_json({"name": name, **fields})
    else:
        echo(
            f"compacted {name}: {after.rows} rows, {before.partition_count} partitions of {size_of(before.size_bytes)} "
            f"became {after.partition_count} of {size_of(after.size_bytes)}"
        )


def _list(client: Client, promoted: bool, as_json: bool) -> None:
    held = client.partitions(promoted=promoted)
    if as_json:
        print_json({"partitions": [partition_fields(one) for one in held]})
        return
    print_table(
        ["TASKMANAGER", "JOB", "EDGE", "PRODUCER", "ATTEMPT", "ROWS", "SIZE", "PROMOTED AS"],
        [
            [
                one.taskmanager_id or "(shared storage)",
                one.job_id,
                one.edge_id,
                f"{one.vertex}/{one.subtask_index}",
                one.attempt,
                one.rows,
                size_of(one.size_bytes),
                one.promoted_as,
            ]
            for one in held
        ],
    )
