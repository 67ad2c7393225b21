"""JSON as lines and as one array: how rows end, and why one is malformed."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from typing_extensions import override

from penstock.connectors.json_shape import JsonShape, NotTabularJsonError, detect_shape
from penstock.connectors.json_structure import ArrayScan, elements_as_lines, scan_array
from penstock.connectors.messages import shorten
from penstock.connectors.text_parsing import (
    is_utf8,
    json_columns,
    json_parse_schema,
    parse_json,
    utf8_problem,
)
from penstock.errors import TaskFailure
from taskmanager.connectors.columns import ColumnPlan
from taskmanager.connectors.text_format import Block, TextFormat, table_to_batch


def open_json_format(path: str, head: bytes, plan: ColumnPlan) -> TextFormat:
    """The format that the first character of a file says.

    Raises:
        TaskFailure: the file is JSON of a shape that has no rows.
    """
    try:
        shape, offset = detect_shape(head)
    except NotTabularJsonError as error:
        raise TaskFailure(f"{path}: {error}") from error
    line = 1 + head.count(b"\n", 0, offset)
    if shape is not JsonShape.ARRAY:
        return JsonLinesFormat(plan.file_schema, offset, line)
    if offset == len(head):
        raise TaskFailure(f"{path}: the array is not closed: the file is cut off or malformed")
    return JsonArrayFormat(plan.file_schema, offset, line)


_NO_COLUMNS = pa.schema([pa.field("", pa.null())])


class _JsonFormat(TextFormat):
    """What lines and arrays share: rows are objects."""

    def __init__(self, schema: pa.Schema, data_offset: int, first_line: int) -> None:
        self._schema = schema
        # Without a column of the file's own to read, the rows still count.
        self._parse_schema = json_parse_schema(schema) if schema.names else _NO_COLUMNS
        self.data_offset = data_offset
        self.first_line = first_line

    def parse_objects(
        self, text: bytes, count: int, value_starts: npt.NDArray[np.int64] | None = None
    ) -> pa.RecordBatch:
        """A stream of this many objects as rows with the declared types."""
        if not is_utf8(text):
            raise pa.ArrowInvalid("not valid UTF-8")
        table = parse_json(text, self._parse_schema, value_starts)
        if table.num_rows != count:
            raise pa.ArrowInvalid(f"{table.num_rows} values in place of {count}")
        return table_to_batch(json_columns(table, self._schema) if self._schema.names else table)

    @override
    def explain(self, row: bytes) -> str:
        if problem := utf8_problem(row):
            return problem
        try:
            value = json.loads(row, parse_float=_finite)
        except ValueError as error:
            return f"malformed JSON: {error}"
        except RecursionError:
            return "malformed JSON: values are nested too deep"
        if not isinstance(value, dict):
            return f"a JSON {_json_type(value)} in place of an object"
        for field in self._schema:
            text = json.dumps({field.name: value.get(field.name)}).encode()
            one = type(self)(pa.schema([field]), 0, 1)
            try:
                one.parse_objects(text, 1)
            except pa.ArrowInvalid:
                shown = shorten(json.dumps(value.get(field.name)), 100)
                return f'column "{field.name}": {shown} is not {field.type}'
        return "malformed JSON: a key is there twice, or more than one value stands here"


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{shorten(text, 100)} is beyond what a number with fractions holds")
    return number


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names: dict[type, str] = {list: "array", str: "string", int: "number", float: "number"}
    return names[type(value)]


class JsonLinesFormat(_JsonFormat):
    """One object per line; blank lines are skipped."""

    @override
    def cut(self, text: bytes, *, at_end: bool) -> Block:
        return Block(len(text) if at_end else text.rfind(b"\n") + 1)

    @override
    def parse(self, text: bytes, structure: Any = None) -> pa.RecordBatch:
        if not text.endswith(b"\n"):
            text += b"\n"
        data = np.frombuffer(text, dtype=np.uint8)
        ends = np.flatnonzero(data == ord("\n"))
        # Each that is not blank begins and ends an object: as many objects as lines are one in each.
        starts = np.concatenate(([0], ends[:-1] + 1))
        last = np.maximum(ends - 1, 0)
        last = np.maximum(last - (data[last] == ord("\r")), 0)
        blank = 0
        for index in np.flatnonzero(data[last] != ord("}")):
            line = text[starts[index] : ends[index]].strip()
            if line and not line.endswith(b"}"):
                raise pa.ArrowInvalid("a line does not end with an object")
            blank += not line
        return self.parse_objects(text, len(ends) - blank)

    @override
    def rows(self, text: bytes) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = []
        start = 0
        while start < len(text):
            end = text.find(b"\n", start) + 1 or len(text)
            if text[start:end].strip():
                spans.append((start, end))
            start = end
        return spans


class JsonArrayFormat(_JsonFormat):
    """One array of objects over the whole file."""

    row_noun = "element"
    must_close = True

    @override
    def cut(self, text: bytes, *, at_end: bool) -> Block:
        scan = scan_array(text)
        if scan.end >= 0:
            return Block(scan.end + 1, closed=True, structure=scan)
        if at_end:
            return Block(len(text), structure=scan)
        return Block(int(scan.commas[-1]) + 1 if len(scan.commas) else 0, structure=scan)

    @override
    def parse(self, text: bytes, structure: Any = None) -> pa.RecordBatch:
        scan: ArrayScan = structure or scan_array(text)
        stop = scan.end if scan.end >= 0 else len(text)
        starts, ends = scan.value_starts, np.append(scan.commas, stop)
        if not text[starts[-1] : stop].strip():
            ends = ends[:-1]  # behind a last comma, or in an array without elements
        data = np.frombuffer(text, dtype=np.uint8)
        # Each begins and ends an object: as many objects as elements are one in each.
        for index in np.flatnonzero(data[np.maximum(ends - 1, 0)] != ord("}")):
            if not text[starts[index] : ends[index]].rstrip().endswith(b"}"):
                raise pa.ArrowInvalid("an element does not end with an object")
        return self.parse_objects(elements_as_lines(text, scan), len(ends), starts)

    @override
    def rows(self, text: bytes) -> list[tuple[int, int]]:
        spans = scan_array(text).elements(len(text))
        start, end = spans[-1]
        return spans if text[start:end].strip() else spans[:-1]
