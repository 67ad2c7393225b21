"""Which columns Parquet gives back as they were: with the same Arrow type, and every value exact (pure).

A file that is written with its Arrow schema gives back what Parquet itself has no type for, as long as the
values go through it unchanged: unsigned integers, durations, half floats, large types. What is named
here does not come back, or only where its values happen to allow it.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

_EXACT: Final = (
    pa.types.is_null,
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_date32,
    pa.types.is_duration,
)
_LISTS: Final = (pa.types.is_list, pa.types.is_large_list)


def parquet_misfit(schema: pa.Schema) -> str | None:
    """The first column that Parquet cannot hold, and why; None = it holds them all.

    Example:
        >>> parquet_misfit(pa.schema([("n", pa.uint64()), ("wait", pa.duration("us"))]))
        >>> parquet_misfit(pa.schema([("at", pa.list_(pa.timestamp("s")))]))
        'column at[]: Parquet has no seconds, and milliseconds do not reach as far (timestamp[s])'
    """
    if not len(schema):
        return "it has no columns, and a Parquet file without columns has no rows"
    for field in schema:
        found = _misfit(field.type, field.name)
        if found is not None:
            path, reason = found
            return f"column {path}: {reason}"
    return None


def read_again(given: pa.DataType) -> pa.DataType:
    """A type whose values are read from Parquet again: in structs, lists of a fixed size may be null.

    Example: pyarrow does not read the file where the struct is null, and the list never is.
        >>> lists = pa.list_(pa.int64(), 2)
        >>> read_again(pa.struct([pa.field("x", lists, nullable=False)]))
        StructType(struct<x: fixed_size_list<item: int64>[2]>)
    """
    if pa.types.is_struct(given):
        return pa.struct([_read_again(field, is_inside=True) for field in given])
    if pa.types.is_map(given):
        key, item = _read_again(given.key_field), _read_again(given.item_field)
        return pa.map_(key, item, given.keys_sorted)
    if pa.types.is_fixed_size_list(given):
        return pa.list_(_read_again(given.value_field), given.list_size)
    if pa.types.is_large_list(given):
        return pa.large_list(_read_again(given.value_field))
    return pa.list_(_read_again(given.value_field)) if pa.types.is_list(given) else given


def _read_again(field: pa.Field, *, is_inside: bool = False) -> pa.Field:
    """The same of a field; inside of a struct or not."""
    is_list = is_inside and pa.types.is_fixed_size_list(field.type)
    return field.with_type(read_again(field.type)).with_nullable(field.nullable or is_list)


def _misfit(given: pa.DataType, path: str) -> tuple[str, str] | None:
    """Path and reason of the first type within one that does not fit."""
    if any(fits(given) for fits in _EXACT):
        return None
    if any(fits(given) for fits in _LISTS):
        return _misfit(given.value_type, f"{path}[]")
    if pa.types.is_fixed_size_list(given):
        if not given.list_size:
            return path, f"lists of no values do not come back ({given})"
        return _misfit(given.value_type, f"{path}[]")
    if pa.types.is_map(given):
        return _misfit(given.key_type, f"{path}.key") or _misfit(given.item_type, f"{path}.value")
    if pa.types.is_struct(given):
        if not given.num_fields:
            return path, "Parquet has no structs without fields"
        fields = (given.field(number) for number in range(given.num_fields))
        return next((f for field in fields if (f := _misfit_of_field(field, path))), None)
    reason = _reason(given)
    return None if reason is None else (path, f"{reason} ({given})")


def _misfit_of_field(field: pa.Field, path: str) -> tuple[str, str] | None:
    """Path and reason of the first type that does not fit, within a field of a struct."""
    path = f"{path}.{field.name}"
    if pa.types.is_fixed_size_list(field.type) and not field.nullable:  # pyarrow fails on them
        return (
            path,
            f"lists of a fixed size that are never null are not read from Parquet where their struct is null ({field.type})",
        )
    return _misfit(field.type, path)


def _reason(given: pa.DataType) -> str | None:
    """Why a type that holds no others does not fit; None = it does."""
    if pa.types.is_decimal(given):
        return "Parquet has no decimals of negative scale" if given.scale < 0 else None
    if pa.types.is_fixed_size_binary(given):
        return None if given.byte_width else "Parquet has no values of no bytes"
    if pa.types.is_timestamp(given) or pa.types.is_time(given):
        return (
            None
            if given.unit != "s"
            else "Parquet has no seconds, and milliseconds do not reach as far"
        )
    if pa.types.is_date64(given):
        return "Parquet has days, not their milliseconds"
    if pa.types.is_dictionary(given):
        return "Parquet gives dictionaries back with other indices, or as plain values"
    return "Parquet has no such type"
