"""What the slot processes of a TaskManager have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.config import Configuration


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
    token: str = ""
