"""Aim: a word stands for one value, whatever its type, and gives it back. Method: values of each kind of key against
a dict of them; more text at once than offsets reach, with a small reach."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from taskmanager.state.value_words import ValueWords

VALUES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int8(), [1, -1, 1]),
    (pa.uint64(), [2**64 - 1, 0, 2**64 - 1]),
    (pa.float32(), [0.5, float("inf"), 0.5]),
    (pa.bool_(), [True, False, True]),
    (pa.timestamp("us", "Europe/Paris"), [dt.datetime(1960, 1, 1, tzinfo=dt.UTC)] * 2),
    (pa.string(), ["b", "", "a", "b", "é"]),
    (pa.binary(), [b"\0", b"", b"\0\0", b"\0"]),
    (pa.decimal128(20, 2), [Decimal("1.50"), Decimal("-1.50"), Decimal("1.50")]),
]


@pytest.mark.parametrize(("kind", "values"), VALUES, ids=[str(kind) for kind, _ in VALUES])
def test_words_stand_for_values(kind: pa.DataType, values: list[Any]) -> None:
    words = ValueWords(kind)
    before = words.view()
    first, again = words.of(pa.array(values, kind)), words.of(pa.array(values[::-1], kind))
    assert first.tolist() == again[::-1].tolist()
    assert len(set(first.tolist())) == len(set(values))
    for reader in (words, words.view()):
        assert reader.values(first).equals(pa.array(values, kind))
        assert reader.values(first[:0]).equals(pa.array([], kind))
    assert before.values(first[:0]).type == kind


def test_text_beyond_offsets_is_wide() -> None:
    words = ValueWords(pa.string(), bytes_max=100)
    numbers = words.of(pa.array(["x" * 60, "y" * 30]))
    picked = np.tile(numbers, 9)
    found = words.values(picked)
    assert found.type == pa.large_string()
    assert found.to_pylist() == ["x" * 60, "y" * 30] * 9
