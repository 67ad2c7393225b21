"""``penstock savepoint``, ``operation``, ``savepoints``, ``dispose`` and ``state``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING
from uuid import uuid4

import click

from penstock.cli.context import (
    common_options,
    connected,
    echo,
    patiently,
    print_json,
    print_table,
    reports_errors,
)
from penstock.cli.describe import size_of, time_of
from penstock.client.job import TERMINAL_STATES, JobHandle
from penstock.client.job_operations import FORMATS, operation_of, whole_directory
from penstock.errors import JobManagerUnreachable, JobNotFound, JobRejected
from penstock.storage.store_names import whole_name

if TYPE_CHECKING:
    from penstock.storage.stored_state import KeptState

_format_option = click.option(
    "--format",
    "format_",
    type=click.Choice(list(FORMATS)),
    default="native",
    show_default=True,
    help="native: as the state backend keeps it, quick. canonical: for either backend.",
)


@contextmanager
def _names_operation(job_id: str, operation_id: str) -> Iterator[None]:
    """Says how to ask for what has become of an operation whose answer did not come."""
    try:
        yield
    except JobManagerUnreachable as error:
        raise JobManagerUnreachable(
            f"{error}; what has become of it says, once one leads again: penstock operation {job_id} {operation_id}"
        ) from error


@click.command()
@click.argument("job")
@click.argument("directory", metavar="[DIR]", required=False)
@_format_option
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
        with _names_operation(job_id, operation_id):
            taken = client.savepoint(
                job_id, whole_directory(directory), operation_id, FORMATS[format_]
            )
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
@click.option(
    "--savepoint-dir",
    metavar="DIR",
    help="Gets a directory for the savepoint; default execution.checkpointing.savepoint-dir.",
)
@click.option(
    "--drain",
    is_flag=True,
    help="End event time first: windows fire, and functions hear of the end of the data.",
)
@_format_option
@click.option("--operation-id", metavar="ID", help="As of savepoint.")
@common_options
@reports_errors
def stop(
    job: str,
    savepoint_dir: str | None,
    drain: bool,
    format_: str,
    operation_id: str | None,
    jobmanager: str | None,
    as_json: bool,
) -> None:
    """End a job with a savepoint, and wait until it has FINISHED.

    Sources read nothing behind the savepoint; all output up to it is committed. Whatever fails on the way leaves the
    job running, and is said.
    """
    operation_id = operation_id or uuid4().hex
    if drain:
        echo(
            "--drain ends event time: all windows fire, and the savepoint is for ending the job, not for resuming it",
            err=True,
        )
    with connected(jobmanager) as client:
        job_id = client.job(job).summary.job_id
        directory = whole_directory(savepoint_dir)
        with _names_operation(job_id, operation_id):
            taken = client.stop(
                job_id, directory, operation_id, drain=drain, format=FORMATS[format_]
            )
        JobHandle(client, job_id).wait()
    if as_json:
        print_json({"job_id": job_id, "operation_id": operation_id, "path": taken.path})
    else:
        echo(taken.path)


@click.command()
@click.argument("owner", metavar="OWNER")
@click.argument("operation_id", metavar="ID")
@common_options
@reports_errors
def operation(owner: str, operation_id: str, jobmanager: str | None, as_json: bool) -> None:
    """Show what has become of a savepoint, checkpoint, stop or drain that was asked for under an id.

    OWNER is the job, or the TaskManager that is drained.
    """
    with connected(jobmanager) as client:
        details = client.operation(owner, operation_id)
    shown = operation_of(details)
    if as_json:
        print_json({"job_id": details.job_id or None, **asdict(shown)})
        return
    place = shown.path or shown.taskmanager_id
    echo(f"{shown.kind.lower()} {shown.id} {shown.status} {place}".rstrip())
    if shown.progress:
        echo(shown.progress)
    if shown.failure:
        echo(f"it failed: {shown.failure}")


_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document with stable fields."
)


@click.command()
@click.argument("directory", metavar="DIR")
@_json_option
@reports_errors
def savepoints(directory: str, as_json: bool) -> None:
    """List the savepoints in DIR, newest first."""
    from penstock.storage.kept_state import list_savepoints

    found = list_savepoints(whole_name(directory))
    if as_json:
        print_json({"savepoints": [asdict(one) for one in found]})
        return
    print_table(
        ["PATH", "STATUS", "JOB", "NAME", "TAKEN", "FORMAT", "SIZE", "OUTPUT"],
        [
            [
                one.path,
                one.status + (" (for ending)" if one.is_for_ending else ""),
                one.job_id,
                one.job_name,
                time_of(one.taken_at_ms) if one.taken_at_ms else "",
                one.format,
                size_of(one.size_bytes),
                one.output.replace("-", " "),
            ]
            for one in found
        ],
    )
    for one in found:
        if one.problem:
            echo(f"{one.path}: {one.problem}", err=True)
        if one.owner:
            echo(f"{one.path}: claimed: {one.owner}", err=True)


@click.command()
@click.argument("path")
@click.option(
    "--force", is_flag=True, help="Nobody runs a job on it: ask no JobManager, and mind no owner."
)
@common_options
@reports_errors
def dispose(path: str, force: bool, jobmanager: str | None, as_json: bool) -> None:
    """Remove a savepoint, or the checkpoints that an ended job has left.

    PATH is the directory of the savepoint, or that of the job in the checkpoint store. Whether that job still runs,
    or another one may go back to it, is asked of the JobManager.
    """
    from penstock.storage.kept_state import dispose as dispose_of
    from penstock.storage.open_store import place_of

    def check_ended(job_id: str) -> None:
        if force:
            return
        with connected(jobmanager) as client:
            try:
                state = client.job(job_id).summary.state
            except JobNotFound:
                return
        if state not in TERMINAL_STATES:
            raise JobRejected(
                f"job {job_id} still runs, and goes on from what is in {path} when something fails: nothing "
                f"has been removed; `penstock cancel {job_id}` ends it"
            )

    uri = patiently(path, lambda: place_of(whole_name(path)))

    def check_unneeded() -> None:
        if force:
            return
        with connected(jobmanager) as client:
            running = [one.job_id for one in client.jobs() if one.state not in TERMINAL_STATES]
            for job_id in running:
                started = client.job(job_id).started_from
                is_there = f"{place_of(started.path)}/".startswith(f"{place_of(uri)}/")
                if is_there and not started.independent_since_checkpoint_id:
                    raise JobRejected(
                        f"job {job_id} was started from {started.path}, and a failure takes it back there until its "
                        "first own checkpoint is complete: nothing has been removed; "
                        f"`penstock checkpoint {job_id}` takes one"
                    )

    what = patiently(uri, lambda: dispose_of(uri, check_ended, check_unneeded, force=force))
    if as_json:
        print_json({"path": uri, "removed": what})
    else:
        echo(f"removed {what} {uri}")
    if not force:
        with connected(jobmanager) as client:
            client.jobs(look_again=True)  # nobody else would tell it


@click.command()
@click.argument("path")
@click.argument("uid", required=False)
@click.argument("state_name", metavar="[STATE]", required=False)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="Rows of STATE to print.",
)
@click.option(
    "--no-count",
    is_flag=True,
    help="Leave out how many rows states have: large ones are read to count them.",
)
@_json_option
@reports_errors
def state(
    path: str,
    uid: str | None,
    state_name: str | None,
    limit: int,
    no_count: bool,
    as_json: bool,
) -> None:
    """Show what a savepoint or a checkpoint holds.

    PATH is a savepoint, a job's directory of checkpoints (its newest one is meant), or one chk-<n> in it. Without
    STATE its states are listed, all or those of operator UID; with it, rows of that state.
    """
    from itertools import islice

    from penstock.storage.content_check import check_content
    from penstock.storage.packed_files_store import PackedReader
    from penstock.storage.restore_point import open_restore_point
    from penstock.storage.stored_state import stored_rows, stored_states

    point = open_restore_point(whole_name(path), use="read")
    reader = PackedReader(point.store, point.manifest)
    if uid is not None and state_name is not None:
        rows = list(islice(stored_rows(point.manifest, reader, uid, state_name), limit))
        rows = [{name: _shown(value) for name, value in row.items()} for row in rows]
        if as_json:
            print_json({"path": point.uri, "uid": uid, "state": state_name, "rows": rows})
            return
        names = list(dict.fromkeys(name for row in rows for name in row))
        print_table(
            [name.upper() for name in names],
            [[row.get(name, "") for name in names] for row in rows],
        )
        return
    counted = None if no_count else reader
    if counted is not None:
        check_content(
            point, counted, has_tables=False
        )  # those are read, and checked, to count their rows
    states = [one for one in stored_states(point.manifest, counted) if uid in (None, one.uid)]
    if uid is not None and not states:
        raise JobRejected(f"{point.uri} holds no state of an operator {uid!r}")
    if as_json:
        manifest = point.manifest
        print_json(
            {
                "path": point.uri,
                "job_id": manifest.job_id,
                "job_name": manifest.job_name,
                "checkpoint_id": manifest.checkpoint_id,
                "states": [asdict(one) for one in states],
            }
        )
        return
    _print_states(states)


def _print_states(states: list[KeptState]) -> None:
    print_table(
        ["UID", "OPERATOR", "STATE", "KIND", "BACKEND", "ROWS", "SUBTASKS", "COLUMNS"],
        [
            [
                one.uid,
                one.operator,
                one.name,
                one.kind,
                one.backend,
                "" if one.rows is None else f"{one.rows:,}",
                len(one.subtasks),
                ", ".join(f"{name}: {kind}" for name, kind in one.columns.items()),
            ]
            for one in states
        ],
    )


def _shown(value: object) -> object:
    """A value as JSON and people read it; what JSON does not know is text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_shown(one) for one in value]
    if isinstance(value, dict):
        return {_shown_key(name): _shown(one) for name, one in value.items()}
    return repr(value) if isinstance(value, bytes) else str(value)


def _shown_key(key: object) -> object:
    """The key of a dict, which JSON takes of a few types."""
    shown = _shown(key)
    return str(shown) if isinstance(shown, list | dict) else shown
