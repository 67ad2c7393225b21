"""What becomes of the rows of a kept partition (pure)."""

from __future__ import annotations

import enum

from penstock.pb import graph_pb2


class Retention(enum.Enum):
    """How a kept partition is read, and where its rows may be."""

    BLOCKING = graph_pb2.RESULT_PARTITION_TYPE_BLOCKING
    """Read when it is complete, from files, by any number of consumers."""
    CACHING = graph_pb2.RESULT_PARTITION_TYPE_CACHING
    """Read while it is written; kept since the latest completed checkpoint, in memory, then in files."""
    CACHING_MEMORY = graph_pb2.RESULT_PARTITION_TYPE_CACHING_MEMORY
    """Read while it is written; kept in memory as long as there is room."""

    @property
    def may_spill(self) -> bool:
        """Its rows may be in files."""
        return self is not Retention.CACHING_MEMORY
