"""How blocks of CSV and JSON text become Arrow tables: one set of options for client and readers.

The client parses the first block of a file to infer its schema, the readers parse every block with
the declared one. Both run pyarrow's parsers on this thread alone.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.connectors.text_options import DEFAULTS, TextOptions
from penstock.rows.casting import as_written

if TYPE_CHECKING:
    from pyarrow import csv

_CSV_QUOTE = b'"'
_LINE_END, _OBJECT_START = ord("\n"), ord("{")
_TIME_OF_DAY = r"^\d\d:\d\d(:\d\d(\.\d+)?)?$"
_OBJECT_OR_BLANK = re.compile(rb"\s*(?:\{|\Z)")


def is_utf8(text: bytes) -> bool:
    """Whether the bytes are valid UTF-8 (pyarrow's JSON parser does not check)."""
    if text.isascii():
        return True
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def utf8_problem(text: bytes) -> str:
    """What is wrong with text that is not UTF-8, and what to do; "" = nothing.

    >>> utf8_problem("1,café".encode("latin-1"))
    'not valid UTF-8 (byte 0xe9 behind "1,caf"): save the file as UTF-8 (iconv -f LATIN1 -t UTF-8)'
    """
    if is_utf8(text):
        return ""
    if text.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16, not UTF-8: save the file as UTF-8 (iconv -f UTF-16 -t UTF-8)"
    try:
        text.decode()
    except UnicodeDecodeError as error:
        before = text[max(0, error.start - 20) : error.start].decode(errors="ignore")
        place = f'behind "{before}"' if before else "at its start"
        return (
            f"not valid UTF-8 (byte 0x{text[error.start]:02x} {place}): save the file as UTF-8 "
            "(iconv -f LATIN1 -t UTF-8)"
        )
    return ""


def parse_csv(
    text: bytes,
    names: list[str],
    types: dict[str, pa.DataType] | None,
    columns: list[str] | None = None,
    options: TextOptions = DEFAULTS,
) -> pa.Table:
    """Whole rows of CSV, without their header.

    Args:
        text: whole rows.
        names: the names of all columns of the file, in its order.
        types: column -> type; None infers.
        columns: the columns to make, null where they are not in the file; None makes all.
        options: delimiter and null texts.

    Raises:
        pa.ArrowInvalid: a row has another number of fields, or a value does not fit.

    Example: what is infinite, or below zero, says so.
        >>> parse_csv(b"1e400\\n", ["x"], {"x": pa.float64()})
        Traceback (most recent call last):
        pyarrow.lib.ArrowInvalid: the number '1e400' is beyond double
    """
    from pyarrow import csv

    def read(types: dict[str, pa.DataType] | None, columns: list[str] | None) -> pa.Table:
        return csv.read_csv(
            pa.BufferReader(text),
            read_options=csv.ReadOptions(
                use_threads=False, block_size=len(text) + 1, column_names=names
            ),
            parse_options=csv.ParseOptions(
                newlines_in_values=_CSV_QUOTE in text, delimiter=options.delimiter
            ),
            convert_options=csv_convert_options(types, columns, options),
        )

    table = read(types, columns)
    has_hexadecimals = b"0x" in text or b"0X" in text
    for field, column in zip(table.schema, table.columns, strict=True) if types else ():
        if any(map(_has_infinity, column.chunks)) or (has_hexadecimals and _is_signed(field)):
            as_written(column, read({field.name: pa.string()}, [field.name]).column(0))
    return table if not options.nulls else _null_texts(table, options.nulls)


def _is_signed(field: pa.Field) -> bool:
    return bool(pa.types.is_signed_integer(field.type))


def csv_convert_options(
    types: dict[str, pa.DataType] | None, columns: list[str] | None, options: TextOptions
) -> csv.ConvertOptions:
    """How fields become values."""
    from pyarrow import csv

    return csv.ConvertOptions(
        column_types=types,
        include_columns=columns or [],
        include_missing_columns=True,
        null_values=["", *(options.nulls or ())],
    )


def _null_texts(table: pa.Table, nulls: Sequence[str]) -> pa.Table:
    """Null texts of text columns: the parser would make empty texts null with them."""
    for index, field in enumerate(table.schema):
        if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
            column = table.column(index)
            is_null = pc.is_in(column, pa.array(nulls, field.type))
            table = table.set_column(index, field, pc.if_else(is_null, None, column))
    return table


def parse_json(
    text: bytes, schema: pa.Schema | None, value_starts: npt.NDArray[np.int64] | None = None
) -> pa.Table:
    """A stream of JSON objects.

    Args:
        text: whole objects, separated by line ends.
        schema: the columns to make; None infers.
        value_starts: offsets at which objects start, for objects that go over several lines; None =
            each on its own line.

    Raises:
        pa.ArrowInvalid: malformed, no object, or a value does not fit.
    """
    from pyarrow import json

    if not text.endswith(b"\n"):
        text += b"\n"
    _check_objects(text, value_starts)
    return json.read_json(
        pa.BufferReader(text),
        read_options=json.ReadOptions(use_threads=False, block_size=len(text) + 1),
        parse_options=json.ParseOptions(
            explicit_schema=schema,
            newlines_in_values=value_starts is not None,
            unexpected_field_behavior="infer" if schema is None else "ignore",
        ),
    )


def _check_objects(text: bytes, value_starts: npt.NDArray[np.int64] | None) -> None:
    """Refuses values that are no objects: a bare null crashes pyarrow's parser (seen up to 26)."""
    data = np.frombuffer(text, dtype=np.uint8)
    starts = value_starts
    if starts is None:
        starts = np.concatenate(([0], np.flatnonzero(data == _LINE_END)[:-1] + 1))
    for start in starts[data[starts] != _OBJECT_START]:
        if _OBJECT_OR_BLANK.match(text, int(start)) is None:
            raise pa.ArrowInvalid("a value is not an object")


def json_parse_schema(schema: pa.Schema) -> pa.Schema:
    """The types to ask pyarrow's JSON parser for: text for what JSON has as text, and the parser reads as something else."""
    return pa.schema(
        [
            pa.field(field.name, pa.string() if _is_text_in_json(field.type) else field.type)
            for field in schema
        ]
    )


def json_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """What was read with ``json_parse_schema(schema)``, with the types of the schema.

    Raises:
        pa.ArrowInvalid: a text is no date, no time of day or not base64, or a number is beyond its type.

    Example:
        >>> texts = pa.table({"b": ["YWI=", None]})
        >>> json_columns(texts, pa.schema([("b", pa.binary())])).to_pylist()
        [{'b': b'ab'}, {'b': None}]
    """
    columns = [
        _from_text(column, field.type) for column, field in zip(table.columns, schema, strict=True)
    ]
    if any(_has_infinity(chunk) for column in columns for chunk in column.chunks):
        raise pa.ArrowInvalid("a number is beyond its type")
    return pa.table(columns, schema=schema)


def _has_infinity(array: pa.Array) -> bool:
    """Whether there is one at any depth. JSON has none: the parser makes them of numbers that float32 does not hold."""
    kind = array.type
    if pa.types.is_floating(kind):
        return bool(pc.any(pc.is_inf(array), min_count=0).as_py())
    if pa.types.is_struct(kind):
        return any(map(_has_infinity, array.flatten()))
    if pa.types.is_map(kind):
        return _has_infinity(array.items)
    return bool(pa.types.is_nested(kind)) and _has_infinity(array.flatten())


def nested_type_of_text(type_: pa.DataType) -> pa.DataType | None:
    """A type inside of a nested one that ``json_columns`` makes of text, which it does for whole columns only."""
    if not pa.types.is_nested(type_):
        return None
    for index in range(type_.num_fields):
        inner = type_.field(index).type
        found = inner if _is_text_in_json(inner) else nested_type_of_text(inner)
        if found is not None:
            return found
    return None


def _from_text(column: pa.ChunkedArray, type_: pa.DataType) -> pa.ChunkedArray:
    if pa.types.is_time(type_):
        return times_of_day(column, type_)
    return _bytes(column, type_) if _is_bytes(type_) else column.cast(type_)


def _bytes(texts: pa.ChunkedArray, type_: pa.DataType) -> pa.ChunkedArray:
    try:
        values = [
            None if text is None else base64.b64decode(text, validate=True)
            for text in texts.to_pylist()
        ]
    except (binascii.Error, ValueError) as error:
        raise pa.ArrowInvalid("a text is not base64") from error
    return pa.chunked_array([pa.array(values, type_)])


def times_of_day(texts: pa.ChunkedArray, type_: pa.DataType) -> pa.ChunkedArray:
    """Times of day that were written as text.

    pyarrow reads none: times of the first day of the epoch are read in their place.

    Raises:
        pa.ArrowInvalid: a text is none, or has more digits than the type.
    """
    if not pc.all(pc.match_substring_regex(texts, _TIME_OF_DAY), min_count=0).as_py():
        raise pa.ArrowInvalid(f"a text is not {type_}")
    moments = pc.binary_join_element_wise("1970-01-01T", texts, "")
    return moments.cast(pa.timestamp(type_.unit)).cast(type_)


def _is_text_in_json(type_: pa.DataType) -> bool:
    return pa.types.is_date(type_) or pa.types.is_time(type_) or _is_bytes(type_)


def _is_bytes(type_: pa.DataType) -> bool:
    types = pa.types
    return (
        types.is_binary(type_) or types.is_large_binary(type_) or types.is_fixed_size_binary(type_)
    )
