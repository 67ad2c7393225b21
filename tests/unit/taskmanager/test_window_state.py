"""Aim: the tables behind windows forget exactly what they are told to, and give memory and numbers back.

Method: random operations against plain dicts, with thresholds small enough that compaction happens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.aggregates.aggregate_layout import GroupColumnSpec
from penstock.streams.windows import sliding
from taskmanager.kernels import AccumulatorKind, encode_keys
from taskmanager.operators.aggregation import AggregateInputs
from taskmanager.operators.operator import Operator
from taskmanager.operators.slice_timeline import SliceTimeline
from taskmanager.state import distinct_count, slot_column, slot_keys, value_log
from taskmanager.state.backend import AggregateDescriptor, KeyedStateBackend
from taskmanager.state.group_columns import group_column
from taskmanager.state.group_table import GroupTable
from taskmanager.state.instances import NumberPool
from taskmanager.state.key_index import KeyIndex
from taskmanager.state.value_log import ValueLog
from tests.support.examples import examples
from tests.support.operator_harness import OperatorHarness

FUNCTIONS = ["first", "last", "min", "max", "count_distinct", "collect_list"]
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)))),
        st.tuples(st.just("clear"), st.lists(st.integers(0, 4), unique=True)),
        st.tuples(
            st.just("move"), st.lists(st.integers(0, 4), min_size=2, max_size=2, unique=True)
        ),
    ),
    max_size=15,
)


@pytest.fixture(autouse=True)
def compact_early(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (distinct_count, slot_column, slot_keys, value_log):
        monkeypatch.setattr(module, "_COMPACT_ABOVE", 3)


@examples(150)
@given(operations=OPERATIONS, function=st.sampled_from(FUNCTIONS))
def test_group_columns_equal_lists(operations: list[Any], function: str) -> None:
    output = {"count_distinct": pa.int64(), "collect_list": pa.list_(pa.string())}
    column = group_column(
        GroupColumnSpec("a", function, "s", pa.string(), output.get(function, pa.string()))
    )
    held: dict[int, list[tuple[int, str]]] = {group: [] for group in range(5)}
    arrived = 0
    for operation, argument in operations:
        if operation == "update":
            groups = np.array([group for group, _ in argument], np.int64)
            values = pa.array([f"v{value}" for _, value in argument], pa.string())
            sequence = np.arange(arrived, arrived + len(argument))
            arrived += len(argument)
            column.update(groups, sequence, values)
            for group, at, value in zip(groups, sequence, values.to_pylist(), strict=True):
                held[int(group)].append((int(at), value))
        elif operation == "clear":
            column.clear(np.array(argument, np.int64))
            for group in argument:
                held[group] = []
        else:
            source, target = argument
            column.merge(column, np.array([source]), np.array([target]))
            column.clear(np.array([source]))
            held[target] = sorted(held[target] + held[source])
            held[source] = []
        found = column.results(np.arange(5)).to_pylist()
        assert found == [_expected(function, [v for _, v in held[g]]) for g in range(5)]
    assert column.memory_bytes >= 0


def _expected(function: str, values: list[str]) -> Any:
    if function == "collect_list":
        return values
    if function == "count_distinct":
        return len(set(values))
    if not values:
        return None
    return {"first": values[0], "last": values[-1], "min": min(values), "max": max(values)}[
        function
    ]


@examples(60)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=12),
    picks=st.lists(st.integers(-1, 300), max_size=30),
)
def test_value_log_gives_back_what_was_appended(lengths: list[int], picks: list[int]) -> None:
    log = ValueLog(pa.string())
    expected: list[str] = []
    for i, length in enumerate(lengths):
        values = [f"{i}-{j}" for j in range(length)]
        assert log.append(pa.array(values, pa.string())) == len(expected)
        expected += values
    positions = np.array([p for p in picks if p < len(expected)], np.int64)
    found = log.take(positions).to_pylist()
    assert found == [None if p < 0 else expected[p] for p in positions]
    log.keep(positions[positions >= 0])
    assert log.take(np.arange(len(log))).to_pylist() == [expected[p] for p in positions if p >= 0]


@examples(60)
@given(
    steps=st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 9), min_size=1, max_size=8)), max_size=15
    )
)
def test_key_index_gives_indices_of_removed_keys_out_again(
    steps: list[tuple[bool, list[int]]],
) -> None:
    index = KeyIndex([pa.int64(), pa.string()])
    held: dict[int, int] = {}
    for is_removal, keys in steps:
        if is_removal:
            keys = sorted({key for key in keys if key in held})
            index.remove(np.array([held.pop(key) for key in keys], np.int64))
        else:
            names = pa.array([f"k{key}" for key in keys])
            slots, _ = index.enter(encode_keys([pa.array(keys), names]))
            for key, number in zip(keys, slots.tolist(), strict=True):
                assert held.setdefault(key, number) == number
        assert len(index) == len(held) == len(set(held.values()))
        assert index.bound <= 10
        numbers, names = index.key_columns(np.array(list(held.values()), np.int64))
        assert numbers.to_pylist() == list(held)
        assert names.to_pylist() == [f"k{key}" for key in held]


def test_number_pool_gives_numbers_out_again() -> None:
    pool = NumberPool()
    first = pool.allocate(5)
    pool.release(first[1:3])
    again = pool.allocate(4)
    assert sorted(again.tolist()) == [1, 2, 5, 6]
    assert pool.bound == 7


def test_backend_keeps_namespaces_apart_and_reuses_memory() -> None:
    harness = OperatorHarness(Operator(), subtask_index=1, parallelism=2)
    backend: KeyedStateBackend = harness.state
    assert (backend.max_parallelism, backend.key_groups) == (128, range(64, 128))
    descriptor = AggregateDescriptor((pa.int64(),), (AccumulatorKind.COUNT,), list)
    table = backend.group_table("slices", 20, descriptor)
    _count(table, [1, 2, 2])
    _count(backend.group_table("slices", 10, descriptor), [5])
    assert backend.namespaces("slices") == [10, 20]
    assert backend.memory_bytes() > 0
    backend.drop("slices", 20)
    backend.drop("slices", 20)
    assert backend.namespaces("slices") == [10]
    fresh = backend.group_table("slices", 30, descriptor)
    assert len(fresh) == 0


def test_chunks_hand_out_everything_once() -> None:
    table = GroupTable((pa.int64(),), (AccumulatorKind.COUNT,), [])
    _count(table, list(range(10)))
    emitted = []
    for rows in table.chunks(4):
        emitted.append(rows.keys[0].to_pylist())
    assert [len(keys) for keys in emitted] == [4, 4, 2]
    assert sorted(key for keys in emitted for key in keys) == list(range(10))


def _count(table: GroupTable, keys: list[int]) -> None:
    inputs = AggregateInputs([None], [None], [], np.empty(0, np.int64))
    table.update(encode_keys([pa.array(keys)]), inputs)


def test_a_late_row_makes_no_slice_live() -> None:
    timeline = SliceTimeline(sliding(10, 5).to_proto())
    timeline.advance(20)
    assert timeline.first_in_time_slice() == 15
    with pytest.raises(AssertionError, match="late row"):
        timeline.add(10)
    timeline.add(15)
    assert timeline.next_due(23) is None
    assert timeline.next_due(24) == 25
