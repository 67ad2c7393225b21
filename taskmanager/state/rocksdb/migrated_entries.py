"""Entries of a restored database that were written for another declaration, written anew for the present one."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from penstock.errors import TaskFailure
from penstock.storage.entries.byte_strings import ByteStrings, SstEntries
from penstock.storage.entries.entry_keys import moved_to, partition_bounds
from penstock.storage.entries.entry_values import decoded_rows, encoded_rows
from penstock.storage.entries.row_values import decoded_values, encoded_values
from taskmanager.state.accumulator_columns import from_columns
from taskmanager.state.aggregate_change import AggregateChange, aggregate_change, number_kinds
from taskmanager.state.descriptors import StateDescriptor
from taskmanager.state.migrated_values import migration_of
from taskmanager.state.rocksdb.database_store import Database
from taskmanager.state.rocksdb.partitions import PartitionCatalog, StoredState, state_schema


class MigratedEntries:
    """What becomes of restored entries."""

    def __init__(self, catalog: PartitionCatalog, database: Database) -> None:
        self._catalog = catalog
        self._database = database

    def values(
        self, name: str, schema: pa.Schema, descriptor: StateDescriptor, now_ms: int
    ) -> None:
        """Of a column that was stored with another codec."""
        stored, declared = self._catalog.states.get(name), schema.serialize().to_pybytes()
        if stored is None or stored.schema == declared:
            return
        old = pa.ipc.read_schema(pa.py_buffer(stored.schema))
        migration = migration_of(stored.kind, old, schema, descriptor, now_ms)
        if migration is not None:
            stored.schema = declared
            entry = migration.entry
            self._rewrite(stored, lambda values: ByteStrings.of([entry(one) for one in values]))

    def aggregates(self, name: str, kind: str, schema: pa.Schema, identity_count: int) -> bool:
        """Of a table that was stored for other aggregates; False = it was not.

        Args:
            identity_count: columns that rows are known by.
        """
        stored, declared = self._catalog.states.get(name), state_schema(schema)
        if stored is None or stored.kind != kind:
            return False
        old = pa.ipc.read_schema(pa.py_buffer(stored.schema))
        try:
            change = aggregate_change(old, declared)
        except TaskFailure:
            return False  # who keeps the state says what was stored and what is declared
        if change is None:
            return False
        stored.schema = declared.serialize().to_pybytes()
        if not change.changes(old):
            return False
        content = AggregateChange(
            tuple(place if place is None else place - identity_count for place in change.places)[
                identity_count:
            ],
            pa.schema(list(declared)[identity_count:]),
        )
        fields = list(old)[identity_count:]
        self._rewrite(stored, lambda values: _changed_rows(content, fields, values))
        return True

    def _rewrite(self, stored: StoredState, changed: Callable[[list[bytes]], ByteStrings]) -> None:
        for partition in stored.partitions.values():
            if not partition.is_stored:
                continue
            number = self._catalog.new_number()
            for names, values in self._database.scan(*partition_bounds(partition.number)):
                keys = moved_to(number, ByteStrings.of(names))
                self._database.ingest(SstEntries(keys, changed(values), None))
            self._database.drop_range(*partition_bounds(partition.number))
            partition.number = number


def _changed_rows(
    change: AggregateChange, stored: list[pa.Field], values: list[bytes]
) -> ByteStrings:
    """Values of entries, which were written for these fields, as they are declared."""
    kinds = number_kinds(stored)
    if kinds is None:
        types = [field.type for field in stored]
        columns = decoded_values(types, ByteStrings.of(values))
    else:
        columns = [
            pa.array(numbers, mask=None if valid is None else ~valid)
            for numbers, valid in zip(
                *decoded_rows([kind.dtype for kind in kinds], values), strict=True
            )
        ]
    changed = change.columns(columns, len(values))
    kinds = number_kinds(change.schema)
    if kinds is None:
        return encoded_values(changed)
    return encoded_rows(*from_columns(kinds, changed))
