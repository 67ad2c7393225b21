"""Which inputs of a subtask are given to it as files, and which it reads over channels.

Only a Spark stage is given files: those of complete partitions that lie on its machine, or on a mount that all see. What is
on the disk of another TaskManager comes over channels, as everywhere. Files that Spark has written, and that lie on the
machine, are read by their channels without anybody who serves them, so that subtasks read them side by side.
"""

from __future__ import annotations

from common.pb import internal_pb2
from penstock.config import Configuration
from penstock.errors import PartitionUnavailable, StoreCorrupt, StoreTransient
from penstock.pb import graph_pb2
from taskmanager.network.input_connector import partition_of
from taskmanager.partitions.in_place import PartitionInPlace, in_place
from taskmanager.partitions.sealed_partition import SealedPartition
from taskmanager.task.exchange import DataExchange

_READ_BY_SPARK = frozenset({graph_pb2.SPILL_FORMAT_PARQUET, graph_pb2.SPILL_FORMAT_OF_SPARK})
"""What the planner says of exchanges whose columns Spark reads as they lie."""


class InputsInPlace:
    """The inputs of one subtask.

    Attributes:
        edges: what it reads over channels.
        partitions: per input of the vertex, what it is given as files.
        is_sought: there may be such, or files that channels read themselves.
    """

    def __init__(
        self,
        deployment: internal_pb2.TaskDeployment,
        exchange: DataExchange,
        config: Configuration,
    ) -> None:
        self.edges = list(deployment.inputs)
        self.partitions: dict[int, list[PartitionInPlace]] = {}
        operators = deployment.vertex.operators
        self._is_for_spark = bool(operators) and operators[0].HasField("spark")
        self.is_sought = self._is_for_spark or any(map(_is_of_spark, self.edges))
        self._exchange = exchange
        self._config = config
        self._taken: set[tuple[str, int]] = set()

    def find(self) -> None:
        """Looks which partitions are here; on an I/O thread, before the subtask is built.

        Raises:
            PartitionUnavailable: one is, and its index is damaged.
        """
        if not self._is_for_spark:
            self._find_near()
            return
        edges = []
        for edge in self.edges:
            if edge.spill_format not in _READ_BY_SPARK:
                edges.append(
                    edge
                )  # its files may be Parquet by configuration, of types that Spark has not
                continue
            given = self.partitions.setdefault(edge.target_input, [])
            left = internal_pb2.InputEdge()
            left.CopyFrom(edge)
            del left.channels[:]
            for channel in edge.channels:
                found = self._found(channel)
                if found is None:
                    left.channels.append(channel)
                else:
                    given.append(found)
                    self._taken.add(_key(channel))
            if left.channels:
                edges.append(left)
        self.edges = edges

    def _find_near(self) -> None:
        for edge in filter(_is_of_spark, self.edges):
            for channel in edge.channels:
                if self._sealed(channel) is not None:
                    self._exchange.read_here(channel)

    def _found(self, channel: internal_pb2.InputChannel) -> PartitionInPlace | None:
        sealed = self._sealed(channel)
        if sealed is None:
            return None
        return in_place(sealed, channel.subpartition_index, self._config)

    def _sealed(self, channel: internal_pb2.InputChannel) -> SealedPartition | None:
        try:
            return self._exchange.complete_here(channel)
        except StoreTransient:
            return None  # a channel asks again
        except StoreCorrupt as error:
            partition = partition_of(channel)
            raise PartitionUnavailable(
                f"partition {partition} cannot be read: {error}", partition=partition
            ) from error

    def has(self, channel: internal_pb2.InputChannel) -> bool:
        """Whether files of that producer were given: an attempt that takes its place changes nothing for them."""
        return _key(channel) in self._taken


def _is_of_spark(edge: internal_pb2.InputEdge) -> bool:
    return edge.spill_format == graph_pb2.SPILL_FORMAT_OF_SPARK


def _key(channel: internal_pb2.InputChannel) -> tuple[str, int]:
    return channel.edge_id, channel.producer_attempt.subtask_index
