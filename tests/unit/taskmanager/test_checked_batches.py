"""Aim: what a function returns to ``mapInArrow`` has the names, the order and the types that it declares. Method: batches of its own."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import cloudpickle
import pandas as pd
import pyarrow as pa
import pytest

from taskmanager.spark.checked_batches import checked_batches, checked_frames

UTC = pa.timestamp("us", "UTC")
STRUCT = pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))])


def returned(kind: pa.DataType, declared: pa.DataType, values: list[Any], **field: Any) -> None:
    batch = pa.record_batch({"x": pa.array(values, kind)})
    schema = pa.schema([pa.field("x", declared, **field)])
    assert (
        list(checked_batches(lambda batches: batches, schema)(iter([batch, batch]))) == [batch] * 2
    )


@pytest.mark.parametrize(
    ("kind", "declared"),
    [
        (pa.int64(), pa.int64()),
        (pa.large_string(), pa.string()),
        (pa.timestamp("us", "Europe/Berlin"), UTC),
        (pa.decimal128(10, 2), pa.decimal128(12, 4)),
        (pa.null(), pa.float64()),
        (STRUCT, STRUCT),
        (pa.map_(pa.string(), STRUCT), pa.map_(pa.string(), STRUCT)),
    ],
    ids=str,
)
def test_what_spark_reads_the_same_goes_through(kind: pa.DataType, declared: pa.DataType) -> None:
    returned(kind, declared, [None])


@pytest.mark.parametrize(
    ("kind", "declared"),
    [
        (pa.int32(), pa.int64()),
        (pa.string(), pa.binary()),
        (pa.timestamp("us"), UTC),
        (UTC, pa.timestamp("us")),
        (pa.timestamp("ms", "UTC"), UTC),
        (pa.decimal128(10, 4), pa.decimal128(10, 2)),
        (pa.decimal128(10, 2), pa.decimal128(10, 4)),
        (pa.struct(list(STRUCT)[::-1]), STRUCT),
        (pa.struct([("a", pa.int32()), STRUCT.field("b")]), STRUCT),
        (pa.list_(pa.int32()), pa.list_(pa.int64())),
        (pa.map_(pa.string(), pa.int8()), pa.map_(pa.string(), pa.int64())),
    ],
    ids=str,
)
def test_another_type_is_named(kind: pa.DataType, declared: pa.DataType) -> None:
    with pytest.raises(TypeError, match=r"column 'x' is .* and should be "):
        returned(kind, declared, [None])


def test_columns_are_those_that_were_declared_in_their_order() -> None:
    one, two = pa.array([1]), pa.array([2])
    schema = pa.schema([("a", pa.int64()), ("b", pa.int64())])
    for names, told in (
        (("b", "a"), "'b', 'a'"),
        (("a", "c"), "'a', 'c'"),
        (("a", "b", "c"), "'a', 'b', 'c'"),
        (("a",), "'a'"),
    ):
        batch = pa.record_batch([one, two, one][: len(names)], names=list(names))
        run = checked_batches(lambda batches: batches, schema)
        with pytest.raises(
            TypeError, match=rf"returned the columns {told}, and .* declares 'a', 'b'"
        ):
            list(run(iter([batch])))


def test_frames_of_pandas_have_no_column_that_was_not_declared() -> None:
    frame = pd.DataFrame({"a": [1], "b": [2], "c": [3]})
    for given, names in ((frame, ["a", "b"]), (frame.set_axis([0, 1, 2], axis=1), ["a", "b"])):
        with pytest.raises(TypeError, match=r"returned ('c'|2) beyond .* declares, 'a', 'b'"):
            list(checked_frames(lambda frames: frames, names)(iter([given])))
    first, second = checked_frames(lambda frames: frames, ["c", "b", "a"])(iter([frame, None]))
    assert first is frame
    assert second is None  # what is no frame is Spark's to tell


def test_nulls_are_refused_where_none_may_be() -> None:
    returned(pa.int64(), pa.int64(), [1], nullable=False)
    with pytest.raises(TypeError, match="column 'x' is declared NOT NULL and has nulls"):
        returned(pa.int64(), pa.int64(), [None], nullable=False)


def test_it_travels_to_where_nothing_of_ours_is() -> None:
    run = checked_batches(lambda batches: batches, pa.schema([("a", pa.int64())]))
    code = (
        "import pickle, sys, pyarrow as pa; sys.modules['taskmanager'] = sys.modules['penstock'] = None\n"
        "run = pickle.load(sys.stdin.buffer)\n"
        "try: list(run(iter([pa.record_batch({'b': [1]})])))\n"
        "except TypeError as error: print(error)"
    )
    sent = cloudpickle.dumps(run)
    assert pickle.loads(sent)
    told = subprocess.run(
        [sys.executable, "-c", code], input=sent, check=True, timeout=60, capture_output=True
    ).stdout
    assert b"mapInArrow: the function returned the columns 'b'" in told
