"""Aim: rows come out in order, each once, however few of them fit into memory, whatever their types, nulls and NaN.

Method: drawn batches against Python's sort; few runs may be merged at a time, so that they are merged in several steps.
"""

from __future__ import annotations

import math
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import TaskFailure
from penstock.pb import graph_pb2
from taskmanager.operators.persisted import PersistOperator
from taskmanager.operators.row_sorter import RowSorter
from tests.support.operator_harness import OperatorHarness

SCHEMA = pa.schema([("x", pa.float64()), ("text", pa.string()), ("row", pa.int64())])
ROWS = st.tuples(
    st.one_of(st.none(), st.just(math.nan), st.integers(-3, 3).map(float)),
    st.one_of(st.none(), st.sampled_from(["", "a", "ä", "b"])),
)


def order(row: dict[str, Any]) -> tuple[Any, ...]:
    x, text = row["x"], row["text"]
    is_nan = x is not None and math.isnan(x)
    place = 2 if x is None else 1 if is_nan else 0
    return place, 0.0 if place else x, text is None, (text or "").encode()


@given(
    st.lists(st.lists(ROWS, min_size=1, max_size=7), max_size=12),
    st.sampled_from([1, 200, 1 << 20]),
    st.integers(2, 4),
)
def test_rows_come_in_order_each_once(
    drawn: list[list[tuple[Any, Any]]], memory_bytes: int, fan_in: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        sorter = RowSorter(["x", "text"], Path(directory) / "runs", memory_bytes, fan_in)
        numbered = [
            [{"x": x, "text": text, "row": 100 * b + i} for i, (x, text) in enumerate(rows)]
            for b, rows in enumerate(drawn)
        ]
        for rows in numbered:
            sorter.add(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
        out = [row for batch in sorter.ordered() for row in batch.to_pylist()]
        sorter.close()
        assert not (Path(directory) / "runs").exists()
    assert [order(row) for row in out] == sorted(order(row) for rows in numbered for row in rows)
    assert sorted(row["row"] for row in out) == [row["row"] for rows in numbered for row in rows]


def test_no_more_is_in_memory_than_a_batch_of_each_run(tmp_path: Path) -> None:
    before = pa.total_allocated_bytes()
    sorter = RowSorter(["n"], tmp_path / "runs", memory_bytes=1 << 20, fan_in=8)
    generator = np.random.default_rng(5)
    count = 0
    for _ in range(100):  # 26 MB in 25 runs
        n = generator.integers(0, 1 << 40, 16_384)
        sorter.add(pa.RecordBatch.from_pydict({"n": n, "value": n}))
        count += len(n)
        assert pa.total_allocated_bytes() - before < 16 << 20
    last, seen = -1, 0
    for batch in sorter.ordered():
        values = batch["n"].to_numpy()
        assert last <= values[0]
        assert (np.diff(values) >= 0).all()
        assert batch["n"].equals(batch["value"])
        last, seen = values[-1], seen + len(values)
        assert pa.total_allocated_bytes() - before < 16 << 20
    assert seen == count
    sorter.close()


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()  # no directory can be made there
    sorter = RowSorter(["n"], tmp_path / "runs", memory_bytes=1)
    with pytest.raises(
        TaskFailure, match=r"cannot be sorted: .*runs cannot be written to.*make room"
    ):
        sorter.add(pa.RecordBatch.from_pydict({"n": [1]}))


def test_the_sink_gives_out_its_rows_when_all_are_there(tmp_path: Path) -> None:
    sink = graph_pb2.SinkSpec(persist=graph_pb2.PersistSink(name="x", sort_by=["n"]))
    harness = OperatorHarness(
        PersistOperator(graph_pb2.Operator(sink=sink)), work_directory=tmp_path / "work"
    )
    for numbers in ([3, 1], [2]):
        assert list(harness.operator.process(pa.RecordBatch.from_pydict({"n": numbers}))) == []
    (out,) = list(harness.operator.on_end_of_data())
    assert out.to_pydict() == {"n": [1, 2, 3]}


def test_decimals_of_few_bits_are_sorted(tmp_path: Path) -> None:
    """Arrow leaves them where they are."""
    numbers = [3, -1, 2, -7]
    sorter = RowSorter(["d"], tmp_path / "runs", 1 << 20)
    for part in (numbers[:3], numbers[3:]):
        values = pa.array([Decimal(number) for number in part], pa.decimal64(9, 2))
        sorter.add(pa.record_batch({"d": values}))
    out = [row["d"] for batch in sorter.ordered() for row in batch.to_pylist()]
    sorter.close()
    assert out == sorted(numbers)
