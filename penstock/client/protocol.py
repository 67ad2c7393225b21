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

PARENT_DEATH_VARIABLE = "PENSTOCK_PARENT_DEATH"
"""Set to 1 in a daemon's environment: it ends when the process that started it ends. Meant for that
daemon alone: what it starts itself does not inherit it."""

EMBEDDED_MARKER = ".embedded"
"""A daemon's directory that holds a file of this name was made for the process that started the
daemon, and goes with it."""
