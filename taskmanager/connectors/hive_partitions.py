"""Splits a batch by its partition columns into ``key=value`` directories (Hive's layout)."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from penstock.connectors.listing import HIVE_NULL


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
    codes = np.zeros(batch.num_rows, dtype=np.int64)
    names: list[list[str]] = []
    for column in columns:
        texts = batch.column(batch.schema.get_field_index(column)).cast(pa.string())
        encoded = texts.dictionary_encode(null_encoding="encode")
        values = encoded.dictionary.to_pylist()
        names.append([directory_name(column, value) for value in values])
        codes = codes * len(values) + encoded.indices.to_numpy(zero_copy_only=False)
    present, group_of_row = np.unique(codes, return_inverse=True)
    rows = batch.drop_columns(list(columns))
    directories = [_directory(int(code), names) for code in present]
    if len(present) == 1:
        return [(directories[0], rows)]
    order = np.argsort(group_of_row, kind="stable")
    bounds = np.searchsorted(group_of_row[order], np.arange(len(present) + 1))
    sorted_rows = rows.take(pa.array(order))
    groups = [
        (directory, sorted_rows.slice(int(bounds[index]), int(bounds[index + 1] - bounds[index])))
        for index, directory in enumerate(directories)
    ]
    return sorted(groups, key=lambda group: group[0])


def _directory(code: int, names: list[list[str]]) -> str:
    parts: list[str] = []
    for values in reversed(names):
        code, index = divmod(code, len(values))
        parts.append(values[index])
    return "/".join(reversed(parts))


def directory_name(column: str, value: str | None) -> str:
    """The directory of one value of a partition column; a text that reads like null is escaped."""
    text = HIVE_NULL if value is None else quote(value, safe="")
    if value == HIVE_NULL:
        text = text.replace("_", "%5F", 1)
    return f"{quote(column, safe='')}={text}"
