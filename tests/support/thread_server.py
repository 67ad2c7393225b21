"""A gRPC server that is none of ours, for clients that call from a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc


@contextmanager
def grpc_server(add: Callable[[grpc.Server], None]) -> Iterator[str]:
    """Its address, for the time of the block.

    Args:
        add: gives it its services.
    """
    server = grpc.server(futures.ThreadPoolExecutor(1))  # noqa: TID251 - it is none of ours
    add(server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
