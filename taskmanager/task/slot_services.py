"""What the subtasks of a slot share."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from common.clock import Clock
from common.pb import internal_pb2
from penstock.config import Configuration
from penstock.storage.object_store import ObjectStore
from taskmanager.snapshot.local_copies_store import LocalCopies
from taskmanager.snapshot.snapshot_files_store import random_name
from taskmanager.spark.driver_runner import SparkDriverRunner
from taskmanager.state.memory import ManagedMemory
from taskmanager.task.exchange import DataExchange


@dataclass(frozen=True, slots=True)
class SlotServices:
    """What the subtasks of a slot share.

    Attributes:
        post: adds mail; any thread.
        executor: the slot's I/O threads, which read ahead of sources.
        background_executor: more threads, for what may hang.
        snapshot_executor: threads that write snapshots and read them again, apart from those that others
            wait for.
        memory: what the states of the slot may take together.
        work_directory: the slot's own, for databases.
        report: sends a report to the daemon.
        open_store: opens the checkpoint directory of a job.
        local_copies: of the job's snapshots on this TaskManager; None = nowhere to keep them.
        spark: its Spark driver; None = there is none.
        new_name: makes names that no other process uses.
    """

    config: Configuration
    clock: Clock
    exchange: DataExchange
    executor: Executor
    background_executor: Executor
    snapshot_executor: Executor
    memory: ManagedMemory
    work_directory: Path
    post: Callable[[Callable[[], None]], None]
    report: Callable[[internal_pb2.SlotReport], None]
    artifact_paths: dict[str, str]
    open_store: Callable[[str], ObjectStore]
    local_copies: LocalCopies | None = None
    spark: SparkDriverRunner | None = None
    new_name: Callable[[], str] = random_name
