"""Rows of the states of one operator on their way into a savepoint.

They come in any order and are written by key-group. What does not fit into the memory that is meant for them lies in
files meanwhile, a file per state and range of key-groups, and a range is sorted, checked and written at a time.

Invariants: no two rows of a state that are written have the same identity; no two sessions of a key touch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from penstock.errors import JobRejected
from penstock.pb import checkpoint_pb2
from penstock.rows.column_values import shown_row, shown_value
from penstock.state_tables.state_view import StateView
from penstock.state_tables.table_parts import TIME
from penstock.storage.batch_parts import ANY_NUMBER, in_parts
from penstock.storage.blobs import Blob
from penstock.storage.codec import StateError
from penstock.storage.hashing import hash_columns
from penstock.storage.key_encoding import encode_keys
from penstock.storage.key_groups import key_group_of
from penstock.storage.key_types import Int64Array
from penstock.storage.run_columns import BACKEND, DELETED, KEY_GROUP, RUN_VERSION
from penstock.storage.run_merge import identity_codes, identity_of
from penstock.storage.run_writer import SegmentWriter

LIMIT_BYTES: Final = 64 << 20
"""Of rows that wait in memory; with the range that is being written about twice as much is used."""
_RANGES_MAX: Final = 64
_CHUNK_ROWS: Final = 1 << 16
_NAMESPACE: Final = "__namespace"


@dataclass(slots=True)
class _Table:
    view: StateView
    schema: pa.Schema
    waiting: list[pa.RecordBatch] = field(default_factory=list)


class KeyedSpool:
    """Takes the rows of all states of an operator, then gives them out as runs.

    Args:
        instance: unique for this operator of this savepoint; letters and digits.
        directory: for what does not fit into memory; it is there, and empty.
        where: the operator, for messages.
    """

    def __init__(
        self,
        max_parallelism: int,
        instance: str,
        directory: Path,
        where: str,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        self._max_parallelism = max_parallelism
        self._instance = instance
        self._directory = directory
        self._where = where
        self._limit_bytes = limit_bytes
        self._tables: list[_Table] = []
        self._waiting_bytes = 0
        self._is_spilled = False
        self._segments: dict[int, list[checkpoint_pb2.StateSegment]] = {}

    def table(self, view: StateView) -> int:
        """A state whose rows are to come; its number."""
        own = [one for one in view.stored_schema if one.name not in (KEY_GROUP, DELETED)]
        fields = [pa.field(KEY_GROUP, pa.uint16()), pa.field(_NAMESPACE, pa.int64()), *own]
        self._tables.append(_Table(view, pa.schema(fields)))
        return len(self._tables) - 1

    def add(self, table: int, namespaces: Int64Array, columns: Sequence[pa.Array]) -> None:
        """Rows of a state as they are stored.

        Args:
            columns: those of the state's stored rows, but for key-groups and marks of removal.
        """
        held = self._tables[table]
        if not len(namespaces):
            return
        groups = key_group_of(hash_columns(held.view.keys(columns)), self._max_parallelism)
        arrays = [pa.array(groups), pa.array(namespaces)]
        identity = identity_of(held.view.kind, held.schema)
        for one, column in zip(list(held.schema)[2:], columns, strict=True):
            is_key = one.name in identity
            # Keys that are equal are the same bytes: -0.0 is 0.0, and every NaN is one.
            arrays.append(encode_keys([column]).to_arrays()[0] if is_key else column)
        batch = pa.RecordBatch.from_arrays(arrays, schema=held.schema)
        held.waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes > self._limit_bytes:
            self._spill()

    def ranges(self) -> list[range]:
        """The key-groups that are written together; as many subtasks the savepoint has of the operator."""
        count = min(self._max_parallelism, _RANGES_MAX) if self._is_spilled else 1
        bounds = [index * self._max_parallelism // count for index in range(count + 1)]
        return [range(*bounds[index : index + 2]) for index in range(count)]

    def blobs(self) -> Iterator[Blob]:
        """What is to be written, a blob per range; each is made as it is written.

        Raises (while a blob is made):
            StateError: two rows have the same identity.
        """
        if self._is_spilled:
            self._spill()
        for index in range(len(self.ranges())):
            yield Blob(self._name(index), partial(self._range, index))

    def snapshot(
        self, index: int, handle: checkpoint_pb2.StateHandle
    ) -> checkpoint_pb2.KeyedStateSnapshot:
        """What the savepoint says of a range that was written."""
        key_groups, name = self.ranges()[index], self._name(index)
        file = checkpoint_pb2.StateFile(name=name, handle=handle)
        return checkpoint_pb2.KeyedStateSnapshot(
            backend=BACKEND,
            format_version=RUN_VERSION,
            instance=self._instance,
            first_key_group=key_groups.start,
            last_key_group=key_groups.stop - 1,
            max_parallelism=self._max_parallelism,
            files=[file] if handle.size_bytes else [],
            tables=[
                checkpoint_pb2.StateTable(
                    name=one.view.name,
                    kind=one.view.kind,
                    schema=one.view.stored_schema.serialize().to_pybytes(),
                )
                for one in self._tables
            ],
            segments=self._segments[index],
        )

    def _name(self, index: int) -> str:
        return f"{self._instance}-{index}"

    def _spill(self) -> None:
        """Moves what waits in memory into files."""
        self._is_spilled = True
        ranges = self.ranges()
        # Few small numbers: they are sorted digit by digit.
        places = np.arange(len(ranges), dtype=np.uint8)
        range_of = np.repeat(places, [len(one) for one in ranges])
        for place, table in enumerate(self._tables):
            parts: list[list[pa.RecordBatch]] = [[] for _ in ranges]
            for batch in _in_chunks(table.waiting):
                which = range_of[batch.column(0).to_numpy()]
                rows = batch.take(pa.array(np.argsort(which, kind="stable")))
                start = 0
                for index, count in enumerate(np.bincount(which, minlength=len(ranges)).tolist()):
                    if count:
                        parts[index].append(rows.slice(start, count))
                    start += count
            table.waiting = []
            for index, some in enumerate(parts):
                if some:
                    self._append(place, index, some)
        self._waiting_bytes = 0

    def _append(self, table: int, index: int, batches: Sequence[pa.RecordBatch]) -> None:
        path = self._path(table, index)
        with path.open("ab") as file, pa.ipc.new_stream(file, batches[0].schema) as writer:
            for batch in batches:
                writer.write_batch(batch)

    def _path(self, table: int, index: int) -> Path:
        return self._directory / f"{self._instance}-{table}-{index}.arrow"

    def _range(self, index: int) -> Iterator[memoryview]:
        """The bytes of one range: segment by segment."""
        segments = self._segments[index] = []
        offset = 0
        for place, table in enumerate(self._tables):
            for namespace, rows in self._sorted(place, table, index):
                writer = SegmentWriter()
                yield from writer.write([_as_stored(rows, table.view)])
                segments.append(writer.whole(place, namespace, self._name(index), offset))
                offset += writer.size_bytes

    def _sorted(
        self, place: int, table: _Table, index: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        batches = list(self._read(place, index)) if self._is_spilled else table.waiting
        for rows in _combined(batches):
            self._check_once(rows, table.view)
            if table.view.kind == "sessions":
                self._check_apart(rows, table.view)
            namespaces = rows.column(1).to_numpy()
            order = np.argsort(rows.column(0).to_numpy(), kind="stable")
            if (namespaces != namespaces[0]).any():
                order = order[np.argsort(namespaces[order], kind="stable")]
            rows = rows.take(pa.array(order))
            found = namespaces[order]
            bounds = [0, *(np.flatnonzero(np.diff(found)) + 1).tolist(), len(found)]
            for start, stop in itertools.pairwise(bounds):
                yield int(found[start]), rows.slice(start, stop - start)

    def _read(self, table: int, index: int) -> Iterator[pa.RecordBatch]:
        path = self._path(table, index)
        if not path.exists():
            return
        with pa.memory_map(str(path)) as file:
            while file.tell() < file.size():
                with pa.ipc.open_stream(file) as reader:
                    yield from reader

    def _check_once(self, rows: pa.RecordBatch, view: StateView) -> None:
        identity = identity_of(view.kind, rows.schema)
        if not identity:
            return
        columns = [rows.column(1), *(rows.column(name) for name in identity)]
        if not _may_repeat(columns):
            return
        codes = identity_codes(encode_keys(columns))
        if len(codes) and int(codes.max()) + 1 == len(codes):
            return
        _, first = np.unique(codes, return_index=True)
        twice = int(np.setdiff1d(np.arange(len(codes)), first)[0])
        told = _told(rows, twice, identity, view)
        raise StateError(f"{self._where}, state {view.name!r}: {told} is there twice")

    def _check_apart(self, rows: pa.RecordBatch, view: StateView) -> None:
        """Sessions of a key that touch would have become one."""
        keys = _key_columns(rows.schema.names)
        codes = identity_codes(encode_keys([rows.column(name) for name in keys]))
        starts, ends = rows.column("start").to_numpy(), rows.column("end").to_numpy()
        order = np.lexsort((starts, codes))
        before, behind = order[:-1], order[1:]
        touch = (codes[before] == codes[behind]) & (starts[behind] <= ends[before])
        if touch.any():
            place = int(np.argmax(touch))
            both = " and ".join(
                f"{_time(rows, 'start', row)} to {_time(rows, 'end', row)}"
                for row in (int(before[place]), int(behind[place]))
            )
            told = _told(rows, int(before[place]), keys, view)
            raise StateError(
                f"{self._where}, state {view.name!r}: {told} has sessions that touch, {both}: give them as one"
            )


def _may_repeat(columns: Sequence[pa.Array]) -> bool:
    """False where all rows differ, which their hashes say at a fraction of the cost of comparing them."""
    try:
        hashes = np.sort(hash_columns(columns))
    except JobRejected:
        return True  # of a type that is no key
    return bool((hashes[1:] == hashes[:-1]).any())


def _told(rows: pa.RecordBatch, row: int, columns: Sequence[str], view: StateView) -> str:
    """Some columns of a row, its keys by their own names."""
    names = dict(zip(_key_columns(columns), view.key_names, strict=False))
    shown = shown_row(rows.select(list(columns)), row)
    return ", ".join(f"{names.get(name, name)}={value!r}" for name, value in shown.items())


def _time(rows: pa.RecordBatch, column: str, row: int) -> str:
    return str(shown_value(rows.column(column)[row].cast(TIME)))


def _key_columns(identity: Sequence[str]) -> list[str]:
    return [name for name in identity if name.startswith("key_")]


def _in_chunks(batches: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches that are large enough to be dealt out, and small enough for the processor's cache."""
    for part in in_parts(batches, ANY_NUMBER, _CHUNK_ROWS):
        yield from _combined(part)


def _combined(batches: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """As one batch; none of none."""
    if len(batches) < 2:
        return list(batches)
    return [pa.concat_batches(batches)]


def _as_stored(rows: pa.RecordBatch, view: StateView) -> pa.RecordBatch:
    columns = []
    for one in view.stored_schema:
        if one.name == DELETED:
            columns.append(pa.repeat(pa.scalar(False), rows.num_rows))
        else:
            columns.append(rows.column(one.name))
    return pa.RecordBatch.from_arrays(columns, schema=view.stored_schema)
