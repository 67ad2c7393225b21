"""Compiled loops over the version words of a key table: stamp, copy what has changed.

See ``interface`` for the layout of records.
"""

from __future__ import annotations

from penstock.storage.key_types import Int64Array
from taskmanager.kernels import interface
from taskmanager.kernels.jit import (
    BOOL,
    INT64,
    INT64S,
    INT64S_IN,
    RECORDS,
    RECORDS_IN,
    kernel,
)

_EMPTY = interface.EMPTY_WORD


@kernel(INT64(INT64S_IN, RECORDS, INT64, INT64, INT64S, INT64S))
def touch(
    slots: Int64Array,
    records: Int64Array,
    column: int,
    version: int,
    touched: Int64Array,
    before: Int64Array,
) -> int:
    """See ``interface.Kernels.touch``."""
    count = 0
    for row in range(len(slots)):
        slot = slots[row]
        found = records[slot, column]
        if found != version:
            touched[count] = slot
            before[count] = found
            count += 1
            records[slot, column] = version
    return count


@kernel(INT64(INT64S_IN, RECORDS, INT64, BOOL, INT64, INT64, INT64, INT64, INT64S, INT64S))
def touch_displaced(
    slots: Int64Array,
    records: Int64Array,
    column: int,
    byte_keys: bool,
    after: int,
    up_to: int,
    from_slot: int,
    version: int,
    touched: Int64Array,
    before: Int64Array,
) -> int:
    """See ``interface.Kernels.touch_displaced``."""
    capacity = records.shape[0] - 2
    count = 0
    for row in range(len(slots)):
        slot = slots[row]
        while True:
            found = records[slot, column]
            if after < found <= up_to and slot >= from_slot:
                touched[count] = slot
                before[count] = found
                count += 1
                records[slot, column] = version
            if slot >= capacity:
                break
            slot += 1
            if slot == capacity:
                slot = 0
            if byte_keys:
                if records[slot, 1] < 0:
                    break
            elif records[slot, 0] == _EMPTY:
                break
    return count


@kernel(INT64(RECORDS_IN, INT64, INT64, INT64, INT64, INT64, INT64S, RECORDS), nogil=True)
def copy_changed(
    records: Int64Array,
    column: int,
    after: int,
    up_to: int,
    start: int,
    stop: int,
    found: Int64Array,
    copies: Int64Array,
) -> int:
    """See ``interface.Kernels.copy_changed``."""
    width = records.shape[1]
    count = 0
    for slot in range(start, stop):
        version = records[slot, column]
        if after < version <= up_to:
            found[count] = slot
            for word in range(width):
                copies[count, word] = records[slot, word]
            count += 1
    return count
