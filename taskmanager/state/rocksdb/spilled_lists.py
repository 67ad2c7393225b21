"""Lists of keys in memory before their entries in the database; how they are cut into these is told in ``list_entries``.

A key brings its whole list in. What is written of one that was only added to is its last chunk and what comes behind that, and the
head where the number of chunks has changed. Lists with a time to live are one entry each: what has expired is left out when they are
written, so that places of items mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from typing_extensions import override

from penstock.errors import StoreCorrupt
from penstock.storage.entries import list_entries
from penstock.storage.entries.entry_keys import PARTITION_BYTES, entry_keys
from penstock.storage.entries.list_entries import (
    chunk_count,
    chunk_name,
    chunk_value,
    chunks_behind,
    head_of,
    head_value,
    items_of,
)
from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import Int64Array
from taskmanager.kernels.tombstones import Tombstones
from taskmanager.state.descriptors import ABSENT, StateDescriptor
from taskmanager.state.hashmap.cell_columns import CellExport
from taskmanager.state.hashmap.list_column import ListColumn, ListExport
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


@dataclass(frozen=True, slots=True)
class _Value:
    """The value of an entry: number of chunks of a head, -1 = of a chunk."""

    chunks: int
    items: list[Any]


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
    def encode(self, cell: Any) -> bytes:
        value = cell if isinstance(cell, _Value) else _Value(0, cell)
        items = list(map(self._codec.encode, value.items))
        data = chunk_value(items) if value.chunks < 0 else head_value(value.chunks, items)
        self._encoded_items += len(items)
        self._encoded_bytes += len(data)
        return data

    @override
    def is_empty(self, cell: Any) -> bool:
        return not isinstance(cell, (_Value, _Cut)) and super().is_empty(cell)

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
        missing = len(self.values) - len(slots)
        self._lengths = np.append(self._lengths[slots], np.zeros(missing, np.int64))
        self._replaced_in = np.append(self._replaced_in[slots], np.full(missing, -1, np.int64))
        self._item_count = int(self._lengths.sum())
        # All is written, so that nobody asks for what was before; slots have other keys now.
        self._logs.clear()
        self._logged_count = 0

    @override
    def memory_bytes(self) -> int:
        average = self._encoded_bytes / self._encoded_items if self._encoded_items else 64.0
        told = self._tombstones.size + self._buried.size
        cells = (len(self._spill_home.rests) + told) * CELL_BYTES
        return int(cells + self._item_count * average) + 16 * self._logged_count

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

    def _bury(self, name: bytes, chunks: int) -> None:
        """The chunks of a list are to be removed, unless there are such again."""
        names = [chunk_name(name, number) for number in range(1, chunks + 1)]
        self._buried.bury(self.version, names, len(names))

    def _chunks_of(self, items: int) -> int:
        return chunk_count(items, self.chunk_items) if self._is_cut else 0

    @override
    def _export(
        self, since_version: int, max_parallelism: int, buried: list[KeyBatch]
    ) -> CellExport:
        starts = self._starts(since_version) if self._is_cut else np.zeros(len(self.values), int)
        chunks = self._buried.after(since_version)
        return _SpilledExport(
            self, self._home, since_version, max_parallelism, buried, starts, chunks
        )

    @override
    def _changes(self, export: CellExport) -> Iterator[tuple[list[bytes], list[Any]]]:
        assert isinstance(export, _SpilledExport)
        for names in export.buried_chunks:
            yield names, [ABSENT] * len(names)
        for keys, cells in export.cells():
            heads = entry_keys(self.partition, keys, self._spill_home.max_parallelism).to_list()
            found = [*chain.from_iterable(map(self._written, heads, cells))]
            yield [name for name, _ in found], [cell for _, cell in found]

    def _written(self, head: bytes, cell: Any) -> Iterator[tuple[bytes, Any]]:
        """The entries that are written of one list."""
        if not isinstance(cell, _Cut):
            yield head, cell
            return
        if cell.first is not None:
            yield head, _Value(cell.chunks, cell.first)
        for number in range(cell.start + 1, cell.chunks + 1):
            begin = (number - cell.start - 1) * self.chunk_items
            items = cell.rest[begin : begin + self.chunk_items]
            yield chunk_name(head, number), _Value(-1, items)


class _SpilledExport(ListExport):
    """A sealed column of lists on its way into the database.

    Attributes:
        buried_chunks: names of chunks that are gone, unless they are written again.
    """

    def __init__(
        self,
        column: SpilledLists,
        home: Any,
        since_version: int,
        max_parallelism: int,
        tombstones: list[KeyBatch],
        starts: Int64Array,
        buried_chunks: list[list[bytes]],
    ) -> None:
        super().__init__(column, home, since_version, max_parallelism, tombstones, starts)
        self.buried_chunks = buried_chunks
        self._lists = column

    @override
    def _copies(self, slots: Int64Array) -> list[Any]:
        starts = self._starts[slots].tolist()
        return [self._copy(*one) for one in zip(slots.tolist(), starts, strict=True)]

    def _copy(self, slot: int, written: int) -> Any:
        """What is to be written of a list of which so many items are in the database."""
        items, size = self._lists.values[slot], self._lists.chunk_items
        if items is ABSENT:
            return ABSENT
        chunks = self._lists._chunks_of(len(items))
        if not chunks:
            return list(items)
        is_head_written = written >= size and self._lists._chunks_of(written) == chunks
        start = max(0, written // size - 1)
        first = None if is_head_written else items[:size]
        return _Cut(first, start, chunks, items[(start + 1) * size :])
