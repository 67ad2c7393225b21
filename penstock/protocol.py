"""What both sides of every connection must agree on."""

from __future__ import annotations

PROTOCOL_VERSION = 1
"""Counts incompatible changes of the gRPC services; ``Hello`` refuses another one."""

MESSAGE_SIZE_MAX_BYTES = 64 * 1024 * 1024
"""Largest gRPC message either side sends or takes."""

CHUNK_SIZE_BYTES = 1024 * 1024
"""Size of the pieces in which artifacts and logs travel."""

METADATA_SIZE_MAX_BYTES = 64 * 1024
"""Largest gRPC metadata: an error with the user's traceback travels as metadata."""
