"""``penstock checkpoint`` and ``checkpoints``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from penstock.cli.context import (
    common_options,
    connected,
    echo,
    print_json,
    print_table,
    reports_errors,
)
from penstock.cli.describe import size_of, time_of
from penstock.client.job_checkpoints import Checkpoint, checkpoint_of


@click.command()
@click.argument("job")
@common_options
@reports_errors
def checkpoint(job: str, jobmanager: str | None, as_json: bool) -> None:
    """Take a checkpoint of a job now and wait until it is complete."""
    with connected(jobmanager) as client:
        job_id = client.job(job).summary.job_id
        checkpoint_id = client.checkpoint(job_id)
    if as_json:
        print_json({"job_id": job_id, "checkpoint_id": checkpoint_id})
    else:
        echo(f"{job_id} checkpoint {checkpoint_id} completed")


@click.command()
@click.argument("job")
@common_options
@reports_errors
def checkpoints(job: str, jobmanager: str | None, as_json: bool) -> None:
    """List the last checkpoints of a job, newest first."""
    with connected(jobmanager) as client:
        job_id = client.job(job).summary.job_id
        listed = client.checkpoints(job_id)
    shown = [checkpoint_of(details) for details in listed.checkpoints]
    if as_json:
        print_json(
            {
                "job_id": job_id,
                "completed_count": listed.completed_count,
                "failed_count": listed.failed_count,
                "restored_checkpoint_id": listed.restored_checkpoint_id or None,
                "checkpoints": [checkpoint_fields(one) for one in shown],
            }
        )
        return
    print_table(
        ["ID", "STATUS", "TRIGGERED", "DURATION", "ACKS", "STATE", "UPLOADED", "ALIGNED", "KEPT"],
        [
            [
                one.id,
                one.status,
                time_of(one.triggered_at_ms),
                "" if one.duration_ms is None else f"{one.duration_ms} ms",
                f"{one.acknowledged_subtasks}/{one.total_subtasks}",
                size_of(one.state_bytes),
                size_of(one.uploaded_bytes),
                f"{one.alignment_ms} ms",
                "yes" if one.retained else "",
            ]
            for one in shown
        ],
    )
    for one in shown:
        if one.failure:
            echo(f"checkpoint {one.id} failed: {one.failure}")


def checkpoint_fields(shown: Checkpoint) -> dict[str, Any]:
    """One checkpoint of ``penstock checkpoints --json``."""
    return {**asdict(shown), "duration_ms": shown.duration_ms}
