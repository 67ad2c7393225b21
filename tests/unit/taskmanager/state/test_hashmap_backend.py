"""Aim: what the in-memory backend promises around snapshots: what is written, refused, kept and read.

Method: snapshots written by hand into a dict of files.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.aggregates.aggregate_layout import GroupColumnSpec
from penstock.errors import CheckpointAborted, StoreCorrupt, StoreNotFound, Unrecoverable
from penstock.pb import checkpoint_pb2
from penstock.storage.codec import codec_of
from taskmanager.kernels import AccumulatorKind, encode_keys, record_versions
from taskmanager.state.backend import AggregateDescriptor
from taskmanager.state.descriptors import ABSENT, StateDescriptor, StateKind
from taskmanager.state.group_columns import group_column
from taskmanager.state.group_table import GroupTable
from taskmanager.state.hashmap import cell_columns
from taskmanager.state.hashmap.number_column import NumberColumn
from taskmanager.state.hashmap.object_sizes import average_bytes
from taskmanager.state.hashmap.store import HashMapStateBackend
from taskmanager.state.memory import ManagedMemory
from taskmanager.state.row_table import RowDescriptor, part_rows
from tests.support.hashmap_backend import (
    Files,
    SteppedClock,
    Writing,
    environment,
    take_snapshot,
)
from tests.support.one_backend import KEYS, OneBackend

INT = codec_of(pa.int64())
TEXT = codec_of("msgpack/1")
COUNTS = AggregateDescriptor((pa.int64(),), (AccumulatorKind.COUNT,), list)
VALUE = StateDescriptor("value", StateKind.VALUE, INT)


class Inputs:
    """One row per key."""

    def __init__(self) -> None:
        self.values: list[Any] = [None]
        self.valid: list[Any] = [None]
        self.columns: list[Any] = []
        self.sequence = np.empty(0, np.int64)
        self.is_partial = False


def count(backend: HashMapStateBackend, keys: range, namespace: int = 0) -> GroupTable:
    table = backend.group_table("counts", namespace, COUNTS)
    table.update(encode_keys([pa.array(keys, pa.int64())]), Inputs())
    return table


def counts(table: GroupTable) -> dict[int, int]:
    rows = table.rows(table.keys())
    return dict(zip(rows.keys[0].to_pylist(), rows.accumulators[0].tolist(), strict=True))


def put(backend: HashMapStateBackend, keys: list[int], stored: list[Any], **kinds: Any) -> None:
    descriptor = kinds.get("descriptor", VALUE)
    space = backend.key_space([pa.int64()])
    column = space.value_column(descriptor)
    slots = space.enter(encode_keys([pa.array(keys, pa.int64())])).tolist()
    for slot, value in zip(slots, stored, strict=True):
        column.values[slot] = value
        column.changed.append(slot)
    space.leave()


def values(backend: HashMapStateBackend, descriptor: StateDescriptor = VALUE) -> dict[int, Any]:
    space = backend.key_space([pa.int64()])
    column = space.value_column(descriptor)
    found = {}
    for keys in list(space.keys()):
        slots = space.enter(keys).tolist()
        for key, slot in zip(keys.to_arrays()[0].to_pylist(), slots, strict=True):
            if column.values[slot] is not ABSENT:
                found[key] = column.values[slot]
        space.leave()
    return found


# -- what is written


def test_what_has_not_changed_is_not_written_again() -> None:
    files = Files()
    backend = HashMapStateBackend(environment(files))
    count(backend, range(20_000))
    put(backend, list(range(2000)), list(range(2000)))
    first = Writing(backend.snapshot(1), files)
    first.finish()
    backend.checkpoint_completed(1)
    unchanged = Writing(backend.snapshot(2), files)
    described = unchanged.finish()
    assert unchanged.written_bytes == 0
    assert len(described.files) == 1
    backend.checkpoint_completed(2)
    count(backend, range(200))
    little = Writing(backend.snapshot(3), files)
    described = little.finish()
    assert 0 < little.written_bytes < first.written_bytes / 10
    assert len(described.segments) == 3
    assert all(file.shared for file in described.files)
    backend.checkpoint_completed(3)
    restored = HashMapStateBackend(environment(files, [described]))
    assert sum(counts(restored.group_table("counts", 0, COUNTS)).values()) == 20_200


def test_without_increments_every_snapshot_is_whole() -> None:
    files = Files()
    backend = HashMapStateBackend(environment(files, is_incremental=False))
    count(backend, range(100))
    for checkpoint_id in (1, 2):
        described = take_snapshot(backend, checkpoint_id, files)
        assert [segment.row_count for segment in described.segments] == [100]
        assert not any(file.shared for file in described.files)


def test_only_confirmed_files_are_referred_to() -> None:
    files = Files()
    backend = HashMapStateBackend(environment(files))
    count(backend, range(10))
    (base,) = take_snapshot(backend, 1, files).files
    count(backend, range(5))
    (lost,) = (
        file
        for file in Writing(backend.snapshot(2), files).finish().files
        if file.name != base.name
    )
    backend.checkpoint_aborted(2)
    described = take_snapshot(backend, 3, files)
    assert base.name in {file.name for file in described.files}
    assert lost.name not in {file.name for file in described.files}
    restored = HashMapStateBackend(environment(files, [described]))
    assert counts(restored.group_table("counts", 0, COUNTS)) == {
        key: 2 if key < 5 else 1 for key in range(10)
    }


def test_two_snapshots_may_be_written_at_once_and_no_more() -> None:
    files = Files()
    backend = HashMapStateBackend(environment(files))
    count(backend, range(10))
    first = Writing(backend.snapshot(1), files)
    count(backend, range(10))
    second = Writing(backend.snapshot(2), files)
    with pytest.raises(CheckpointAborted, match="checkpoint 3: 2 snapshots of operator 'operator'"):
        backend.snapshot(3)
    first.finish()
    count(backend, range(10))
    third = Writing(backend.snapshot(3), files)
    for writing, expected in ((third, 3), (second, 2)):
        restored = HashMapStateBackend(environment(files, [writing.finish()]))
        assert set(counts(restored.group_table("counts", 0, COUNTS)).values()) == {expected}


def test_a_discarded_snapshot_cannot_be_written_to_its_end() -> None:
    files = Files()
    backend = HashMapStateBackend(environment(files))
    count(backend, range(10))
    writing = Writing(backend.snapshot(7), files)
    assert writing.step()
    backend.checkpoint_aborted(7)
    with pytest.raises(CheckpointAborted, match="checkpoint 7: it was discarded"):
        writing.finish()
    writing.snapshot.discard()
    closed = Writing(backend.snapshot(8), files)
    backend.close()
    with pytest.raises(CheckpointAborted):
        closed.finish()


def test_sealing_does_no_work_per_key(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = HashMapStateBackend(environment(Files()))
    count(backend, range(5000))
    put(backend, list(range(5000)), list(range(5000)))

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("work per key")

    for owner, name in (
        (record_versions.RecordExport, "_next"),
        (record_versions.RecordVersions, "_piece"),
        (cell_columns.CellExport, "_next"),
        (cell_columns.CellExport, "save"),
    ):
        monkeypatch.setattr(owner, name, forbidden)
    snapshot = backend.snapshot(1)
    snapshot.discard()


def test_files_of_which_little_is_left_are_given_up() -> None:
    files = Files()
    backend = HashMapStateBackend(environment(files))
    count(backend, range(20_000), namespace=1)
    count(backend, range(100), namespace=2)
    (big,) = take_snapshot(backend, 1, files).files
    backend.drop("counts", 1)
    described = take_snapshot(backend, 2, files)
    assert big.name not in {file.name for file in described.files}
    assert [segment.row_count for segment in described.segments] == [100]


# -- restore


def test_what_nobody_asks_for_is_carried_forward_unread() -> None:
    files = Files()
    backend = HashMapStateBackend(environment(files))
    count(backend, range(50), namespace=5)
    put(backend, [1, 2], [10, 20])
    described = take_snapshot(backend, 1, files)
    for checkpoint_id in (2, 3):
        backend = HashMapStateBackend(environment(files, [described]))
        assert backend.namespaces("counts") == [5]
        reads = files.read_count
        described = take_snapshot(backend, checkpoint_id, files)
        assert files.read_count == reads
        assert len(described.files) == 1
    backend = HashMapStateBackend(environment(files, [described]))
    assert values(backend) == {1: 10, 2: 20}
    assert len(backend.group_table("counts", 5, COUNTS)) == 50


def test_what_nobody_asks_for_is_copied_where_other_subtasks_have_a_part() -> None:
    files = Files()
    backend = HashMapStateBackend(environment(files))
    count(backend, range(500))
    described = [take_snapshot(backend, 1, files)]
    for parallelism in (3, 2, 1):
        following = []
        for index in range(parallelism):
            backend = HashMapStateBackend(
                environment(files, described, subtask_index=index, parallelism=parallelism)
            )
            take_snapshot(backend, 2, files)
            following.append(take_snapshot(backend, 3, files))
        described = following
        files.keep_only(described)
    backend = HashMapStateBackend(environment(files, described))
    assert counts(backend.group_table("counts", 0, COUNTS)) == dict.fromkeys(range(500), 1)


def test_rows_of_every_kind_of_table_are_restored_with_their_types() -> None:
    files = Files()
    schema = pa.schema([("k", pa.dictionary(pa.int32(), pa.string())), ("v", pa.float32())])
    rows = pa.record_batch(
        [pa.array(["a", "b", "a"]).dictionary_encode(), pa.array([1.5, None, 2.5], pa.float32())],
        schema=schema,
    )
    descriptor = RowDescriptor(schema, ("k",))
    backend = HashMapStateBackend(environment(files))
    backend.row_table("rows", 3, descriptor).add(rows, np.arange(3))
    timers = backend.timer_table("timers", [schema.field("k").type])
    timers.register(encode_keys([rows.column(0)]), np.array([30, 20, 30]))
    described = take_snapshot(backend, 1, files)
    backend = HashMapStateBackend(environment(files, [described]))
    assert (
        part_rows([backend.row_table("rows", 3, descriptor)], 0, 1).to_pylist() == rows.to_pylist()
    )
    timers = backend.timer_table("timers", [schema.field("k").type])
    assert (len(timers), timers.next_time()) == (2, 20)
    due = timers.take_due(100, 10)
    assert due is not None
    assert due[0].to_arrays()[0].type == schema.field("k").type
    assert (due[0].to_arrays()[0].to_pylist(), due[1].tolist()) == (["b", "a"], [20, 30])


def test_group_columns_are_snapshotted_with_their_keys() -> None:
    spec = GroupColumnSpec("texts", "collect_list", "value", pa.string(), pa.list_(pa.string()))

    def descriptor() -> AggregateDescriptor:
        return AggregateDescriptor(
            (pa.int64(),), (AccumulatorKind.COUNT,), lambda: [group_column(spec)]
        )

    files = Files()
    backend = HashMapStateBackend(environment(files))
    expected: dict[int, list[str]] = {}
    described = []
    for step in range(4):
        table = backend.group_table("texts", 0, descriptor())
        inputs = Inputs()
        keys = [key for key in range(10) if key % (step + 1) == 0]
        inputs.columns = [pa.array([f"{key}-{step}" for key in keys])]
        inputs.sequence = np.arange(len(keys)) + step * 10
        table.update(encode_keys([pa.array(keys)]), inputs)
        for key in keys:
            expected.setdefault(key, []).append(f"{key}-{step}")
        described.append(take_snapshot(backend, step, files))
    assert len(described[-1].segments) > 1
    backend = HashMapStateBackend(environment(files, described[-1:]))
    table = backend.group_table("texts", 0, descriptor())
    rows = table.rows(table.keys())
    assert dict(zip(rows.keys[0].to_pylist(), rows.columns[0].to_pylist(), strict=True)) == expected


@pytest.mark.parametrize("damage", ["altered", "truncated"])
def test_a_damaged_file_is_noticed(damage: str) -> None:
    files = Files()
    backend = HashMapStateBackend(environment(files))
    count(backend, range(1000))
    described = take_snapshot(backend, 1, files)
    ((path, data),) = files.content.items()
    half = len(data) // 2
    altered = data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
    files.content[path] = altered if damage == "altered" else data[:-3]
    described.files[0].handle.offset = 7  # of a file that is packed with others
    (segment,) = described.segments
    start = 7 + segment.offset
    restored = HashMapStateBackend(environment(files, [described]))
    told = (
        f"^{re.escape(path)}, bytes {start} to {start + segment.size_bytes} "
        r"\(part 0 of 1, key-groups 0 to 127, state of operator 'operator', file .*\), is not what was written"
    )
    with pytest.raises(StoreCorrupt, match=told):
        restored.group_table("counts", 0, COUNTS)


@pytest.mark.parametrize("is_incremental", [False, True])
def test_restored_rows_are_found_when_their_files_go_with_an_older_checkpoint(
    is_incremental: bool,
) -> None:
    """The JobManager deletes them while it tells the tasks that a newer checkpoint is complete."""
    files = Files()
    before = [
        HashMapStateBackend(environment(files, subtask_index=index, parallelism=2))
        for index in (0, 1)
    ]
    for backend in before:
        for namespace in (0, 1, 2):
            count(backend, range(40), namespace)  # each loads those of its key-groups only
    described = [take_snapshot(backend, 1, files) for backend in before]
    expected = dict.fromkeys(range(40), 1)

    restored = HashMapStateBackend(environment(files, described, is_incremental=is_incremental))
    second = Writing(restored.snapshot(2), files).finish()
    third = Writing(restored.snapshot(3), files)
    third.step()  # it goes on writing, or fails; nothing can be read from it
    files.keep_only([second])
    assert counts(restored.group_table("counts", 0, COUNTS)) == expected
    restored.checkpoint_aborted(3)
    restored.checkpoint_completed(2)
    assert counts(restored.group_table("counts", 1, COUNTS)) == expected
    count(restored, range(1), namespace=1)
    fourth = take_snapshot(restored, 4, files)
    files.keep_only([fourth])
    assert counts(restored.group_table("counts", 2, COUNTS)) == expected
    again = HashMapStateBackend(environment(files, [fourth], is_incremental=is_incremental))
    assert counts(again.group_table("counts", 1, COUNTS)) == expected | {0: 2}
    assert counts(again.group_table("counts", 0, COUNTS)) == expected


def test_restored_rows_that_are_nowhere_are_missed() -> None:
    files = Files()
    backend = HashMapStateBackend(environment(files))
    count(backend, range(10))
    described = take_snapshot(backend, 1, files)
    restored = HashMapStateBackend(environment(files, [described], is_incremental=False))
    Writing(restored.snapshot(2), files).step()
    files.keep_only([])
    with pytest.raises(StoreNotFound):
        restored.group_table("counts", 0, COUNTS)


def test_numbers_of_loops_are_written_once_they_are_left() -> None:
    """Two loops in one bundle, with more keys than there was room for between them, and a number that is gone."""
    files = Files()
    backend = HashMapStateBackend(environment(files))
    numbers = StateDescriptor("value", StateKind.VALUE, INT, number_kind="int64")
    space = backend.key_space([pa.int64()])
    column = space.value_column(numbers)
    assert isinstance(column, NumberColumn)

    def loop(keys: range, number: int | None) -> None:
        slots = space.enter(encode_keys([pa.array(keys, pa.int64())]))
        column.values.numbers[slots] = 0 if number is None else number
        column.values.are_there[slots] = number is not None
        column.changed_numbers[slots] = True
        column.put_numbers(slots)

    loop(range(10), 1)
    loop(range(5, 500), 2)
    space.leave()
    loop(range(4), None)
    space.leave()
    expected = {key: 1 if key < 5 else 2 for key in range(4, 500)}
    restored = HashMapStateBackend(environment(files, [take_snapshot(backend, 1, files)]))
    assert values(restored, numbers) == values(backend, numbers) == expected
    assert not column.changed_numbers.any()


# -- time to live, memory, threads


def test_expired_values_are_swept_and_left_out_of_snapshots() -> None:
    files, clock = Files(), SteppedClock(1000)
    stamped = codec_of(f"stamped/1:{INT.name}")
    descriptor = StateDescriptor("value", StateKind.VALUE, stamped, ttl_ms=100)
    backend = HashMapStateBackend(environment(files, clock=clock))
    keys = list(range(200))
    put(backend, keys, [(key, 900 + key) for key in keys], descriptor=descriptor)
    described = take_snapshot(backend, 1, files)
    alive = {key: (key, 900 + key) for key in keys if key > 0}
    restored = HashMapStateBackend(environment(files, [described], clock=clock))
    assert values(restored, descriptor) == alive
    clock.time_ms = 1100
    space = backend.key_space([pa.int64()])
    removed = [space.sweep(clock.time_ms, 50) for _ in range(4)]
    assert removed == [50, 50, 1, 0]
    expected = {key: (key, 900 + key) for key in keys if key > 100}
    assert values(backend, descriptor) == expected
    described = take_snapshot(backend, 2, files)
    restored = HashMapStateBackend(environment(files, [described], clock=clock))
    assert values(restored, descriptor) == expected


def test_keys_without_anything_left_are_forgotten() -> None:
    backend = HashMapStateBackend(environment(Files()))
    space = backend.key_space([pa.string()])
    column = space.map_column(StateDescriptor("map", StateKind.MAP, INT, codec_of(pa.string())))
    for start in range(0, 20_000, 1000):
        keys = encode_keys([pa.array([f"key-{i}" for i in range(start, start + 1000)])])
        slots = space.enter(keys).tolist()
        for slot in slots:
            column.put(slot, "a", 1)
        space.leave()
        assert len(column.items(space.enter(keys).tolist()[0])) == 1
        for slot in slots:
            column.clear(slot)
        space.leave()
    assert list(space.keys()) == []
    assert space.room <= 4096
    assert space.key_bytes() < 1 << 20


def test_the_memory_limit_names_the_largest_state() -> None:
    clock = SteppedClock()
    memory = ManagedMemory(1 << 20)
    backend = HashMapStateBackend(environment(Files(), clock=clock, memory=memory))
    put(backend, [1], [1])
    clock.time_ms += 10
    text = StateDescriptor("texts", StateKind.VALUE, TEXT)
    put(backend, list(range(2000)), [b"x" * 1000 for _ in range(2000)], descriptor=text)
    clock.time_ms += 10
    with pytest.raises(Unrecoverable, match="the largest is operator: state texts with 2 MB"):
        put(backend, [1], [1])
    backend.close()
    assert memory.used_bytes() == 0


def test_states_of_the_same_name_are_counted_one_by_one() -> None:
    memory = ManagedMemory(1 << 40)
    large, small = [HashMapStateBackend(environment(Files(), memory=memory)) for _ in range(2)]
    put(
        large,
        list(range(4000)),
        [b"x" * 1000 for _ in range(4000)],
        descriptor=StateDescriptor("texts", StateKind.VALUE, TEXT),
    )
    put(small, [1], [b"x"], descriptor=StateDescriptor("texts", StateKind.VALUE, TEXT))
    memory.limit_bytes = 3 << 20
    with pytest.raises(Unrecoverable, match="takes 4 MB, its limit is 3 MB"):
        memory.check()
    used_bytes = memory.used_bytes()
    small.close()
    assert used_bytes > memory.used_bytes() > 4_000_000
    large.close()
    assert memory.used_bytes() == 0


def test_sizes_of_objects_are_estimated() -> None:
    assert average_bytes([]) == 0
    assert 1000 < average_bytes([b"x" * 1000] * 100) < 1100
    nested = {"a": [b"x" * 500] * 10, "b": (1, 2.5)}
    assert 5000 < average_bytes([nested]) < 20_000


def test_exports_and_changes_on_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_versions, "CHUNK_SLOTS", 512)
    monkeypatch.setattr(cell_columns, "CHUNK_SLOTS", 256)
    files = Files()
    backend = HashMapStateBackend(environment(files))
    generator = np.random.default_rng(3)
    rounds = 0
    for checkpoint_id in range(1, 16):
        writing = Writing(backend.snapshot(checkpoint_id), files)
        described: list[checkpoint_pb2.KeyedStateSnapshot] = []
        thread = threading.Thread(target=lambda w=writing, d=described: d.append(w.finish()))
        expected = rounds
        thread.start()
        for _ in range(int(generator.integers(1, 6))):
            rounds += 1
            count(backend, range(3000))
            put(backend, list(range(1000)), [rounds] * 1000)
        thread.join()
        backend.checkpoint_completed(checkpoint_id)
        restored = HashMapStateBackend(environment(files, described))
        found = counts(restored.group_table("counts", 0, COUNTS))
        assert found == (dict.fromkeys(range(3000), expected) if expected else {})
        assert values(restored) == (dict.fromkeys(range(1000), expected) if expected else {})


def test_states_above_the_limit_end_the_job_and_say_which_is_largest(tmp_path: Path) -> None:
    kept = GroupColumnSpec("all", "collect_list", "s", pa.string(), pa.list_(pa.string()))
    one = OneBackend("hashmap", tmp_path)
    backend = one.open(memory_bytes=16 << 20)
    texts = AggregateDescriptor(KEYS, (), lambda: [group_column(kept)])
    inputs = Inputs()
    inputs.values, inputs.valid, inputs.sequence = [], [], np.arange(1000)
    inputs.columns = [pa.array(["x" * 1000] * 1000)]

    def fill() -> None:
        for _ in range(40):
            one.clock.time_ms += 1000
            table = backend.group_table("large lists", 0, texts)
            table.update(encode_keys([pa.array(range(1000))]), inputs)

    message = r"its limit is 16 MB .*the largest is operator: state large lists with 1\d MB"
    with pytest.raises(Unrecoverable, match=message):
        fill()
    backend.close()
