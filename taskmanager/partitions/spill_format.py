"""In which format the rows of kept partitions are written (pure).

An edge of the graph may say it: who reads the files in place depends on it. Where it does not, the
configuration of the TaskManager does, and what that format cannot hold exactly is written as Arrow.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from penstock.config import Configuration
from penstock.pb import graph_pb2
from penstock.storage.parquet_types import parquet_misfit
from taskmanager.partitions.retention import Retention


class SpillFormat(enum.Enum):
    """Of one file; the value is the ending of its name."""

    ARROW = "arrow"
    PARQUET = "parquet"
    SPARK = "spark.parquet"
    """Parquet as Spark writes it; only files that are taken as they are."""


_OF_EDGE = {
    graph_pb2.SPILL_FORMAT_ARROW: SpillFormat.ARROW,
    graph_pb2.SPILL_FORMAT_PARQUET: SpillFormat.PARQUET,
}


class FormatMisfitError(ValueError):
    """Rows cannot be written in the format that their reader needs; the message names the column."""


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """How the files of a partition are written.

    Attributes:
        wanted: the format.
        is_required: nothing may be written in another one.

    Example: what Parquet cannot hold exactly is written as Arrow, unless a reader needs Parquet.
        >>> schema = pa.schema([("at", pa.timestamp("s"))])
        >>> FormatChoice(SpillFormat.PARQUET).format_of(schema).value
        'arrow'
    """

    wanted: SpillFormat = SpillFormat.ARROW
    is_required: bool = False

    def format_of(self, schema: pa.Schema) -> SpillFormat:
        """The format of a file with rows of a schema.

        Raises:
            FormatMisfitError: it would not be the one that is required.
        """
        if self.wanted is SpillFormat.ARROW or (misfit := parquet_misfit(schema)) is None:
            return self.wanted
        if self.is_required:
            raise FormatMisfitError(f"the reader of these rows needs Parquet files: {misfit}")
        return SpillFormat.ARROW


ARROW_FILES: Final = FormatChoice()


def format_choice(
    retention: Retention, of_edge: graph_pb2.SpillFormat.ValueType, config: Configuration
) -> FormatChoice:
    """How the files of an edge's partitions are written."""
    if (required := _OF_EDGE.get(of_edge)) is not None:
        return FormatChoice(required, is_required=True)
    if retention is Retention.BLOCKING:
        own = config.taskmanager_spill_blocking_format
    else:
        own = config.taskmanager_spill_caching_format
    return FormatChoice(SpillFormat(own or config.taskmanager_spill_format))
