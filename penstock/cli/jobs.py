"""``penstock list``, ``info``, ``attach``, ``cancel`` and ``logs``."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict

import click

from penstock.cli.context import (
    EXIT_INTERRUPTED,
    common_options,
    connected,
    echo,
    print_json,
    print_table,
    reports_errors,
)
from penstock.cli.describe import (
    LOAD_COLUMNS,
    attempt_state_name,
    details_fields,
    duration_of,
    load_cells,
    repeated_lines,
    result_fields,
    started_lines,
    state_name,
    summary_fields,
    time_of,
)
from penstock.client.job import JobHandle
from penstock.client.job_logs import attempt_logs
from penstock.client.progress import ProgressDisplay, slot_wait_text
from penstock.pb import client_pb2
from penstock.printable import in_one_line

_LOOK_MS = 2_000
"""How often a job that is cancelled is asked what keeps it from ending."""


@click.command("list")
@click.option(
    "--restorable",
    is_flag=True,
    help="Only jobs that have failed, or were cancelled, and have left a checkpoint; with its path.",
)
@common_options
@reports_errors
def list_jobs(restorable: bool, jobmanager: str | None, as_json: bool) -> None:
    """List running and ended jobs, newest first."""
    with connected(jobmanager) as client:
        jobs = sorted(client.jobs(look_again=restorable), key=lambda job: -job.submitted_at_ms)
    if restorable:
        jobs = [job for job in jobs if job.restorable_from]
    if as_json:
        print_json({"jobs": [summary_fields(job) for job in jobs]})
        return
    now_ms = time.time_ns() // 1_000_000
    print_table(
        ["JOB", "NAME", "STATE", "SUBMITTED", "DURATION", "RESTARTS"]
        + (["RESTORABLE FROM"] if restorable else []),
        [
            [
                job.job_id,
                job.name,
                state_name(job.state) + (" (unreadable)" if job.problem else ""),
                time_of(job.submitted_at_ms),
                duration_of(job, now_ms),
                job.restarts,
                *([job.restorable_from] if restorable else []),
            ]
            for job in jobs
        ],
    )


@click.command()
@click.argument("job")
@common_options
@reports_errors
def info(job: str, jobmanager: str | None, as_json: bool) -> None:
    """Show a job: its vertices, subtasks and, where it failed, why."""
    with connected(jobmanager) as client:
        details = client.job(job)
    if as_json:
        print_json(details_fields(details))
        return
    _print_head(details)
    _print_vertices(details)
    if details.HasField("failure"):
        _print_failure(details)
    if details.start_again:
        echo(f"\nto start it again from its newest checkpoint: {details.start_again}")


def _print_head(details: client_pb2.JobDetails) -> None:
    summary = details.summary
    echo(f"{in_one_line(summary.name)}  {summary.job_id}  {state_name(summary.state)}")
    if summary.problem:
        echo(f"{summary.problem}; it is tried again")
    if summary.restarts:
        echo(f"restarts: {summary.restarts}")
    if details.HasField("started_from"):
        is_over = bool(summary.ended_at_ms) and not summary.restorable_from
        echo("\n".join(started_lines(details.started_from, is_over=is_over)))
    if details.last_checkpoint_id:
        when = time_of(details.last_checkpoint_at_ms)
        echo(f"last checkpoint: {details.last_checkpoint_id}, {when}")
    if details.failed_checkpoints:
        echo(f"failed checkpoints: {details.failed_checkpoints}")
    for repeated in details.repeated_output:
        echo("\n".join(repeated_lines(repeated)))
    if details.HasField("slot_wait"):
        echo(slot_wait_text(details.slot_wait))


def _print_vertices(details: client_pb2.JobDetails) -> None:
    print_table(
        [
            *("VERTEX", "NAME", "SUBTASK", "ATTEMPT", "STATE", "TASKMANAGER", "IN", "OUT"),
            *LOAD_COLUMNS,
        ],
        [
            [
                vertex.id,
                vertex.name,
                subtask.subtask_index,
                subtask.attempt,
                attempt_state_name(subtask.state) + note,
                subtask.taskmanager_id,
                f"{subtask.metrics.records_in:,}",
                f"{subtask.metrics.records_out:,}",
                *load_cells([subtask.metrics]),
            ]
            for vertex in details.vertices
            for subtasks, note in (
                (vertex.subtasks, ""),
                (vertex.speculative_attempts, " (speculative)"),
            )
            for subtask in subtasks
        ],
    )
    echo()
    print_table(
        [*LOAD_COLUMNS, "OF ALL SUBTASKS OF"],
        [
            [*load_cells([one.metrics for one in vertex.subtasks]), f"{vertex.id} {vertex.name}"]
            for vertex in details.vertices
        ],
    )


def _print_failure(details: client_pb2.JobDetails) -> None:
    failure = details.failure
    has_failed = details.summary.state in (
        client_pb2.JOB_STATE_FAILING,
        client_pb2.JOB_STATE_FAILED,
    )
    what = "failed" if has_failed else "last failure"
    echo(f"\n{what}: {failure.error_class}: {failure.message}")
    if failure.position:
        echo(f"position: {failure.position}")
    if failure.row:
        echo(f"row: {failure.row}")
    if failure.traceback:
        echo(failure.traceback)


@click.command()
@click.argument("job")
@common_options
@reports_errors
def cancel(job: str, jobmanager: str | None, as_json: bool) -> None:
    """Cancel a job and wait until it has ended."""
    with connected(jobmanager) as client:
        job_id = client.job(job).summary.job_id
        client.cancel(job_id)
        details = client.job(job_id)
        told = ""
        for details in client.watch(job_id, _LOOK_MS):
            told = _tell_obstacle(details, told)
    if as_json:
        print_json(summary_fields(details.summary))
    else:
        echo(f"{job_id} {state_name(details.summary.state)}")


def _tell_obstacle(details: client_pb2.JobDetails, told: str) -> str:
    """Says why a job that is cancelled has not ended, once; returns what has been said last."""
    problem = details.summary.problem
    if problem and problem != told:
        echo(f"cancelled, and not ended yet: {problem}; it is tried again", err=True)
    return problem or told


@click.command()
@click.argument("job")
@common_options
@reports_errors
def attach(job: str, jobmanager: str | None, as_json: bool) -> None:
    """Show the progress of a job until it has ended. Ctrl-C leaves it to the cluster."""
    with connected(jobmanager) as client:
        summary = client.job(job).summary
        try:
            with ProgressDisplay() as display:
                result = JobHandle(client, summary.job_id).wait(on_progress=display)
        except KeyboardInterrupt:
            echo(f"job {summary.job_id} runs on", err=True)
            sys.exit(EXIT_INTERRUPTED)
    if as_json:
        print_json(result_fields(result, summary.name))
    else:
        echo(f"{summary.job_id} {in_one_line(summary.name)} {result.status}")


@click.command()
@click.argument("job")
@click.option("--subtask", metavar="V/I", help="One subtask: vertex/index, for example v1/0.")
@common_options
@reports_errors
def logs(job: str, subtask: str | None, jobmanager: str | None, as_json: bool) -> None:
    """Print what the subtasks of a job wrote: user output, print sinks, failures."""
    vertex, index = _subtask(subtask)
    with connected(jobmanager) as client:
        job_id = client.job(job).summary.job_id
        found = attempt_logs(client.logs(job_id, vertex, index))
    if as_json:
        print_json({"logs": [asdict(log) for log in found]})
        return
    for log in found:
        echo(f"==> {in_one_line(log.vertex)}/{log.subtask_index} attempt {log.attempt} <==")
        click.echo(log.text, nl=False)


def _subtask(text: str | None) -> tuple[str, int]:
    if text is None:
        return "", -1
    vertex, slash, index = text.partition("/")
    if not vertex or not slash or not index.isdigit():
        raise click.BadParameter(
            f"{text!r}: write vertex/index, for example v1/0", param_hint="--subtask"
        )
    return vertex, int(index)
