"""Values, lists and maps of keys that were stored with another codec than the one declared now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.storage.codec import StateCodec, codec_of
from penstock.storage.codec_migration import MigrationRefusedError, migration
from penstock.storage.entries.list_entries import items_of, with_items
from penstock.storage.run_columns import CODEC, DELETED
from taskmanager.state.descriptors import StateDescriptor, StateKind


@dataclass(frozen=True, slots=True)
class Migration:
    """What makes the values of a state what is declared.

    Attributes:
        old: how they were stored.
        new: how they are declared.
        convert: makes the stored form of the one that of the other.
    """

    kind: StateKind
    old: StateCodec
    new: StateCodec
    convert: Callable[[Any], Any]

    def batches(
        self, batches: Iterable[pa.RecordBatch], schema: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        """Rows of a run; the values are in the last column, null in tombstones.

        Args:
            schema: of the state as it is declared.
        """
        for batch in batches:
            column = batch.column(batch.num_columns - 1)
            if self.kind is StateKind.LIST:
                values = self._lists(column)
            else:
                values = self._values(column, batch.column(DELETED))
            yield pa.RecordBatch.from_arrays([*batch.columns[:-1], values], schema=schema)

    def entry(self, data: bytes) -> bytes:
        """The value of an entry of a database."""
        if self.kind is not StateKind.LIST:
            return self._encoded(data)
        return with_items(data, map(self._encoded, items_of(data)))

    def _encoded(self, data: bytes) -> bytes:
        return self.new.encode(self.convert(self.old.decode(data)))

    def _values(self, column: pa.Array, deleted: pa.Array) -> pa.Array:
        if not deleted.true_count:
            return self.new.column([self.convert(one) for one in self.old.stored(column)])
        kept = self.old.stored(column.filter(pc.invert(deleted)))
        places = iter(range(len(kept)))
        order = [None if gone else next(places) for gone in deleted.to_pylist()]
        values = self.new.column([self.convert(one) for one in kept])
        return values.take(pa.array(order, pa.int64()))

    def _lists(self, column: pa.Array) -> pa.Array:
        lengths = pc.list_value_length(column).to_pylist()
        items = self.new.column([self.convert(one) for one in self.old.stored(column.flatten())])
        offsets: list[int | None] = []
        end = 0
        for length in lengths:
            offsets.append(None if length is None else end)
            end += length or 0
        made = pa.large_list if pa.types.is_large_list(column.type) else pa.list_
        array = pa.LargeListArray if pa.types.is_large_list(column.type) else pa.ListArray
        index = pa.int64() if pa.types.is_large_list(column.type) else pa.int32()
        return array.from_arrays(pa.array([*offsets, end], index), items, type=made(items.type))


def migration_of(
    kind: str,
    stored: pa.Schema,
    declared: pa.Schema,
    descriptor: StateDescriptor,
    now_ms: int,
) -> Migration | None:
    """What makes stored values what is declared; None = they are, or nothing does.

    Args:
        stored: schema of its rows: the values are the last column.
        declared: the same, of the state as it is declared.
        now_ms: when values that get a time to live count as written.
    """
    before, now = _columns(stored), _columns(declared)
    old_name = (stored.field(len(stored) - 1).metadata or {}).get(CODEC, b"").decode()
    if kind != descriptor.kind.value or before[:-1] != now[:-1] or not old_name:
        return None
    old, new = codec_of(old_name), descriptor.codec
    try:
        convert = migration(old, new, now_ms)
    except MigrationRefusedError:
        return None  # who keeps the state says what was stored and what is declared
    return None if convert is None else Migration(descriptor.kind, old, new, convert)


def _columns(schema: pa.Schema) -> list[tuple[str, str, bytes]]:
    return [
        (field.name, str(field.type), (field.metadata or {}).get(CODEC, b"")) for field in schema
    ]
