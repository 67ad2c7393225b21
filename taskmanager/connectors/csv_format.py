"""CSV: how its rows end, and why one is malformed."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from typing_extensions import override

from penstock.connectors.csv_structure import last_row_end, row_ends
from penstock.connectors.inference import parse_csv_header
from penstock.connectors.messages import delimiter_hint, shorten
from penstock.connectors.text_options import TextOptions
from penstock.connectors.text_parsing import parse_csv, utf8_problem
from penstock.errors import JobRejected, TaskFailure
from taskmanager.connectors.columns import ColumnPlan
from taskmanager.connectors.text_format import Block, TextFormat, table_to_batch

_CLOSED = "the block ends behind a row"
_OPEN_QUOTE = "a quote is not closed"


class CsvFormat(TextFormat):
    """One CSV file: its header names the columns, in any order; without one the schema does."""

    bad_rows_span_lines = True

    def __init__(
        self,
        names: list[str],
        data_offset: int,
        first_line: int,
        schema: pa.Schema,
        options: TextOptions,
    ) -> None:
        self._names = names
        self._options = options
        self._delimiter = options.delimiter
        self._types = {field.name: field.type for field in schema}
        # Without a column of the file's own to read, the rows still count.
        self._columns = schema.names or names[:1]
        self.data_offset = data_offset
        self.first_line = first_line

    @classmethod
    def open(cls, path: str, head: bytes, plan: ColumnPlan) -> CsvFormat:
        """Reads the header.

        Raises:
            TaskFailure: it is malformed or lacks a declared column.
        """
        try:
            names, length = parse_csv_header(path, head, plan.options, plan.declared_names)
        except JobRejected as error:
            raise TaskFailure(str(error)) from error
        if names is None:
            return cls([], len(head), 1, plan.file_schema, plan.options)
        plan.check_names(names, delimiter_hint(names, plan.options.delimiter))
        line = 1 + head.count(b"\n", 0, length)
        return cls(names, length, line, plan.file_schema, plan.options)

    @override
    def cut(self, text: bytes, *, at_end: bool) -> Block:
        if at_end:
            return Block(len(text))
        if b'"' not in text:
            return Block(text.rfind(b"\n") + 1)
        return Block(last_row_end(text, self._delimiter), structure=_CLOSED)

    @override
    def parse(self, text: bytes, structure: Any = None) -> pa.RecordBatch:
        if structure is not _CLOSED and b'"' in text and not _is_closed(text, self._delimiter):
            # pyarrow would take what is left of the text for the field's value.
            raise pa.ArrowInvalid(_OPEN_QUOTE)
        return table_to_batch(self._parsed(text, self._columns))

    def _parsed(self, text: bytes, columns: list[str]) -> pa.Table:
        return parse_csv(text, self._names, self._types, columns, self._options)

    @override
    def rows(self, text: bytes) -> list[tuple[int, int]]:
        ends = [int(end) for end in row_ends(text, self._delimiter)]
        if not ends or ends[-1] < len(text):
            ends.append(len(text))
        return list(zip([0, *ends[:-1]], ends, strict=True))

    @override
    def explain(self, row: bytes) -> str:
        if problem := utf8_problem(row):
            return problem
        if not _is_closed(row, self._delimiter):
            return f"malformed CSV: {_OPEN_QUOTE}"
        texts = dict.fromkeys(self._names, pa.string())
        try:
            parse_csv(row, self._names, texts, options=self._options)
        except pa.ArrowInvalid as error:
            return f"malformed CSV: {_reason(error)}"
        for name in self._columns:
            try:
                self._parsed(row, [name])
            except pa.ArrowInvalid as error:
                return f'column "{name}": {_reason(error)}'
        return "malformed CSV"


def _is_closed(text: bytes, delimiter: str) -> bool:
    """Whether the text does not end inside a quoted field."""
    whole = text if text.endswith(b"\n") else text + b"\n"
    return last_row_end(whole, delimiter) == len(whole)


def _reason(error: pa.ArrowInvalid) -> str:
    """pyarrow's words without its own numbers of columns and rows."""
    text = str(error).removeprefix("CSV parse error: ")
    while text.startswith(("In CSV column", "Row #")):
        text = text.partition(": ")[2]
    return shorten(text)
