"""The partition server, seen from the daemon: the process that serves what finished attempts left on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.clock import Clock
from common.log import get_logger
from common.pb import internal_pb2
from penstock.client.keyring import Token
from taskmanager.daemon.helper_process_runner import HelperProcessRunner
from taskmanager.processes.fork_protocol import ProcessKind
from taskmanager.processes.forkserver_runner import ForkserverRunner


class PartitionServerRunner(HelperProcessRunner):
    """Keeps one partition server running.

    Args: as of ``HelperProcessRunner``; its configuration has the spill directory.
    """

    def __init__(
        self,
        configuration: internal_pb2.SlotConfiguration,
        log_file: Path,
        forkserver: ForkserverRunner,
        clock: Clock,
        token: Token,
    ) -> None:
        kind = ProcessKind.PARTITION_SERVER
        super().__init__(kind, configuration, log_file, forkserver, clock, token)

    async def release(self, job_id: str, partitions: Sequence[internal_pb2.PartitionId]) -> None:
        """Tells the server that partitions have been removed; empty = all of the job."""
        process = self.process
        if process is None:
            return  # the next one never sees them
        release = internal_pb2.ReleasePartitions(job_id=job_id, partitions=partitions)
        try:
            await process.channel.send(internal_pb2.SlotCommand(release_partitions=release))
        except ConnectionError:
            get_logger(__name__).info("command.dropped", reason="the partition server has ended")
