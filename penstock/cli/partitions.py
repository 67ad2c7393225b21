"""``penstock partitions``: what finished subtasks have left on the disks of TaskManagers."""

from __future__ import annotations

import click

from penstock.cli.context import (
    common_options,
    connected,
    echo,
    print_json,
    print_table,
    reports_errors,
)
from penstock.cli.describe import partition_fields, size_of


@click.command()
@click.option("--promoted", is_flag=True, help="Only those that outlive their job.")
@click.option("--drop", "name", metavar="NAME", help="Drop what was promoted under this name.")
@common_options
@reports_errors
def partitions(promoted: bool, name: str | None, jobmanager: str | None, as_json: bool) -> None:
    """List the complete result partitions that TaskManagers hold."""
    with connected(jobmanager) as client:
        if name is not None:
            dropped = client.drop_partitions(name)
            if as_json:
                print_json({"name": name, "dropped": dropped})
            else:
                echo(f"dropped {dropped} partitions of {name}")
            return
        held = client.partitions(promoted=promoted)
    if as_json:
        print_json({"partitions": [partition_fields(one) for one in held]})
        return
    print_table(
        ["TASKMANAGER", "JOB", "EDGE", "PRODUCER", "ATTEMPT", "ROWS", "SIZE", "PROMOTED AS"],
        [
            [
                one.taskmanager_id,
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
