"""Aim: after any history the in-memory backend restores to what it held when a snapshot was taken.

Method: random operations on all kinds of state, with snapshots that are written part by part between
them, confirmed or aborted in any order, files deleted as soon as no confirmed snapshot names them, and
restores into one or several subtasks. The oracle is a dict, copied when a snapshot is taken.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import CheckpointAborted, StoreNotFound
from penstock.pb import checkpoint_pb2
from penstock.storage.codec import codec_of
from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_groups import owners
from taskmanager.kernels import AccumulatorKind, encode_keys, record_versions
from taskmanager.state import slot_keys
from taskmanager.state.backend import AggregateDescriptor
from taskmanager.state.descriptors import ABSENT, StateDescriptor, StateKind
from taskmanager.state.hashmap import cell_columns, list_column, map_column, timer_table
from taskmanager.state.hashmap.store import HashMapStateBackend
from tests.support.hashmap_backend import MAX_PARALLELISM, Files, Writing, environment

Model = dict[str, Any]

INT, TEXT = codec_of(pa.int64()), codec_of("msgpack/1")
VALUE = StateDescriptor("value", StateKind.VALUE, INT)
LIST = StateDescriptor("list", StateKind.LIST, TEXT)
MAP = StateDescriptor("map", StateKind.MAP, INT, codec_of(pa.string()))
NAMESPACES = [10, 20, 30]
KEYS = 90


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["seed"] % 2:
        monkeypatch.setattr(record_versions, "_TOMBSTONES_MIN", 5)
        monkeypatch.setattr(cell_columns, "TOMBSTONES_MIN", 5)
        monkeypatch.setattr(list_column, "LOGGED_MIN", 20)
        monkeypatch.setattr(map_column, "TOMBSTONES_MIN", 5)
        monkeypatch.setattr(slot_keys, "_COMPACT_ABOVE", 50)
        monkeypatch.setattr(timer_table, "_SLACK", 5)
    monkeypatch.setattr(record_versions, "CHUNK_SLOTS", 40)
    monkeypatch.setattr(cell_columns, "CHUNK_SLOTS", 16)
    monkeypatch.setattr(map_column, "CHUNK_SLOTS", 16)


class Kinds:
    """One type of key in all states."""

    def __init__(self, types: list[pa.DataType], keys: list[tuple[Any, ...]]) -> None:
        self.types = types
        self.keys = keys
        kinds = (AccumulatorKind.COUNT, AccumulatorKind.SUM_INT64)
        self.descriptor = AggregateDescriptor(tuple(types), kinds, list)

    def batch(self, keys: list[tuple[Any, ...]]) -> KeyBatch:
        columns = [[key[index] for key in keys] for index in range(len(self.types))]
        return encode_keys(
            [pa.array(column, kind) for column, kind in zip(columns, self.types, strict=True)]
        )

    @staticmethod
    def tuples(keys: KeyBatch) -> list[tuple[Any, ...]]:
        return list(zip(*(array.to_pylist() for array in keys.to_arrays()), strict=True))


INTEGERS = Kinds([pa.int64()], [(None,), *((i * 7,) for i in range(KEYS))])
PAIRS = Kinds(
    [pa.string(), pa.int32()], [(None if i % 9 == 0 else f"k{i % 13}", i) for i in range(KEYS)]
)


@dataclass
class Taken:
    """A snapshot of all subtasks, on its way."""

    checkpoint_id: int
    writings: list[Writing]
    model: Model
    described: list[checkpoint_pb2.KeyedStateSnapshot] = field(default_factory=list)


class History:
    """Backends of all subtasks, and what should be in them."""

    def __init__(self, kinds: Kinds, seed: int, *, is_incremental: bool) -> None:
        self.kinds = kinds
        self.random = random.Random(seed)
        self.is_incremental = is_incremental
        self.files = Files()
        self.model: Model = {"groups": {}, "value": {}, "list": {}, "map": {}, "timers": set()}
        self.confirmed: list[checkpoint_pb2.KeyedStateSnapshot] = []
        self.confirmed_model = copy.deepcopy(self.model)
        self.taken: list[Taken] = []
        self.next_id = 1
        self.backends: list[HashMapStateBackend] = []
        self.open(1)

    def open(self, parallelism: int) -> None:
        for backend in self.backends:
            backend.close()
        self.backends = [
            HashMapStateBackend(
                environment(
                    self.files,
                    self.confirmed,
                    subtask_index=index,
                    parallelism=parallelism,
                    is_incremental=self.is_incremental,
                )
            )
            for index in range(parallelism)
        ]
        self.taken = []
        self.model = copy.deepcopy(self.confirmed_model)
        self.spaces: dict[int, Any] = {}

    def split(self, keys: list[tuple[Any, ...]]) -> list[tuple[int, list[tuple[Any, ...]]]]:
        if not keys:
            return []
        count = len(self.backends)
        subtasks = owners(self.kinds.batch(keys).hashes, count, MAX_PARALLELISM).tolist()
        return [
            (index, [key for key, owner in zip(keys, subtasks, strict=True) if owner == index])
            for index in range(count)
            if index in subtasks
        ]

    def some_keys(self) -> list[tuple[Any, ...]]:
        return self.random.choices(self.kinds.keys, k=self.random.randint(1, 25))

    def columns(self, index: int) -> tuple[Any, Any, Any, Any]:
        if index not in self.spaces:
            space = self.backends[index].key_space(self.kinds.types)
            self.spaces[index] = (
                space,
                space.value_column(VALUE),
                space.list_column(LIST),
                space.map_column(MAP),
            )
        return self.spaces[index]

    # -- operations

    def add(self) -> None:
        namespace = self.random.choice(NAMESPACES)
        model = self.model["groups"].setdefault(namespace, {})
        for index, keys in self.split(self.some_keys()):
            table = self.backends[index].group_table("groups", namespace, self.kinds.descriptor)
            numbers = np.array([self.random.randint(0, 9) for _ in keys])
            inputs = _Inputs([None, numbers], [None, None])
            table.update(self.kinds.batch(keys), inputs)
            for key, number in zip(keys, numbers.tolist(), strict=True):
                count, total = model.get(key, (0, 0))
                model[key] = (count + 1, total + number)

    def drop(self) -> None:
        namespace = self.random.choice(NAMESPACES)
        self.model["groups"].pop(namespace, None)
        for backend in self.backends:
            backend.drop("groups", namespace)

    def bundle(self) -> None:
        for index, keys in self.split(self.some_keys()):
            space, values, lists, maps = self.columns(index)
            slots = space.enter(self.kinds.batch(keys)).tolist()
            for key, slot in zip(keys, slots, strict=True):
                self.change_value(values, key, slot)
                self.change_list(lists, key, slot)
                self.change_map(maps, key, slot)
            space.leave()

    def change_value(self, column: Any, key: Any, slot: int) -> None:
        model = self.model["value"]
        assert column.values[slot] == model.get(key, ABSENT)
        choice = self.random.random()
        if choice < 0.4:
            column.values[slot] = model[key] = self.random.randint(0, 99)
            column.changed.append(slot)
        elif choice < 0.7:
            model.pop(key, None)
            column.values[slot] = ABSENT
            column.changed.append(slot)

    def change_list(self, column: Any, key: Any, slot: int) -> None:
        model = self.model["list"]
        found = column.values[slot]
        assert (None if found is ABSENT else found) == model.get(key) or not found
        choice = self.random.random()
        if choice < 0.3:
            item = TEXT.to_stored(self.random.randint(0, 99))
            if found is ABSENT:
                column.values[slot] = [item]
            else:
                found.append(item)
            model.setdefault(key, []).append(item)
            column.changed.append(slot)
        elif choice < 0.5 and found is not ABSENT:
            column.values[slot] = ABSENT
            model.pop(key, None)
            column.changed.append(slot)
            column.replaced.append(slot)
        elif choice < 0.6 and found is not ABSENT:
            column.values[slot] = found[1:] or ABSENT
            model[key] = model[key][1:]
            if not model[key]:
                del model[key]
            column.changed.append(slot)
            column.replaced.append(slot)

    def change_map(self, column: Any, key: Any, slot: int) -> None:
        model = self.model["map"]
        entries = model.setdefault(key, {})
        assert dict(column.items(slot)) == entries
        name = f"entry-{self.random.randint(0, 3)}"
        choice = self.random.random()
        if choice < 0.3:
            entries[name] = self.random.randint(0, 99)
            column.put(slot, name, entries[name])
        elif choice < 0.5:
            entries.pop(name, None)
            column.remove(slot, name)
        elif choice < 0.6:
            entries.clear()
            column.clear(slot)
        assert column.get(slot, name) == entries.get(name, ABSENT)
        if not entries:
            del model[key]

    def timers(self) -> None:
        for index, keys in self.split(self.some_keys()):
            table = self.backends[index].timer_table("timers", self.kinds.types)
            times = [self.random.randint(0, 30) for _ in keys]
            timers = set(zip(keys, times, strict=True))
            if self.random.random() < 0.6:
                table.register(self.kinds.batch(keys), np.array(times))
                self.model["timers"] |= timers
            else:
                table.delete(self.kinds.batch(keys), np.array(times))
                self.model["timers"] -= timers

    def fire(self) -> None:
        up_to = self.random.randint(0, 12)
        for index, backend in enumerate(self.backends):
            table = backend.timer_table("timers", self.kinds.types)
            mine = {timer for timer in self.model["timers"] if self.owner(timer[0]) == index}
            assert len(table) == len(mine)
            due = table.take_due(up_to, 7)
            earliest = sorted(time for _, time in mine if time <= up_to)
            if due is None:
                assert not earliest
                continue
            fired = list(zip(self.kinds.tuples(due[0]), due[1].tolist(), strict=True))
            assert [time for _, time in fired] == earliest[: len(fired)]
            assert len(fired) <= 7
            assert set(fired) <= mine
            self.model["timers"] -= set(fired)

    def owner(self, key: Any) -> int:
        return int(owners(self.kinds.batch([key]).hashes, len(self.backends), MAX_PARALLELISM)[0])

    # -- checkpoints

    def snapshot(self) -> None:
        checkpoint_id, self.next_id = self.next_id, self.next_id + 1
        if len(self.taken) >= 2:
            # All of them may have been written: then there is room for another one.
            return
        try:
            writings = [
                Writing(backend.snapshot(checkpoint_id), self.files) for backend in self.backends
            ]
        except CheckpointAborted:
            for backend in self.backends:
                backend.checkpoint_aborted(checkpoint_id)
            return
        self.taken.append(Taken(checkpoint_id, writings, copy.deepcopy(self.model)))

    def step(self) -> None:
        if not self.taken:
            return
        taken = self.random.choice(self.taken)
        try:
            self.random.choice(taken.writings).step()
        except StoreNotFound:
            self.abort(taken)

    def complete(self) -> None:
        if not self.taken:
            return
        taken = self.random.choice(self.taken)
        try:
            described = [writing.finish() for writing in taken.writings]
        except StoreNotFound:
            # It was to copy what an operator has asked for since, from a file that is gone.
            self.abort(taken)
            return
        self.taken = [other for other in self.taken if other.checkpoint_id > taken.checkpoint_id]
        for backend in self.backends:
            backend.checkpoint_completed(taken.checkpoint_id)
        self.confirmed, self.confirmed_model = described, taken.model
        # Snapshots that are on their way refer to no other files.
        self.files.keep_only(described)

    def abort(self, taken: Taken | None = None) -> None:
        if self.taken:
            taken = taken or self.random.choice(self.taken)
            self.taken.remove(taken)
            for backend in self.backends:
                backend.checkpoint_aborted(taken.checkpoint_id)

    def restore(self) -> None:
        self.open(self.random.choice([1, 1, 2, 3]))

    # -- oracle

    def content(self) -> Model:
        found: Model = {"groups": {}, "value": {}, "list": {}, "map": {}, "timers": set()}
        for index, backend in enumerate(self.backends):
            for namespace in backend.namespaces("groups"):
                table = backend.group_table("groups", namespace, self.kinds.descriptor)
                keys = table.keys()
                if len(keys):
                    rows = table.rows(keys)
                    numbers = zip(*(part.tolist() for part in rows.accumulators), strict=True)
                    groups = dict(zip(self.kinds.tuples(keys), numbers, strict=True))
                    found["groups"].setdefault(namespace, {}).update(groups)
            space, values, lists, maps = self.columns(index)
            for batch in space.keys():  # noqa: SIM118 - not a dict
                slots = space.enter(batch).tolist()
                for key, slot in zip(self.kinds.tuples(batch), slots, strict=True):
                    if values.values[slot] is not ABSENT:
                        found["value"][key] = values.values[slot]
                    if lists.values[slot] is not ABSENT:
                        found["list"][key] = lists.values[slot]
                    if maps.items(slot):
                        found["map"][key] = dict(maps.items(slot))
                space.leave()
            timers = backend.timer_table("timers", self.kinds.types)
            while (due := timers.take_due(1000, 50)) is not None:
                found["timers"] |= set(zip(self.kinds.tuples(due[0]), due[1].tolist(), strict=True))
        return found

    def check(self) -> None:
        expected = copy.deepcopy(self.model)
        expected["groups"] = {space: rows for space, rows in expected["groups"].items() if rows}
        assert self.content() == expected


class _Inputs:
    def __init__(self, values: list[Any], valid: list[Any]) -> None:
        self.values, self.valid = values, valid
        self.columns: list[Any] = []
        self.sequence = np.empty(0, np.int64)
        self.is_partial = False


WEIGHTS = {
    "add": 6, "drop": 1, "bundle": 6, "timers": 4, "fire": 2,
    "snapshot": 4, "step": 8, "complete": 3, "abort": 1, "restore": 1,
}  # fmt: skip


@pytest.mark.parametrize("kinds", [INTEGERS, PAIRS], ids=["integers", "pairs"])
@pytest.mark.parametrize("is_incremental", [True, False], ids=["incremental", "full"])
@pytest.mark.parametrize("seed", range(12))
def test_any_history_restores_to_its_snapshots(
    kinds: Kinds, is_incremental: bool, seed: int
) -> None:
    history = History(kinds, seed, is_incremental=is_incremental)
    names, weights = list(WEIGHTS), list(WEIGHTS.values())
    for operation in history.random.choices(names, weights, k=150):
        getattr(history, operation)()
    history.complete()
    history.open(history.random.choice([1, 2, 4]))
    history.check()
