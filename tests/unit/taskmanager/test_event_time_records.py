"""Aim: what has no event time is a bad record under its operator's own policy; all else gets the right one.

Method: the operator alone; expected times come from Python's integers and datetimes.
"""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import BadRecord
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME, schema_to_bytes
from taskmanager.operators.event_time import EventTimeOperator
from tests.support.operator_harness import OperatorHarness

LIMIT = 2**62


def harness(kind: pa.DataType, on_error: str = "fail") -> OperatorHarness:
    schema = pa.schema([("i", pa.int64()), ("t", kind)])
    action = {"fail": graph_pb2.ERROR_ACTION_FAIL, "skip": graph_pb2.ERROR_ACTION_SKIP}.get(
        on_error, graph_pb2.ERROR_ACTION_SIDE_OUTPUT
    )
    tag = on_error if action == graph_pb2.ERROR_ACTION_SIDE_OUTPUT else ""
    spec = graph_pb2.Operator(
        name="times",
        event_time=graph_pb2.EventTimeSpec(column="t"),
        on_error=graph_pb2.ErrorPolicy(action=action, tag=tag),
        input_schema=schema_to_bytes(schema),
        output_schema=schema_to_bytes(schema.append(pa.field(EVENT_TIME, pa.int64(), False))),
    )
    return OperatorHarness(EventTimeOperator(spec))


def push(driven: OperatorHarness, array: pa.Array) -> None:
    driven.push(pa.record_batch({"i": pa.array(range(len(array)), pa.int64()), "t": array}))


def event_times(array: pa.Array) -> list[int]:
    driven = harness(array.type)
    push(driven, array)
    return [time for batch in driven.batches for time in batch[EVENT_TIME].to_pylist()]


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([-LIMIT, 0, LIMIT], pa.int64()), [-LIMIT, 0, LIMIT]),
        (pa.array([-5, 7], pa.int8()), [-5, 7]),
        (pa.array([0, LIMIT], pa.uint64()), [0, LIMIT]),
        (pa.array([-1, 2], pa.timestamp("s")), [-1000, 2000]),
        (pa.array([-1500, 1500], pa.timestamp("ms", "Europe/Berlin")), [-1500, 1500]),
        (pa.array([-1, 2500999, -(2**63)], pa.timestamp("us")), [-1, 2500, -(2**63) // 1000]),
        (pa.array([-1, 2**63 - 1], pa.timestamp("ns", "UTC")), [-1, (2**63 - 1) // 10**6]),
        (pa.array([dt.date(1969, 12, 31), dt.date(1970, 1, 2)]), [-86_400_000, 86_400_000]),
        (pa.array([2**31 - 1], pa.int32()).view(pa.date32()), [(2**31 - 1) * 86_400_000]),
        (pa.array([86_400_000], pa.int64()).view(pa.date64()), [86_400_000]),
    ],
)
def test_event_times(array: pa.Array, expected: list[int]) -> None:
    assert event_times(array) == expected
    assert event_times(array.slice(1)) == expected[1:]


NONE_OF_THEM: list[tuple[pa.Array, str]] = [
    (pa.array([None], pa.int64()), "is null"),
    (pa.array([None], pa.timestamp("us")), "is null"),
    (pa.array([None], pa.date32()), "is null"),
    (pa.array([None], pa.float64()), "is null"),
    (pa.array([1.0], pa.float64()), r"is 1\.0 \(double\).*\.cast\('int64'\)"),
    (pa.array([2.5], pa.float32()), r"is 2\.5 \(float\)"),
    (pa.array([Decimal("1.5")]), r"is 1\.5 \(decimal128"),
    (pa.array([LIMIT + 1], pa.int64()), "2\\*\\*62 ms"),
    (pa.array([-(2**63)], pa.int64()), "2\\*\\*62 ms"),
    (pa.array([2**64 - 1], pa.uint64()), "18446744073709551615 .*2\\*\\*62 ms"),
    (pa.array([2**63 - 1], pa.timestamp("s")), "2\\*\\*62 ms"),
    (pa.array([-(LIMIT // 1000) - 1], pa.timestamp("s", "UTC")), "2\\*\\*62 ms"),
    (pa.array([2**63 - 1], pa.timestamp("ms")), "2\\*\\*62 ms"),
    (pa.array([2**63 - 1], pa.int64()).view(pa.date64()), "2\\*\\*62 ms"),
]


@pytest.mark.parametrize(("bad", "message"), NONE_OF_THEM)
def test_what_has_none_is_a_bad_record(bad: pa.Array, message: str) -> None:
    good: list[pa.Array] = []
    if pa.types.is_integer(bad.type) or pa.types.is_timestamp(bad.type):
        good = [pa.array([1], bad.type)]
    array = pa.concat_arrays([*good, bad, *good])
    kept: list[Any] = [0, 2][: 2 * len(good)]

    with pytest.raises(BadRecord, match=message) as failure:
        push(harness(bad.type), array)
    assert failure.value.operator == "times"
    assert f"'i': {len(good)}" in failure.value.row

    skipped = harness(bad.type, "skip")
    push(skipped, array)
    assert [b["i"].to_pylist() for b in skipped.batches] == ([kept] if kept else [])
    assert skipped.counters.bad_records == 1

    aside = harness(bad.type, "bad")
    push(aside, array)
    assert [b["i"].to_pylist() for b in aside.batches] == ([kept] if kept else [])
    (side,) = [e for e in aside.emitted if not isinstance(e, pa.RecordBatch) and hasattr(e, "tag")]
    assert side.batch.schema.names == ["i", "t", "error"]
    assert side.batch["i"].to_pylist() == [len(good)]
    assert side.batch["t"].equals(bad)
