"""What the slot processes of a TaskManager have in common."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.names import require_name
from common.pb import internal_pb2
from penstock.client.keyring import Token, keyring_of
from penstock.config import Configuration
from penstock.storage.open_store import is_s3
from taskmanager.network.gateway import Gateway
from taskmanager.slots.artifact_cache_store import JobFiles
from taskmanager.spark.left_sessions_runner import LeftSessions
from taskmanager.spark.session_note_store import SLOTS


def _no_gateway() -> None:
    """Data connections are plain."""


@dataclass(frozen=True, slots=True)
class SlotEnvironment:
    """What is the same for all slots of this TaskManager.

    Attributes:
        log_directory: holds one directory per job.
        socket_directory: private, with a short path.
        work_directory: holds one directory per slot process.
        local_state: directories for copies of snapshots.
        spill_directory: takes partitions that do not fit into memory, or outlive their slot.
        terminal_fd: where print sinks write besides their log, None = nowhere.
        token: the cluster's secret, "" without one.
        gateway: the way to other hosts, once it is there; None = slots connect to them.
        left_sessions: ends what slots have left on servers of Spark Connect.
    """

    taskmanager_id: str
    host_id: str
    config: Configuration
    log_directory: Path
    socket_directory: Path
    work_directory: Path
    spill_directory: Path
    packages: Mapping[str, str]
    local_state: Sequence[Path] = ()
    terminal_fd: int | None = None
    token: Token = ""
    gateway: Callable[[], Gateway | None] = _no_gateway
    left_sessions: LeftSessions = field(default_factory=LeftSessions)

    def job_logs(self, job_id: str) -> Path:
        """Where the logs of a job are.

        Raises:
            JobRejected: its id cannot be a name.
        """
        return self.log_directory / require_name("job id", job_id)

    def configuration(
        self,
        job_id: str,
        slot_id: str,
        number: int,
        files: JobFiles,
        config: Configuration,
        leader_epoch: int,
        oldest_peer_epoch: int,
    ) -> internal_pb2.SlotConfiguration:
        """What a slot process is told first.

        Args:
            number: of the process: no two of the TaskManager have the same.
            config: of the job.
            leader_epoch: the process is started under this leader.
            oldest_peer_epoch: slots of the job run on that were started under this one.
        """
        unix_path, keyring = "", keyring_of(self.token)
        gateway = self.gateway()
        if self.config.taskmanager_local_sockets or gateway is not None:
            # Numbered, not named after the slot: the path must stay short.
            unix_path = str(self.socket_directory / f"{number}.sock")
        return internal_pb2.SlotConfiguration(
            job_id=job_id,
            slot_id=slot_id,
            taskmanager_id=self.taskmanager_id,
            host_id=self.host_id,
            leader_epoch=leader_epoch,
            unix_socket_path=unix_path,
            tcp_bind_host=self.config.taskmanager_bind_host,
            tcp_advertised_host=self.config.taskmanager_host,
            code_paths=files.code_paths,
            artifact_paths=files.artifact_paths,
            log_directory=str(self.job_logs(job_id)),
            # Of this process alone: what it leaves is removed while the next one may be running.
            work_directory=str(self.work_directory / SLOTS / f"{slot_id}-{number}"),
            config=config.to_mapping(),
            token=keyring.text,
            token_path=keyring.place,
            spill_directory=str(self.spill_directory),
            local_state_directories=map(str, self.local_state),
            oldest_peer_epoch=oldest_peer_epoch,
            gateway_unix_path=gateway.unix_path if gateway else "",
            gateway_port=gateway.port if gateway else 0,
        )

    def clear(self, configuration: internal_pb2.SlotConfiguration) -> None:
        """Removes what a process that has ended has left: its databases, a session on a server of Spark Connect; off the event loop."""
        if configuration.unix_socket_path:
            Path(configuration.unix_socket_path).unlink(missing_ok=True)
        work = Path(configuration.work_directory)
        self.left_sessions.end_of(work)
        shutil.rmtree(work, ignore_errors=True)


def preloaded(config: Configuration) -> str:
    """The module that slots of a job import before they are forked, since it is slow; "" = none.

    Example:
        >>> preloaded(Configuration.from_mapping({"execution.checkpointing.dir": "s3://bucket/kept"}))
        'penstock.storage.s3.library'
    """
    return "penstock.storage.s3.library" if is_s3(config.execution_checkpointing_dir) else ""
