"""Columns that directories called ``key=value`` add to those of the files below them."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

import pyarrow as pa

from penstock.connectors.messages import name_list
from penstock.errors import JobRejected

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1
_INTEGER = re.compile("-?[0-9]+")

_log = logging.getLogger("penstock")


def with_partition_columns(
    schema: pa.Schema,
    found: Mapping[str, Mapping[str, str | None]],
    optional: frozenset[str] = frozenset(),
) -> pa.Schema:
    """The schema of the files with the columns of their directories, which win over the files' own of that name.

    Args:
        found: by file what its directories say, see ``listing.partition_values``.
        optional: columns that files may be without.

    Raises:
        JobRejected: a file has a column neither in its directories nor among its own.
    """
    for key in dict.fromkeys(key for values in found.values() for key in values):
        index = schema.get_field_index(key)
        without = [path for path, values in found.items() if key not in values]
        if without and index < 0 and key not in optional:
            raise JobRejected(
                f'{name_list(without, limit=3)}: has no column "{key}", which others have by a directory {key}=...; '
                "every file of a source must have all its columns: move it into such a directory, or read the "
                "directories alone"
            )
        if index >= 0:
            _log.warning(
                'column "%s" is in the files and in the names of their directories (%s=...): the directories\' values '
                "are read",
                key,
                key,
            )
        type_ = partition_type([values[key] for values in found.values() if key in values])
        field = pa.field(key, type_)
        schema = schema.append(field) if index < 0 else schema.set(index, field)
    return schema


def partition_type(values: Sequence[str | None]) -> pa.DataType:
    """Integers where all values are integers, and different ones where they are different texts, else strings.

    >>> partition_type(["01", "12", None]), partition_type(["01", "1"]), partition_type(["2", "--5"])
    (DataType(int32), DataType(string), DataType(string))
    """
    present = {value for value in values if value is not None}
    if not present or not all(map(_INTEGER.fullmatch, present)):
        return pa.string()
    numbers = {int(value) for value in present}
    largest = max(~number if number < 0 else number for number in numbers)
    if len(numbers) < len(present) or largest > _INT64_MAX:
        return pa.string()
    return pa.int32() if largest <= _INT32_MAX else pa.int64()
