"""``penstock cluster``: a local cluster of real daemons."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from penstock.cli.context import default_directory, echo, print_json, print_table, reports_errors
from penstock.cli.describe import details_fields, time_of
from penstock.config import parse_override
from penstock.errors import StreamError
from penstock.local.local_cluster import LocalCluster, StoppedDaemon
from penstock.local.started_processes import STOP_DEADLINE_S
from penstock.printable import in_one_line

_directory_option = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="The cluster's directory; default $PENSTOCK_DIR, then ~/.penstock.",
)
_ASK_TIMEOUT_S = 2.0
_ASKED_MAX = 20
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def cluster() -> None:
    """Start, stop and look at a local cluster of real daemons."""


@cluster.command()
@click.option("--jobmanagers", type=click.IntRange(1, 16), default=1, show_default=True)
@click.option("--taskmanagers", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--slots", type=click.IntRange(1, 1024), help="Slots per TaskManager.  [default: 2]")
@click.option(
    "-D",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="A configuration value, kept in DIR/penstock.yaml.",
)
@_directory_option
@_json_option
@reports_errors
def start(
    jobmanagers: int,
    taskmanagers: int,
    slots: int | None,
    overrides: tuple[str, ...],
    directory: Path | None,
    as_json: bool,
) -> None:
    """Start what is missing of the cluster; a dead daemon is replaced."""
    local = LocalCluster(directory or default_directory())
    values: dict[str, object] = dict(parse_override(text) for text in overrides)
    if slots is not None:
        values["taskmanager.numberOfTaskSlots"] = slots
    local.configure(values)
    for told in local.configuration().without_effect():
        echo(f"penstock: {told}", err=True)
    local.start(taskmanagers=taskmanagers, jobmanagers=jobmanagers)
    if slots is not None:
        _warn_of_other_slots(local.slots(), slots)
    _print_status(local.status(), as_json)


@cluster.command()
@_directory_option
@_json_option
@reports_errors
def stop(directory: Path | None, as_json: bool) -> None:
    """Stop every daemon of the cluster."""
    local = LocalCluster(directory or default_directory())
    jobs = _unfinished_jobs(local)
    ended = local.stop()
    if as_json:
        print_json({"stopped": [_stopped_fields(daemon) for daemon in ended], "jobs": jobs})
        return
    for daemon in ended:
        if daemon.was_killed:
            echo(
                f"penstock: the {daemon.role} {daemon.id} (pid {daemon.pid}) had not ended after "
                f"{STOP_DEADLINE_S:.0f} s and was killed",
                err=True,
            )
    for job in jobs or ():
        echo(_left_text(job))
    echo(f"stopped {len(ended)} daemons in {local.directory}")


def _stopped_fields(daemon: StoppedDaemon) -> dict[str, Any]:
    return {"role": daemon.role, "pid": daemon.pid, "was_killed": daemon.was_killed}


def _unfinished_jobs(local: LocalCluster) -> list[dict[str, Any]] | None:
    """What runs as the cluster is stopped; None where no JobManager says so soon."""
    if not any(one.alive and one.role == "jobmanager" for one in local.daemons()):
        return []
    deadline = time.monotonic() + _ASK_TIMEOUT_S
    timeouts_s = dict.fromkeys(
        ("connect_timeout_s", "call_timeout_s", "leader_timeout_s"), _ASK_TIMEOUT_S
    )
    try:
        with local.client(**timeouts_s) as client:
            jobs = []
            for one in [one for one in client.jobs() if not one.ended_at_ms][:_ASKED_MAX]:
                if time.monotonic() > deadline:
                    return None
                jobs.append(details_fields(client.job(one.job_id)))
            return jobs
    except (
        StreamError,
        ValueError,
    ):  # or it is of another version, and has states that are not known here
        return None


def _left_text(job: dict[str, Any]) -> str:
    """What becomes of a job of a cluster that is stopped."""
    who = f"job {in_one_line(job['name'])} ({job['job_id']}) was {job['state']}"
    if job["last_checkpoint_id"] is None:
        return f"{who} and had completed no checkpoint: what it has done is lost"
    when = time_of(job["last_checkpoint_at_ms"])
    return f"{who}: it goes on from checkpoint {job['last_checkpoint_id']}, {when}, when the cluster is started again"


@cluster.command()
@_directory_option
@_json_option
@reports_errors
def status(directory: Path | None, as_json: bool) -> None:
    """Show the daemons of the cluster."""
    _print_status(LocalCluster(directory or default_directory()).status(), as_json)


def _warn_of_other_slots(running: dict[str, int], wanted: int) -> None:
    others = [f"{name} with {count}" for name, count in running.items() if count != wanted]
    if others:
        echo(
            f"penstock: {', '.join(others)} slots ran already: --slots {wanted} counts for "
            "TaskManagers that are started from now on; stop the cluster and start it again",
            err=True,
        )


def _print_status(status: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(status)
        return
    echo(f"JobManager {status['jobmanager']}, directory {status['directory']}")
    print_table(
        ["ROLE", "ID", "PID", "ADDRESS", "METRICS", "PARTITIONS", "STATE"],
        [
            [
                daemon["role"],
                daemon["id"],
                daemon["pid"],
                daemon["address"],
                daemon["metrics_address"],
                "" if daemon["held_partitions"] is None else daemon["held_partitions"],
                _state(daemon, status),
            ]
            for daemon in status["daemons"]
        ],
    )


def _state(daemon: dict[str, Any], status: dict[str, Any]) -> str:
    if not daemon["alive"]:
        return "dead"
    jobmanagers = [one for one in status["daemons"] if one["role"] == "jobmanager"]
    if daemon not in jobmanagers or len(jobmanagers) == 1 or not status["leader"]:
        return "alive"
    return "alive, leads" if daemon["address"] == status["leader"] else "alive, stands by"
