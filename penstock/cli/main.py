"""The command line: ``penstock ...``. Exit statuses: 0 done, 1 failed, 2 wrong use, 3 no leader."""

from __future__ import annotations

import gc
import importlib.metadata
from dataclasses import replace

import click

from penstock.cli.checkpoints import checkpoint, checkpoints
from penstock.cli.cluster import cluster
from penstock.cli.compact import compact
from penstock.cli.context import client_configuration
from penstock.cli.exceptions import exceptions
from penstock.cli.fsck import fsck
from penstock.cli.health import health
from penstock.cli.jobs import attach, cancel, info, list_jobs, logs
from penstock.cli.nexmark import nexmark
from penstock.cli.partitions import partitions
from penstock.cli.run import plan, run
from penstock.cli.savepoints import dispose, operation, savepoint, savepoints, state, stop
from penstock.cli.taskmanagers import drain, taskmanagers
from penstock.client.protocol import DAEMON_PROTOCOL_VERSION, PROTOCOL_VERSION


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    importlib.metadata.version("penstock"),
    prog_name="penstock",
    message=f"%(prog)s, version %(version)s (protocol of clients {PROTOCOL_VERSION}, of daemons "
    f"{DAEMON_PROTOCOL_VERSION})",
)
def main() -> None:
    """Run and operate Penstock jobs."""
    gc.freeze()  # what is imported is no garbage: the end of the process need not look at it
    from penstock.storage.object_store import FIRST_ANSWER_MS
    from penstock.storage.open_store import use_s3

    use_s3(lambda: replace(client_configuration().s3, first_answer_ms=FIRST_ANSWER_MS))


for command in (
    cluster,
    run,
    plan,
    list_jobs,
    info,
    attach,
    cancel,
    logs,
    checkpoint,
    checkpoints,
    stop,
    savepoint,
    savepoints,
    operation,
    state,
    dispose,
    compact,
    exceptions,
    partitions,
    taskmanagers,
    drain,
    health,
    fsck,
    nexmark,
):
    main.add_command(command)


if __name__ == "__main__":
    main()
