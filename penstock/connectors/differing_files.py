"""Files of one source whose columns have types of another kind: what is told to somebody who has given no schema."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa


def told_differences(schemas: Mapping[str, pa.Schema], merged: pa.Schema) -> list[str]:
    """What somebody should know who has not given a schema: columns that are read as another kind of value than some
    of the files have, since others have it so.

    Args:
        schemas: of the files, by path.
        merged: what is read of all of them.

    >>> whole, parts = pa.schema([("n", pa.int32())]), pa.schema([("n", pa.float64())])
    >>> told_differences({"a.parquet": whole, "b.parquet": parts}, parts)
    ['column "n" is int32 in a.parquet and double in b.parquet: it is read as double; schema= says otherwise']
    >>> told_differences({"a.parquet": whole}, pa.schema([("n", pa.int64())]))
    []
    """
    told = []
    for field in merged:
        types = {
            path: schema.field(field.name).type
            for path, schema in schemas.items()
            if field.name in schema.names
        }
        other = next((path for path, own in types.items() if _is_other_kind(own, field.type)), None)
        same = next((path for path, own in types.items() if own == field.type), None)
        if other is not None:
            beside = "" if same is None else f" and {field.type} in {same}"
            told.append(
                f'column "{field.name}" is {types[other]} in {other}{beside}: it is read as {field.type}; schema= says '
                "otherwise"
            )
    return told


def _is_other_kind(own: pa.DataType, merged: pa.DataType) -> bool:
    """Integers as floats, and anything but text as text."""
    if pa.types.is_floating(merged):
        return pa.types.is_integer(own)
    return pa.types.is_string(merged) and not (own == merged or pa.types.is_null(own))
