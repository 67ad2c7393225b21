"""The rows that a snapshot holds of one table, each key once, for a range of key-groups.

Of several rows of one identity the last one counts, tombstones included. Rows are read some key-groups at a time, so
that what is in memory at once does not grow with the state.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.pb import checkpoint_pb2
from penstock.state_tables.state_view import STORED_DELETED
from penstock.storage.blobs import SnapshotReader
from penstock.storage.run_reader import SegmentPlace, parts_of, segment_batches

CHUNK_BYTES: Final = 16 << 20
"""As much of the files is read at once, unless one key-group has more."""


def keyed_rows(
    keyed: checkpoint_pb2.KeyedStateSnapshot,
    table: int,
    identity: Sequence[str],
    reader: SnapshotReader,
    key_groups: range,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(namespace, rows as they are stored) of one table.

    Args:
        table: its place in the snapshot.
        identity: columns that tell rows apart; none = all count.
        key_groups: whose rows are wanted.

    Raises:
        StoreCorrupt, StoreNotFound, StoreTransient: a file cannot be read.
    """
    covered = range(keyed.first_key_group, keyed.last_key_group + 1)
    wanted = range(max(covered.start, key_groups.start), min(covered.stop, key_groups.stop))
    if not wanted:
        return
    chains: dict[int, list[checkpoint_pb2.StateSegment]] = {}
    for segment in keyed.segments:
        if segment.table == table:
            chains.setdefault(segment.namespace, []).append(segment)
    files = {file.name: file.handle for file in keyed.files}
    for namespace, chain in sorted(chains.items()):
        places = [
            SegmentPlace(
                files[one.file],
                one.offset,
                one.size_bytes,
                parts_of(one),
                f"state {keyed.tables[table].name!r}, file {one.file}",
            )
            for one in chain
        ]
        for chunk in _chunks(places, wanted):
            rows = _last_rows(places, chunk, identity, reader)
            if rows is not None and rows.num_rows:
                yield namespace, rows


def _chunks(places: Sequence[SegmentPlace], wanted: range) -> Iterator[range]:
    """Ranges of key-groups that are read at once."""
    size_bytes = sum(
        part.size_bytes
        for place in places
        for part in place.parts
        if part.first_key_group < wanted.stop and part.last_key_group >= wanted.start
    )
    has_parts = all(place.parts for place in places)
    count = min(len(wanted), -(-size_bytes // CHUNK_BYTES)) if has_parts else 1
    bounds = np.linspace(wanted.start, wanted.stop, max(count, 1) + 1).astype(int).tolist()
    for start, stop in itertools.pairwise(bounds):
        yield range(start, stop)


def _last_rows(
    places: Sequence[SegmentPlace],
    key_groups: range,
    identity: Sequence[str],
    reader: SnapshotReader,
) -> pa.RecordBatch | None:
    batches = [
        _within(batch, key_groups)
        for place in places
        for batch in segment_batches(reader, place, key_groups)
    ]
    batches = [batch for batch in batches if batch.num_rows]
    if not batches:
        return None
    rows = pa.concat_batches(batches) if len(batches) > 1 else batches[0]
    if identity:
        rows = _without_earlier(rows, identity)
    if STORED_DELETED in rows.schema.names:
        deleted = rows.column(STORED_DELETED)
        if deleted.true_count:
            rows = rows.filter(pc.invert(deleted))
    return rows


def _within(batch: pa.RecordBatch, key_groups: range) -> pa.RecordBatch:
    groups = batch.column(0).to_numpy()
    start = int(np.searchsorted(groups, key_groups.start, side="left"))
    stop = int(np.searchsorted(groups, key_groups.stop, side="left"))
    return batch.slice(start, stop - start)


def _without_earlier(rows: pa.RecordBatch, identity: Sequence[str]) -> pa.RecordBatch:
    """The last row of each identity, in their order."""
    place = "place of the row"
    columns = [*(rows.column(name) for name in identity), pa.array(np.arange(rows.num_rows))]
    keys = pa.Table.from_arrays(columns, names=[*identity, place])
    last = keys.group_by(list(identity)).aggregate([(place, "max")]).column(f"{place}_max")
    if len(last) == rows.num_rows:
        return rows
    return rows.take(pa.array(np.sort(last.to_numpy())))
