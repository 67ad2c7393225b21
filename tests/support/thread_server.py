"""A gRPC server that is none of ours, for clients that call from a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc


@contextmanager
def grpc_server(add: Callable[[grpc.Server], None], *, calls_max: int = 1) -> Iterator[str]:
    """Its address, for the time of the block.

    Args:
        add: gives it its services.
        calls_max: how many it does at once.
    """
    server = grpc.server(futures.ThreadPoolExecutor(calls_max))  # noqa: TID251 - it is none of ours
    add(server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
