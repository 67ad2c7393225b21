"""Rewrites what an earlier job has persisted: fewer partitions, fuller files, rows in order.

It is a job that reads a set and persists it again under its name: the cluster sees to it that the name has the old rows or the new
ones, whole, whatever dies when, that nobody else's rows are replaced, and that jobs which read the old ones go on to find them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from penstock.errors import JobRejected
from penstock.graph.logical import ReadSource, WriteSink
from penstock.graph.persisted import check_sort_columns
from penstock.pb import graph_pb2
from penstock.rows.spark_types import check_from_spark
from penstock.streams.environment import Environment

if TYPE_CHECKING:
    from penstock.pb import client_pb2
    from penstock.streams.stream import Stream

PARTITION_BYTES: Final = 1 << 30
"""Of a partition, where their number is ours to choose: about."""

_CONFIG: Final[dict[str, object]] = {
    "execution.runtime-mode": "batch",
    "restart-strategy.type": "fixed-delay",
    "restart-strategy.fixed-delay.attempts": 3,
    "restart-strategy.fixed-delay.delay": "1s",
    "spark.sql.caseSensitive": True,
}


@dataclass(frozen=True, slots=True)
class Compaction:
    """What is to be done.

    Attributes:
        name: of the set.
        sort_by: columns that the rows of each partition are put in order of; none = as they are read.
        on_spark: Spark puts them in order, in one partition.
        partitions: how many there are to be; None = of about ``PARTITION_BYTES``, and no more than there were.
    """

    name: str
    sort_by: tuple[str, ...] = ()
    on_spark: bool = False
    partitions: int | None = None


def compact(
    wanted: Compaction,
    before: client_pb2.PersistedDetails,
    slots: int,
    environment: Callable[[dict[str, object]], Environment],
) -> None:
    """Makes a new set of the rows of one, which takes its name.

    Args:
        before: the set.
        slots: of the cluster.
        environment: one of the cluster, with the configuration that is given and its own.

    Raises:
        JobRejected: the rows cannot be put in that order, or are not there any more.
        JobFailed: it could not be done, and nothing has changed.
    """
    schema = pa.ipc.read_schema(pa.py_buffer(before.schema))
    check_sort_columns("--sort-by", wanted.sort_by, schema, before.updates_of)
    if wanted.on_spark:
        _check_spark_has(schema)
    parallelism = 1 if wanted.on_spark else wanted.partitions or partition_count(before, slots)
    with environment({**_CONFIG, "parallelism.default": parallelism}) as env:
        stream = env.read_persisted(wanted.name)
        spec = graph_pb2.PersistSink(
            name=wanted.name,
            overwrite=True,
            updates_of=before.updates_of,
            replaces_job_id=_written_by(stream),
        )
        if wanted.on_spark:
            stream = stream.spark(SparkOrder(wanted.sort_by), schema=stream.schema)
        else:
            spec.sort_by.extend(wanted.sort_by)
        stream._end(WriteSink(graph_pb2.SinkSpec(persist=spec)), "persist")
        env.execute(f"compact {wanted.name}")


def _check_spark_has(schema: pa.Schema) -> None:
    for field in schema:
        try:
            check_from_spark("--spark", pa.schema([field]))
        except JobRejected as error:
            raise JobRejected(
                f"--spark: column {field.name!r} is {field.type}, which does not come back from Spark as it was: "
                "leave --spark out"
            ) from error


def partition_count(before: client_pb2.PersistedDetails, slots: int) -> int:
    """How many partitions a set is to have: of about ``PARTITION_BYTES``, no more than it had, one for each slot at most.

    >>> from penstock.pb import client_pb2
    >>> partition_count(client_pb2.PersistedDetails(partition_count=40, size_bytes=3 * PARTITION_BYTES + 1), 8)
    4
    >>> partition_count(client_pb2.PersistedDetails(partition_count=40, size_bytes=5), 8)
    1
    """
    full = -(-before.size_bytes // PARTITION_BYTES)
    return max(1, min(full, before.partition_count, slots))


@dataclass(frozen=True, slots=True)
class SparkOrder:
    """Puts a DataFrame in order of columns, as ``RowSorter`` does: nulls last."""

    sort_by: Sequence[str]

    def __call__(self, rows: Any) -> Any:
        """The same rows, in order; as they are where there are no columns."""
        columns = [rows["`" + column.replace("`", "``") + "`"] for column in self.sort_by]
        return rows.orderBy(*[column.asc_nulls_last() for column in columns]) if columns else rows


def _written_by(stream: Stream) -> str:
    """The job whose rows a stream of ``read_persisted`` reads."""
    operation = stream._source.node.operation
    assert isinstance(operation, ReadSource), "it reads a set"
    return operation.spec.persisted.job_id
