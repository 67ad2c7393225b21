"""Which Arrow types the columns of a stream may have, so that what cannot run is refused when it is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from penstock.errors import JobRejected


def check_column_types(where: str, schema: pa.Schema) -> None:
    """Checks that rows with these columns can be taken apart, moved and kept.

    Args:
        where: the call, for the message.

    Raises:
        JobRejected: a column, or a part of it, has a type that this cannot be done with.
    """
    for field in schema:
        for kind in parts_of_type(field.type):
            remedy = _remedy(kind)
            if remedy:
                raise JobRejected(
                    f"{where}: column {field.name!r} is {field.type}, which the rows of a stream cannot have: "
                    f"{remedy}"
                )


def first_of_type(schema: pa.Schema, is_unfit: Callable[[pa.DataType], bool]) -> pa.Field | None:
    """The first column that is, or has in it, a type of some kind; None = there is none."""
    return next((field for field in schema if any(map(is_unfit, parts_of_type(field.type)))), None)


def is_extension(kind: pa.DataType) -> bool:
    """Whether values of the type are those of another one with a meaning of their own, such as UUIDs."""
    return isinstance(kind, pa.BaseExtensionType)


def is_calendar_interval(kind: pa.DataType) -> bool:
    """Whether it is months, days and nanoseconds, which files have no column for."""
    return bool(pt.is_interval(kind))


def has_no_parquet_type(kind: pa.DataType) -> bool:
    """Whether Parquet files have no column for values of the type, other than for what they are made of."""
    return bool(
        is_calendar_interval(kind)
        or (pt.is_decimal(kind) and kind.scale < 0)
        or (pt.is_struct(kind) and not kind.num_fields)
        or (pt.is_fixed_size_binary(kind) and not kind.byte_width)
    )


def parts_of_type(kind: pa.DataType) -> Iterator[pa.DataType]:
    """A type and all that it is made of."""
    yield kind
    if isinstance(kind, pa.BaseExtensionType):
        yield from parts_of_type(kind.storage_type)
    elif pt.is_dictionary(kind) or pt.is_run_end_encoded(kind):
        yield from parts_of_type(kind.value_type)
    else:
        for index in range(kind.num_fields):
            yield from parts_of_type(kind.field(index).type)


def without_runs(array: pa.Array) -> pa.Array:
    """A run-end encoded array as the values that it stands for, which Arrow can cast; others as they are."""
    return pc.run_end_decode(array) if pt.is_run_end_encoded(array.type) else array


def _remedy(kind: pa.DataType) -> str:
    """What to do about a type, "" = nothing has to be done."""
    if pt.is_string_view(kind):
        return "make it a string, for example by table.cast(...) or .cast('string')"
    if pt.is_binary_view(kind):
        return "make it binary, for example by table.cast(...) or .cast('binary')"
    if pt.is_run_end_encoded(kind):
        return "decode it, by pyarrow.compute.run_end_decode(column)"
    if pt.is_union(kind):
        return "give each of its types a column of its own"
    if isinstance(kind, pa.Bool8Type):
        return "make it bool, for example by table.cast(...)"
    if _is_list_view(kind):
        return "make it a list, for example by table.cast(...)"
    if isinstance(kind, pa.BaseExtensionType) and not pt.is_primitive(kind.storage_type):
        if pt.is_fixed_size_binary(kind.storage_type):
            return ""
        return f"make it what it is stored as, {kind.storage_type}, for example by table.cast(...)"
    return ""


def _is_list_view(kind: pa.DataType) -> bool:
    return bool(pt.is_list_view(kind) or pt.is_large_list_view(kind))
