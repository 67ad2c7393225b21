"""Aim: rows of several buckets have the values that were added, whatever their types and wherever nulls come.
Method: columns of random pieces against the concatenated pieces."""

from __future__ import annotations

import datetime as dt
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from taskmanager.operators.join_columns import BucketColumn, Places

DAY = dt.date(2020, 1, 1)
VALUES: dict[pa.DataType, list[Any]] = {
    pa.int8(): [-128, 0, 127],
    pa.uint64(): [0, 2**64 - 1],
    pa.float32(): [0.5, float("-inf")],
    pa.date32(): [DAY, DAY + dt.timedelta(7)],
    pa.timestamp("us", "Europe/Berlin"): [dt.datetime(2020, 1, 1, tzinfo=dt.UTC)],
    pa.bool_(): [False, True],
    pa.decimal128(9, 2): [0, 7],
    pa.string(): ["", "ä", "b" * 40],
}


@pytest.mark.parametrize("kind", VALUES, ids=str)
@pytest.mark.parametrize("null_from", [0, 3, 99], ids=["nulls", "later", "none"])
def test_rows_have_the_values_that_were_added(kind: pa.DataType, null_from: int) -> None:
    rng = random.Random(7)
    added: list[list[pa.Array]] = [[], [], []]
    columns = [BucketColumn(kind) for _ in added]
    for step in range(6):
        for bucket in (0, 2):  # the one between stays empty
            some = VALUES[kind] + [None] * (step >= null_from and bucket == 2)
            values = pa.array(rng.choices(some, k=rng.choice([1, 5, 90])), kind)
            piece = values.slice(1) if len(values) > 1 else values
            columns[bucket].add(piece)
            added[bucket].append(piece)
    for few in ([0], [2], [0, 1, 2]):
        whole = [pa.concat_arrays(added[i] or [pa.array([], kind)]) for i in few]
        rows = [(i, place) for i, values in enumerate(whole) for place in range(len(values))]
        rng.shuffle(rows)
        wanted = np.array(rows[:70], np.int64)
        places = Places(list(map(len, whole)), wanted[:, 0].copy(), wanted[:, 1].copy())
        expected = pa.array([whole[i][place] for i, place in wanted.tolist()], kind)
        assert places.taken([columns[i] for i in few]) == expected


def test_what_was_taken_stays_as_it_was_when_more_is_added() -> None:
    column = BucketColumn(pa.int64())
    column.add(pa.array([1, 2]))
    (before,) = column.pieces
    for value in range(100):
        column.add(pa.array([value]))
    column.add(pa.array([None], pa.int64()))
    assert before.to_pylist() == [1, 2]
    found = [value for piece in column.pieces for value in piece.to_pylist()]
    assert found == [1, 2, *range(100), None]
