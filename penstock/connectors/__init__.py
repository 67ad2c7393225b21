"""What a user names: sources and sinks as entries of the job graph, and the contracts of their own."""

from penstock.connectors.files import file_sink, file_source
from penstock.connectors.generators import (
    generator_source,
    nexmark_source,
    sample_generator_schema,
)
from penstock.connectors.memory import arrow_source, rows_to_table
from penstock.connectors.streams import collect_sink, discard_sink, print_sink, socket_source

__all__ = [
    "arrow_source",
    "collect_sink",
    "discard_sink",
    "file_sink",
    "file_source",
    "generator_source",
    "nexmark_source",
    "print_sink",
    "rows_to_table",
    "sample_generator_schema",
    "socket_source",
]
