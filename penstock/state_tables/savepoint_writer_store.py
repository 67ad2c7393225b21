"""Writes savepoints from tables: ``ps.write_savepoint``.

Each operator's rows go through a spool into one file; the manifest comes last, and only where there is none, so that a
savepoint is there as a whole or not at all.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from penstock.errors import ConfigurationError, JobRejected, StoreNotFound, StoreTransient
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.state_tables.declared_tables import DeclaredList, declared_lists, declared_tables
from penstock.state_tables.given_rows import given_batches, given_columns
from penstock.state_tables.group_parts import arrived_by
from penstock.state_tables.keyed_spool_store import KeyedSpool
from penstock.state_tables.known_splits import DIGEST, complete_splits, discovered_splits
from penstock.state_tables.opened_state import StateTables, open_state
from penstock.state_tables.operator_tables import (
    SPLITS,
    SUBTASK,
    entry_key,
    item_columns,
    packed,
)
from penstock.state_tables.savepoint_draft import (
    WATERMARK_CODEC,
    SavepointDraft,
    changes_of,
    positions_of,
)
from penstock.state_tables.source_positions import split_snapshots
from penstock.state_tables.state_view import StateView
from penstock.state_tables.table_parts import WrittenAs
from penstock.state_tables.value_columns import fitted
from penstock.storage.blobs import Blob, list_items
from penstock.storage.codec import StateError
from penstock.storage.manifest import encode_manifest
from penstock.storage.object_store import ObjectStore, SwapUnanswered, delete_all
from penstock.storage.open_store import open_store
from penstock.storage.run_columns import DELETED, KEY_GROUP
from penstock.storage.savepoint import (
    ABOUT_OUTPUT,
    MANIFEST_PATH,
    STATE_DIRECTORY,
)
from penstock.storage.savepoint_places import check_is_outside
from penstock.storage.settled_swap import settled_swap
from penstock.storage.snapshot_files import PackedSnapshotWriter, snapshot_file_name
from penstock.storage.store_names import whole_name, without_slash

_INLINE_BYTES: Final = 1 << 10
_OWN: Final = frozenset({KEY_GROUP, DELETED})
_BROADCAST = checkpoint_pb2.REDISTRIBUTION_BROADCAST


def write_savepoint(
    path: str | PathLike[str],
    states: Mapping[str, Mapping[str, Any] | None],
    *,
    base: str | PathLike[str] | StateTables | None = None,
    job: Any = None,
    sources: Mapping[str, Any] | None = None,
    max_parallelism: int | None = None,
) -> str:
    """Writes a canonical savepoint, which a job is started from, with either state backend and any parallelism.

    Args:
        path: of a directory that is not there yet, or is empty, and lies in no other savepoint; also ``s3://``.
        states: uid of an operator -> name of a state -> its rows: a ``pyarrow`` table, batches, a list of dicts, a data
            frame; with the columns that ``open_state`` gives. None in place of rows drops a state, and in place of an
            operator's states all of them.
        base: a checkpoint or savepoint with all that is not given: this is a new version of it.
        job: the ``Environment`` (or its plan) that is to be started: says what states are where there is no base, and
            is checked against what is written.
        sources: uid of a source -> where it is to go on.
        max_parallelism: number of key-groups, where it shall be another than the base's, or the job's.

    Returns:
        The savepoint, as ``from_savepoint=`` and ``run --from-savepoint`` take it.

    Raises:
        StateError: something does not fit; nothing is left of the savepoint.
        JobRejected: the job could not be started from it.
        StoreTransient: it cannot be written now.
        SwapUnanswered: nobody knows whether the savepoint is there; nothing of it is removed.
    """
    try:
        uri = without_slash(whole_name(path))
    except ConfigurationError as error:
        raise StateError(f"write_savepoint: {error}") from error
    changes, positions = changes_of(states), positions_of(sources)
    graph = graph_of(job)
    if base is not None and not isinstance(base, StateTables):
        base = open_state(base)
    if base is None and graph is None:
        raise StateError(
            "write_savepoint needs base= (a savepoint, of which this is a new version) or job= (the environment that "
            "describes the job): one of them says what the states are"
        )
    store = open_store(uri)
    _check_is_new(store, uri)
    draft = SavepointDraft(None if base is None else base.manifest, graph, max_parallelism, uri)
    draft.check_uids([*changes, *positions])
    writing = _Writing(store, draft, base)
    try:
        writing.write(changes, positions)
        draft.leave_stages_out()
        draft.check_start(uri)
        writing.finish()
    except BaseException:
        writing.give_up()
        raise
    return uri


def graph_of(job: Any) -> graph_pb2.JobGraph | None:
    """The graph of an environment, or of a plan."""
    if job is None or isinstance(job, graph_pb2.JobGraph):
        return job
    plan = job.plan() if hasattr(job, "plan") else job
    graph = getattr(plan, "graph", None)
    if not isinstance(graph, graph_pb2.JobGraph):
        raise StateError(f"job={type(job).__name__} is no Environment: give the one that was built")
    return graph


def _inside(store: ObjectStore) -> tuple[str, ...]:
    try:
        return store.first_parts()
    except StoreNotFound:
        return ()


def _check_is_new(store: ObjectStore, uri: str) -> None:
    inside = _inside(store)
    if inside:
        raise StateError(
            f"{uri} is not empty ({', '.join(inside[:5])}): a savepoint is written into a directory of its own"
        )
    try:
        check_is_outside(uri)
    except JobRejected as error:
        raise StateError(f"write_savepoint: {error}") from error
    store.check_writable()


class _Writing:
    """The files of one savepoint.

    Args:
        store: its directory.
        draft: its manifest, which is filled in.
        base: with what is not given.
    """

    def __init__(self, store: ObjectStore, draft: SavepointDraft, base: StateTables | None) -> None:
        self._store = store
        self._draft = draft
        self._base = base
        self._now_ms = time.time_ns() // 10**6
        self._begun: list[str] = []
        """Paths of what may be there of it before its manifest is."""
        self._may_be_complete = False
        self._closed_at_ms: dict[str, int] = {}
        """State of the operator that is being written -> the watermark that ends the first window which was given."""

    def write(
        self, changes: Mapping[str, Mapping[str, Any] | None], positions: Mapping[str, Any]
    ) -> None:
        """Writes the state of all operators, and puts it into the manifest."""
        for uid in list(self._draft.operators):
            with_all = self._all_of(uid, changes[uid]) if uid in changes else {}
            arrived = self._write_keyed(uid, with_all)
            self._write_lists(uid, with_all, arrived)
            for name, closed_at_ms in self._closed_at_ms.items():
                self._draft.check_is_open(uid, name, closed_at_ms)
            if uid in positions:
                self._write_splits(uid, positions[uid])
        self._keep_done_splits()

    def finish(self) -> None:
        """The manifest, and what says whether the output that the base names was committed."""
        now_ms = time.time_ns() // 10**6
        manifest, base = self._draft.manifest, self._base
        manifest.completed_at_ms = now_ms
        if base is None:
            manifest.triggered_at_ms = now_ms
        elif base.is_savepoint:
            for mark in ABOUT_OUTPUT.intersection(base.store.first_parts()):
                # Others write the same of this base: what was not seen to be made here is not ours to remove.
                self._check_first(self._store.compare_and_swap(mark, None, base.store.get(mark)))
                self._begun.append(mark)
        self._may_be_complete = True
        content = encode_manifest(manifest)
        try:
            self._check_first(settled_swap(self._store, MANIFEST_PATH, None, content))
        except (StateError, StoreTransient) as error:
            self._may_be_complete = isinstance(error, SwapUnanswered)
            raise

    def give_up(self) -> None:
        """Removes what has been written, unless it may be complete."""
        if self._may_be_complete:
            return
        delete_all(self._store, self._begun)
        if not _inside(self._store):  # or else somebody else writes one there
            self._store.remove_remains()

    @staticmethod
    def _check_first(is_first: bool) -> None:
        if not is_first:
            raise StateError(
                "another savepoint was written there meanwhile: give each a directory of its own"
            )

    def _all_of(self, uid: str, own: Mapping[str, Any] | None) -> dict[str, Any]:
        """What is given of an operator, by state; checked by name."""
        held = () if self._base is None else self._base.states_of(uid)
        operator = self._draft.declared.get(uid)
        known = {
            **dict.fromkeys(one.name for one in held),
            **({} if operator is None else declared_tables(operator)),
            **({} if operator is None else declared_lists(operator)),
        }
        known.pop(SPLITS, None)
        given = dict.fromkeys(known) if own is None else dict(own)
        for name in given:
            if name not in known:
                names = ", ".join(map(repr, known))
                raise StateError(
                    f"operator {uid!r} has no state {name!r} that can be written: it has {names or 'none'}"
                )
        return given

    def _write_keyed(self, uid: str, given: Mapping[str, Any]) -> int:
        """Returns how many rows have come that it says the order of."""
        where = f"operator {uid!r}"
        self._closed_at_ms.clear()
        views, arrived = self._views(uid, given), 0
        if not views:
            return arrived
        instance = uuid.uuid4().hex
        with tempfile.TemporaryDirectory(prefix="penstock-savepoint-") as directory:
            spool = KeyedSpool(
                self._draft.max_parallelism_of(uid), instance, Path(directory), where
            )
            for name, view in views.items():
                table = spool.table(view)
                rows = (
                    self._given_rows(uid, name, view, given[name])
                    if name in given
                    else self._kept_rows(uid, name, view)
                )
                stored = pa.schema([one for one in view.stored_schema if one.name not in _OWN])
                for namespaces, columns in rows:
                    spool.add(table, namespaces, columns)
                    arrived = max(arrived, arrived_by(stored, columns, f"{where}, state {name!r}"))
            writer = self._writer(uid, instance)
            handles = writer.write(spool.blobs())
            held = self._draft.snapshots_of(uid, len(handles))
            for index, handle in enumerate(handles.values()):
                held[index].keyed.CopyFrom(spool.snapshot(index, handle))
        return arrived

    def _views(self, uid: str, given: Mapping[str, Any]) -> dict[str, StateView]:
        """The keyed states that are to be written."""
        views = {} if self._base is None else dict(self._base.views_of(uid))
        operator, known = self._draft.declared.get(uid), self._draft.operators[uid].declared
        declared = declared_tables(known if operator is None else operator)
        for name in given:
            if name not in views and name in declared:
                one = declared[name]
                views[name] = StateView(one.name, one.kind, one.schema, known, one.ttl_ms)
        dropped = {name for name, data in given.items() if data is None}
        return {name: view for name, view in views.items() if name not in dropped}

    def _given_rows(
        self, uid: str, name: str, view: StateView, data: Any
    ) -> Iterator[tuple[np.ndarray, list[pa.Array]]]:
        where = f"state {name!r} of operator {uid!r}"
        written = WrittenAs(self._now_ms, where)
        names = given_columns(data)
        if names is not None:
            view.check_names(names, where)
        for batch in given_batches(data, view.schema, where):
            namespaces, columns = view.stored(batch, written)
            closed_at_ms = view.closed_at_ms(namespaces)
            if closed_at_ms is not None:
                before = self._closed_at_ms.get(name, closed_at_ms)
                self._closed_at_ms[name] = min(before, closed_at_ms)
            yield namespaces, columns

    def _kept_rows(
        self, uid: str, name: str, view: StateView
    ) -> Iterator[tuple[np.ndarray, list[pa.Array]]]:
        assert self._base is not None
        names = [one.name for one in view.stored_schema if one.name not in _OWN]
        for namespace, batch in self._base.stored_batches(uid, name):
            columns = [batch.column(one) for one in names]
            yield np.full(batch.num_rows, namespace, np.int64), columns

    def _write_lists(self, uid: str, given: Mapping[str, Any], arrived: int) -> None:
        base = self._base
        for held in self._draft.snapshots_of(uid, 0):
            kept = [one for one in held.lists if one.name not in given]
            del held.lists[:]
            for one in kept:
                if one.HasField("handle"):
                    assert base is not None
                    items = list_items(one, base.reader)
                    one = checkpoint_pb2.OperatorStateSnapshot(
                        name=one.name,
                        redistribution=one.redistribution,
                        codec=one.codec,
                        items=items,
                    )
                held.lists.append(one)
        operator, known = self._draft.declared.get(uid), self._draft.operators[uid].declared
        declared = dict(declared_lists(known if operator is None else operator))
        if base is not None:
            declared.update(base.lists_of(uid))
        for name, data in given.items():
            if data is not None and name in declared:
                what = declared[name]
                self._deal(uid, what, self._items(uid, name, what.codec, data))
                if what.codec == WATERMARK_CODEC:
                    self._draft.fit_watermarks(uid)
        if arrived:
            self._draft.count_arrivals(uid, arrived)
        self._move_large_lists(uid)

    def _items(self, uid: str, name: str, codec: str, data: Any) -> list[tuple[int | None, bytes]]:
        """(subtask, item) as it is stored."""
        where = f"state {name!r} of operator {uid!r}"
        columns = item_columns(codec)
        schema = pa.schema(
            [(SUBTASK, pa.int32()), *((column, one.type) for column, one in columns)]
        )
        found: list[tuple[int | None, bytes]] = []
        for batch in given_batches(data, schema, where):
            wanted = {column for column, _ in columns}
            if {*batch.schema.names} - {SUBTASK} != wanted:
                raise StateError(
                    f"{where} is given with {batch.schema.names}; its columns are {', '.join(wanted)}"
                )
            parts = [
                one.encoded(batch.column(column), f"{where}: column {column!r}")
                for column, one in columns
            ]
            subtasks = [None] * batch.num_rows
            if SUBTASK in batch.schema.names:
                column = fitted(batch.column(SUBTASK), pa.int32(), f"{where}: column {SUBTASK!r}")
                subtasks = column.to_pylist()
            if any(one is not None and one < 0 for one in subtasks):
                raise StateError(
                    f"{where}: column {SUBTASK!r} has numbers below 0; null = any subtask"
                )
            found += zip(subtasks, packed(parts), strict=True)
        if len(columns) > 1:
            keys = [entry_key(item) for _, item in found]
            if len({*keys}) < len(keys):
                raise StateError(f"{where}: a key is there twice")
        return found

    def _deal(
        self, uid: str, what: DeclaredList, items: Sequence[tuple[int | None, bytes]]
    ) -> None:
        held = self._draft.snapshots_of(uid, 1)
        by_subtask: dict[int, list[bytes]] = {}
        for place, (subtask, item) in enumerate(items):
            index = place if subtask is None else subtask
            index = 0 if what.redistribution == _BROADCAST else index % len(held)
            by_subtask.setdefault(index, []).append(item)
        for index, own in by_subtask.items():
            held[index].lists.add(
                name=what.name, redistribution=what.redistribution, items=own, codec=what.codec
            )

    def _move_large_lists(self, uid: str) -> None:
        """Lists that are too large for the manifest lie in files."""
        large = {
            f"{index}-{one.name}": one
            for index, held in enumerate(self._draft.snapshots_of(uid, 0))
            for one in held.lists
            if sum(map(len, one.items)) > _INLINE_BYTES
        }
        if not large:
            return
        contents = {
            name: checkpoint_pb2.OperatorStateItems(items=one.items).SerializeToString()
            for name, one in large.items()
        }
        blobs = [Blob(name, partial(list, (content,))) for name, content in contents.items()]
        for name, handle in self._writer(uid, uuid.uuid4().hex).write(blobs).items():
            one = large[name]
            one.item_count = len(one.items)
            del one.items[:]
            one.handle.CopyFrom(handle)

    def _write_splits(self, uid: str, positions: Any) -> None:
        if self._draft.operators[uid].kind != "source":
            raise StateError(f"sources: operator {uid!r} is no source")
        where = f"sources: source {uid!r}"
        self._draft.check_reads(uid, where)
        held = self._draft.snapshots_of(uid, 1)
        stored = [split for one in held for split in one.splits]
        read = [
            checkpoint_pb2.SplitSnapshot(id=split.id, done=True) for split in stored if split.done
        ]
        digests = np.concatenate(
            [
                np.empty(0, DIGEST),
                *(self._digests(one) for one in self._draft.drop_done_splits(uid)),
            ]
        )
        for one in held:
            del one.splits[:]
        splits = split_snapshots(positions, where)
        if not self._draft.take_files(uid, splits, read, where):
            operator = self._draft.declared.get(uid, graph_pb2.Operator())
            ask = partial(discovered_splits, operator, len(held), self._now_ms)
            complete_splits(splits, stored, digests, ask, where)
        for place, split in enumerate(splits):
            held[place % len(held)].splits.append(split)
            held[place % len(held)].split_parallelism = len(held)

    def _keep_done_splits(self) -> None:
        for done in self._draft.manifest.done_splits:
            if done.chunks:
                loose = np.unique(self._digests(done)).tobytes()
                del done.chunks[:]
                done.loose = loose

    def _digests(self, done: checkpoint_pb2.DoneSplits) -> np.ndarray:
        assert self._base is not None
        contents = (*map(self._base.reader.read, done.chunks), done.loose)
        return np.concatenate([np.frombuffer(content, DIGEST) for content in contents])

    def _writer(self, uid: str, unique: str) -> PackedSnapshotWriter:
        vertex = self._draft.vertex_of(uid)
        name = snapshot_file_name(self._draft.manifest.checkpoint_id, vertex, 0, 0, unique)
        self._begun.append(f"{STATE_DIRECTORY}/{name}")
        return PackedSnapshotWriter(self._store, name, _INLINE_BYTES, directory=STATE_DIRECTORY)
