"""Aim: aggregates that are more than numbers are as exact where they do not fit into memory.

Method: random changes of tables that forget everything now and then, against dicts; a table many times as
large as memory; tables of checkpoints that kept them in memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.aggregates.aggregate_layout import GroupColumnSpec
from taskmanager.kernels import AccumulatorKind, encode_keys
from taskmanager.state.backend import AggregateDescriptor
from taskmanager.state.group_columns import group_column
from tests.support.backend_history import Inputs
from tests.support.one_backend import KEYS, OneBackend
from tests.support.rocksdb_cluster import fast_directory

SPECS = [
    GroupColumnSpec("all", "collect_list", "s", pa.string(), pa.list_(pa.string())),
    GroupColumnSpec("different", "count_distinct", "s", pa.string(), pa.int64()),
    GroupColumnSpec("newest", "last", "s", pa.string(), pa.string()),
    GroupColumnSpec("least", "min", "s", pa.string(), pa.string()),
]
BOTH = AggregateDescriptor(KEYS, (AccumulatorKind.COUNT,), lambda: list(map(group_column, SPECS)))
COLUMNS = AggregateDescriptor(KEYS, (), lambda: list(map(group_column, SPECS)))
Model = dict[int, list[str]]


@pytest.fixture
def one() -> Iterator[OneBackend]:
    with fast_directory() as directory:
        home = OneBackend("rocksdb", directory)
        yield home
        home.close()


def keys_of(keys: Any) -> Any:
    return encode_keys([pa.array(keys, pa.int64())])


def add(table: Any, keys: list[int], texts: list[str], first: int, descriptor: Any) -> None:
    numbers: list[Any] = [None] * len(descriptor.kinds)
    columns = [pa.array(texts, pa.string())] * len(SPECS)
    sequence = np.arange(first, first + len(keys))
    table.update(keys_of(keys), Inputs(numbers, numbers, columns, sequence))


def found_in(rows: Any) -> dict[int, Any]:
    columns = [column.to_pylist() for column in rows.columns]
    if rows.accumulators:
        assert rows.accumulators[0].tolist() == [len(texts) for texts in columns[0]]
    return dict(zip(rows.keys[0].to_pylist(), zip(*columns, strict=True), strict=True))


def expected_of(model: Model) -> dict[int, Any]:
    return {key: (ts, len(set(ts)), ts[-1], min(ts)) for key, ts in model.items()}


@pytest.mark.parametrize("descriptor", [BOTH, COLUMNS], ids=["with numbers", "without"])
@pytest.mark.parametrize("seed", range(5))
def test_tables_that_forget_hold_what_dicts_would(
    one: OneBackend, seed: int, descriptor: AggregateDescriptor
) -> None:
    generator, number = random.Random(seed), 0
    backend = one.open()
    models: dict[int, Model] = {}
    for turn in range(90):
        choice, name = generator.random(), generator.randrange(3)
        table = backend.group_table("state", name, descriptor)
        model = models.setdefault(name, {})
        if choice < 0.45:
            keys = [generator.randrange(15) for _ in range(generator.randint(1, 8))]
            texts = [generator.choice("abcdef") * generator.randint(0, 3) for _ in keys]
            add(table, keys, texts, number, descriptor)
            number += len(keys)
            for key, text in zip(keys, texts, strict=True):
                model.setdefault(key, []).append(text)
        elif choice < 0.6:
            assert len(table) == len(model)
            asked = keys_of(range(20))
            assert found_in(table.rows(table.keys(asked))) == expected_of(model)
        elif choice < 0.75:
            backend._shrink(everything=generator.random() < 0.5)
        elif choice < 0.8:
            backend.drop("state", name)
            models[name] = {}
        elif choice < 0.9:
            _emit(backend, name, model, generator, descriptor)
            backend.drop("state", name)
            models[name] = {}
        else:
            backend = one.open(one.checkpoint(backend, turn))
    merged = backend.group_table("merged", 0, descriptor)
    for name in sorted(models):
        merged.merge(backend.group_table("state", name, descriptor))
        backend._shrink(everything=True)
    everything = sorted({key for model in models.values() for key in model})
    assert sorted(merged.keys().to_arrays()[0].to_pylist()) == everything
    rows = found_in(merged.rows(keys_of(everything))) if everything else {}
    for key in everything:
        texts = [text for name in sorted(models) for text in models[name].get(key, [])]
        assert sorted(rows[key][0]) == sorted(texts)
        assert rows[key][1] == len(set(texts))


def _emit(
    backend: Any,
    name: int,
    model: Model,
    generator: random.Random,
    descriptor: AggregateDescriptor,
) -> None:
    """Hands out all rows, whatever goes out of memory meanwhile."""
    left = expected_of(model)
    table = backend.group_table("state", name, descriptor)
    for rows in table.chunks(generator.randint(1, 4)):
        for key, row in found_in(rows).items():
            assert left.pop(key) == row
        if generator.random() < 0.2:
            backend._shrink(everything=True)
    assert not left


def test_aggregates_go_to_the_subtasks_of_their_keys(one: OneBackend) -> None:
    backend = one.open()
    texts = [str(key % 7) for key in range(200)]
    add(backend.group_table("state", 3, BOTH), list(range(200)), texts, 0, BOTH)
    written = [one.checkpoint(backend)]
    for parallelism in (1, 3, 2):
        following, found = [], {}
        for index in range(parallelism):
            backend = one.open(*written, subtask_index=index, parallelism=parallelism)
            table = backend.group_table("state", 3, BOTH)
            following.append(one.checkpoint(backend, 2))
            assert {kept.kind for kept in following[-1].tables} == {"group"}
            for rows in table.chunks(50):
                found |= found_in(rows)
        assert found == expected_of({key: [text] for key, text in enumerate(texts)})
        written = following


def test_aggregates_many_times_as_large_as_memory_stay_within_it(one: OneBackend) -> None:
    """60,000 keys with two texts of 400 bytes are 48 MB, the slot's memory is 16."""
    lists = AggregateDescriptor(KEYS, (), lambda: [group_column(SPECS[0])])
    backend, number, size, largest = one.open(memory_bytes=16 << 20), 60_000, 1000, 0
    ledger = backend._environment.memory
    for turn in range(2):
        for start in range(0, number, size):
            keys = list(range(start, start + size))
            texts = pa.array([f"{key:0400}" for key in keys])
            table = backend.group_table("state", 0, lists)
            table.update(keys_of(keys), Inputs([], [], [texts], np.array(keys) + turn * number))
            ledger.check()
            largest = max(largest, ledger.used_bytes())
        one.checkpoint(backend, turn)
    seen = 0
    for rows in backend.group_table("state", 0, lists).chunks(1000):
        for key, texts in zip(rows.keys[0].to_pylist(), rows.columns[0].to_pylist(), strict=True):
            assert texts == [f"{key:0400}"] * 2
            seen += 1
        largest = max(largest, ledger.used_bytes())
    assert seen == number
    assert largest < 16 << 20
