"""Which namespaces of which states there are, and the partitions of the database they lie in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from penstock.errors import TaskFailure
from penstock.pb import checkpoint_pb2
from penstock.storage.key_types import value_type
from penstock.storage.run_columns import ADDED, CODEC, codec_field
from taskmanager.state.descriptors import StateDescriptor
from taskmanager.state.rocksdb.cache_host import StoredTable


@dataclass(slots=True)
class Partition:
    """A namespace of a state.

    Attributes:
        number: of the partition in the database.
        is_stored: the database holds something of it.
        table: what operators use; None = not asked for since it was restored.
    """

    number: int
    is_stored: bool
    row_count: int = 0
    table: StoredTable | None = None


@dataclass(slots=True)
class StoredState:
    """A state of the database.

    Attributes:
        kind: ``group``, ...
        schema: Arrow IPC schema of its rows.
        partitions: by namespace.
    """

    kind: str
    schema: bytes
    partitions: dict[int, Partition] = field(default_factory=dict)


class PartitionCatalog:
    """All states of a database.

    Attributes:
        states: by name.
    """

    def __init__(self) -> None:
        self.states: dict[str, StoredState] = {}
        self._next_number = 1

    def new_number(self) -> int:
        """A partition that there has never been."""
        self._next_number += 1
        return self._next_number - 1

    def restore(self, snapshot: checkpoint_pb2.KeyedStateSnapshot) -> None:
        """Takes over the partitions of the snapshot that the database was opened with."""
        for table in snapshot.tables:
            self.states[table.name] = StoredState(table.kind, table.schema)
        for name, segment in stored_segments(snapshot):
            partition = Partition(segment.offset, is_stored=True, row_count=segment.row_count)
            self.states[name].partitions[segment.namespace] = partition
            self._next_number = max(self._next_number, segment.offset + 1)

    def partition_for(self, table: checkpoint_pb2.StateTable, namespace: int) -> Partition:
        """The partition of a namespace of a state that another snapshot has; made where there is none."""
        state = self.states.setdefault(table.name, StoredState(table.kind, table.schema))
        partition = state.partitions.get(namespace)
        if partition is None:
            partition = state.partitions[namespace] = Partition(self.new_number(), is_stored=True)
        return partition

    def found(self, name: str, namespace: int) -> Partition | None:
        """The partition of a namespace; None = there is none."""
        state = self.states.get(name)
        return None if state is None else state.partitions.get(namespace)

    def partition(
        self, name: str, namespace: int, kind: str, schema: pa.Schema, owner: str
    ) -> Partition:
        """The partition of a namespace; made where there is none.

        Raises:
            TaskFailure: it was restored with other types.
        """
        partition = self.found(name, namespace) or self.unused_partition()
        self.keep(partition, name, namespace, kind, schema, owner)
        return partition

    def unused_partition(self) -> Partition:
        """A partition of no namespace, yet (``keep``)."""
        return Partition(self.new_number(), is_stored=False)

    def keep(
        self,
        partition: Partition,
        name: str,
        namespace: int,
        kind: str,
        schema: pa.Schema,
        owner: str,
    ) -> None:
        """A namespace has this partition.

        Args:
            schema: of its rows; what tables add to each does not count.
            owner: of the state, for messages.

        Raises:
            TaskFailure: it was restored with other types.
        """
        state = self.state(name, kind, state_schema(schema).serialize().to_pybytes(), owner)
        state.partitions[namespace] = partition

    def state(self, name: str, kind: str, schema: bytes, owner: str) -> StoredState:
        """A state, made where there is none.

        Raises:
            TaskFailure: it was restored with other types.
        """
        state = self.states.get(name)
        if state is None:
            state = self.states[name] = StoredState(kind, schema)
        elif state.kind != kind or not _is_same(state.schema, schema):
            raise TaskFailure(
                f"state {name} of {owner} was stored as {_shown(state.kind, state.schema)}, but the job "
                f"keeps {_shown(kind, schema)}: give the operator another uid, or restore what was stored"
            )
        state.schema = schema
        return state

    def all_partitions(self) -> Iterator[Partition]:
        """The partitions of all states."""
        for state in self.states.values():
            yield from state.partitions.values()

    def describe(self) -> tuple[list[checkpoint_pb2.StateTable], list[checkpoint_pb2.StateSegment]]:
        """The states and their partitions as they are now."""
        tables: list[checkpoint_pb2.StateTable] = []
        segments: list[checkpoint_pb2.StateSegment] = []
        for name, state in self.states.items():
            for namespace, partition in state.partitions.items():
                count: int | None = partition.row_count or None
                if partition.table is not None:
                    count = partition.table.known_row_count
                segments.append(
                    checkpoint_pb2.StateSegment(
                        table=len(tables),
                        namespace=namespace,
                        offset=partition.number,
                        row_count=count or 0,
                        is_empty=count == 0,
                    )
                )
            tables.append(
                checkpoint_pb2.StateTable(name=name, kind=state.kind, schema=state.schema)
            )
        return tables, segments


def stored_segments(
    snapshot: checkpoint_pb2.KeyedStateSnapshot,
) -> Iterator[tuple[str, checkpoint_pb2.StateSegment]]:
    """The partitions of a snapshot with the names of their states."""
    for segment in snapshot.segments:
        yield snapshot.tables[segment.table].name, segment


def state_schema(schema: pa.Schema) -> pa.Schema:
    """What a state keeps of the rows of its tables."""
    kept = [field for field in schema if field.name not in ADDED]
    return pa.schema(kept, metadata=schema.metadata)


def column_schema(key_types: Sequence[pa.DataType], descriptor: StateDescriptor) -> pa.Schema:
    """What a column of keyed objects looks like: types of the keys, codecs of the rest."""
    fields = [pa.field(f"key_{index}", type_) for index, type_ in enumerate(key_types)]
    if descriptor.key_codec is not None:
        fields.append(codec_field("map_key", descriptor.key_codec))
    fields.append(codec_field("value", descriptor.codec))
    return pa.schema(fields)


def _is_same(stored: bytes, declared: bytes) -> bool:
    """Whether rows are the same; what a schema says besides (which columns are the key) does not count."""
    if stored == declared:
        return True
    schemas = [
        pa.ipc.read_schema(pa.py_buffer(one)).remove_metadata() for one in (stored, declared)
    ]
    return _plain_keys(schemas[0]).equals(_plain_keys(schemas[1]), check_metadata=True)


def _plain_keys(schema: pa.Schema) -> pa.Schema:
    """Dictionary types are none of keys' own."""
    return pa.schema(
        [
            field.with_type(value_type(field.type)) if field.name.startswith("key_") else field
            for field in schema
        ]
    )


def _shown(kind: str, schema: bytes) -> str:
    fields = pa.ipc.read_schema(pa.py_buffer(schema))
    columns = ", ".join(f"{field.name}: {_shown_type(field)}" for field in fields)
    return f"{kind} ({columns})"


def _shown_type(field: pa.Field) -> str:
    codec = (field.metadata or {}).get(CODEC)
    return str(field.type) if codec is None else codec.decode()
