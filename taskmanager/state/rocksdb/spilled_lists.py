"""Lists of keys in memory before their entries in the database; how they are cut into these is told in ``list_entries``.

A key brings its whole list in. What is written of one that was only added to is its last chunk and what comes behind that, and the
head where the number of chunks has changed. Lists with a time to live are one entry each: what has expired is left out when they are
written, so that places of items mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from typing_extensions import override

from penstock.errors import StoreCorrupt
from penstock.storage.entries import list_entries
from penstock.storage.entries.entry_keys import PARTITION_BYTES, entry_keys
from penstock.storage.entries.list_entries import (
    LENGTH_BYTES,
    chunk_count,
    chunk_name,
    chunk_value,
    chunks_behind,
    head_of,
    head_value,
    items_of,
)
from penstock.storage.key_types import Int64Array
from taskmanager.kernels.tombstones import Tombstones
from taskmanager.state.descriptors import ABSENT, StateDescriptor
from taskmanager.state.hashmap.cell_columns import CellExport
from taskmanager.state.hashmap.list_column import ListColumn
from taskmanager.state.rocksdb.spilled_columns import CELL_BYTES, SpilledValues, SpillHome
from taskmanager.state.rocksdb.spilled_table import LOADED_VERSION


@dataclass(frozen=True, slots=True)
class _Cut:
    """What is written of a list.

    Attributes:
        first: the items of the head; None = it stays.
        start: chunks up to this one stay.
        chunks: how many there are.
        rest: the items of the chunks behind.
    """

    first: list[Any] | None
    start: int
    chunks: int
    rest: list[Any]


class SpilledLists(SpilledValues, ListColumn):
    """A list per key; see ``ListColumn``. An empty list is none."""

    def __init__(
        self, home: SpillHome, descriptor: StateDescriptor, partition: int, *, is_stored: bool
    ) -> None:
        super().__init__(home, descriptor, partition, is_stored=is_stored)
        self.chunk_items = list_entries.CHUNK_ITEMS
        self._is_cut = not descriptor.ttl_ms
        self._item_count = 0
        self._encoded_bytes = 0
        self._encoded_items = 0
        # Names of chunks of lists that were replaced or removed since.
        self._buried = Tombstones[list[bytes]]()

    @override
    def decode(self, data: bytes) -> Any:
        return list(map(self._codec.decode, items_of(data)))

    @override
    def may_expire(self, data: bytes, now_ms: int) -> bool:
        return any(self._is_expired(item, now_ms) for item in self.decode(data))

    @override
    def rest_of(self, name: bytes, data: bytes) -> bytes:
        return head_of(name, data)[PARTITION_BYTES:]

    @override
    def bring_keys(self, slots: list[int]) -> None:
        if not self.is_stored:
            return
        rests, reader = self._spill_home.rests, self._spill_home.reader
        names = [self.head + rests[slot] for slot in slots]
        heads = reader.get_many(names)
        behind = [0 if data is None else chunks_behind(data) for data in heads]
        wanted = [
            chunk_name(name, number)
            for name, count in zip(names, behind, strict=True)
            for number in range(1, count + 1)
        ]
        chunks = iter(reader.get_many(wanted) if wanted else ())
        for slot, name, data, count in zip(slots, names, heads, behind, strict=True):
            if data is not None:
                self._bring(slot, name, [data, *(next(chunks) for _ in range(count))])

    def _bring(self, slot: int, name: bytes, entries: list[bytes | None]) -> None:
        """Brings in the list of a key: its head and its chunks."""
        items: list[Any] = []
        for data in entries:
            if data is None:
                raise StoreCorrupt(
                    f"a list of state {self.descriptor.name!r} has {len(entries) - 1} chunks by its head, and one of "
                    "them is not in the database: start from an older checkpoint"
                )
            items += self.decode(data)
        self.values[slot] = items
        self._versions[slot] = LOADED_VERSION
        self._lengths[slot] = len(items)
        self._item_count += len(items)
        self.present[slot] = True
        stored, wanted = len(entries) - 1, self._chunks_of(len(items))
        if stored != wanted:  # as it was written by others: it is written anew
            self._bury(name, stored)
            self.changed.append(slot)
            self.replaced.append(slot)

    @override
    def keep(self, slots: list[int]) -> None:
        super().keep(slots)
        self._item_count = int(self._lengths.sum())
        # All is written, so that nobody asks for what was before; slots have other keys now.
        self._logs = Tombstones()

    @override
    def memory_bytes(self) -> int:
        average = self._encoded_bytes / self._encoded_items if self._encoded_items else 64.0
        told = self._tombstones.size + self._buried.size
        cells = (len(self._spill_home.rests) + told) * CELL_BYTES
        return int(cells + self._item_count * average) + 16 * self._logs.size

    @override
    def forget(self, version: int) -> None:
        super().forget(version)
        self._buried.forget(version)

    @override
    def _left(self, slots: Int64Array, gone: Int64Array) -> Int64Array:
        ended = np.unique(np.concatenate([gone, np.array(self.replaced, np.int64)]))
        for slot in ended[(self._lengths[ended] > self.chunk_items)].tolist():
            name = self.head + self._spill_home.rests[slot]
            self._bury(name, self._chunks_of(int(self._lengths[slot])))
        different = np.unique(slots)
        before = int(self._lengths[different].sum())
        left = super()._left(slots, gone)
        self._item_count += int(self._lengths[different].sum()) - before
        return left

    @override
    def copy_from(self, slot: int, start: int) -> Any:
        items, size = self.values[slot], self.chunk_items
        if items is ABSENT:
            return ABSENT
        chunks = self._chunks_of(len(items))
        if not chunks:
            return list(items)
        is_head_written = start >= size and self._chunks_of(start) == chunks
        chunk = max(0, start // size - 1)
        first = None if is_head_written else items[:size]
        return _Cut(first, chunk, chunks, items[(chunk + 1) * size :])

    def _bury(self, name: bytes, chunks: int) -> None:
        """The chunks of a list are to be removed, unless there are such again."""
        names = [chunk_name(name, number) for number in range(1, chunks + 1)]
        self._buried.bury(self.version, names, len(names))

    def _chunks_of(self, items: int) -> int:
        return chunk_count(items, self.chunk_items) if self._is_cut else 0

    @override
    def _gone(self, since_version: int) -> Iterable[bytes]:
        return chain.from_iterable(self._buried.after(since_version))

    @override
    def _changes(self, export: CellExport) -> Iterator[tuple[bytes, bytes | None]]:
        for keys, cells in export.cells():
            heads = entry_keys(self.partition, keys, self._spill_home.max_parallelism).to_list()
            yield from chain.from_iterable(map(self._written, heads, cells))

    def _written(self, head: bytes, cell: Any) -> Iterator[tuple[bytes, bytes | None]]:
        """The entries that are written of one list."""
        if not isinstance(cell, _Cut):
            yield head, None if self.is_empty(cell) else head_value(0, self._encoded_items_of(cell))
            return
        if cell.first is not None:
            yield head, head_value(cell.chunks, self._encoded_items_of(cell.first))
        for number in range(cell.start + 1, cell.chunks + 1):
            begin = (number - cell.start - 1) * self.chunk_items
            items = cell.rest[begin : begin + self.chunk_items]
            yield chunk_name(head, number), chunk_value(self._encoded_items_of(items))

    def _encoded_items_of(self, items: list[Any]) -> list[bytes]:
        found = list(map(self._codec.encode, items))
        self._encoded_items += len(found)
        self._encoded_bytes += sum(map(len, found)) + LENGTH_BYTES * len(found)
        return found
