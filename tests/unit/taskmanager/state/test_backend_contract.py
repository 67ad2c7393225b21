"""Aim: what everybody relies on of a keyed state backend holds for both of them.

Method: each test runs on either backend, through real codecs, packed files and stores. What any history of
changes, checkpoints and restarts leads to is in ``test_backend_histories``.
"""

from __future__ import annotations

import gc
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.aggregates.aggregate_layout import GroupColumnSpec
from penstock.errors import CheckpointAborted, StreamError, TaskFailure, Unrecoverable
from penstock.pb import checkpoint_pb2
from penstock.storage.codec import Stamped, codec_of
from penstock.storage.key_groups import key_group_range
from taskmanager.kernels import AccumulatorKind, encode_keys
from taskmanager.state.backend import AggregateDescriptor
from taskmanager.state.descriptors import ABSENT, StateDescriptor, StateKind
from taskmanager.state.group_columns import group_column
from taskmanager.state.hashmap import cell_columns
from taskmanager.state.instances import InstanceTable
from taskmanager.state.row_table import RowDescriptor
from tests.support.backend_history import Inputs
from tests.support.backend_job import BACKENDS
from tests.support.one_backend import KEYS, Cells, OneBackend, add_counts, counts_of
from tests.support.rocksdb_cluster import fast_directory

INT, TEXT, PACKED = codec_of(pa.int64()), codec_of(pa.string()), codec_of("msgpack/1")
VALUE = StateDescriptor("value", StateKind.VALUE, INT)
LIST = StateDescriptor("list", StateKind.LIST, INT)
MAP = StateDescriptor("map", StateKind.MAP, INT, TEXT)
COUNTS = AggregateDescriptor(KEYS, (AccumulatorKind.COUNT,), list)
COLLECTED = GroupColumnSpec("all", "collect_list", "value", pa.int64(), pa.list_(pa.int64()))
COLLECTS = AggregateDescriptor(KEYS, (AccumulatorKind.COUNT,), lambda: [group_column(COLLECTED)])


@pytest.fixture(params=BACKENDS)
def one(request: pytest.FixtureRequest) -> Iterator[OneBackend]:
    with fast_directory() as directory:
        home = OneBackend(request.param, directory)
        yield home
        home.close()


# -- keyed objects


def test_equal_keys_have_equal_slots_in_all_columns(one: OneBackend) -> None:
    backend = one.open()
    values, lists = Cells(backend, VALUE), Cells(backend, LIST)
    for _ in range(2):
        slots = values.enter(7, None, 7, 8, None)
        assert slots[0] == slots[2]
        assert slots[1] == slots[4]
        assert len(set(slots)) == 3
        assert min(slots) >= 0
        assert [values.column.values[slot] for slot in slots] == [ABSENT] * 5
        assert [lists.column.values[slot] for slot in slots] == [ABSENT] * 5
        values.space.leave()
    assert list(values.space.keys()) == []


def test_a_cell_may_change_several_times_in_a_bundle(one: OneBackend) -> None:
    backend = one.open()
    cells = Cells(backend, VALUE)
    for stored in ([1, ABSENT, 2], [3, ABSENT], [ABSENT, 4, ABSENT, 5]):
        (slot,) = cells.enter(1)
        for each in stored:
            cells.column.values[slot] = each
            cells.column.changed.append(slot)
        cells.space.leave()
        assert cells.read(1) == [stored[-1]]
        restored = Cells(one.open(one.checkpoint(backend, len(one.opened))), VALUE)
        assert restored.read(1, 2) == [stored[-1], ABSENT]


@pytest.mark.parametrize("codec", [INT, TEXT, PACKED, codec_of("pickle/1")], ids=lambda c: c.name)
@pytest.mark.parametrize("is_stamped", [False, True])
def test_none_is_a_value_and_absent_is_none(one: OneBackend, codec: Any, is_stamped: bool) -> None:
    none = codec.to_stored(None)
    ttl_ms = 1 << 40 if is_stamped else 0
    if is_stamped:
        codec, none = Stamped(codec), (none, 5)
    value = StateDescriptor("v", StateKind.VALUE, codec, ttl_ms=ttl_ms)
    items = StateDescriptor("l", StateKind.LIST, codec, ttl_ms=ttl_ms)
    entries = StateDescriptor("m", StateKind.MAP, codec, INT, ttl_ms=ttl_ms)
    backend = one.open()
    cells = [Cells(backend, descriptor) for descriptor in (value, items, entries)]
    cells[0].set({1: none, 2: ABSENT})
    cells[1].set({1: [none, none], 2: []})
    cells[2].change(lambda column, slot, key: column.put(slot, key, none), [1])
    restored = one.open(one.checkpoint(backend))
    for home in (backend, restored):
        cells = [Cells(home, descriptor) for descriptor in (value, items, entries)]
        assert cells[0].read(1, 2) == [none, ABSENT]
        assert cells[1].read(1)[0] == [none, none]
        assert cells[1].read(2)[0] in (ABSENT, [])
        assert cells[2].read(1, 2) == [[(1, none)], []]
        (slot,) = cells[2].enter(1)
        assert cells[2].column.get(slot, 1) == none
        assert cells[2].column.get(slot, 2) is ABSENT
        cells[2].space.leave()


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 100])
def test_a_list_that_is_changed_in_place_after_a_seal_is_snapshotted_as_it_was(
    one: OneBackend, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell_columns, "CHUNK_SLOTS", 4)
    backend = one.open()
    cells = Cells(backend, LIST)
    cells.set({key: [key] for key in range(20)})
    parts = iter(_parts(backend.snapshot(1)))
    written = list(islice(parts, steps))
    cells.change(lambda column, slot, key: _append(column, slot, -key), range(20))
    cells.change(lambda column, slot, key: _append(column, slot, 99), [3, 3, 5])
    cells.set(dict.fromkeys([0, 19], ABSENT))
    written += parts
    restored = Cells(one.open(_finished(one, written)), LIST)
    assert restored.all() == {key: [key] for key in range(20)}
    expected = {key: [key, -key] for key in range(1, 19)}
    expected[3] += [99, 99]
    expected[5] += [99]
    backend.checkpoint_completed(1)
    assert Cells(one.open(one.checkpoint(backend, 2)), LIST).all() == expected


def _append(column: Any, slot: int, item: int) -> None:
    column.values[slot].append(item)
    column.changed.append(slot)


def _parts(snapshot: Any) -> Iterator[Any]:
    for blob in snapshot.blobs():
        for chunk in blob.chunks():
            yield snapshot, blob.name, bytes(chunk)


def _finished(one: OneBackend, parts: list[Any]) -> checkpoint_pb2.KeyedStateSnapshot:
    content: dict[str, bytes] = {}
    for _, name, chunk in parts:
        content[name] = content.get(name, b"") + chunk
    handles = {}
    for name, data in content.items():
        handles[name] = checkpoint_pb2.StateHandle(
            inline=data, size_bytes=len(data), checksum=zlib.crc32(data)
        )
    described: checkpoint_pb2.KeyedStateSnapshot = parts[0][0].describe(handles)
    return described


def test_entries_of_maps_are_scanned_in_the_same_order_whatever_was_removed(
    one: OneBackend,
) -> None:
    names = ["b", "", "ü", "a", "aa", "b\0", "z" * 300]
    in_order = sorted(names, key=TEXT.encode)
    expected: dict[str, int] = {}
    backend = one.open()
    cells = Cells(backend, MAP)
    generator = random.Random(4)
    for turn in range(60):
        (slot,) = cells.enter(1)
        column, name = cells.column, generator.choice(names)
        match generator.randrange(8):
            case 0 | 1 | 2 | 3:
                column.put(slot, name, turn)
                expected[name] = turn
            case 4 | 5:
                column.remove(slot, name)
                expected.pop(name, None)
            case 6 if turn % 3 == 0:
                column.clear(slot)
                expected = {}
            case _:
                assert column.get(slot, name) == expected.get(name, ABSENT)
        scanned = column.items(slot)
        assert scanned == [(name, expected[name]) for name in in_order if name in expected]
        cells.space.leave()
        if turn % 10 == 9:
            backend = one.open(one.checkpoint(backend, turn))
            cells = Cells(backend, MAP)


def test_removed_entries_stay_removed_where_they_were_never_read(one: OneBackend) -> None:
    backend = one.open()
    Cells(backend, MAP).change(_put_three, [1, 2, 3])
    backend = one.open(one.checkpoint(backend))
    cells = Cells(backend, MAP)
    cells.change(lambda column, slot, _: column.remove(slot, "b"), [1])
    cells.change(lambda column, slot, _: column.clear(slot), [2])
    cells.change(lambda column, slot, _: column.put(slot, "b", 9), [2])
    cells.change(lambda column, slot, _: column.remove(slot, "nothing"), [3, 4])
    restored = Cells(one.open(one.checkpoint(backend, 2)), MAP)
    for each in (cells, restored):
        assert each.all() == {
            1: [("a", 1), ("c", 3)],
            2: [("b", 9)],
            3: [("a", 1), ("b", 2), ("c", 3)],
        }


def _put_three(column: Any, slot: int, _: int) -> None:
    for name, value in (("c", 3), ("a", 1), ("b", 2)):
        column.put(slot, name, value)


def test_all_keys_may_be_visited_while_their_cells_change(one: OneBackend) -> None:
    backend = one.open()
    Cells(backend, VALUE).set({key: key for key in range(40)})
    backend = one.open(one.checkpoint(backend))
    cells = Cells(backend, VALUE)
    cells.set({key: key for key in range(40, 60)})
    visited: list[int] = []
    for part in cells.space.keys():  # noqa: SIM118 - not a dict
        slots = cells.space.enter(part).tolist()
        visited += part.to_arrays()[0].to_pylist()
        for slot in slots:
            assert cells.column.values[slot] is not ABSENT
            cells.column.values[slot] = ABSENT
            cells.column.changed.append(slot)
        cells.space.leave()
    assert sorted(visited) == list(range(60))
    assert cells.all() == {}


@pytest.mark.parametrize("kind", list(StateKind))
def test_expired_values_are_swept_and_left_out_of_snapshots(
    one: OneBackend, kind: StateKind
) -> None:
    descriptor = StateDescriptor(
        "old", kind, Stamped(INT), INT if kind is StateKind.MAP else None, ttl_ms=100
    )

    def set_cell(column: Any, slot: int, key: int) -> None:
        stored = (key, 1000 + key)
        if kind is StateKind.MAP:
            column.put(slot, key, stored)
            return
        column.values[slot] = stored if kind is StateKind.VALUE else [stored]
        column.changed.append(slot)

    backend = one.open()
    Cells(backend, descriptor).change(set_cell, range(30))
    restored = one.open(one.checkpoint(backend))
    late = one.open()
    Cells(late, descriptor).change(set_cell, range(30))
    one.clock.time_ms += 109
    assert sorted(Cells(one.open(one.checkpoint(late)), descriptor).all()) == list(range(10, 30))
    for home in (backend, restored):
        space = Cells(home, descriptor).space
        removed = [space.sweep(one.clock.time_ms, 7) for _ in range(12)]
        assert sum(removed) == 10
        assert max(removed) <= 7
        assert sorted(Cells(home, descriptor).all()) == list(range(10, 30))
    again = one.open(one.checkpoint(restored, 3))
    assert sorted(Cells(again, descriptor).all()) == list(range(10, 30))


# -- timers

TIMER_TYPES: list[tuple[list[pa.DataType], list[tuple[Any, ...]]]] = [
    ([pa.int64()], [(None,), *((number,) for number in range(-5, 20))]),
    ([pa.string(), pa.bool_()], [(f"k{n % 7}" if n else None, n % 3 == 0) for n in range(20)]),
    ([pa.dictionary(pa.int32(), pa.string())], [(f"k{n}",) for n in range(20)]),
]


@pytest.mark.parametrize(("types", "keys"), TIMER_TYPES, ids=["integer", "pair", "dictionary"])
def test_timers_fire_by_time_and_then_key_in_an_order_of_their_content(
    types: list[pa.DataType], keys: list[tuple[Any, ...]]
) -> None:
    """On both backends, however they were registered, restored or not: the same order."""
    generator = random.Random(2)
    times = [-(1 << 62), -1, 0, 0, 3, 3, 3, (1 << 62)]
    timers = [(key, generator.choice(times)) for key in dict.fromkeys(keys) for _ in range(3)]
    orders = []
    for kind in BACKENDS:
        for is_restored in (False, True):
            with fast_directory() as directory:
                one = OneBackend(kind, directory)
                backend = one.open()
                generator.shuffle(timers)
                for start in range(0, len(timers), 7):
                    part = timers[start : start + 7]
                    table = backend.timer_table("timers", types)
                    table.register(_keys(types, part), np.array([time for _, time in part]))
                    if is_restored and start % 21 == 0:
                        backend = one.open(one.checkpoint(backend, start))
                orders.append(_fired(backend, types, generator.randint(1, 9)))
                one.close()
    assert [time for _, time in orders[0]] == sorted(time for _, time in set(timers))
    assert set(orders[0]) == set(timers)
    assert all(order == orders[0] for order in orders)


def _keys(types: list[pa.DataType], timers: list[Any]) -> Any:
    columns = list(zip(*(key for key, _ in timers), strict=True))
    return encode_keys([pa.array(c, t) for c, t in zip(columns, types, strict=True)])


def _fired(backend: Any, types: list[pa.DataType], limit: int, up_to: int = 1 << 62) -> list[Any]:
    table = backend.timer_table("timers", types)
    fired: list[Any] = []
    while (due := table.take_due(up_to, limit)) is not None:
        assert 0 < len(due[1]) <= limit
        arrays = due[0].to_arrays()
        assert [array.type for array in arrays] == types
        keys = list(zip(*(array.to_pylist() for array in arrays), strict=True))
        fired += zip(keys, due[1].tolist(), strict=True)
    return fired


def test_a_timer_is_there_once_or_not_at_all(one: OneBackend) -> None:
    types, backend = [pa.int64()], one.open()

    def change(name: str, *timers: tuple[int, int]) -> None:
        table = backend.timer_table("timers", types)
        rows = [((key,), time) for key, time in timers]
        getattr(table, name)(_keys(types, rows), np.array([time for _, time in rows]))

    table = backend.timer_table("timers", types)
    assert (len(table), table.next_time(), table.take_due(9, 9)) == (0, None, None)
    change("register", (1, 5), (1, 5), (2, 5), (1, 7))
    change("register", (1, 5), (3, 1))
    change("delete", (2, 5), (9, 9), (2, 5))
    change("delete", (1, 7))
    change("register", (1, 7), (1, 7))
    for _ in range(2):
        table = backend.timer_table("timers", types)
        assert (len(table), table.next_time()) == (3, 1)
        assert table.take_due(0, 5) is None
        backend = one.open(one.checkpoint(backend, len(one.opened)))
    assert _fired(backend, types, 1, up_to=5) == [((3,), 1), ((1,), 5)]
    change("register", (1, 5))
    assert _fired(backend, types, 5) == [((1,), 5), ((1,), 7)]
    table = backend.timer_table("timers", types)
    assert (len(table), table.next_time()) == (0, None)
    assert _fired(one.open(one.checkpoint(backend, 9)), types, 5) == []


# -- namespaces


@pytest.mark.parametrize("descriptor", [COUNTS, COLLECTS], ids=["numbers", "group columns"])
@pytest.mark.parametrize("parallelism", [1, 2])
def test_namespaces_are_known_before_anything_is_asked_for(
    one: OneBackend, descriptor: AggregateDescriptor, parallelism: int
) -> None:
    backend = one.open()
    for namespace in (-7, 1 << 40, 5):
        add_counts(backend, descriptor, range(100), namespace)
    backend.drop("counts", 5)
    backend.drop("counts", 6)
    backend.drop("nothing", 5)
    written = one.checkpoint(backend)
    for index in range(parallelism):
        restored = one.open(written, subtask_index=index, parallelism=parallelism)
        for home in (backend, restored):
            assert home.namespaces("counts") == [-7, 1 << 40]
            assert home.namespaces("nothing") == []
        restored.drop("counts", -7)
        assert restored.namespaces("counts") == [1 << 40]
        again = one.open(one.checkpoint(restored, 2), subtask_index=index, parallelism=parallelism)
        assert again.namespaces("counts") == [1 << 40]
        mine = counts_of(again, descriptor, 1 << 40)
        assert mine == dict.fromkeys(mine, 1)
        assert len(mine) == 100 if parallelism == 1 else 0 < len(mine) < 100


def test_a_namespace_that_comes_again_is_empty(one: OneBackend) -> None:
    backend = one.open()
    for turn in range(1, 5):
        add_counts(backend, COUNTS, range(turn * 10, 50), 7)
        if turn % 2:
            one.checkpoint(backend, turn)
        assert counts_of(backend, COUNTS, 7) == dict.fromkeys(range(turn * 10, 50), 1)
        backend.drop("counts", 7)
    add_counts(backend, COUNTS, [1], 7)
    assert counts_of(one.open(one.checkpoint(backend, 9)), COUNTS, 7) == {1: 1}


# -- restore


@pytest.mark.parametrize("is_incremental", [True, False], ids=["incremental", "full"])
@pytest.mark.parametrize("layout", [(1, 1, 1), (3, 2, 1), (2, 3, 1)], ids=str)
def test_what_nobody_asks_for_is_carried_forward(
    one: OneBackend, layout: tuple[int, ...], is_incremental: bool
) -> None:
    backend = one.open(is_incremental=is_incremental)
    add_counts(backend, COLLECTS, range(60), 4)
    cells = Cells(backend, MAP), Cells(backend, VALUE)
    cells[0].change(_put_three, range(60))
    cells[1].set({key: key for key in range(60)})
    backend.timer_table("timers", KEYS).register(encode_keys([pa.array(range(60))]), np.arange(60))
    written = [one.checkpoint(backend)]
    for parallelism in layout:
        following = []
        for index in range(parallelism):
            backend = one.open(
                *[part for part in written if _overlaps(part, index, parallelism)],
                subtask_index=index,
                parallelism=parallelism,
                is_incremental=is_incremental,
            )
            lost = backend.snapshot(2)
            one.write(lost)
            backend.checkpoint_aborted(2)
            lost.discard()
            one.checkpoint(backend, 3)
            following.append(one.checkpoint(backend, 4))
        written = following
        one.keep_only(written)
    backend = one.open(*written)
    assert counts_of(backend, COLLECTS, 4) == dict.fromkeys(range(60), 1)
    cells = Cells(backend, MAP), Cells(backend, VALUE)
    assert cells[0].all() == {key: [("a", 1), ("b", 2), ("c", 3)] for key in range(60)}
    assert cells[1].all() == {key: key for key in range(60)}
    assert _fired(backend, list(KEYS), 99) == [((key,), key) for key in range(60)]


def _overlaps(part: Any, index: int, parallelism: int) -> bool:
    own = key_group_range(index, parallelism, part.max_parallelism)
    return part.first_key_group < own.stop and part.last_key_group >= own.start


def _ask_value(codec: Any) -> Callable[[Any], Any]:
    return lambda b: b.key_space(KEYS).value_column(StateDescriptor("kept", StateKind.VALUE, codec))


def _ask_map(codec: Any, key_codec: Any) -> Callable[[Any], Any]:
    descriptor = StateDescriptor("kept", StateKind.MAP, codec, key_codec)
    return lambda b: b.key_space(KEYS).map_column(descriptor)


def _ask_groups(
    key: pa.DataType, kind: AccumulatorKind, column: GroupColumnSpec | None = None
) -> Callable[[Any], Any]:
    def new_columns() -> list[Any]:
        return [] if column is None else [group_column(column)]

    return lambda b: b.group_table("kept", 1, AggregateDescriptor((key,), (kind,), new_columns))


def _ask_rows(kind: pa.DataType) -> Callable[[Any], Any]:
    schema = pa.schema([("k", pa.int64()), ("x", kind)])
    return lambda b: b.row_table("kept", 1, RowDescriptor(schema, ("k",)))


def _ask_sessions(kind: AccumulatorKind) -> Callable[[Any], Any]:
    return lambda b: b.session_table("kept", KEYS, 10, lambda: InstanceTable([kind], []))


def _ask_timers(kind: pa.DataType) -> Callable[[Any], Any]:
    return lambda b: b.timer_table("kept", [kind])


COUNT, SUM_FLOAT = AccumulatorKind.COUNT, AccumulatorKind.SUM_FLOAT64
TEXTS = GroupColumnSpec("all", "collect_list", "value", pa.string(), pa.list_(pa.string()))


def _fill(table: Any) -> None:
    """One entry for whatever state it is."""
    keys, one_row = encode_keys([pa.array([5], pa.int64())]), np.zeros(1, np.int64)
    match type(table).__name__:
        case "HashMapTimerTable" | "StoredTimerTable":
            table.register(keys, one_row)
        case "RowTable" | "StoredRowTable":
            batch = pa.record_batch({"k": pa.array([5]), "x": pa.array([5])})
            table.add(batch, one_row)
        case "SessionTable" | "StoredSessionTable":
            table.add(table.key_indices(keys), one_row)
        case _:
            raise AssertionError(table)


CHANGED = {
    "value codec": (_ask_value(INT), _ask_value(TEXT), "int64", "string"),
    "value name of codec": (
        _ask_value(PACKED),
        _ask_value(codec_of("pickle/1")),
        "msgpack/1",
        "pickle/1",
    ),
    "kind": (_ask_value(INT), _ask_map(INT, TEXT), "value", "map"),
    "map values": (_ask_map(INT, TEXT), _ask_map(TEXT, TEXT), "int64", "string"),
    "map keys": (_ask_map(INT, TEXT), _ask_map(INT, INT), "string", "int64"),
    "no ttl any more": (_ask_value(Stamped(INT)), _ask_value(INT), "stamped/1", "arrow.int64/1"),
    "group keys": (
        _ask_groups(pa.int64(), COUNT),
        _ask_groups(pa.string(), COUNT),
        "int64",
        "string",
    ),
    "numbers": (
        _ask_groups(pa.int64(), COUNT),
        _ask_groups(pa.int64(), SUM_FLOAT),
        "int64",
        "double",
    ),
    "group columns": (
        _ask_groups(pa.int64(), COUNT, COLLECTED),
        _ask_groups(pa.int64(), COUNT, TEXTS),
        "int64",
        "string",
    ),
    "rows": (_ask_rows(pa.int64()), _ask_rows(pa.string()), "int64", "string"),
    "sessions": (_ask_sessions(COUNT), _ask_sessions(SUM_FLOAT), "int64", "double"),
    "timers": (_ask_timers(pa.int64()), _ask_timers(pa.string()), "int64", "string"),
    "other table": (_ask_sessions(COUNT), _ask_timers(pa.int64()), "sessions", "timers"),
}


@pytest.mark.parametrize("changed", list(CHANGED))
def test_other_types_than_were_stored_are_refused(one: OneBackend, changed: str) -> None:
    ask, ask_now, stored, declared = CHANGED[changed]
    backend = one.open()
    table = ask(backend)
    if changed in ("group keys", "numbers", "group columns"):
        columns = [pa.array([5], pa.int64())] if changed == "group columns" else []
        inputs = type("Inputs", (), {"values": [None], "valid": [None], "columns": columns})()
        inputs.sequence, inputs.is_partial = np.zeros(1, np.int64), False
        table.update(encode_keys([pa.array([5], pa.int64())]), inputs)
    elif hasattr(table, "put") or hasattr(table, "values"):
        space = backend.key_space(KEYS)
        (slot,) = space.enter(encode_keys([pa.array([5], pa.int64())])).tolist()
        if hasattr(table, "put"):
            table.put(slot, "a", 1)
        else:
            table.values[slot] = PACKED.to_stored(5) if "name" in changed else 5
            if "ttl" in changed:
                table.values[slot] = 5, 1
            table.changed.append(slot)
        space.leave()
    else:
        _fill(table)
    written = one.checkpoint(backend)
    ask(one.open(written))
    with pytest.raises(TaskFailure) as caught:
        ask_now(one.open(written))
    message = str(caught.value)
    before, _, after = message.partition(", but the job ")
    assert "kept" in before, message
    assert "operator" in before, message
    assert stored in before, message
    assert declared in after, message
    assert "uid" in after, message


def test_other_backends_and_formats_are_refused_for_good(one: OneBackend) -> None:
    (other,) = set(BACKENDS) - {one.kind}
    # The in-memory backend's format is that of canonical savepoints.
    said = "format 0" if other == "hashmap" else f"state.backend.type: {other}"
    for snapshot, message in (
        (checkpoint_pb2.KeyedStateSnapshot(backend=other), said),
        (checkpoint_pb2.KeyedStateSnapshot(backend="future"), "future"),
        (checkpoint_pb2.KeyedStateSnapshot(backend=one.kind, format_version=9), "9"),
        (checkpoint_pb2.KeyedStateSnapshot(backend=one.kind, format_version=1), "1"),
    ):
        with pytest.raises(Unrecoverable, match=r"operator") as caught:
            one.open(snapshot)
        assert message in str(caught.value)


# -- snapshots, memory, end


def _operations(call: Callable[[], Any]) -> tuple[int, Any]:
    """Calls of functions, Python's and others', while something is called."""
    counted = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    gc.collect()
    gc.disable()
    sys.setprofile(count)
    try:
        result = call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counted, result


def test_the_synchronous_part_does_no_work_per_key(one: OneBackend) -> None:
    counted = []
    for size in (20, 2000):
        backend = one.open()
        cells = [Cells(backend, descriptor) for descriptor in (VALUE, LIST, MAP)]
        for turn in range(2):
            add_counts(backend, COUNTS, range(size))
            cells[0].set({key: key for key in range(size)})
            cells[1].set({key: [key] for key in range(size)})
            cells[2].change(_put_three, range(size))
            keys = encode_keys([pa.array(range(size), pa.int64())])
            table = backend.timer_table("timers", KEYS)
            table.register(keys, np.full(size, turn))
            count, snapshot = _operations(lambda b=backend, t=turn: b.snapshot(t))
            counted.append(count)
            one.write(snapshot)
            backend.checkpoint_completed(turn)
    assert counted[2] < counted[0] + 40
    assert counted[3] < counted[1] + 40


def test_too_many_snapshots_under_way_are_declined_and_nothing_is_lost(one: OneBackend) -> None:
    backend = one.open()
    waiting: list[Any] = []

    def take_next() -> None:
        checkpoint_id = len(waiting) + 1
        add_counts(backend, COUNTS, range(checkpoint_id))
        add_counts(backend, COUNTS, [checkpoint_id], checkpoint_id)
        waiting.append(backend.snapshot(checkpoint_id))

    take_next()
    take_next()
    if one.kind == "rocksdb":
        take_next()
    with pytest.raises(CheckpointAborted, match="are still being written") as caught:
        take_next()
    declined = caught.value.checkpoint_id
    assert declined == len(waiting) + 1 > 2
    assert "operator" in caught.value.reason
    backend.checkpoint_aborted(declined)
    written = {number: one.write(each) for number, each in enumerate(waiting, 1)}
    backend.checkpoint_completed(1)
    for number, snapshot in (*written.items(), (declined, one.checkpoint(backend, declined))):
        restored = one.open(snapshot)
        expected = {key: number - key for key in range(number)}
        assert counts_of(restored, COUNTS) == expected
        assert restored.namespaces("counts") == list(range(number + 1))


@pytest.mark.parametrize("in_runs", [False, True])
def test_aborted_checkpoints_make_room_for_the_next(one: OneBackend, *, in_runs: bool) -> None:
    backend = one.open()
    lost = []
    for checkpoint_id in range(1, 9):
        add_counts(backend, COUNTS, [checkpoint_id])
        lost.append(backend.snapshot(checkpoint_id, in_runs=in_runs))
        backend.checkpoint_aborted(checkpoint_id)
    for snapshot in lost:
        with pytest.raises(StreamError, match="discarded"):
            one.write(snapshot)
    restored = one.open(one.checkpoint(backend, 9))
    assert counts_of(restored, COUNTS) == dict.fromkeys(range(1, 9), 1)


def test_a_discarded_snapshot_fails_and_its_changes_join_the_next(one: OneBackend) -> None:
    backend = one.open()
    cells = Cells(backend, VALUE)
    cells.set({1: 1})
    add_counts(backend, COLLECTS, range(5))
    one.checkpoint(backend, 1)
    cells.set({2: 2})
    add_counts(backend, COLLECTS, range(5))
    lost = backend.snapshot(2)
    lost.discard()
    lost.discard()
    with pytest.raises(StreamError, match="discarded"):
        one.write(lost)
    backend.checkpoint_aborted(2)
    backend.checkpoint_aborted(2)
    written = one.checkpoint(backend, 3)
    one.keep_only([written])
    restored = one.open(written)
    assert Cells(restored, VALUE).all() == {1: 1, 2: 2}
    assert counts_of(restored, COLLECTS) == dict.fromkeys(range(5), 2)


def test_close_removes_everything_and_may_be_called_again(one: OneBackend) -> None:
    backend = one.open()
    add_counts(backend, COUNTS, range(10))
    Cells(backend, VALUE).set({1: 1})
    written = one.checkpoint(backend)
    add_counts(backend, COUNTS, range(10))
    frozen = backend.snapshot(2)
    begun = iter(_parts(backend.snapshot(3)))
    backend.close()
    backend.close()
    assert not one.work_directory().exists()
    for attempt in (lambda: one.write(frozen), lambda: list(begun), lambda: backend.snapshot(4)):
        with pytest.raises(StreamError):
            attempt()
    frozen.discard()
    backend.checkpoint_completed(2)
    backend.checkpoint_aborted(3)
    restored = one.open(written)
    assert counts_of(restored, COUNTS) == dict.fromkeys(range(10), 1)


@pytest.mark.parametrize("kind", [pa.string(), pa.int64()], ids=str)
def test_keys_of_dictionaries_keep_their_type(one: OneBackend, kind: pa.DataType) -> None:
    """Restored ones beside new ones too."""
    types, values = [pa.dictionary(pa.int32(), kind)], pa.array([1, 2, 3, 4]).cast(kind)

    def contents() -> InstanceTable:
        return InstanceTable([COUNT], [])

    def add(first: int, stop: int) -> None:
        part = values.slice(first, stop - first)
        keys = encode_keys([part.dictionary_encode().cast(types[0])])
        inputs = Inputs([None], [None], [], None)
        sessions = backend.session_table("sessions", types, 10, contents)
        update = sessions.add(sessions.key_indices(keys), np.arange(len(part)))
        sessions.contents.update(update.of_row, inputs)
        counts = backend.count_table("counts", types, contents)
        indices = counts.key_indices(keys)
        counts.window_index[indices] += 1
        counts.changed(indices)

    backend = one.open()
    add(0, 2)
    backend = one.open(one.checkpoint(backend))
    add(1, 3)
    if one.kind == "rocksdb":
        backend._shrink(everything=True)
    add(2, 4)
    sessions = backend.session_table("sessions", types, 10, contents)
    due: list[Any] = []
    while len(some := sessions.due(100)):
        (keys,) = sessions.keys(some)
        assert keys.type == types[0]
        due += zip(keys.to_pylist(), sessions.contents.rows(some, []).accumulators[0], strict=True)
        sessions.contents.clear(some)
        sessions.remove(some)
    assert sorted(due) == list(zip(values.to_pylist(), [1, 2, 2, 1], strict=True))
    counts = backend.count_table("counts", types, contents)
    indices = counts.key_indices(encode_keys([values.dictionary_encode().cast(types[0])]))
    assert counts.window_index[indices].tolist() == [1, 2, 2, 1]
