"""Sources and sinks without files: a socket's lines, printing, discarding, collecting."""

from __future__ import annotations

import pyarrow as pa

from penstock.errors import JobRejected
from penstock.pb import graph_pb2

SOCKET_SCHEMA = pa.schema([pa.field("line", pa.string())])

_PORT_MAX = 65535


def socket_source(host: str, port: int) -> tuple[graph_pb2.SourceSpec, pa.Schema]:
    """A source that connects to a server and reads its lines, one row each, until the server closes.

    It cannot be replayed: a socket does not say again what it has said.

    Raises:
        JobRejected: the host is empty or the port out of range.
    """
    if not host:
        raise JobRejected("read_socket: the host is empty")
    if not 1 <= port <= _PORT_MAX:
        raise JobRejected(f"read_socket: the port must lie in 1..{_PORT_MAX}, not {port}")
    spec = graph_pb2.SourceSpec(socket=graph_pb2.SocketSource(host=host, port=port), bounded=False)
    return spec, SOCKET_SCHEMA


def print_sink() -> graph_pb2.SinkSpec:
    """A sink that prints one line per row to the task's log."""
    return graph_pb2.SinkSpec(print=graph_pb2.PrintSink())


def discard_sink() -> graph_pb2.SinkSpec:
    """A sink that drops its rows (they are counted like any others)."""
    return graph_pb2.SinkSpec(discard=graph_pb2.DiscardSink(), supports_concurrent_attempts=True)


def collect_sink(collect_id: str, limit: int | None = None) -> graph_pb2.SinkSpec:
    """A sink that sends its rows back to the client.

    Args:
        collect_id: names this collect within the job.
        limit: rows over all subtasks; None = all.

    Raises:
        JobRejected: the limit is not positive.
    """
    if limit is not None and limit <= 0:
        raise JobRejected(f"collect: limit must be positive, not {limit}")
    return graph_pb2.SinkSpec(
        collect=graph_pb2.CollectSink(collect_id=collect_id, limit=limit or 0)
    )
