"""Rows known by their key, or by it and a number: how their entries are read (``keyed_entries`` writes them).

An entry's key is that of the row's key (``entry_keys``), then the number where there is one (8 bytes,
such that their order is that of the numbers); its value is the rest of the row (``row_values``).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from penstock.storage.entries.byte_strings import ByteStrings
from penstock.storage.entries.entry_keys import decoded_keys
from penstock.storage.entries.row_values import decoded_values
from penstock.storage.key_types import Int64Array

NUMBER_BYTES: Final = 8
SIGN: Final = np.uint64(1 << 63)


def split_numbers(names: list[bytes]) -> tuple[list[bytes], Int64Array]:
    """The entry keys of the rows' keys, and the rows' numbers."""
    words = np.frombuffer(b"".join([name[-NUMBER_BYTES:] for name in names]), ">u8")
    return [name[:-NUMBER_BYTES] for name in names], (words.astype(np.uint64) ^ SIGN).view(np.int64)


def keyed_batch(
    schema: pa.Schema,
    key_types: tuple[pa.DataType, ...],
    names: list[bytes],
    values: list[bytes],
    *,
    with_numbers: bool,
) -> pa.RecordBatch:
    """Entries as rows of a ``keyed_schema``; key-groups are left at 0."""
    identity: list[pa.Array] = []
    if with_numbers:
        names, numbers = split_numbers(names)
        identity.append(pa.array(numbers))
    keys = decoded_keys(key_types, ByteStrings.of(names)).to_arrays()
    first = 2 + len(keys) + len(identity)
    content = decoded_values(schema.types[first:], ByteStrings.of(values))
    count = len(names)
    heads = [pa.array(np.zeros(count, np.uint16)), pa.repeat(False, count)]
    return pa.RecordBatch.from_arrays([*heads, *keys, *identity, *content], schema=schema)
