"""What both sides of every connection must agree on."""

from __future__ import annotations

from typing import Final

PROTOCOL_VERSION = 1
"""Counts incompatible changes of the gRPC services; ``Hello`` refuses another one."""

DAEMON_PROTOCOL_VERSION = 7
"""Counts incompatible changes of what daemons say to each other, calls and rows: a TaskManager registers with a
JobManager that speaks the same one only. Here, so that ``penstock --version`` tells it before an upgrade."""

MESSAGE_SIZE_MAX_BYTES = 64 * 1024 * 1024
"""Largest gRPC message either side sends or takes."""

CHUNK_SIZE_BYTES = 1024 * 1024
"""Size of the pieces in which artifacts and logs travel."""

METADATA_SIZE_MAX_BYTES = 64 * 1024
"""Largest gRPC metadata: an error with the user's traceback travels as metadata."""

WINDOW_BYTES = 4 * 1024 * 1024
"""What a peer may send on a stream ahead of who reads it. gRPC's own estimate of it grows with the time that a busy
machine takes to answer, to hundreds of megabytes."""

TRANSPORT_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_SIZE_MAX_BYTES),
    ("grpc.max_send_message_length", MESSAGE_SIZE_MAX_BYTES),
    ("grpc.max_metadata_size", METADATA_SIZE_MAX_BYTES),
    ("grpc.http2.bdp_probe", 0),
    # Daemons are called at local or internal addresses: never through a web proxy.
    ("grpc.enable_http_proxy", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
)
"""Of every channel and server of gRPC."""

PARENT_DEATH_VARIABLE = "PENSTOCK_PARENT_DEATH"
"""Set to 1 in a daemon's environment: it ends when the process that started it ends. Meant for that
daemon alone: what it starts itself does not inherit it."""

EMBEDDED_MARKER = ".embedded"
"""A daemon's directory that holds a file of this name was made for the process that started the
daemon, and goes with it."""
