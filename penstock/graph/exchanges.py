"""The types of an exchange: what becomes of rows between the operator that makes them and the next.

They are Flink's result partition types, under the names that users write. All but pipelined ones keep
the rows, so that they can be read again: a restart on one side of such an exchange need not reach the other.
"""

from __future__ import annotations

from penstock.errors import JobRejected
from penstock.naming import nearest_hint
from penstock.pb import graph_pb2

PIPELINED = graph_pb2.RESULT_PARTITION_TYPE_PIPELINED
BLOCKING = graph_pb2.RESULT_PARTITION_TYPE_BLOCKING
CACHING = graph_pb2.RESULT_PARTITION_TYPE_CACHING
CACHING_MEMORY = graph_pb2.RESULT_PARTITION_TYPE_CACHING_MEMORY

EXCHANGES = {
    "pipelined": PIPELINED,
    "blocking": BLOCKING,
    "caching": CACHING,
    "caching-memory": CACHING_MEMORY,
}
"""The names of ``.exchange(...)`` and ``execution.exchange.default``."""

_NAMES = {partition_type: name for name, partition_type in EXCHANGES.items()}


def exchange_of(name: object) -> graph_pb2.ResultPartitionType.ValueType:
    """The type that a user means.

    Raises:
        JobRejected: there is none of that name.
    """
    found = EXCHANGES.get(name) if isinstance(name, str) else None
    if found is None:
        hint = nearest_hint(name, EXCHANGES) if isinstance(name, str) else ""
        raise JobRejected(
            f"exchange: {name!r} is no type of exchange{hint}; there are "
            + ", ".join(repr(known) for known in EXCHANGES)
        )
    return found


def exchange_name(partition_type: int) -> str:
    """Inverse of ``exchange_of``; a number that is no type of this version as text."""
    return _NAMES.get(graph_pb2.ResultPartitionType.ValueType(partition_type), str(partition_type))


def is_known(partition_type: int) -> bool:
    """Whether this version knows the type."""
    return partition_type in _NAMES


def keeps_rows(partition_type: int) -> bool:
    """Whether rows of such an exchange can be read again."""
    return partition_type != PIPELINED
