"""``penstock taskmanagers`` and ``drain``: the TaskManagers of a cluster, what runs there, and how it leaves them."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import click

from penstock.cli.context import (
    common_options,
    connected,
    print_json,
    print_table,
    reports_errors,
)
from penstock.cli.describe import size_of, time_of
from penstock.pb import client_pb2


@click.command()
@common_options
@reports_errors
def taskmanagers(jobmanager: str | None, as_json: bool) -> None:
    """List the TaskManagers of a cluster, with their slots and the jobs in them."""
    with connected(jobmanager) as client:
        shown = client.cluster().taskmanagers
    if as_json:
        print_json({"taskmanagers": [taskmanager_fields(one) for one in shown]})
        return
    print_table(
        [
            "TASKMANAGER",
            "ADDRESS",
            "PID",
            "SLOTS",
            "FREE",
            "MEMORY",
            "SPILL",
            "HEARTBEAT",
            "VERSION",
            "DRAINED",
        ],
        [
            [
                one.taskmanager_id,
                one.address,
                one.pid,
                one.slots_total,
                one.slots_free,
                size_of(one.memory_bytes),
                size_of(one.spill_bytes),
                time_of(one.last_heartbeat_ms),
                one.version,
                "yes" if one.drained else "",
            ]
            for one in shown
        ],
    )
    held = [(one.taskmanager_id, slot) for one in shown for slot in one.slots]
    if held:
        click.echo()
        print_table(
            ["TASKMANAGER", "SLOT", "JOB", "PID", "MEMORY"],
            [
                [name, slot.slot_id, slot.job_id, slot.pid or "", size_of(slot.memory_bytes)]
                for name, slot in held
            ],
        )


@click.command()
@click.argument("taskmanager")
@click.option(
    "--partitions",
    type=click.Choice(["wait", "remake"]),
    default="wait",
    show_default=True,
    help="What becomes of partitions that it keeps for consumers, and of jobs without checkpoints: they are waited for, "
    "or made again elsewhere.",
)
@click.option("--undo", is_flag=True, help="Give it tasks again, also while it is being drained.")
@click.option(
    "--operation-id",
    metavar="ID",
    help="Names the drain: asked for twice under one id, it is done once.",
)
@common_options
@reports_errors
def drain(
    taskmanager: str,
    partitions: str,
    undo: bool,
    operation_id: str | None,
    jobmanager: str | None,
    as_json: bool,
) -> None:
    """Empty a TaskManager, and wait until nothing of it is in use.

    It gets no more tasks. Those that it has begin on other TaskManagers from a checkpoint behind which their job holds, so
    that nothing is done twice and no failure is counted. It stays drained until it is stopped, or --undo.
    """
    operation_id = operation_id or uuid4().hex
    with connected(jobmanager) as client:
        if undo:
            client.undo_drain(taskmanager)
        else:
            client.drain(taskmanager, operation_id, makes_again=partitions == "remake")
    if as_json:
        named = None if undo else operation_id
        print_json({"taskmanager_id": taskmanager, "operation_id": named, "drained": not undo})
    elif undo:
        click.echo(f"{taskmanager} is given tasks again")
    else:
        click.echo(f"{taskmanager} is drained: stop it, or give it tasks again with --undo")


def taskmanager_fields(shown: client_pb2.TaskManagerDetails) -> dict[str, Any]:
    """One TaskManager of ``penstock taskmanagers --json``."""
    return {
        "taskmanager_id": shown.taskmanager_id,
        "address": shown.address,
        "pid": shown.pid,
        "slots_total": shown.slots_total,
        "slots_free": shown.slots_free,
        "memory_bytes": shown.memory_bytes,
        "spill_bytes": shown.spill_bytes,
        "held_partitions": shown.held_partitions,
        "held_partitions_bytes": shown.held_partitions_bytes,
        "last_heartbeat_ms": shown.last_heartbeat_ms,
        "version": shown.version,
        "drained": shown.drained,
        "slots": [
            {
                "slot_id": slot.slot_id,
                "job_id": slot.job_id,
                "pid": slot.pid or None,
                "memory_bytes": slot.memory_bytes,
            }
            for slot in shown.slots
        ],
    }
