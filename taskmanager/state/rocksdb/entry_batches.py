"""Batches of keys and entries put together, and records turned into sorted entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from penstock.storage.entries.byte_strings import ByteStrings, SstEntries
from penstock.storage.entries.entry_keys import entry_keys, entry_order
from penstock.storage.entries.entry_values import encoded_rows
from penstock.storage.key_encoding import bounds_of, concatenated_keys
from penstock.storage.key_types import BoolArray, Int64Array
from taskmanager.kernels import Rows
from taskmanager.kernels.accumulators import Values

PART_ENTRIES: Final = 1 << 20
"""Of records that become entries at once: many more would take much memory beside the table they come from."""


SHARED_BYTES: Final = 32 << 20
"""Of entries that are written together; more only where they come together."""


class EntryFiles:
    """Sorted entries on their way into a database: those that come one after the other share a file.

    Args:
        ingest: writes entries, which win over those before.
    """

    def __init__(self, ingest: Callable[[SstEntries], None]) -> None:
        self._ingest = ingest
        self._waiting: list[SstEntries] = []
        self._size_bytes = 0

    def add(self, entries: SstEntries) -> None:
        """Writes entries, which win over those that were added before, now or later."""
        if not len(entries.keys):
            return
        size_bytes = sum(
            int(one.offsets[-1] - one.offsets[0]) for one in (entries.keys, entries.values)
        )
        if self._waiting:
            last = self._waiting[-1].keys
            is_behind = last.at(len(last) - 1) < entries.keys.at(0)
            if not is_behind or self._size_bytes + size_bytes > SHARED_BYTES:
                self.flush()
        self._waiting.append(entries)
        self._size_bytes += size_bytes

    def flush(self) -> None:
        """Writes what waits."""
        waiting, self._waiting, self._size_bytes = self._waiting, [], 0
        if waiting:
            self._ingest(concat_entries(waiting))


def concat_strings(parts: Sequence[ByteStrings]) -> ByteStrings:
    """The strings of all parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    data = [part.data[int(part.offsets[0]) : int(part.offsets[-1])] for part in parts]
    lengths = np.concatenate([part.lengths() for part in parts])
    return ByteStrings(np.concatenate(data), bounds_of(lengths))


def concat_rows(parts: Sequence[Rows]) -> Rows:
    """The records of at least one part."""
    if len(parts) == 1:
        return parts[0]
    accumulators: list[Values] = []
    validity: list[BoolArray | None] = []
    for column in range(len(parts[0].accumulators)):
        accumulators.append(np.concatenate([part.accumulators[column] for part in parts]))
        validity.append(_concat_validity(parts, column))
    return Rows(concatenated_keys([part.keys for part in parts]), accumulators, validity)


def concat_entries(parts: Sequence[SstEntries]) -> SstEntries:
    """The entries of at least one part, whose keys are beyond those of the part before."""
    if len(parts) == 1:
        return parts[0]
    deleted = None
    if any(part.deleted is not None for part in parts):
        deleted = np.concatenate(
            [
                np.zeros(len(part.keys), np.bool_) if part.deleted is None else part.deleted
                for part in parts
            ]
        )
    keys = concat_strings([part.keys for part in parts])
    return SstEntries(keys, concat_strings([part.values for part in parts]), deleted)


def sorted_entries(partition: int, rows: Rows, max_parallelism: int) -> Iterator[SstEntries]:
    """Records as entries, part after part in their order; of records with the same key one is taken (they
    are equal)."""
    order = entry_order(rows.keys, max_parallelism)
    for start in range(0, len(order), PART_ENTRIES):
        some = order[start : start + PART_ENTRIES]
        yield _sorted_part(partition, rows, some, max_parallelism)


def _sorted_part(partition: int, rows: Rows, order: Int64Array, max_parallelism: int) -> SstEntries:
    ordered = rows.keys.take(order)
    keys, hashes = entry_keys(partition, ordered, max_parallelism), ordered.hashes
    again = [
        row
        for row in (np.flatnonzero(hashes[1:] == hashes[:-1]) + 1).tolist()
        if keys.at(row) == keys.at(row - 1)
    ]
    if again:
        kept = np.delete(np.arange(len(order)), again)
        order, keys = order[kept], keys.take(kept)
    values = encoded_rows(
        [values[order] for values in rows.accumulators],
        [None if valid is None else valid[order] for valid in rows.validity],
    )
    return SstEntries(keys, values, None)


def _concat_validity(parts: Sequence[Rows], column: int) -> BoolArray | None:
    if all(part.validity[column] is None for part in parts):
        return None
    columns: list[BoolArray] = []
    for part in parts:
        valid = part.validity[column]
        columns.append(np.ones(len(part.keys), np.bool_) if valid is None else valid)
    return np.concatenate(columns)
