"""``penstock savepoint`` and ``operation``."""

from __future__ import annotations

from dataclasses import asdict
from uuid import uuid4

import click

from penstock.cli.context import common_options, connected, echo, print_json, reports_errors
from penstock.client.job_operations import FORMATS, operation_of, whole_directory


@click.command()
@click.argument("job")
@click.argument("directory", metavar="[DIR]", required=False)
@click.option(
    "--format",
    "format_",
    type=click.Choice(list(FORMATS)),
    default="native",
    show_default=True,
    help="native: as the state backend keeps it, quick. canonical: for either backend.",
)
@click.option(
    "--operation-id",
    metavar="ID",
    help="Names the savepoint: asked for twice under one id, it is taken once.",
)
@common_options
@reports_errors
def savepoint(
    job: str,
    directory: str | None,
    format_: str,
    operation_id: str | None,
    jobmanager: str | None,
    as_json: bool,
) -> None:
    """Take a savepoint of a job and wait until it is complete.

    It becomes a directory of its own in DIR (default: execution.checkpointing.savepoint-dir), which holds all
    it needs and is yours: keep it, copy it, move it. The job runs on.
    """
    operation_id = operation_id or uuid4().hex
    with connected(jobmanager) as client:
        job_id = client.job(job).summary.job_id
        taken = client.savepoint(job_id, whole_directory(directory), operation_id, FORMATS[format_])
    if as_json:
        print_json(
            {"job_id": job_id, "operation_id": operation_id, "path": taken.path}
            | {"checkpoint_id": taken.checkpoint_id, "uploaded": taken.uploaded}
        )
        return
    echo(taken.path)
    if taken.uploaded:
        echo("in another store than the job's checkpoints: all of it was written anew", err=True)


@click.command()
@click.argument("job")
@click.argument("operation_id", metavar="ID")
@common_options
@reports_errors
def operation(job: str, operation_id: str, jobmanager: str | None, as_json: bool) -> None:
    """Show what has become of a savepoint or checkpoint that was asked for under an id."""
    with connected(jobmanager) as client:
        job_id = client.job(job).summary.job_id
        shown = operation_of(client.operation(job_id, operation_id))
    if as_json:
        print_json({"job_id": job_id, **asdict(shown)})
        return
    echo(f"{shown.kind.lower()} {shown.id} {shown.status} {shown.path}".rstrip())
    if shown.failure:
        echo(f"it failed: {shown.failure}")
