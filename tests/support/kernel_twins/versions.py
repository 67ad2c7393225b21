"""The numpy twins of ``compiled_versions``."""

from __future__ import annotations

import numpy as np

from penstock.storage.key_types import BoolArray, Int64Array


def stamp_changed(
    slots: Int64Array,
    changed: BoolArray,
    are_there: BoolArray,
    versions: Int64Array,
    present: BoolArray,
    version: int,
    gone: Int64Array,
) -> tuple[int, int]:
    """See ``compiled_versions.stamp_changed``."""
    _, first = np.unique(slots, return_index=True)
    marked = slots[np.sort(first)]
    marked = marked[changed[marked]]
    held, left = marked[are_there[marked]], marked[~are_there[marked]]
    changed[marked] = False
    versions[held] = version
    present[held] = True
    gone[: len(left)] = left
    return len(held), len(left)


def touch(
    slots: Int64Array,
    records: Int64Array,
    column: int,
    version: int,
    touched: Int64Array,
    before: Int64Array,
) -> int:
    """See ``compiled_versions.touch``."""
    others = slots[records[slots, column] != version]
    _, first = np.unique(others, return_index=True)
    others = others[np.sort(first)]
    return _touch(others, records, column, version, touched, before)


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
    """See ``compiled_versions.touch_displaced``: removal by the twin may move every record."""
    versions = records[from_slot:, column]
    moved = np.flatnonzero((versions > after) & (versions <= up_to)) + from_slot
    return _touch(moved, records, column, version, touched, before)


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
    """See ``compiled_versions.copy_changed``."""
    versions = records[start:stop, column]
    slots = np.flatnonzero((versions > after) & (versions <= up_to)) + start
    found[: len(slots)] = slots
    copies[: len(slots)] = records[slots]
    return len(slots)


def _touch(
    slots: Int64Array,
    records: Int64Array,
    column: int,
    version: int,
    touched: Int64Array,
    before: Int64Array,
) -> int:
    touched[: len(slots)] = slots
    before[: len(slots)] = records[slots, column]
    records[slots, column] = version
    return len(slots)
