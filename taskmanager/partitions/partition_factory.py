"""Makes the result partitions of a slot process, each of the kind its edge asks for."""

from __future__ import annotations

from collections.abc import Iterable

from common.pb import internal_pb2
from penstock.config import Configuration
from penstock.errors import InvariantViolation
from penstock.partition_id import PartitionId
from penstock.pb import checkpoint_pb2, graph_pb2
from taskmanager.network.partition_registry import PartitionSource
from taskmanager.network.result_partition import PartitionContext, ResultPartition
from taskmanager.partitions.exchange_cache import ExchangeCache
from taskmanager.partitions.kept_partition import BlockingPartition, KeptPartition, NoFiles
from taskmanager.partitions.retention import Retention
from taskmanager.partitions.sealed_partition import SealedPartition
from taskmanager.partitions.shared_partitions import SharedPartitions
from taskmanager.partitions.spill_format import format_choice
from taskmanager.partitions.spill_runner import SpillRunner
from taskmanager.partitions.spilling import Spilling


class PartitionFactory:
    """Kept partitions of a slot process share its cache.

    Args:
        config: of the job.
        spill: its files; None = everything stays in memory, and nothing can be blocking.
    """

    def __init__(self, config: Configuration, spill: SpillRunner | None = None) -> None:
        self._config = config
        self._spill = spill
        self._shared: dict[tuple[str, str], SharedPartitions] = {}
        self._cache = ExchangeCache(
            config.taskmanager_memory_exchange_cache_bytes,
            config.taskmanager_spill_max_bytes,
            can_spill=spill is not None,
        )

    def shared(self, name: str, job_id: str) -> PartitionSource:
        """Complete partitions of a job on shared storage, or on the disk of this TaskManager (``local_name``).

        Raises:
            InvariantViolation: this process writes and reads no files.
        """
        found = self._shared.get((name, job_id))
        if found is None:
            spill = self._spill
            if spill is None:
                raise InvariantViolation(f"this process has no files, and is to read from {name}")
            found = SharedPartitions(
                name,
                lambda one: spill.complete(job_id, one, name),
                is_own=name == self.local_name(),
            )
            self._shared[name, job_id] = found
        return found

    def here(self, job_id: str, partition_id: PartitionId, shared: str) -> SealedPartition | None:
        """A complete partition whose files this machine sees; see ``SpillRunner.here``."""
        return None if self._spill is None else self._spill.here(job_id, partition_id, shared)

    def local_name(self) -> str:
        """What the place of this process's own files is named, for ``shared``."""
        return "" if self._spill is None else str(self._spill.root)

    @property
    def next_deadline_ns(self) -> int | None:
        """Monotonic time at which ``tick`` has something to do; None = nothing waits."""
        return None if self._spill is None else self._spill.next_deadline_ns

    def tick(self, now_ns: int) -> None:
        """Ends the waits whose deadline has passed."""
        if self._spill is not None:
            self._spill.tick(now_ns)

    def set_spilling(self, spilling: Spilling) -> None:
        """Whether kept partitions may be written to disk from now on."""
        self._cache.set_spilling(spilling)

    def create(
        self,
        context: PartitionContext,
        edge: internal_pb2.OutputEdge,
        positions: Iterable[checkpoint_pb2.ChannelPosition] = (),
    ) -> ResultPartition:
        """The output of an attempt on an edge.

        Args:
            positions: where the attempt goes on, of this edge and others; from 0 where not named.
        """
        kind = edge.edge.partition_type
        if kind == graph_pb2.RESULT_PARTITION_TYPE_PIPELINED:
            return ResultPartition(context)
        retention = Retention(kind)
        first_rows = {
            position.index: position.rows
            for position in positions
            if position.edge_id == edge.edge.id
        }
        unread = frozenset(edge.finished_subpartitions)
        spill = self._spill if retention.may_spill else None
        choice = format_choice(retention, edge.edge.spill_format, self._config)
        files = (
            NoFiles()
            if spill is None
            else spill.partition(context.partition_id, choice, edge.shared_directory)
        )
        if retention is Retention.BLOCKING:
            if spill is None:
                raise InvariantViolation(
                    f"{context.partition_id} is blocking, and this process has no spill directory"
                )
            return BlockingPartition(
                context,
                self._cache,
                files,
                first_rows=first_rows,
                unread=unread,
                takes_files=edge.edge.spill_format == graph_pb2.SPILL_FORMAT_OF_SPARK,
            )
        return KeptPartition(
            context, retention, self._cache, files, first_rows=first_rows, unread=unread
        )
