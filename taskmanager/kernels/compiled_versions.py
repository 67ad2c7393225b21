"""Compiled loops over the version words of a key table: stamp, copy what has changed.

See ``layout`` for the layout of records.
"""

from __future__ import annotations

from penstock.storage.key_types import Int64Array
from taskmanager.kernels import layout
from taskmanager.kernels.jit import (
    BOOL,
    INT64,
    INT64S,
    INT64S_IN,
    RECORDS,
    RECORDS_IN,
    kernel,
)

_EMPTY = layout.EMPTY_WORD


@kernel(INT64(INT64S_IN, RECORDS, INT64, INT64, INT64S, INT64S))
def touch(
    slots: Int64Array,
    records: Int64Array,
    column: int,
    version: int,
    touched: Int64Array,
    before: Int64Array,
) -> int:
    """Sets the column of all records at ``slots`` to the version, and tells what it has changed.

    Args:
        touched: int64[n], filled with the (different) slots that had another version.
        before: int64[n], filled with the versions they had.

    Returns:
        How many there are.
    """
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
    """Stamps what removing the records at ``slots`` will empty or move, as far as it matters.

    Args:
        slots: the records to be removed.
        after: only records with a version above it, ...
        up_to: ... and at most this, ...
        from_slot: ... and from this slot on are stamped.
        touched: int64[records], filled with the slots that were stamped.
        before: int64[records], filled with the versions they had.

    Returns:
        How many there are; a twin, which moves more, stamps more.
    """
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
    """Fills ``found`` (int64[stop - start]) with the slots in ``start .. stop - 1``, ascending, whose
    version is above ``after`` and at most ``up_to``, and ``copies`` (int64[stop - start, width])
    with their records; returns how many."""
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
