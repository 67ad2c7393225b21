"""Aim: where nobody reads which count window it was, a key between two windows leaves nothing behind, and no row is lost
or counted twice for it.

Method: through the harness, with both backends: the size of snapshots, and random rows with restores against a model; the table
by itself for what it tells snapshots.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock as ps
import penstock.testing as pt
from penstock.graph.plan_text import what_grows
from penstock.storage.run_merge import latest
from taskmanager.kernels import encode_keys
from taskmanager.state.count_table import CountTable
from taskmanager.state.value_log import GroupedLog

SCHEMA = {"k": int, "v": int}


def _windows(stream: Any) -> Any:
    return stream.key_by("k").window(ps.count_window(3)).aggregate(total=ps.sum("v")).uid("windows")


def unnumbered(stream: Any) -> Any:
    return _windows(stream).select("k", "total")


def reduced(stream: Any) -> Any:
    window = stream.key_by("k").window(ps.count_window(3))
    return (
        window.reduce(lambda a, b: {"k": a.k, "v": a.v + b.v})
        .uid("windows")
        .select("k", total=ps.col("v"))
    )


def _filled(h: pt.Harness, keys: range) -> None:
    for _ in range(3):
        h.push_many([{"k": k, "v": 1} for k in keys])


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
@pytest.mark.parametrize("build", [unnumbered, reduced])
def test_keys_between_two_windows_are_not_in_snapshots(build: Any, backend: Any) -> None:
    sizes = []
    for count in (10, 3000):
        with pt.harness(build, schema=SCHEMA, backend=backend) as h:
            _filled(h, range(count))
            assert len(h.take()) == count
            sizes.append(len(h.snapshot()))
    assert sizes[1] < sizes[0] + 5_000


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_the_index_goes_on_where_it_is_read(backend: Any) -> None:
    with pt.harness(_windows, schema=SCHEMA, backend=backend) as h:
        _filled(h, range(2))
        _filled(h, range(2))
        assert sorted(row["window_index"] for row in h.take()) == [0, 0, 1, 1]
        snapshot = h.snapshot()
    with pt.harness(_windows, schema=SCHEMA, backend=backend, restore=snapshot) as h:
        _filled(h, range(2))
        assert [row["window_index"] for row in h.take()] == [2, 2]


def _notes(env: ps.Environment) -> list[str]:
    return [one["note"] for v in env.plan().to_dict()["vertices"] for one in v["operators"]]


@pytest.mark.parametrize(
    ("build", "ttl", "is_noted"),
    [
        (_windows, None, True),
        (unnumbered, None, False),
        (_windows, ps.Ttl("7d"), False),
    ],
)
@pytest.mark.parametrize("is_endless", [True, False])
def test_the_plan_and_the_log_say_what_keeps_every_key(
    build: Any,
    ttl: Any,
    is_noted: bool,
    is_endless: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(ps, "count_window", partial(ps.count_window, ttl=ttl))
    with ps.Environment("127.0.0.1:1") as env:
        if is_endless:
            rows = env.read_json(tmp_path, schema=SCHEMA, watch="1s")
        else:
            rows = env.from_rows([{"k": 1, "v": 1}], schema=SCHEMA)
        build(rows).discard()
        noted = [note for note in _notes(env) if "every key there has ever been" in note]
        assert len(noted) == is_noted
        assert len(what_grows(env.plan().graph)) == (is_noted and is_endless)


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
@pytest.mark.parametrize("before", [unnumbered, _windows])
def test_no_row_is_lost_or_counted_twice(backend: Any, before: Any) -> None:
    numbers = random.Random(5)
    waiting: dict[int, list[int]] = {}
    snapshot = None
    for turn in range(8):
        build = before if turn < 2 else unnumbered
        found: Counter[tuple[int, int]] = Counter()
        expected: Counter[tuple[int, int]] = Counter()
        with pt.harness(build, schema=SCHEMA, backend=backend, restore=snapshot) as h:
            for _ in range(12):
                rows = [
                    {"k": numbers.randrange(12), "v": numbers.randrange(100)}
                    for _ in range(numbers.randrange(1, 20))
                ]
                h.push_many(rows)
                for row in rows:
                    window = waiting.setdefault(row["k"], [])
                    window.append(row["v"])
                    if len(window) == 3:
                        expected[row["k"], sum(waiting.pop(row["k"]))] += 1
                found.update((row["k"], row["total"]) for row in h.take())
                if numbers.random() < 0.4:
                    snapshot = h.snapshot(complete=numbers.random() < 0.5)
            snapshot = h.snapshot()
        assert found == expected


def _table() -> CountTable:
    table = CountTable([pa.int64()], GroupedLog(pa.int64()))
    table.drop_empty_keys()
    return table


def _give(table: CountTable, key: int, filled: int) -> None:
    indices = table.key_indices(encode_keys([pa.array([key], pa.int64())]))
    table.filled[indices] = filled
    table.changed(indices)
    table.leave(indices)


def _rows(table: CountTable, since: int) -> list[tuple[bool, int]]:
    batches = table.seal(since, 128).batches()
    return sorted((row["is_deleted"], row["k"]) for batch in batches for row in _named(batch))


def _named(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    deleted, keys = batch.column(1).to_pylist(), batch.column(2).to_pylist()
    return [{"is_deleted": gone, "k": key} for gone, key in zip(deleted, keys, strict=True)]


def test_a_key_that_no_snapshot_knows_goes_at_once() -> None:
    table = _table()
    for key in range(1000):
        _give(table, key, 1)
        _give(table, key, 0)
    assert len(table) == 0
    assert len(table.filled) < 1000, "indices are given out again"
    assert _rows(table, 0) == []


def test_a_key_that_snapshots_know_goes_when_they_have_been_told() -> None:
    table = _table()
    _give(table, 7, 2)
    _give(table, 8, 2)
    assert _rows(table, 0) == [(False, 7), (False, 8)]
    _give(table, 7, 0)
    assert len(table) == 2
    assert _rows(table, 1) == [(True, 7)]
    assert _rows(table, 1) == [(True, 7)], "a snapshot that was given up joins the next"
    table.forget(1)
    assert len(table) == 2
    table.forget(2)
    assert len(table) == 1
    _give(table, 7, 1)
    assert _rows(table, 3) == [(False, 7)]


def test_empty_keys_of_before_go() -> None:
    numbered = CountTable([pa.int64()], GroupedLog(pa.int64()))
    _give(numbered, 7, 0)
    _give(numbered, 8, 1)
    numbered.instance[1:2] = numbered.numbers.allocate(1)
    numbered.contents.append(np.array([0]), np.array([1]), pa.array([5]))  # type: ignore[attr-defined]
    table = CountTable([pa.int64()], GroupedLog(pa.int64()))
    batches = list(numbered.seal(0, 128).batches())
    assert len(list(latest(batches, ["key_0"]))) == 1
    table.load(batches, 2)
    assert len(table) == 2
    table.drop_empty_keys()
    assert _rows(table, 0) == [(False, 8)]
    table.forget(1)
    assert len(table) == 1


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_a_key_between_two_windows_costs_little_where_its_index_is_read(backend: Any) -> None:
    """8 bytes for the index, and the key, in a snapshot: some dozens of bytes in all."""
    sizes = []
    for count in (1_000, 31_000):
        with pt.harness(_windows, schema=SCHEMA, backend=backend) as h:
            for _ in range(3):
                rows = pa.table({"k": range(count), "v": [1] * count})
                h.push_many(rows.to_pylist())
            h.take()
            sizes.append(len(h.snapshot()))
    assert (sizes[1] - sizes[0]) / 30_000 < 100
