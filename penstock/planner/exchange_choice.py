"""Which type an exchange gets.

What the operator in front of it says (``.exchange``) counts; else exchanges are blocking in batch mode, and of
the job's default type in streaming mode. Where rows need not move there is nothing to choose: they
are handed on pipelined, unless the operator says otherwise.
"""

from __future__ import annotations

import pyarrow as pa

from penstock.config import Configuration
from penstock.errors import JobRejected
from penstock.graph.exchanges import BLOCKING, PIPELINED, exchange_name, exchange_of
from penstock.graph.logical import Node, NodeInput
from penstock.pb import graph_pb2
from penstock.rows.spark_types import carried_schema, is_read_alike
from penstock.storage.parquet_types import parquet_misfit

AS_USUAL = graph_pb2.SPILL_FORMAT_UNSPECIFIED
OF_SPARK = graph_pb2.SPILL_FORMAT_OF_SPARK
_ANY_ROW_TO_ANY = frozenset(
    {
        graph_pb2.PARTITIONING_FORWARD,
        graph_pb2.PARTITIONING_REBALANCE,
        graph_pb2.PARTITIONING_RESCALE,
    }
)


def exchange_type(
    partitioning: graph_pb2.Partitioning.ValueType,
    wanted: graph_pb2.ResultPartitionType.ValueType | None,
    config: Configuration,
) -> graph_pb2.ResultPartitionType.ValueType:
    """The type of an exchange.

    Args:
        wanted: what the user said, None = nothing.
    """
    if wanted is not None:
        return wanted
    if partitioning == graph_pb2.PARTITIONING_FORWARD:
        return PIPELINED
    if config.runtime_mode == "batch":
        return BLOCKING
    return exchange_of(config.default_exchange)


def exchange_beside_spark(
    reader: str, wanted: graph_pb2.ResultPartitionType.ValueType | None
) -> graph_pb2.ResultPartitionType.ValueType:
    """The type of an exchange into a Spark stage, or out of one.

    Args:
        reader: the operator behind it.
        wanted: what the user said, None = nothing.

    Raises:
        JobRejected: the user wants another one than there can be.
    """
    if wanted not in (None, BLOCKING):
        raise JobRejected(
            f"the exchange in front of operator {reader!r} leads into a Spark stage or out of one, which takes and "
            f"gives whole results: it is blocking, not {exchange_name(wanted or 0)}. Leave .exchange(...) out"
        )
    return BLOCKING


def read_by_spark(
    schema: pa.Schema, given: graph_pb2.SpillFormat.ValueType
) -> graph_pb2.SpillFormat.ValueType:
    """What the files of an exchange into a Spark stage have to be: Parquet, where Spark can read them in place.

    Args:
        given: what they are whoever reads them.
    """
    if given != AS_USUAL:
        return given
    if parquet_misfit(schema) is None and all(is_read_alike(field.type) for field in schema):
        return graph_pb2.SPILL_FORMAT_PARQUET
    return AS_USUAL


def given_by_spark(
    schema: pa.Schema, partitioning: graph_pb2.Partitioning.ValueType
) -> graph_pb2.SpillFormat.ValueType:
    """What the files of an exchange out of a Spark stage are: those that Spark writes, where its columns are ours, and
    it does not matter which consumer gets which rows.

    Example: an unsigned integer is wider in Spark's files, so the rows are written anew.
        >>> given_by_spark(pa.schema([("n", pa.int64())]), graph_pb2.PARTITIONING_REBALANCE) == OF_SPARK
        True
        >>> given_by_spark(pa.schema([("n", pa.uint64())]), graph_pb2.PARTITIONING_REBALANCE) == OF_SPARK
        False
    """
    if partitioning in _ANY_ROW_TO_ANY and schema.equals(carried_schema(schema)):
        return OF_SPARK
    return AS_USUAL


def wanted_exchange(
    reader: Node, source: NodeInput
) -> graph_pb2.ResultPartitionType.ValueType | None:
    """What the user said of the exchange between two operators, None = nothing.

    What only prepares a call (the key of ``key_by(fn)``, a column of an aggregate) runs where its input
    does: the exchange is the one behind it.
    """
    return None if reader.is_preparation else _said_of(source)


def _said_of(source: NodeInput) -> graph_pb2.ResultPartitionType.ValueType | None:
    node = source.node
    if source.tag:
        return None
    if node.properties.exchange is None and node.is_preparation:
        return _said_of(node.inputs[0])
    return node.properties.exchange
