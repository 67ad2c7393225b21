"""Compiled loops over versions, in the words of a key table or in an array by slot: stamp, copy what has changed.

See ``layout`` for the layout of records.
"""

from __future__ import annotations

from penstock.storage.key_types import BoolArray, Int64Array
from taskmanager.kernels import layout
from taskmanager.kernels.jit import (
    BOOL,
    BOOLS,
    BOOLS_IN,
    INT64,
    INT64S,
    INT64S_IN,
    RECORDS,
    RECORDS_IN,
    TWO_INT64,
    kernel,
)

_EMPTY = layout.EMPTY_WORD


@kernel(TWO_INT64(INT64S_IN, BOOLS, BOOLS_IN, INT64S, BOOLS, INT64, INT64S))
def stamp_changed(
    slots: Int64Array,
    changed: BoolArray,
    are_there: BoolArray,
    versions: Int64Array,
    present: BoolArray,
    version: int,
    gone: Int64Array,
) -> tuple[int, int]:
    """Stamps the slots that are marked as changed and hold something, and takes the marks away.

    Args:
        slots: int64[n], also more than once.
        changed: bool[room], the marks.
        are_there: bool[room], which slots hold something.
        versions: int64[room]; those of stamped slots become ``version``.
        present: bool[room]; those of stamped slots become True.
        version: the present one.
        gone: int64[n], filled with the (different) marked slots that hold nothing.

    Returns:
        How many have been stamped, and how many are gone.
    """
    stamped = left = 0
    for row in range(len(slots)):
        slot = slots[row]
        if changed[slot]:
            changed[slot] = False
            if are_there[slot]:
                versions[slot] = version
                present[slot] = True
                stamped += 1
            else:
                gone[left] = slot
                left += 1
    return stamped, left


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
