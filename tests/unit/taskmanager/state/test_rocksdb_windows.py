"""Aim: sessions and count windows that do not fit into memory are as exact as those that do.

Method: operators on a backend that hardly has a cache beside the same ones in memory, with late rows,
restarts and either kind of contents; sessions many times as large as memory; checkpoints in which they
were still kept in memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.aggregates.aggregate_layout import GroupColumnSpec
from penstock.rows.schema import EVENT_TIME
from penstock.state.base import Ttl
from penstock.storage.key_groups import key_group_of, key_group_range
from penstock.streams.windows import Window, count_window, session
from taskmanager.kernels import AccumulatorKind, encode_keys
from taskmanager.operators.window_aggregate import window_aggregate_operator
from taskmanager.state.group_columns import group_column
from taskmanager.state.hashmap.store import HashMapStateBackend
from taskmanager.state.instances import InstanceTable
from taskmanager.state.rocksdb import count_rows, session_rows
from tests.support.backend_history import Inputs
from tests.support.one_backend import KEYS, OneBackend
from tests.support.operator_harness import OperatorHarness
from tests.support.rocksdb_cluster import fast_directory, starved_backend
from tests.support.window_specs import NUMBERS, OBJECTS, batch_of, window_aggregate_spec

AGGREGATES = {"n": NUMBERS["n"], "last_x": OBJECTS["last_x"]}


@pytest.fixture
def directory() -> Iterator[Path]:
    with fast_directory() as path:
        yield path


@pytest.mark.parametrize(("lateness", "seed"), [(0, 0), (25, 1)])
def test_sessions_that_are_read_back_fire_as_those_in_memory(
    directory: Path, lateness: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_rows, "PART_ROWS", 3)
    _compare(directory, session(20), lateness, random.Random(seed))


@pytest.mark.parametrize("seed", range(3))
def test_count_windows_that_are_read_back_fill_as_those_in_memory(
    directory: Path, seed: int
) -> None:
    _compare(directory, count_window(4), 0, random.Random(seed))


@pytest.mark.parametrize("seed", range(3))
def test_keys_of_count_windows_that_are_read_back_expire_as_those_in_memory(
    directory: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(count_rows, "_SWEPT_ROWS", 5)
    _compare(directory, count_window(4, ttl=Ttl("3s")), 0, random.Random(seed))


@pytest.mark.parametrize("rows_each", [1, 4, 5])
def test_expired_keys_that_memory_has_forgotten_leave_the_database(
    directory: Path, rows_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(count_rows, "_SWEPT_ROWS", 50)
    window = count_window(4, ttl=Ttl("1h"))
    spec = window_aggregate_spec(window.to_proto(), ("k",), AGGREGATES)
    harness = OperatorHarness(
        window_aggregate_operator(spec), backend=starved_backend, work_directory=directory
    )
    for _ in range(rows_each):
        for start in range(0, 1000, 100):
            rows = [
                {"k": k, "x": 1, "f": 1.0, "s": "a", EVENT_TIME: 0}
                for k in range(start, start + 100)
            ]
            harness.push(batch_of(rows))
    harness.snapshot()
    database: Any = harness.state

    def stored() -> int:
        return sum(len(names) for names, _ in database._database.scan(b"", b"\xff" * 9))

    assert stored() == 1000
    harness.advance_clock(harness.clock.now_ms() + 2 * 3_600_000)
    harness.snapshot()
    assert stored() == 0
    harness.close()


def _compare(directory: Path, window: Window, lateness: int, rng: random.Random) -> None:
    """The same rows, watermarks and restarts on both backends."""
    spec = window_aggregate_spec(window.to_proto(allowed_lateness=lateness), ("k",), AGGREGATES)

    def start(number: int) -> list[OperatorHarness]:
        return [
            OperatorHarness(
                window_aggregate_operator(spec),
                backend=backend,
                work_directory=directory / f"{number}-{index}",
                restored=[taken[index]] if taken else [],
            )
            for index, backend in enumerate((HashMapStateBackend, starved_backend))
        ]

    taken: list[Any] = []
    harnesses, found, watermark = start(0), [[], []], 0
    now_ms = harnesses[0].clock.now_ms()
    for turn in range(60):
        rows = [
            {"k": rng.randrange(40), "x": turn, "f": 1.0, "s": "a", EVENT_TIME: watermark + t}
            for t in (rng.randrange(-30, 60) for _ in range(rng.randint(1, 12)))
        ]
        watermark += rng.randrange(15)
        now_ms += rng.choice([1, 100, 1000])
        for harness in harnesses:
            harness.advance_clock(now_ms)
            harness.push(batch_of(rows))
            harness.watermark(watermark)
        if rng.random() < 0.1:
            taken = [harness.snapshot() for harness in harnesses]
            _collect(harnesses, found)
            harnesses = start(turn + 1)
    for harness in harnesses:
        harness.end()
    _collect(harnesses, found)
    assert found[0]
    assert sorted(found[0]) == sorted(found[1])


def _collect(harnesses: list[OperatorHarness], found: list[list[str]]) -> None:
    for rows, harness in zip(found, harnesses, strict=True):
        rows += [repr(sorted(row.items())) for row in harness.take_rows()]


def _contents() -> InstanceTable:
    texts = GroupColumnSpec("all", "collect_list", "s", pa.string(), pa.list_(pa.string()))
    return InstanceTable([AccumulatorKind.COUNT], [group_column(texts)])


def _add(table: Any, keys: np.ndarray, times: np.ndarray, texts: list[str]) -> None:
    update = table.add(table.key_indices(encode_keys([pa.array(keys)])), times)
    if len(update.source):
        table.contents.merge(update.source, update.target)
    inputs = Inputs([None], [None], [pa.array(texts)], np.arange(len(texts)))
    table.contents.update(update.of_row, inputs)


def test_sessions_many_times_as_large_as_memory_stay_within_it(directory: Path) -> None:
    """60,000 sessions of two rows with 400 bytes each are 48 MB, the slot's memory is 16."""
    one = OneBackend("rocksdb", directory)
    backend = one.open(memory_bytes=16 << 20)
    ledger, number, size, largest = backend._environment.memory, 60_000, 1000, 0
    for turn in range(2):
        for start in range(0, number, size):
            keys = np.arange(start, start + size)
            table = backend.session_table("sessions", KEYS, 100, _contents)
            _add(table, keys, keys + 50 * turn, [f"{key:0400}" for key in keys.tolist()])
            ledger.check()
            largest = max(largest, ledger.used_bytes())
        one.checkpoint(backend, turn)
    fired = 0
    table = backend.session_table("sessions", KEYS, 100, _contents)
    for watermark in (number // 2, 2 * number):
        while len(due := table.due(watermark)):
            rows = table.contents.rows(due, table.keys(due))
            keys = rows.keys[0].to_pylist()
            assert rows.accumulators[0].tolist() == [2] * len(due)
            assert rows.columns[0].to_pylist() == [[f"{key:0400}"] * 2 for key in keys]
            assert (table.ends(due) - 1 <= watermark).all()
            fired += len(due)
            table.contents.clear(due)
            table.remove(due)
            ledger.check()
            largest = max(largest, ledger.used_bytes())
    assert fired == number
    assert table.next_end() is None
    one.checkpoint(backend, 2)
    left = [len(names) for names, _ in backend._database.scan(b"", b"\xff" * 9)]
    assert not left
    assert largest < 16 << 20
    one.close()


def test_windows_go_to_the_subtasks_of_their_keys(directory: Path) -> None:
    one = OneBackend("rocksdb", directory)
    backend = one.open()
    keys = np.arange(300)
    _add(backend.session_table("sessions", KEYS, 10, _contents), keys, keys, list(map(str, keys)))
    counts = backend.count_table("counts", KEYS, _contents)
    indices = counts.key_indices(encode_keys([pa.array(keys)]))
    counts.filled[indices], counts.window_index[indices] = 1, keys
    counts.instance[indices] = counts.numbers.allocate(len(keys))
    texts = pa.array(map(str, keys))
    counts.contents.update(counts.instance[indices], Inputs([None], [None], [texts], keys))
    counts.changed(indices)
    written = [one.checkpoint(backend)]
    for parallelism in (1, 3, 2):
        following, found = [], []
        for index in range(parallelism):
            backend = one.open(*written, subtask_index=index, parallelism=parallelism)
            owned = key_group_range(index, parallelism, backend.max_parallelism)
            hashes = encode_keys([pa.array(keys)]).hashes
            groups = key_group_of(hashes, backend.max_parallelism)
            mine = keys[(groups >= owned.start) & (groups < owned.stop)]
            counts = backend.count_table("counts", KEYS, _contents)
            indices = counts.key_indices(encode_keys([pa.array(mine)]))
            assert counts.window_index[indices].tolist() == mine.tolist()
            held = counts.contents.rows(counts.instance[indices], []).columns[0].to_pylist()
            assert held == [[str(key)] for key in mine]
            backend.session_table("sessions", KEYS, 10, _contents)
            following.append(one.checkpoint(backend, 5))
            assert {table.kind for table in following[-1].tables} == {
                "sessions",
                "counts",
                "timers",
            }
            sessions = backend.session_table("sessions", KEYS, 10, _contents)
            while len(due := sessions.due(1000)):
                found += sessions.keys(due)[0].to_pylist()
                sessions.contents.clear(due)
                sessions.remove(due)
        assert sorted(found) == keys.tolist()
        written = following
    one.close()


def test_a_writer_on_another_thread_leaves_the_keys_of_counts_alone(directory: Path) -> None:
    one = OneBackend("rocksdb", directory)
    counts: Any = one.open().count_table("counts", KEYS, _contents)
    counts.drop_empty_keys()
    for filled in (1, 0):
        indices = counts.key_indices(encode_keys([pa.array([7, 8])]))
        counts.filled[indices] = [filled, 1]
        counts.changed(indices)
        counts.leave(indices)
        part = counts.freeze()
        part.entries()
        part.written()  # as the thread does that writes a snapshot, whatever the mailbox does meanwhile
        part.release()
    assert len(counts) == 2
    assert counts.freeze() is None
    assert len(counts) == 1
    one.close()
