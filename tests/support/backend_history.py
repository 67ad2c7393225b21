"""Random changes to every kind of keyed state, made to both backends and to plain dicts at once.

``BackendHistory`` is what the state machine of the contract suite and its table tests act on. Every
operation is made on a ``BackendJob``; a dict per backend says what must be in it (they differ only while
rows are being emitted, since nothing says in which order). Taking a checkpoint copies the dicts, a restart
puts the copies back.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pytest

from penstock.aggregates.aggregate_layout import GroupColumnSpec
from penstock.errors import StoreTransient
from penstock.storage.codec import Stamped, codec_of
from penstock.storage.entries.entry_keys import PARTITION_BYTES, partition_bounds
from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_groups import owners
from taskmanager.kernels import AccumulatorKind, encode_keys, record_versions
from taskmanager.state import slot_keys
from taskmanager.state.backend import AggregateDescriptor, KeyedStateBackend
from taskmanager.state.descriptors import ABSENT, StateDescriptor, StateKind
from taskmanager.state.group_columns import group_column
from taskmanager.state.group_table import GroupTable, TableRows
from taskmanager.state.hashmap import cell_columns, map_column, timer_table
from taskmanager.state.instances import InstanceTable
from taskmanager.state.rocksdb.spilled_table import SpilledKeyedTable
from taskmanager.state.rocksdb.write_queue_runner import EntryWriter
from taskmanager.state.row_table import RowDescriptor, part_rows
from tests.support.backend_job import BACKENDS, MAX_PARALLELISM, BackendJob, Subtask
from tests.support.rocksdb_cluster import fast_directory

Key = tuple[Any, ...]
Model = dict[str, Any]
Row = tuple[Key, Any, int]
"""Key, value, place in the order of arrival."""

NAMESPACES: Final = (-5, 10, 20, 30)
GROUPS: Final = ("sums", "firing sums", "lists", "firing lists", "only lists")
GAP_MS: Final = 10
WINDOW_ROWS: Final = 3
TTL_MS: Final = 40

INT, TEXT, PACKED = codec_of(pa.int64()), codec_of(pa.string()), codec_of("msgpack/1")
COLUMNS: Final = (
    StateDescriptor("value", StateKind.VALUE, INT),
    StateDescriptor("list", StateKind.LIST, PACKED),
    StateDescriptor("map", StateKind.MAP, INT, TEXT),
    StateDescriptor("old value", StateKind.VALUE, Stamped(INT), ttl_ms=TTL_MS),
    StateDescriptor("old list", StateKind.LIST, Stamped(INT), ttl_ms=TTL_MS),
    StateDescriptor("old map", StateKind.MAP, Stamped(TEXT), INT, ttl_ms=TTL_MS),
)
_KINDS: Final = (AccumulatorKind.COUNT, AccumulatorKind.SUM_INT64, AccumulatorKind.MAX_FLOAT64)
_COLLECTED: Final = GroupColumnSpec(
    "all", "collect_list", "value", pa.int64(), pa.list_(pa.int64())
)

_NOTHING: Final = (0, None, None, ())
"""Count, sum and maximum of a key, and its values with their places in the order of arrival."""


class KeyKind:
    """One type of key for all states.

    Attributes:
        keys: the keys that there are.
    """

    def __init__(self, types: Sequence[pa.DataType], keys: list[Key]) -> None:
        self.types = tuple(types)
        self.keys = keys

    def batch(self, keys: Sequence[Key]) -> KeyBatch:
        """Keys as operators get them."""
        columns = [[key[index] for key in keys] for index in range(len(self.types))]
        return encode_keys([pa.array(c, t) for c, t in zip(columns, self.types, strict=True)])

    @staticmethod
    def tuples(arrays: Sequence[pa.Array]) -> list[Key]:
        """Keys as they are in the dicts."""
        return list(zip(*(array.to_pylist() for array in arrays), strict=True))


KEY_KINDS: Final = {
    "integers": KeyKind([pa.int64()], [(None,), *((i * 7,) for i in range(24))]),
    "pairs": KeyKind(
        [pa.string(), pa.int32()],
        [(None if i % 9 == 0 else f"k{i % 5}", None if i == 3 else i) for i in range(24)],
    ),
}


@dataclass
class Inputs:
    """See ``TableInputs``."""

    values: list[Any]
    valid: list[Any]
    columns: list[Any] = field(default_factory=list)
    sequence: Any = None
    is_partial: bool = False


class Side:
    """One backend: its subtasks, and what must be in them.

    Attributes:
        columns: per subtask the key space and the columns that this attempt has asked for.
        emitting: tables whose rows are being handed out, by name and namespace, and the keys that are out.
    """

    def __init__(self, history: BackendHistory, kind: str) -> None:
        self.kind = kind
        self.model: Model = _empty()
        self.columns: dict[int, tuple[Any, dict[str, Any]]] = {}
        self.emitting: dict[tuple[str, int], tuple[list[Iterator[TableRows]], set[Key]]] = {}
        self._history = history

    @property
    def subtasks(self) -> list[Subtask]:
        """The running ones."""
        return self._history.job.subtasks[self.kind]

    def split(
        self, rows: Sequence[tuple[Any, ...]]
    ) -> list[tuple[KeyedStateBackend, int, list[Any]]]:
        """Rows (key first) by the subtask that owns them."""
        if not rows:
            return []
        batch = self._history.keys.batch([row[0] for row in rows])
        found = owners(batch.hashes, len(self.subtasks), MAX_PARALLELISM).tolist()
        parts: dict[int, list[Any]] = {}
        for row, owner in zip(rows, found, strict=True):
            parts.setdefault(owner, []).append(row)
        return [(self.subtasks[index].backend, index, part) for index, part in parts.items()]


def _empty() -> Model:
    states: Model = {name: {} for name in GROUPS}
    states |= {descriptor.name: {} for descriptor in COLUMNS}
    return states | {"rows": {}, "sessions": {}, "counts": {}, "timers": set(), "watermark": 0}


def load_all(table: Any) -> None:
    """Brings all keys into memory, where a database has some."""
    if isinstance(table, SpilledKeyedTable) and not table._is_complete:
        for names, _ in table._home.reader.scan(*partition_bounds(table.partition)):
            table._load(table._keys_of(names))


class BackendHistory:
    """A job on both backends, and what must be in them.

    Args:
        seed: of all that operations choose.
        small_limits: tombstones and chunks are few, so that what many of them bring about happens.

    Attributes:
        keys_max: how many rows a change has at most.
        hot_keys: the keys that changes are made to.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        keys: str = "integers",
        is_incremental: bool = True,
        retained_max: int = 1,
        inline_max_bytes: int = 0,
        small_limits: bool = True,
        parallelism: int = 1,
    ) -> None:
        self.random = random.Random(seed)
        self.keys = KEY_KINDS[keys]
        self._cleanup = ExitStack()
        self._shrink_limits(small_limits)
        self.job = BackendJob(
            self._cleanup.enter_context(fast_directory()),
            retained_max=retained_max,
            inline_max_bytes=inline_max_bytes,
            is_incremental=is_incremental,
            frozen=self._frozen,
        )
        self._sequence = 0
        self.keys_max = 10
        self.hot_keys = self.keys.keys
        self.asked = tuple(descriptor.name for descriptor in COLUMNS)
        self.sides = [Side(self, kind) for kind in BACKENDS]
        self._copies: dict[int, list[Model]] = {}
        self.job.start(parallelism)

    def _shrink_limits(self, small: bool) -> None:
        patch = self._cleanup.enter_context(pytest.MonkeyPatch.context())
        for module in (record_versions, cell_columns, map_column):
            patch.setattr(module, "CHUNK_SLOTS", 7)
        if small:
            patch.setattr(record_versions, "_TOMBSTONES_MIN", 3)
            patch.setattr(cell_columns, "TOMBSTONES_MIN", 3)
            patch.setattr(map_column, "TOMBSTONES_MIN", 3)
            patch.setattr(slot_keys, "_COMPACT_ABOVE", 20)
            patch.setattr(timer_table, "_SLACK", 3)

    def close(self) -> None:
        """Ends the job and removes what it has left."""
        self.job.close()
        self._cleanup.close()

    # -- aggregates

    def descriptor(self, name: str) -> AggregateDescriptor:
        """Of one of ``GROUPS``."""
        if "sums" in name:
            return AggregateDescriptor(self.keys.types, _KINDS, list)
        kinds = () if name == "only lists" else _KINDS
        return AggregateDescriptor(self.keys.types, kinds, lambda: [group_column(_COLLECTED)])

    def table(self, backend: KeyedStateBackend, name: str, namespace: int) -> GroupTable:
        """A table of one of ``GROUPS``."""
        return backend.group_table(name, namespace, self.descriptor(name))

    def add(self, name: str, namespace: int) -> None:
        """Rows for an aggregate; some have no value."""
        if self._is_emitting(name, namespace):
            return
        rows = self._numbered([None, *range(-3, 9)], self.some_keys())
        for side in self.sides:
            groups = side.model[name].setdefault(namespace, {})
            for key, value, number in rows:
                groups[key] = _plus(groups.get(key, _NOTHING), value, number)
            for backend, _, part in side.split(rows):
                batch = self.keys.batch([row[0] for row in part])
                self.table(backend, name, namespace).update(batch, self._inputs(name, part))

    def _numbered(self, values: Sequence[int | None], keys: Sequence[Key]) -> list[Row]:
        """Rows of key, value and place in the order of arrival."""
        first, self._sequence = self._sequence, self._sequence + len(keys)
        return [(key, self.random.choice(values), first + i) for i, key in enumerate(keys)]

    def _inputs(self, name: str, rows: Sequence[Row]) -> Inputs:
        values = [value for _, value, _ in rows]
        collected = pa.array(values, pa.int64())
        sequence = np.array([number for *_, number in rows])
        columns = [] if "sums" in name else [collected]
        if name == "only lists":
            return Inputs([], [], columns, sequence)
        numbers = collected.fill_null(0).to_numpy()
        valid = np.array([value is not None for value in values])
        floats = numbers.astype(np.float64)
        return Inputs([None, numbers, floats], [None, valid, valid], columns, sequence)

    def merge(self, name: str, source: int, target: int) -> None:
        """Adds a namespace to another one."""
        if self._is_emitting(name, source) or self._is_emitting(name, target) or source == target:
            return
        for side in self.sides:
            groups = side.model[name]
            if source not in groups or target not in groups:
                return
            for key, row in groups[source].items():
                groups[target][key] = _merged(groups[target].get(key, _NOTHING), row)
            for subtask in side.subtasks:
                of_source = self.table(subtask.backend, name, source)
                self.table(subtask.backend, name, target).merge(of_source)

    def drop(self, name: str, namespace: int) -> None:
        """Removes a namespace, emitted or not."""
        for side in self.sides:
            side.emitting.pop((name, namespace), None)
            side.model[name].pop(namespace, None)
            for subtask in side.subtasks:
                subtask.backend.drop(name, namespace)

    def emit(self, name: str, namespace: int) -> None:
        """Hands out some more rows of a namespace; the last ones are followed by a drop."""
        for side in self.sides:
            groups = side.model[name].get(namespace)
            if groups is None:
                return
            if (name, namespace) not in side.emitting:
                tables = [self.table(s.backend, name, namespace) for s in side.subtasks]
                side.emitting[name, namespace] = [table.chunks(4) for table in tables], set()
            parts, out = side.emitting[name, namespace]
            part = None
            while parts and (part := next(parts[0], None)) is None:
                parts.pop(0)
            if part is not None:
                for key, row in _rows(part).items():
                    assert _expected(name, groups[key]) == row
                    assert key not in out
                    out.add(key)
        if not any(side.emitting[name, namespace][0] for side in self.sides):
            for side in self.sides:
                assert side.emitting[name, namespace][1] == set(side.model[name][namespace])
            self.drop(name, namespace)

    def _is_emitting(self, name: str, namespace: int) -> bool:
        return any((name, namespace) in side.emitting for side in self.sides)

    # -- rows, sessions, count windows

    def add_rows(self, namespace: int) -> None:
        """Rows of a window."""
        keys = self.some_keys()
        first, self._sequence = self._sequence, self._sequence + len(keys)
        rows = [(key, first + index) for index, key in enumerate(keys)]
        for side in self.sides:
            side.model["rows"].setdefault(namespace, []).extend(rows)
            for backend, _, part in side.split(rows):
                table = backend.row_table("rows", namespace, self.row_descriptor)
                columns = zip(*(key for key, _ in part), strict=True)
                arrays = [pa.array(c, t) for c, t in zip(columns, self.keys.types, strict=True)]
                sequence = np.array([number for _, number in part])
                batch = pa.record_batch(
                    [*arrays, pa.array(sequence)], schema=self.row_descriptor.schema
                )
                table.add(batch, sequence)

    @property
    def row_descriptor(self) -> RowDescriptor:
        """Rows of a key and a number."""
        fields = [pa.field(f"k{index}", kind) for index, kind in enumerate(self.keys.types)]
        schema = pa.schema([*fields, pa.field("number", pa.int64())])
        return RowDescriptor(schema, tuple(field.name for field in fields))

    def drop_rows(self, namespace: int) -> None:
        """Removes the rows of a window."""
        for side in self.sides:
            side.model["rows"].pop(namespace, None)
            for subtask in side.subtasks:
                subtask.backend.drop("rows", namespace)

    def sessions(self, backend: KeyedStateBackend) -> Any:
        """The table of sessions with their contents."""
        return backend.session_table("sessions", self.keys.types, GAP_MS, _contents)

    def add_to_sessions(self) -> None:
        """Rows in time, none of them late."""
        since = self.sides[0].model["watermark"] + 1
        rows = self._numbered(range(since, since + 80), self.some_keys())
        for side in self.sides:
            for backend, _, part in side.split(rows):
                for key, time_ms, _ in part:
                    _into_session(side.model["sessions"].setdefault(key, []), time_ms)
                table = self.sessions(backend)
                indices = table.key_indices(self.keys.batch([row[0] for row in part]))
                update = table.add(indices, np.array([time_ms for _, time_ms, _ in part]))
                if len(update.source):
                    table.contents.merge(update.source, update.target)
                table.contents.update(update.of_row, self._inputs("lists", part))

    def fire_sessions(self) -> None:
        """Time passes: sessions that are over fire and go."""
        step_ms = self.random.randrange(40)
        for side in self.sides:
            side.model["watermark"] += step_ms
            watermark = side.model["watermark"]
            fired: dict[tuple[Key, int], Any] = {}
            for subtask in side.subtasks:
                table = self.sessions(subtask.backend)
                while len(due := table.due(watermark)):
                    fired |= _session_rows(table, due)
                    table.mark_fired(due)
                while len(gone := table.expired(watermark, 0)):
                    table.contents.clear(gone)
                    table.remove(gone)
            expected: dict[tuple[Key, int], Any] = {}
            for key, held in list(side.model["sessions"].items()):
                expected |= {
                    (key, times[0]): _session_row(times)
                    for times in held
                    if times[-1] + GAP_MS - 1 <= watermark
                }
                held[:] = [times for times in held if times[-1] + GAP_MS - 1 > watermark]
                if not held:
                    del side.model["sessions"][key]
            assert fired == expected

    def counts(self, backend: KeyedStateBackend) -> Any:
        """The table of count windows with their contents."""
        return backend.count_table("counts", self.keys.types, _contents)

    def add_to_counts(self) -> None:
        """Rows for count windows, one per key."""
        rows = self._numbered(range(50), list(dict.fromkeys(self.some_keys())))
        for side in self.sides:
            for backend, _, part in side.split(rows):
                for key, value, _ in part:
                    index, held = side.model["counts"].get(key, (0, ()))
                    full = len(held) + 1 == WINDOW_ROWS
                    side.model["counts"][key] = (index + 1, ()) if full else (index, (*held, value))
                table = self.counts(backend)
                indices = table.key_indices(self.keys.batch([row[0] for row in part]))
                new = indices[table.instance[indices] < 0]
                table.instance[new] = table.numbers.allocate(len(new))
                table.contents.update(table.instance[indices], self._inputs("lists", part))
                table.filled[indices] += 1
                over = indices[table.filled[indices] == WINDOW_ROWS]
                if len(over):
                    table.contents.clear(table.instance[over])
                    table.numbers.release(table.instance[over])
                    table.instance[over] = -1
                    table.filled[over] = 0
                    table.window_index[over] += 1
                table.changed(indices)

    # -- timers

    def set_timers(self) -> None:
        """Registers timers or deletes them."""
        timers = [(key, self.random.randrange(30)) for key in self.some_keys()]
        is_new = self.random.random() < 0.7
        for side in self.sides:
            for backend, _, part in side.split(timers):
                table = backend.timer_table("timers", self.keys.types)
                change = table.register if is_new else table.delete
                change(self.keys.batch([key for key, _ in part]), np.array([t for _, t in part]))
            known = side.model["timers"]
            side.model["timers"] = known | set(timers) if is_new else known - set(timers)

    def fire_timers(self) -> None:
        """Takes what is due: the same timers in the same order from both backends."""
        up_to, limit = self.random.randrange(20), self.random.randint(1, 6)
        fired: list[list[Any]] = []
        for side in self.sides:
            fired.append([])
            for index, subtask in enumerate(side.subtasks):
                table = subtask.backend.timer_table("timers", self.keys.types)
                mine = {timer for timer in side.model["timers"] if self.owner(timer[0]) == index}
                assert len(table) == len(mine)
                first = table.next_time()
                assert (first is None) == (not mine)
                assert first is None or first <= min(time for _, time in mine)
                taken: list[tuple[Key, int]] = []
                # Fewer than the limit may come although more are due.
                while part := self._take_due(table, up_to, limit - len(taken)):
                    taken += part
                due = sorted(time for _, time in mine if time <= up_to)
                assert [time for _, time in taken] == due[:limit]
                assert set(taken) <= mine
                side.model["timers"] -= set(taken)
                fired[-1] += taken
        assert fired[0] == fired[1]

    def _take_due(self, table: Any, up_to: int, limit: int) -> list[tuple[Key, int]]:
        due = table.take_due(up_to, limit) if limit else None
        if due is None:
            return []
        keys, times = due
        assert 0 < len(times) <= limit
        assert tuple(array.type for array in keys.to_arrays()) == self.keys.types
        return list(zip(self.keys.tuples(keys.to_arrays()), times.tolist(), strict=True))

    # -- keyed objects

    def bundle(self) -> None:
        """A bundle of a process function: looks at all cells of some keys, and changes some of them."""
        keys = self.some_keys()
        actions = [(key, self.random.getrandbits(64)) for key in keys]
        for side in self.sides:
            for _, index, part in side.split(actions):
                space, columns = self.space(side, index)
                slots = space.enter(self.keys.batch([key for key, _ in part])).tolist()
                assert len(set(slots)) == len({key for key, _ in part})
                for (key, seed), slot in zip(part, slots, strict=True):
                    choose = random.Random(seed)
                    for descriptor in COLUMNS:
                        if descriptor.name in columns:
                            cells = side.model[descriptor.name]
                            self._change(
                                descriptor, columns[descriptor.name], slot, key, cells, choose
                            )
                space.leave()

    def _change(
        self, descriptor: StateDescriptor, column: Any, slot: int, key: Key, cells: Any, choose: Any
    ) -> None:
        found = self._cell(descriptor, column, slot)
        expected = self._alive(descriptor, cells.get(key))
        assert found == expected, (descriptor.name, key)
        choice = choose.random()
        if choice < 0.45:
            return
        stored, name = self._stored(descriptor, choose), self._map_key(descriptor, choose)
        is_removed = choice > 0.8
        after: Any
        match descriptor.kind:
            case StateKind.VALUE:
                column.values[slot] = ABSENT if is_removed else stored
                column.changed.append(slot)
                after = None if is_removed else stored
            case StateKind.LIST:
                held = column.values[slot]
                if held is ABSENT:
                    held = column.values[slot] = []
                if is_removed and choose.random() < 0.5:
                    column.values[slot] = ABSENT
                elif is_removed:
                    held.clear()
                else:
                    held.append(stored)
                column.changed += [slot, slot]
                if is_removed:
                    column.replaced.append(slot)
                after = None if is_removed else [*(expected or []), stored]
            case StateKind.MAP:
                after = dict(expected or {})
                assert self._alive_one(descriptor, column.get(slot, name)) == after.get(
                    name, ABSENT
                )
                if choice > 0.93:
                    column.clear(slot)
                    after = {}
                elif is_removed:
                    column.remove(slot, name)
                    after.pop(name, None)
                else:
                    column.put(slot, name, stored)
                    after[name] = stored
                assert self._cell(descriptor, column, slot) == (after or None)
        cells.pop(key, None)
        if after is not None and after != {}:
            cells[key] = after

    def _stored(self, descriptor: StateDescriptor, choose: random.Random) -> Any:
        number = choose.randrange(100)
        if not descriptor.ttl_ms:
            return PACKED.to_stored({"n": number}) if descriptor.codec is PACKED else number
        value: Any = str(number) if descriptor.kind is StateKind.MAP else number
        return value, self.job.clock.time_ms

    @staticmethod
    def _map_key(descriptor: StateDescriptor, choose: random.Random) -> Any:
        number = choose.randrange(-2, 4)
        return number if descriptor.ttl_ms else f"e{number}"

    def _cell(self, descriptor: StateDescriptor, column: Any, slot: int) -> Any:
        """What is in a cell and has not expired; None = nothing."""
        if descriptor.kind is StateKind.MAP:
            items = column.items(slot)
            assert descriptor.key_codec is not None
            encoded = [descriptor.key_codec.encode(name) for name, _ in items]
            assert encoded == sorted(encoded)
            found: Any = dict(items)
            assert len(found) == len(items)
        else:
            found = column.values[slot]
            if found is ABSENT:
                return None
        return self._alive(descriptor, copy.copy(found))

    def _alive(self, descriptor: StateDescriptor, found: Any) -> Any:
        if found is None:
            return None
        match descriptor.kind:
            case StateKind.VALUE:
                alive = self._alive_one(descriptor, found)
                return None if alive is ABSENT else alive
            case StateKind.LIST:
                return [s for s in found if self._alive_one(descriptor, s) is not ABSENT] or None
            case StateKind.MAP:
                return {
                    n: s for n, s in found.items() if self._alive_one(descriptor, s) is not ABSENT
                } or None

    def _alive_one(self, descriptor: StateDescriptor, stored: Any) -> Any:
        if stored is ABSENT or not descriptor.ttl_ms:
            return stored
        return stored if stored[1] + TTL_MS > self.job.clock.time_ms else ABSENT

    def space(self, side: Side, index: int) -> tuple[Any, dict[str, Any]]:
        """The key space of a subtask with the columns that this attempt asks for."""
        if index not in side.columns:
            space = side.subtasks[index].backend.key_space(self.keys.types)
            opened = {}
            for descriptor in COLUMNS:
                if descriptor.name in self.asked:
                    open_column = getattr(space, f"{descriptor.kind.value}_column")
                    opened[descriptor.name] = open_column(descriptor)
                    if descriptor.kind is StateKind.LIST:
                        opened[descriptor.name].chunk_items = 2  # RocksDB: long lists are short
            side.columns[index] = space, opened
        return side.columns[index]

    def sweep(self) -> None:
        """Time passes, and some of what has expired is removed."""
        self.job.clock.time_ms += self.random.choice([0, 5, 25])
        entries_max = self.random.choice([1, 5, 100])
        for side in self.sides:
            for index in range(len(side.subtasks)):
                space, _ = self.space(side, index)
                space.sweep(self.job.clock.time_ms, entries_max)

    def press(self) -> None:
        """The caches of the database are too large: changes are written, keys and rows forgotten."""
        everything = self.random.random() < 0.5
        for side in self.sides:
            for subtask in side.subtasks:
                backend: Any = subtask.backend
                if side.kind == "rocksdb":
                    backend._shrink(everything=everything)

    # -- checkpoints

    def _frozen(self, checkpoint_id: int) -> None:
        self._copies[checkpoint_id] = [copy.deepcopy(side.model) for side in self.sides]

    def export_step(self) -> None:
        """An I/O thread gets on a little with one of the snapshots."""
        if self.job.writings:
            snapshot = self.random.choice(self.job.writings).snapshot
            backend: Any = self.random.choice(self.sides[1].subtasks).backend
            if self.random.random() < 0.4:
                backend._queue.write_next()
            else:
                snapshot.step()

    def interrupt_write(self) -> None:
        """Writing a freeze into a database fails on the way, or it is discarded meanwhile or before."""
        backend: Any = self.random.choice(self.sides[1].subtasks).backend
        queue: Any = backend._queue
        if not len(queue):
            return
        if self.random.random() < 0.4:
            queue.discard(self.random.choice(queue._freezes))
            return
        freeze, is_failing = queue._freezes[0], self.random.random() < 0.5

        def interrupt() -> None:
            if is_failing:
                raise StoreTransient("the disk is away")
            queue.discard(freeze)

        writer = queue._writer
        queue._writer = _InterruptedWriter(writer, self.random.randrange(4), interrupt)
        try:
            with suppress(StoreTransient):
                queue.write_next()
        finally:
            queue._writer = writer

    def finish_one(self) -> None:
        """A snapshot is written to its end."""
        if self.job.writings:
            index = self.random.randrange(len(self.job.writings))
            self.job.writings.pop(index).finish()

    def checkpoint(self) -> int:
        """A whole checkpoint, which completes; its id."""
        self.job.complete()
        before = max(self.job.manifests, default=0)
        self.job.checkpoint()
        self.job.complete()
        newest = max(self.job.manifests, default=0)
        assert newest > before, self.job.declined[-1:]
        return newest

    def restart(
        self, parallelism: int, *, older: bool = False, asked: Sequence[str] | None = None
    ) -> None:
        """Kills all subtasks, and starts from the newest or the oldest retained checkpoint.

        Args:
            asked: names of the columns of objects that the new attempt will ask for; None = all.
        """
        ids = sorted(self.job.manifests)
        chosen = None if not ids else ids[0 if older else -1]
        self.job.is_deaf = False
        self.asked = tuple(d.name for d in COLUMNS) if asked is None else tuple(asked)
        self.job.start(parallelism, chosen)
        models = [_empty() for _ in self.sides] if chosen is None else self._copies[chosen]
        for side, model in zip(self.sides, models, strict=True):
            side.model = copy.deepcopy(model)
            side.columns, side.emitting = {}, {}

    def cross(self, parallelism: int) -> None:
        """Kills all subtasks, and starts each backend from a canonical savepoint of the other one."""
        self.job.is_deaf = False
        self.job.listen()
        self.job.complete()
        models = [copy.deepcopy(side.model) for side in reversed(self.sides)]
        self.asked = tuple(descriptor.name for descriptor in COLUMNS)
        self.job.cross(parallelism)
        for side, model in zip(self.sides, models, strict=True):
            side.model = model
            side.columns, side.emitting = {}, {}

    # -- oracle

    def check(self) -> None:
        """Everything is as the dicts say, in both backends."""
        for side in self.sides:
            model = side.model
            for name in GROUPS:
                self._check_groups(side, name)
            self._check_rows(side)
            sessions: dict[tuple[Key, int], Any] = {}
            counts: dict[Key, Any] = {}
            timers: int = 0
            for subtask in side.subtasks:
                sessions |= self._session_content(subtask.backend)
                counts |= self._count_content(subtask.backend)
                timers += len(subtask.backend.timer_table("timers", self.keys.types))
            assert sessions == {
                (key, times[0]): _session_row(times)
                for key, held in model["sessions"].items()
                for times in held
            }
            assert counts == model["counts"]
            assert timers == len(model["timers"])
            self._check_objects(side)

    def check_nothing_is_left(self) -> None:
        """Right after a checkpoint, with none on its way: nothing is held for one, and what was dropped
        is not in the databases any more."""
        for side in self.sides:
            for subtask in side.subtasks:
                backend: Any = subtask.backend
                if side.kind == "hashmap":
                    held = [e for *_, slot in backend._slots() for e in _exports(slot.table)]
                else:
                    held = [e for table in backend._opened() for e in _exports(table)]
                    assert not len(backend._queue)
                    assert not list(backend._environment.work_directory.glob("links-*"))
                    alive = {partition.number for partition in backend._catalog.all_partitions()}
                    entries = backend._database.scan(partition_bounds(0)[0], b"\xff" * 9)
                    found = {
                        int.from_bytes(key[:PARTITION_BYTES], "big")
                        for keys, _ in entries
                        for key in keys
                    }
                    assert found <= alive, "a dropped partition has entries"
                assert not held, "a snapshot that is over holds something"

    def drain_timers(self) -> None:
        """Takes all timers there are: both backends have the same, in the same order."""
        taken = [
            [
                self._take_due(subtask.backend.timer_table("timers", self.keys.types), 1000, 1000)
                for subtask in side.subtasks
            ]
            for side in self.sides
        ]
        assert taken[0] == taken[1]
        for side, by_subtask in zip(self.sides, taken, strict=True):
            assert {timer for part in by_subtask for timer in part} == side.model["timers"]
            for part in by_subtask:
                assert [time for _, time in part] == sorted(time for _, time in part)
            side.model["timers"] = set()

    def _check_groups(self, side: Side, name: str) -> None:
        model = side.model[name]
        for index, subtask in enumerate(side.subtasks):
            found = subtask.backend.namespaces(name)
            assert found == sorted(found)
            assert set(found) <= set(model), "a dropped namespace is there"
            for namespace, groups in model.items():
                mine = {key: row for key, row in groups.items() if self.owner(key) == index}
                assert not mine or namespace in found
                if namespace not in found or (name, namespace) in side.emitting:
                    continue
                table = self.table(subtask.backend, name, namespace)
                keys = self.keys.batch(list(mine))
                assert len(table.keys(keys)) == len(mine)
                assert len(table) == len(mine)
                if mine:
                    rows = _rows(table.rows(keys))
                    assert rows == {key: _expected(name, row) for key, row in mine.items()}

    def _check_rows(self, side: Side) -> None:
        model = side.model["rows"]
        for index, subtask in enumerate(side.subtasks):
            found = subtask.backend.namespaces("rows")
            assert set(found) <= set(model)
            for namespace, rows in model.items():
                mine = [row for row in rows if self.owner(row[0]) == index]
                assert not mine or namespace in found
                if namespace in found:
                    table = subtask.backend.row_table("rows", namespace, self.row_descriptor)
                    assert len(table) == len(mine)
                    if not mine:
                        continue
                    batch = part_rows([table], 0, 1)
                    keys = self.keys.tuples(batch.columns[:-1])
                    numbers = batch.column(batch.num_columns - 1).to_pylist()
                    assert list(zip(keys, numbers, strict=True)) == mine

    def _session_content(self, backend: KeyedStateBackend) -> dict[tuple[Key, int], Any]:
        table = self.sessions(backend)
        load_all(table)
        bound = table.numbers.bound
        return _session_rows(table, np.flatnonzero(table._end[:bound] != 2**63 - 1))

    def _count_content(self, backend: KeyedStateBackend) -> dict[Key, Any]:
        table = self.counts(backend)
        load_all(table)
        indices = np.arange(len(table))
        keys = table.keys(indices)
        found = {}
        for index, key in enumerate(self.keys.tuples(keys) if len(indices) else []):
            instance, held = table.instance[index : index + 1], []
            if instance[0] >= 0:
                rows = table.contents.rows(instance, [])
                held = rows.columns[0].to_pylist()[0]
                assert rows.accumulators[0].tolist() == [len(held)]
                assert rows.accumulators[1].tolist() == [sum(held)]
            assert table.filled[index] == len(held)
            found[key] = (int(table.window_index[index]), tuple(held))
        return found

    def _check_objects(self, side: Side) -> None:
        for index in range(len(side.subtasks)):
            space, columns = self.space(side, index)
            asked = [descriptor for descriptor in COLUMNS if descriptor.name in columns]
            batches = list(space.keys())
            listed = [key for b in batches for key in self.keys.tuples(b.to_arrays())]
            assert len(listed) == len(set(listed)), "a key is listed twice"
            mine = [key for key in self.keys.keys if self.owner(key) == index]
            if not mine:
                assert not listed
                continue
            held, alive = set(), set()
            slots = space.enter(self.keys.batch(mine)).tolist()
            for descriptor in asked:
                column, cells = columns[descriptor.name], side.model[descriptor.name]
                for key, slot in zip(mine, slots, strict=True):
                    expected = self._alive(descriptor, cells.get(key))
                    assert self._cell(descriptor, column, slot) == expected, descriptor.name
                    held |= {key} & set(cells)
                    alive |= set() if expected is None else {key}
            space.leave()
            assert alive <= set(listed) <= held

    # -- choices

    def some_keys(self) -> list[Key]:
        """A few keys, some of them twice."""
        return self.random.choices(self.hot_keys, k=self.random.randint(1, self.keys_max))

    def owner(self, key: Key) -> int:
        """The subtask of a key."""
        hashes = self.keys.batch([key]).hashes
        return int(owners(hashes, len(self.sides[0].subtasks), MAX_PARALLELISM)[0])


class _InterruptedWriter:
    """An ``EntryWriter`` in which something happens before a call."""

    def __init__(self, writer: EntryWriter, calls: int, interrupt: Callable[[], None]) -> None:
        self._writer = writer
        self._calls = calls
        self._interrupt = interrupt

    def __getattr__(self, name: str) -> Any:
        self._calls -= 1
        if self._calls == -1:
            self._interrupt()
        return getattr(self._writer, name)


def _exports(table: Any) -> list[Any]:
    """What a table keeps for snapshots."""
    if table is None:
        return []
    if hasattr(table, "exports"):
        return list(table.exports)
    held = []
    for name in ("_cache", "_timers", "_records"):
        records = vars(table).get(name)
        if records is not None:
            held += records.versions._exports
    return held


def _contents() -> InstanceTable:
    return InstanceTable(_KINDS, [group_column(_COLLECTED)])


def _plus(row: Any, value: int | None, number: int) -> Any:
    if value is None:
        return (row[0] + 1, *row[1:])
    return _merged(row, (1, value, float(value), ((number, value),)))


def _merged(mine: Any, theirs: Any) -> Any:
    totals = [total for total in (mine[1], theirs[1]) if total is not None]
    largest = [value for value in (mine[2], theirs[2]) if value is not None]
    values = tuple(sorted((*mine[3], *theirs[3])))
    total = sum(totals) if totals else None
    return (mine[0] + theirs[0], total, max(largest, default=None), values)


def _expected(name: str, row: Any) -> Any:
    """What a table says of a key."""
    values = [value for _, value in row[3]] or None
    if name == "only lists":
        return (values,)
    return row[:3] if "sums" in name else (*row[:3], values)


def _rows(part: TableRows) -> dict[Key, Any]:
    columns: list[list[Any]] = []
    for values, valid in zip(part.accumulators, part.validity, strict=True):
        present = np.ones(len(values), bool) if valid is None else valid
        columns.append([v if ok else None for v, ok in zip(values.tolist(), present, strict=True)])
    columns += [[found or None for found in column.to_pylist()] for column in part.columns]
    rows = zip(*columns, strict=True)
    return dict(zip(KeyKind.tuples(part.keys), rows, strict=True))


def _into_session(sessions: list[list[int]], time_ms: int) -> None:
    """Sessions are the times of their rows, sorted."""
    touched = [s for s in sessions if s[0] - GAP_MS <= time_ms <= s[-1] + GAP_MS]
    sessions[:] = [s for s in sessions if s not in touched]
    sessions.append(sorted([time_ms, *(t for s in touched for t in s)]))


def _session_row(times: list[int]) -> Any:
    return (times[-1] + GAP_MS, len(times), sum(times), sorted(times))


def _session_rows(table: Any, sessions: Any) -> dict[tuple[Key, int], Any]:
    if not len(sessions):
        return {}
    rows = table.contents.rows(sessions, table.keys(sessions))
    found = {}
    for index, key in enumerate(KeyKind.tuples(rows.keys)):
        values = rows.columns[0].to_pylist()[index]
        count, total, largest = (float(part[index]) for part in rows.accumulators)
        assert largest == max(values)
        start, end = int(table.starts(sessions)[index]), int(table.ends(sessions)[index])
        found[key, start] = (end, count, total, sorted(values))
    return found
