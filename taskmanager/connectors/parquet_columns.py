"""Which columns of a Parquet file its leaves, of which the footer tells, are parts of."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.types as pt


def column_names(metadata: Any) -> list[str]:
    """For each leaf, in the file's order, the name of the column that it is, or is a part of.

    The path of a leaf does not tell: that of column ``a.b`` is the same as that of the field ``b`` of column ``a``.
    """
    fields = metadata.schema.to_arrow_schema()
    names = [field.name for field in fields for _ in range(leaf_count(field.type))]
    if len(names) == metadata.num_columns:
        return names
    # A footer that says one thing of types and another of leaves: as they are named.
    paths = (metadata.schema.column(i).path for i in range(metadata.num_columns))
    return [path.partition(".")[0] for path in paths]


def leaf_count(type_: pa.DataType) -> int:
    """How many leaves of a Parquet file a column of this type is.

    >>> leaf_count(pa.struct([("a", pa.int64()), ("b", pa.map_(pa.string(), pa.list_(pa.int8())))]))
    3
    """
    if isinstance(type_, pa.BaseExtensionType):
        return leaf_count(type_.storage_type)
    if pt.is_map(type_):
        return leaf_count(type_.key_type) + leaf_count(type_.item_type)
    if pt.is_struct(type_):
        return sum(leaf_count(field.type) for field in type_)
    return leaf_count(type_.value_type) if pt.is_nested(type_) else 1
