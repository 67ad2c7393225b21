"""``penstock exceptions``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from penstock.cli.context import common_options, connected, echo, print_json, reports_errors
from penstock.cli.describe import repeated_fields, repeated_lines, time_of
from penstock.client.job_exceptions import Failure, JobException, exception_of


@click.command()
@click.argument("job")
@common_options
@reports_errors
def exceptions(job: str, jobmanager: str | None, as_json: bool) -> None:
    """List the last failures of a job, newest first, and what came of them."""
    with connected(jobmanager) as client:
        job_id = client.job(job).summary.job_id
        response = client.exceptions(job_id)
    shown = [exception_of(entry) for entry in response.entries]
    if as_json:
        exceptions = [exception_fields(one) for one in shown]
        repeated = [repeated_fields(one) for one in response.repeated_output]
        print_json({"job_id": job_id, "exceptions": exceptions, "repeated_output": repeated})
        return
    for one_repeated in response.repeated_output:
        echo("\n".join((*repeated_lines(one_repeated), "")))
    if not shown:
        echo("no failures")
    for number, one in enumerate(shown):
        if number:
            echo()
        echo("\n".join(_lines(one)))


def exception_fields(shown: JobException) -> dict[str, Any]:
    """One failure of ``penstock exceptions --json``."""
    return {**asdict(shown), "ended_job": shown.ended_job}


def _lines(shown: JobException) -> list[str]:
    cause = shown.root_cause
    lines = [f"{time_of(cause.timestamp_ms)}  {cause.error_class}: {cause.message}"]
    where = _where(cause)
    if where:
        lines.append(f"  at: {where}")
    if cause.position:
        lines.append(f"  position: {cause.position}")
    if cause.row:
        lines.append(f"  row: {cause.row}")
    if shown.labels:
        labels = ", ".join(f"{key}={value}" for key, value in sorted(shown.labels.items()))
        lines.append(f"  labels: {labels}")
    if shown.ended_job:
        lines.append("  the job ended")
    else:
        lines.append(
            f"  restart {shown.restart_number} after {shown.delay_ms} ms: {', '.join(shown.restarted)}"
        )
    if cause.traceback:
        lines += [f"  {line}" for line in cause.traceback.rstrip().splitlines()]
    lines += [
        f"  with it: {one.error_class}: {one.message}{_in_brackets(_where(one))}"
        for one in shown.concurrent
    ]
    more = shown.concurrent_count - len(shown.concurrent)
    if more:
        lines.append(f"  and {more} more")
    return lines


def _where(cause: Failure) -> str:
    parts = [f"operator {cause.operator!r}"] if cause.operator else []
    if cause.vertex:
        parts.append(f"subtask {cause.vertex}/{cause.subtask_index}, attempt {cause.attempt}")
    if cause.taskmanager_id:
        parts.append(f"TaskManager {cause.taskmanager_id}")
    return ", ".join(parts)


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""
