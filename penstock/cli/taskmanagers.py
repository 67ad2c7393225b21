"""``penstock taskmanagers``: the TaskManagers of a cluster, what runs in their slots and what it takes."""

from __future__ import annotations

from typing import Any

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
        ["TASKMANAGER", "ADDRESS", "PID", "SLOTS", "FREE", "MEMORY", "SPILL", "HEARTBEAT"],
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
