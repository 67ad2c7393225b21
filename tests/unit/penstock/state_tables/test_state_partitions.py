"""Aim: the tasks of a reader share a state out without overlap or gap, and types go to Spark and back without loss.

Method: ranges over many sizes, added up; each type of columns there and back.
"""

from __future__ import annotations

import pyarrow as pa
import pytest

import penstock as ps
from penstock.state_tables.carried_columns import converted_batch, spark_schema, spark_type
from penstock.state_tables.opened_state import TablePiece
from penstock.state_tables.state_partitions import (
    StatePartition,
    asked_state,
    key_group_ranges,
    tasks_of,
)


@pytest.mark.parametrize("size_bytes", [0, 1, 99, 100, 101, 999, 10**6])
@pytest.mark.parametrize("groups", [(0, 0), (0, 127), (3, 9)])
def test_ranges_are_the_whole(size_bytes: int, groups: tuple[int, int]) -> None:
    ranges = key_group_ranges(TablePiece(0, *groups), size_bytes, 100)
    assert [g for one in ranges for g in one] == list(range(groups[0], groups[1] + 1))
    assert all(ranges)
    assert len(ranges) == max(1, min(groups[1] - groups[0] + 1, -(-size_bytes // 100)))


def test_every_part_has_one_task() -> None:
    sizes = [5, 0, 95, 1, 300, 0, 40, 60, 1]
    parts = [StatePartition(place, 0, 1, size) for place, size in enumerate(sizes)]
    tasks = tasks_of(parts, 100)
    assert [[one.size_bytes for one in task] for task in tasks] == [
        [5, 0, 95],
        [1],
        [300],
        [0, 40, 60],
        [1],
    ]
    assert tasks_of([], 100) == []


def test_options_that_are_missing_or_unknown_are_named() -> None:
    with pytest.raises(ps.StateError, match="read without state"):
        asked_state({"path": "p", "uid": "u"})
    with pytest.raises(ps.StateError, match="no option filter, range; there are uid, state"):
        asked_state({"path": "p", "uid": "u", "state": "s", "filter": "true", "range": "3"})


def test_what_spark_cannot_have_is_named() -> None:
    schema = pa.schema([("k", pa.int64()), ("value", pa.month_day_nano_interval())])
    with pytest.raises(ps.StateError, match=r"state 's': column 'value' is month_day_nano"):
        spark_schema(schema, "state 's'")
    whole = pa.record_batch({"at": pa.array([1_001], pa.timestamp("ns"))})
    with pytest.raises(ps.StateError, match=r"column 'at'.*would lose data"):
        converted_batch(whole, spark_schema(whole.schema, "state"), "state")
    digits = pa.record_batch({"sum": pa.array([10**40], pa.decimal256(75, 0))})
    with pytest.raises(ps.StateError, match="column 'sum'"):
        converted_batch(digits, spark_schema(digits.schema, "state"), "state")


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.uint64(), [0, 2**64 - 1, None]),
        (pa.decimal256(75, 2), [-1, 10**30, None]),
        (pa.time32("s"), [1, 86_399]),
        (pa.time64("us"), [1]),
        (pa.duration("us"), [-5, 5]),
        (pa.binary(2), [b"ab", None]),
        (pa.large_string(), ["x"]),
        (pa.timestamp("ms", "Europe/Berlin"), [-1, 1]),
        (pa.list_(pa.uint8()), [[1, None], None, []]),
    ],
    ids=str,
)
def test_types_come_back(kind: pa.DataType, values: list[object]) -> None:
    there = pa.record_batch({"value": pa.array(values, kind)})
    carried = converted_batch(there, spark_schema(there.schema, "state"), "state")
    assert carried.schema.field(0).type == spark_type(kind)
    assert converted_batch(carried, there.schema, "state") == there
