"""Splits a batch by its partition columns into ``key=value`` directories (Hive's layout)."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from penstock.connectors.globs import is_hidden
from penstock.connectors.listing import HIVE_NULL
from penstock.rows.casting import cast_kernel


def split_by_partition(
    batch: pa.RecordBatch, columns: Sequence[str]
) -> list[tuple[str, pa.RecordBatch]]:
    """The rows of each directory, in their order, without the partition columns.

    Args:
        batch: n rows.
        columns: the partition columns, outermost directory first.

    Returns:
        (relative directory, rows), sorted by directory.
    """
    group_of_row = np.zeros(batch.num_rows, dtype=np.int64)
    directories = [""]
    for column in columns:
        values = batch.column(batch.schema.get_field_index(column))
        texts = cast_kernel(values.type, pa.string(), safe=False)(values)
        if pt.is_floating(values.type):  # the zeros are equal: one key, one directory
            texts = pc.if_else(pc.equal(texts, "-0"), "0", texts)
        encoded = texts.dictionary_encode(null_encoding="encode")
        names = [directory_name(column, value) for value in encoded.dictionary.to_pylist()]
        codes = group_of_row * len(names) + encoded.indices.to_numpy(zero_copy_only=False)
        present, group_of_row = np.unique(codes, return_inverse=True)
        directories = [
            f"{directories[code // len(names)]}{names[code % len(names)]}/" for code in present
        ]
    rows = batch.drop_columns(list(columns))
    directories = [directory.removesuffix("/") for directory in directories]
    if len(directories) == 1:
        return [(directories[0], rows)]
    order = np.argsort(group_of_row, kind="stable")
    bounds = np.searchsorted(group_of_row[order], np.arange(len(directories) + 1))
    sorted_rows = rows.take(pa.array(order))
    groups = [
        (directory, sorted_rows.slice(int(bounds[index]), int(bounds[index + 1] - bounds[index])))
        for index, directory in enumerate(directories)
    ]
    return sorted(groups, key=lambda group: group[0])


def directory_name(column: str, value: str | None) -> str:
    """The directory of one value of a partition column.

    Escaped is also a text that reads like null, and what would hide the directory from who reads datasets.

    >>> directory_name("day", "a/b"), directory_name("_day", None)
    ('day=a%2Fb', '%5Fday=__HIVE_DEFAULT_PARTITION__')
    """
    text = HIVE_NULL if value is None else quote(value, safe="")
    if value == HIVE_NULL:
        text = text.replace("_", "%5F", 1)
    name = quote(column, safe="")
    if is_hidden(name):
        name = f"%{ord(name[0]):02X}{name[1:]}"
    return f"{name}={text}"
