"""Aim: of lists that are added to, checkpoints write what was added, and whoever reads them finds the whole lists.

Method: the in-memory backend driven by hand; the oracle is a dict of lists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from penstock.pb import checkpoint_pb2
from penstock.storage import run_lists
from penstock.storage.codec import Stamped, codec_of
from penstock.storage.key_encoding import encode_keys
from taskmanager.state.descriptors import ABSENT, StateDescriptor, StateKind
from taskmanager.state.hashmap.restored_rows import restored_rows
from taskmanager.state.hashmap.store import HashMapStateBackend
from tests.support.hashmap_backend import (
    MAX_PARALLELISM,
    Files,
    SteppedClock,
    Writing,
    environment,
    take_snapshot,
)

TEXT = codec_of(pa.string())
LISTS = StateDescriptor("lists", StateKind.LIST, TEXT)
VALUES = StateDescriptor("values", StateKind.VALUE, TEXT)
Snapshots = list[checkpoint_pb2.KeyedStateSnapshot]
Change = Callable[[list[Any]], list[Any]]


def add(held: list[Any]) -> list[Any]:
    return [*held, f"item {len(held)}"]


class Lists:
    """A subtask with lists."""

    def __init__(
        self, files: Files, restored: Snapshots | None = None, index: int = 0, of: int = 1
    ) -> None:
        self.backend = HashMapStateBackend(
            environment(files, restored or [], subtask_index=index, parallelism=of)
        )
        self.space = self.backend.key_space([pa.int64()])
        self.column = self.space.list_column(LISTS)

    def change(self, keys: list[int], change: Change, *, in_place: bool = True) -> None:
        slots = self.space.enter(encode_keys([pa.array(keys, pa.int64())])).tolist()
        for slot in slots:
            held = self.column.values[slot]
            after = change([] if held is ABSENT else held)
            self.column.changed.append(slot)
            if in_place and held is not ABSENT:
                held[:] = after
            else:
                self.column.values[slot] = after or ABSENT
                self.column.replaced.append(slot)
        self.space.leave()

    def content(self) -> dict[int, list[str]]:
        found = {}
        for batch in self.space.keys():  # noqa: SIM118 - not a dict
            keys, slots = batch.to_arrays()[0].to_pylist(), self.space.enter(batch).tolist()
            found |= {
                key: list(self.column.values[slot]) for key, slot in zip(keys, slots, strict=True)
            }
            self.space.leave()
        return found


def as_tables(files: Files, snapshots: Snapshots) -> dict[int, list[str]]:
    """What tools and other backends read."""
    ((_, parts),) = restored_rows(snapshots, files, range(MAX_PARALLELISM), "o").items()
    batches = [batch for rows in parts for batch in rows.latest()]
    found = [row for batch in batches for row in batch.to_pylist()]
    assert len({row["key_0"] for row in found}) == len(found), "a key comes twice"
    assert not any(row["__deleted"] or row["__appended"] for row in found)
    for batch in batches:
        groups = batch.column(0).to_pylist()
        assert groups == sorted(groups)
    return {row["key_0"]: row["items"] for row in found}


def restored(files: Files, snapshots: Snapshots, parallelism: int) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for index in range(parallelism):
        found |= Lists(files, snapshots, index, parallelism).content()
    return found


def test_what_is_added_is_written_and_not_what_was_there() -> None:
    files, keys = Files(), list(range(200))
    lists = Lists(files)
    for _ in range(100):
        lists.change(keys, add)
    writing = Writing(lists.backend.snapshot(1), files)
    described = writing.finish()
    lists.backend.checkpoint_completed(1)
    whole, added = writing.written_bytes, []
    for round_ in range(2, 12):
        lists.change(keys[:150], add)
        writing = Writing(lists.backend.snapshot(round_), files)
        described = writing.finish()
        lists.backend.checkpoint_completed(round_)
        files.keep_only([described])
        added.append(writing.written_bytes)
    assert max(added) < whole / 3, (whole, added)
    assert sorted(added)[5] < whole / 6, (whole, added)
    assert len(described.segments) <= 8
    wanted = lists.content()
    assert [len(wanted[key]) for key in (0, 149, 150)] == [110, 110, 100]
    assert restored(files, [described], 3) == wanted
    assert as_tables(files, [described]) == wanted


def test_what_else_becomes_of_a_list_between_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lists, "JOINED_BYTES", 64)
    files = Files()
    lists = Lists(files)
    lists.change(list(range(40)), lambda _: [f"a{i}" for i in range(40)], in_place=False)
    take_snapshot(lists.backend, 1, files)
    lists.change(list(range(30)), add)
    lists.change([1, 2, 3], lambda held: held[1:], in_place=False)  # replaced, then added to
    lists.change([3, 4], add)
    lists.change([5, 6, 7], lambda _: [], in_place=False)  # removed, then there again
    lists.change([6], add)
    writing = Writing(lists.backend.snapshot(2), files)  # aborted: its changes join the next
    writing.step()
    lists.backend.checkpoint_aborted(2)
    lists.change([8, 6, 50], add)
    described = take_snapshot(lists.backend, 3, files)
    lists.change([8, 50], add)
    lists.change([9], lambda _: ["new"], in_place=False)
    lists.change([10], lambda held: held[:1], in_place=False)
    described = take_snapshot(lists.backend, 4, files)
    assert len({one.from_version for one in described.segments}) > 1, "nothing was added"
    wanted = lists.content()
    assert wanted[6] == ["item 0", "item 1"]
    for parallelism in (1, 2):
        assert restored(files, [described], parallelism) == wanted
    assert as_tables(files, [described]) == wanted
    again = Lists(files, [described])
    again.change([8, 9], add)
    assert as_tables(files, [take_snapshot(again.backend, 5, files)]) == again.content()


def test_what_has_expired_before_is_not_counted() -> None:
    files, clock = Files(), SteppedClock()
    stamped = StateDescriptor("lists", StateKind.LIST, Stamped(TEXT), ttl_ms=10)
    backend = HashMapStateBackend(environment(files, clock=clock))
    space = backend.key_space([pa.int64()])
    column = space.list_column(stamped)

    def put(*items: str) -> None:
        (slot,) = space.enter(encode_keys([pa.array([1])])).tolist()
        stored = [(item, clock.time_ms) for item in items]
        if column.values[slot] is ABSENT:
            column.values[slot] = []
        column.values[slot].extend(stored)
        column.changed.append(slot)
        space.leave()

    put("old", "older")
    clock.time_ms = 5
    put("a")
    clock.time_ms = 12  # what is exported is one item, of a list of three
    take_snapshot(backend, 1, files)
    put("b")
    described = take_snapshot(backend, 2, files)
    clock.time_ms = 13
    after = HashMapStateBackend(environment(files, [described], clock=clock))
    again = after.key_space([pa.int64()])
    found = again.list_column(stamped)
    (slot,) = again.enter(encode_keys([pa.array([1])])).tolist()
    assert found.values[slot] == [("a", 5), ("b", 12)]


def test_what_was_removed_stays_removed_when_it_is_copied_twice() -> None:
    files = Files()
    backend = HashMapStateBackend(environment(files))
    space = backend.key_space([pa.int64()])
    column = space.value_column(VALUES)

    def put(keys: list[int], cell: Any) -> None:
        for slot in space.enter(encode_keys([pa.array(keys)])).tolist():
            column.values[slot] = cell
            column.changed.append(slot)
        space.leave()

    put(list(range(20)), "there")
    take_snapshot(backend, 1, files)
    put([3, 4], ABSENT)
    snapshots = [take_snapshot(backend, 2, files)]
    for parallelism in (2, 1, 2):  # nobody asks for the state: what is restored is copied
        backends = [
            HashMapStateBackend(
                environment(files, snapshots, subtask_index=index, parallelism=parallelism)
            )
            for index in range(parallelism)
        ]
        snapshots = [take_snapshot(one, 3, files) for one in backends]
    told = sum(segment.row_count for one in snapshots for segment in one.segments)
    assert told == 18, "tombstones, or rows that do not count, were copied"
    last = HashMapStateBackend(environment(files, snapshots))
    space = last.key_space([pa.int64()])
    space.value_column(VALUES)
    found = [key for batch in space.keys() for key in batch.to_arrays()[0].to_pylist()]  # noqa: SIM118
    assert sorted(found) == [key for key in range(20) if key not in (3, 4)]
