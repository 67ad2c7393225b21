"""Aim: timers that do not fit into memory are as exact as those that do.

Method: random changes of tables whose head is a few timers long, against a plain set; a table many times
as large as the slot's memory; a checkpoint in which timers were still kept in memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.storage.entries.firing_order import firing_order
from penstock.storage.entries.timer_entries import decoded_timers, timer_entries, timer_place
from penstock.storage.key_encoding import KeyBatch
from taskmanager.kernels import encode_keys
from taskmanager.state.hashmap import timer_table
from taskmanager.state.rocksdb import timer_rows
from tests.support.one_backend import OneBackend
from tests.support.rocksdb_cluster import fast_directory

TYPES = [pa.int64()]
FAR = 1 << 62


@pytest.fixture
def one() -> Iterator[OneBackend]:
    with fast_directory() as directory:
        home = OneBackend("rocksdb", directory)
        yield home
        home.close()


def batch(keys: Any) -> KeyBatch:
    return encode_keys([pa.array(keys, pa.int64())])


def test_entries_are_in_the_order_of_firing_and_decodable() -> None:
    generator = random.Random(1)
    for types, values in (
        ([pa.int64()], [[None, *range(-20, 20)]]),
        ([pa.string(), pa.int32()], [["", None, *"abc", "a" * 40], [None, 1, 2]]),
    ):
        columns = [
            pa.array([generator.choice(choices) for _ in range(300)], kind)
            for choices, kind in zip(values, types, strict=True)
        ]
        rows = list(zip(*(column.to_pylist() for column in columns), strict=True))
        times = np.array([generator.choice([-FAR, -1, 0, 1, FAR]) for _ in rows])
        distinct = sorted(
            {
                (row, time): place
                for place, (row, time) in enumerate(zip(rows, times.tolist(), strict=True))
            }.values()
        )
        keys = encode_keys([column.take(pa.array(distinct)) for column in columns])
        times = times[distinct]
        names = timer_entries(7, keys, times).keys.to_list()
        assert names == sorted(names)
        found, found_times = decoded_timers(types, names)
        order = firing_order(times, keys)
        assert found_times.tolist() == times[order].tolist()
        expected = [array.to_pylist() for array in keys.take(order).to_arrays()]
        assert [array.to_pylist() for array in found.to_arrays()] == expected
        places = list(zip(found_times.tolist(), found.hashes.tolist(), strict=True))
        assert [timer_place(name) for name in names] == places


@pytest.mark.parametrize("seed", range(12))
def test_a_short_head_fires_what_a_set_would(
    one: OneBackend, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    generator = random.Random(seed)
    monkeypatch.setattr(timer_rows, "PART_ROWS", generator.choice([1, 2, 5]))
    monkeypatch.setattr(timer_table, "_SLACK", generator.choice([0, 10]))
    backend = one.open()
    expected: set[tuple[int, int]] = set()
    for turn in range(150):
        table = backend.timer_table("timers", TYPES)
        choice, count = generator.random(), generator.randint(1, 12)
        keys = [generator.randrange(9) for _ in range(count)]
        times = [generator.randrange(30) for _ in range(count)]
        if choice < 0.45:
            table.register(batch(keys), np.array(times))
            expected |= set(zip(keys, times, strict=True))
        elif choice < 0.6:
            table.delete(batch(keys), np.array(times))
            expected -= set(zip(keys, times, strict=True))
        elif choice < 0.75:
            _take(table, expected, generator.randrange(25), count)
        elif choice < 0.85:
            backend._shrink(everything=generator.random() < 0.3)
        elif choice < 0.9 and len(backend._queue) < 2:
            lost = backend.snapshot(1000 + turn)
            if generator.random() < 0.5:
                lost.discard()
        elif choice < 0.95:
            backend = one.open(one.checkpoint(backend, turn))
        elif generator.random() < 0.5:
            assert len(table) == len(expected)
        else:
            first, smallest = table.next_time(), min((t for _, t in expected), default=None)
            assert (first is None) == (smallest is None)
            assert first is None or smallest is None or first <= smallest
    _take(backend.timer_table("timers", TYPES), expected, 1000, 1 << 20)
    assert not expected


@pytest.mark.parametrize("in_runs", [False, True])
def test_a_snapshot_says_that_there_are_no_timers(one: OneBackend, *, in_runs: bool) -> None:
    def snapshot() -> Any:
        written = one.write(backend.snapshot(len(marks) + 1, in_runs=in_runs))
        marks.append(written.segments[0].is_empty)
        return written

    marks: list[bool] = []
    backend = one.open()
    table = backend.timer_table("timers", TYPES)
    snapshot()
    table.register(batch([1, 2]), np.array([5, 6]))
    snapshot()
    backend._shrink(everything=True)
    snapshot()
    assert table.take_due(10, 10) is not None
    assert table.next_time() is None
    restored = snapshot()
    assert marks == [True, False, False, True]
    backend = one.open(restored)
    assert backend.timer_table("timers", TYPES).next_time() is None
    snapshot()
    assert marks[-1]


def _take(table: Any, expected: set[tuple[int, int]], up_to: int, limit: int) -> None:
    due = sorted(time for _, time in expected if time <= up_to)[:limit]
    taken: list[tuple[int, int]] = []
    while len(taken) < limit and (part := table.take_due(up_to, limit - len(taken))):
        taken += zip(part[0].to_arrays()[0].to_pylist(), part[1].tolist(), strict=True)
    assert [time for _, time in taken] == due
    assert set(taken) <= expected
    expected -= set(taken)


def test_timers_many_times_as_large_as_memory_stay_within_it(one: OneBackend) -> None:
    """Of the caches' share of 4 MB: 80 bytes and more for each of 400,000 timers would be 32 MB."""
    backend = one.open(memory_bytes=16 << 20)
    ledger, count = backend._environment.memory, 400_000
    generator = np.random.default_rng(5)
    times = generator.permutation(count)
    table = backend.timer_table("timers", TYPES)
    largest = 0
    for start in range(0, count, 8192):
        part = times[start : start + 8192]
        table.register(batch(part * 3), part)
        ledger.check()
        largest = max(largest, ledger.used_bytes())
    one.checkpoint(backend)
    fired = 0
    while (due := table.take_due(count, 8192)) is not None:
        assert due[1].tolist() == list(range(fired, fired + len(due[1])))
        assert (due[0].to_arrays()[0].to_numpy() == due[1] * 3).all()
        fired += len(due[1])
        ledger.check()
        largest = max(largest, ledger.used_bytes())
    assert fired == count
    assert largest < 16 << 20
