"""What the restored snapshots hold of a table and namespace, read when it is asked for.

Files are read in parts, those with key-groups of this subtask only, and what is read is checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from penstock.errors import TaskFailure, Unrecoverable
from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import SnapshotReader
from penstock.storage.run_columns import BACKEND, CODEC, FORMATS_READ, within
from penstock.storage.run_lists import marked, with_marks
from penstock.storage.run_merge import identity_of, merged_rows
from penstock.storage.run_reader import SegmentPlace, chain_batches
from taskmanager.state.aggregate_change import AggregateChange, aggregate_change
from taskmanager.state.hashmap.chains import Chain, Segment


@dataclass(frozen=True, slots=True)
class RestoredRows:
    """The chain of a table and namespace in one snapshot.

    Attributes:
        schema: of its rows, as it was when they were written.
        chain: where they are.
        files: at least those of the chain, by name.
        key_groups: whose rows count.
        is_shareable: new snapshots may refer to the chain: no rows of other key-groups are in it.
        operator: whose state it is, for messages.
    """

    kind: str
    schema: pa.Schema
    chain: Chain
    files: Mapping[str, checkpoint_pb2.StateFile]
    reader: SnapshotReader
    key_groups: range
    is_shareable: bool
    operator: str

    @property
    def rows_max(self) -> int:
        """Rows of all segments."""
        return sum(segment.row_count for segment in self.chain)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, oldest segment first.

        Raises:
            StoreCorrupt: a file is not what was written.
            StoreNotFound: a file is gone.
        """
        for batch in chain_batches(self.reader, map(self._place, self.chain), self.key_groups):
            rows = within(batch, self.key_groups)
            if rows.num_rows:
                yield with_marks(rows) if self.kind == "list" else rows

    def latest(self) -> Iterator[pa.RecordBatch]:
        """The rows that count, some key-groups after the others; of lists whole ones.

        Raises:
            StoreCorrupt: a file is not what was written.
            StoreNotFound: a file is gone.
        """
        identity = identity_of(self.kind, self.schema)
        chain = [self._place(segment) for segment in self.chain if segment.size_bytes]
        rows = merged_rows(self.reader, chain, identity, self.key_groups)
        return map(with_marks, rows) if self.kind == "list" else rows

    def _place(self, segment: Segment) -> SegmentPlace:
        return SegmentPlace(
            self.files[segment.file].handle,
            segment.offset,
            segment.size_bytes,
            segment.parts,
            f"state of operator {self.operator!r}, file {segment.file}",
        )


def restored_rows(
    snapshots: Iterable[checkpoint_pb2.KeyedStateSnapshot],
    reader: SnapshotReader,
    key_groups: range,
    operator: str,
) -> dict[tuple[str, int], list[RestoredRows]]:
    """What the snapshots hold, by table and namespace; one element per snapshot that has any.

    Raises:
        Unrecoverable: a snapshot was made by another backend, or in another format.
    """
    found: dict[tuple[str, int], list[RestoredRows]] = {}
    for snapshot in snapshots:
        check_format(snapshot, operator)
        covered = range(snapshot.first_key_group, snapshot.last_key_group + 1)
        common = range(
            max(covered.start, key_groups.start),
            max(min(covered.stop, key_groups.stop), covered.start, key_groups.start),
        )
        if not common:
            continue
        files = {file.name: file for file in snapshot.files}
        chains: dict[tuple[int, int], list[Segment]] = {}
        for segment in snapshot.segments:
            chains.setdefault((segment.table, segment.namespace), []).append(_segment(segment))
        for (index, namespace), chain in chains.items():
            table = snapshot.tables[index]
            schema = pa.ipc.read_schema(pa.py_buffer(table.schema))
            rows = RestoredRows(
                table.kind,
                marked(table.kind, schema),
                tuple(chain),
                files,
                reader,
                common,
                covered == key_groups and all(files[one.file].shared for one in chain),
                operator,
            )
            found.setdefault((table.name, namespace), []).append(rows)
    return found


def check_fits(rows: RestoredRows, kind: str, schema: pa.Schema, state: str) -> None:
    """Checks that restored rows are what a table holds.

    Args:
        state: operator and state, for the message.

    Raises:
        TaskFailure: they are not.
    """
    if rows.kind != kind or _columns(rows.schema) != _columns(schema):
        raise _misfit(rows, kind, schema, state)


def restored_change(
    rows: RestoredRows, kind: str, schema: pa.Schema, state: str
) -> AggregateChange | None:
    """What makes restored rows those of a table; None = they are.

    Raises:
        TaskFailure: nothing does.
    """
    try:
        change = aggregate_change(rows.schema, schema) if rows.kind == kind else None
    except TaskFailure as error:
        raise _misfit(rows, kind, schema, state, str(error)) from error
    if change is None:
        check_fits(rows, kind, schema, state)
    return change


def _misfit(
    rows: RestoredRows, kind: str, schema: pa.Schema, state: str, reason: str = ""
) -> TaskFailure:
    because = f" ({reason})" if reason else ""
    return TaskFailure(
        f"{state} was stored as {rows.kind} with {_text(rows.schema)}, but the job declares it as "
        f"{kind} with {_text(schema)}{because}: "
        "declare it as it was, or give the state (or the operator, its uid) another name, so that it "
        "starts empty"
    )


def check_format(
    snapshot: checkpoint_pb2.KeyedStateSnapshot,
    operator: str,
    backend: str = BACKEND,
    formats: tuple[int, ...] = FORMATS_READ,
) -> None:
    """Checks that a snapshot is of a backend, in formats that it reads.

    Raises:
        Unrecoverable: it is not.
    """
    if snapshot.backend != backend:
        raise Unrecoverable(
            f"the state of operator {operator!r} was written by the backend {snapshot.backend!r}, but the "
            f"job runs with {backend!r}: set state.backend.type: {snapshot.backend}, or take a canonical savepoint"
        )
    if snapshot.format_version not in formats:
        raise Unrecoverable(
            f"the state of operator {operator!r} has format {snapshot.format_version}, this version of "
            f"Penstock reads {formats[0]} to {formats[-1]}: use the version that wrote it"
        )


def _segment(segment: checkpoint_pb2.StateSegment) -> Segment:
    """A segment of the base: all that was restored is before whatever changes now."""
    return Segment(
        segment.file,
        segment.offset,
        segment.size_bytes,
        segment.row_count,
        0,
        RESTORED_TO,
        parts=tuple(segment.parts),
    )


RESTORED_TO: Final = 1
"""The version that restored content is taken to be sealed with."""


def _columns(schema: pa.Schema) -> list[tuple[str, pa.DataType, bytes]]:
    return [(field.name, field.type, (field.metadata or {}).get(CODEC, b"")) for field in schema]


def _text(schema: pa.Schema) -> str:
    parts = []
    for name, kind, codec in _columns(schema):
        if not name.startswith("__"):
            parts.append(f"{name}: {kind}" + (f" ({codec.decode()})" if codec else ""))
    return "(" + ", ".join(parts) + ")"
