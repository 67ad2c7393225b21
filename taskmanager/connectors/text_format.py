"""What a text format tells the text reader: where rows end, and what rows a block holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from taskmanager.connectors.columns import ColumnPlan


@dataclass(frozen=True, slots=True)
class Block:
    """Whole rows from the start of a text.

    Attributes:
        length: bytes; 0 = no row ends in the text.
        closed: no rows follow in the file, whatever follows in it.
        structure: what ``parse`` would otherwise find again.
    """

    length: int
    closed: bool = False
    structure: Any = None


class TextFormat(ABC):
    """One file's format.

    Attributes:
        data_offset: where the first row starts, in bytes.
        first_line: the number of that line, from 1.
        row_noun: what a row is called when its number helps to find it, "" where the line does.
        must_close: the last block must be ``closed``.
        bad_rows_span_lines: a malformed row may have swallowed the lines behind it.
    """

    data_offset: int = 0
    first_line: int = 1
    row_noun: str = ""
    must_close: bool = False
    bad_rows_span_lines: bool = False

    @abstractmethod
    def cut(self, text: bytes, *, at_end: bool) -> Block:
        """The whole rows that the text starts with; at the end of the file all of it."""

    @abstractmethod
    def parse(self, text: bytes, structure: Any = None) -> pa.RecordBatch:
        """All rows of a block.

        Raises:
            pa.ArrowInvalid: at least one of the rows is malformed.
        """

    @abstractmethod
    def rows(self, text: bytes) -> list[tuple[int, int]]:
        """Begin and end of every row of a block."""

    @abstractmethod
    def explain(self, row: bytes) -> str:
        """Why this one row is malformed, with the column's name where there is one."""


OpenTextFormat = Callable[[str, bytes, ColumnPlan], TextFormat]
"""(path, first bytes of the file, columns) -> the file's format."""


def table_to_batch(table: pa.Table) -> pa.RecordBatch:
    """The table as one batch."""
    batches = table.combine_chunks().to_batches()
    if batches:
        return batches[0]
    return pa.RecordBatch.from_pylist([], schema=table.schema)
