"""Aim: a record table is a dict from keys to accumulators. Method: both implementations against one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.storage.key_encoding import KeyBatch, encode_keys
from taskmanager.kernels import AccumulatorKind as Kind
from taskmanager.kernels import AccumulatorOverflowError, RecordTable, distinct
from taskmanager.kernels.compiled import Kernels
from taskmanager.kernels.layout import EMPTY_WORD
from tests.support.examples import examples
from tests.support.kernel_twins.implementations import load

IMPLEMENTATIONS = [
    pytest.param(load(compiled=True), id="compiled"),
    pytest.param(load(compiled=False), id="numpy"),
]
both = pytest.mark.parametrize("kernels", IMPLEMENTATIONS)

KINDS = list(Kind)
KEY_POOLS: dict[str, tuple[list[pa.DataType], st.SearchStrategy[tuple[Any, ...]]]] = {
    "int64": (
        [pa.int64()],
        st.tuples(st.one_of(st.none(), st.integers(-4, 40), st.just(EMPTY_WORD))),
    ),
    "float64": ([pa.float64()], st.tuples(st.sampled_from([None, 0.0, -0.0, math.nan, 1.5]))),
    "string": ([pa.string()], st.tuples(st.one_of(st.none(), st.text("ab", max_size=20)))),
    "pair": (
        [pa.int32(), pa.string()],
        st.tuples(st.one_of(st.none(), st.integers(0, 3)), st.sampled_from([None, "", "x", "yz"])),
    ),
}
INTS = st.one_of(st.none(), st.integers(-1000, 1000))
FLOATS = st.one_of(st.none(), st.sampled_from([math.nan, 0.5, -2.25, math.inf, 1024.0]))
UNSIGNED = st.one_of(st.none(), st.integers(0, 5), st.integers(2**63 - 2, 2**64 - 1))


def canonical(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(("nan" if math.isnan(v) else v + 0.0) if isinstance(v, float) else v for v in key)


def key_batch(types: list[pa.DataType], rows: list[tuple[Any, ...]]) -> KeyBatch:
    columns = [pa.array([row[i] for row in rows], type_) for i, type_ in enumerate(types)]
    return encode_keys(columns)


def key_list(columns: list[pa.Array]) -> list[tuple[Any, ...]]:
    return [canonical(row) for row in zip(*(c.to_pylist() for c in columns), strict=True)]


def fold(kind: Kind, current: Any, value: Any) -> Any:
    """The oracle: one value into one accumulator (None = no value yet)."""
    if kind is Kind.COUNT:
        return (current or 0) + (value is not None)
    if value is None:
        return current
    if current is None:
        return value
    if kind in (Kind.SUM_INT64, Kind.SUM_FLOAT64):
        return current + value
    choose: Callable[[Any, Any], Any] = min if "min" in kind.value else max
    if isinstance(value, float) and math.isnan(value):
        return current
    if isinstance(current, float) and math.isnan(current):
        return value
    return choose(current, value)


def values_for(kind: Kind) -> st.SearchStrategy[Any]:
    if kind.dtype == np.float64:
        return FLOATS
    return UNSIGNED if kind.dtype == np.uint64 else INTS


@st.composite
def batches(draw: st.DrawFn) -> tuple[str, list[Kind], list[list[tuple[Any, ...]]]]:
    name = draw(st.sampled_from(sorted(KEY_POOLS)))
    kinds = draw(st.lists(st.sampled_from(KINDS), max_size=4))
    row = st.tuples(KEY_POOLS[name][1], *(values_for(kind) for kind in kinds))
    return name, kinds, draw(st.lists(st.lists(row, max_size=30), max_size=4))


def columns_of(
    kinds: list[Kind], rows: list[tuple[Any, ...]]
) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any] | None]]:
    values, valid = [], []
    for position, kind in enumerate(kinds, start=1):
        cells = [row[position] for row in rows]
        present = np.array([cell is not None for cell in cells], dtype=np.bool_)
        values.append(np.array([cell or 0 for cell in cells], dtype=kind.dtype))
        valid.append(None if present.all() else present)
    return values, valid


def as_dict(table: RecordTable) -> dict[Any, list[Any]]:
    rows = table.rows()
    keys = key_list(rows.keys.to_arrays())
    assert len(set(keys)) == len(keys) == len(table)
    found: dict[Any, list[Any]] = {key: [] for key in keys}
    for accumulator, validity in zip(rows.accumulators, rows.validity, strict=True):
        assert len(accumulator) == len(keys)
        seen = [True] * len(keys) if validity is None else validity.tolist()
        for key, value, there in zip(keys, accumulator.tolist(), seen, strict=True):
            found[key].append(value if there else None)
    return found


def same(left: Any, right: Any) -> bool:
    return repr(sorted(left.items(), key=repr)) == repr(sorted(right.items(), key=repr))


@both
@examples(120)
@given(case=batches(), merged=st.booleans(), room=st.integers(1, 90))
def test_accumulate_against_a_dict(
    kernels: Kernels,
    case: tuple[str, list[Kind], list[list[tuple[Any, ...]]]],
    merged: bool,
    room: int,
) -> None:
    name, kinds, batched = case
    types = KEY_POOLS[name][0]
    table = RecordTable(types, kinds)
    expected: dict[Any, list[Any]] = {}
    for rows in batched:
        values, valid = columns_of(kinds, rows)
        target = RecordTable(types, kinds) if merged else table
        target.accumulate(key_batch(types, [row[0] for row in rows]), values, valid)
        if merged:
            table.merge_rows(target.rows())
        table.resize(len(table) + room)
        partial: dict[Any, list[Any]] = {}
        for row in rows:
            current = (partial if merged else expected).setdefault(
                canonical(row[0]), [None] * len(kinds)
            )
            for position, kind in enumerate(kinds):
                current[position] = fold(kind, current[position], row[position + 1])
        for key, parts in partial.items():
            current = expected.setdefault(key, [None] * len(kinds))
            for position, (kind, part) in enumerate(zip(kinds, parts, strict=True)):
                sums = Kind.SUM_INT64 if kind is Kind.COUNT else kind
                current[position] = fold(sums, current[position], part)
    assert same(as_dict(table), expected)


class Model:
    """A dict with dense indices, free ones on a stack."""

    def __init__(self) -> None:
        self.indices: dict[Any, int] = {}
        self.free: list[int] = []
        self.bound = 0

    def insert(self, key: Any) -> int:
        if key not in self.indices:
            if self.free:
                self.indices[key] = self.free.pop()
            else:
                self.indices[key] = self.bound
                self.bound += 1
        return self.indices[key]

    def remove(self, key: Any) -> None:
        if key in self.indices:
            self.free.append(self.indices.pop(key))


@both
@examples(80)
@given(name=st.sampled_from(sorted(KEY_POOLS)), data=st.data())
def test_dense_indices_against_a_dict(kernels: Kernels, name: str, data: st.DataObject) -> None:
    types, keys = KEY_POOLS[name]
    table, model = RecordTable(types, [], with_index=True), Model()
    for _ in range(data.draw(st.integers(1, 5))):
        rows = data.draw(st.lists(keys, max_size=60))
        batch = key_batch(types, rows)
        if data.draw(st.booleans()):
            found = table.lookup_or_insert(batch)
            assert found.tolist() == [model.insert(canonical(row)) for row in rows]
        else:
            table.remove(batch)
            for row in rows:
                model.remove(canonical(row))
        table.resize(len(table) + data.draw(st.integers(1, 90)))
        assert len(table) == len(model.indices)
        ordered = sorted(model.indices, key=model.indices.__getitem__)
        assert key_list(table.keys()) == ordered
        assert table.indices().tolist() == [model.indices[key] for key in ordered]
        assert table.index_bound == model.bound
        expected = [model.indices.get(canonical(row), -1) for row in rows]
        assert table.lookup(batch).tolist() == expected
        assert table.contains(batch).tolist() == [index >= 0 for index in expected]


@both
@pytest.mark.parametrize("as_text", [False, True])
def test_growth_removal_and_clear(kernels: Kernels, as_text: bool) -> None:
    generator = np.random.default_rng(3)
    numbers = generator.integers(-(2**62), 2**62, 6000)
    texts = [f"{n}-{'x' * (i % 40)}" for i, n in enumerate(numbers.tolist())]
    everything = pa.array(texts if as_text else numbers)
    table = RecordTable([everything.type], [Kind.COUNT, Kind.SUM_INT64])
    ones = np.ones(1500, dtype=np.int64)
    for start in (0, 1500, 3000, 4500, 0):
        batch = encode_keys([everything[start : start + 1500]])
        table.accumulate(batch, [None, ones], [None, None])
    removed = encode_keys([everything[1000:5500]])
    table.remove(removed)
    table.remove(removed)
    kept = everything[:1000].to_pylist() + everything[5500:].to_pylist()
    expected = {(key,): [2 if i < 1000 else 1] * 2 for i, key in enumerate(kept)}
    assert as_dict(table) == expected
    gathered = table.gather(encode_keys([everything[500:1500]]))
    assert gathered.present.tolist() == [True] * 500 + [False] * 500
    assert gathered.accumulators[1][:500].tolist() == [2] * 500
    before = table.memory_bytes()
    table.clear()
    assert len(table) == 0
    assert table.keys()[0].to_pylist() == []
    table.clear()
    assert table.memory_bytes() < before / 10
    table.accumulate(encode_keys([everything[:3]]), [None, ones[:3]], [None, None])
    assert len(table) == 3


@both
@pytest.mark.parametrize("count", [10, 700, 1100])
def test_room_is_made_for_little_more_than_the_keys_that_come(kernels: Kernels, count: int) -> None:
    table = RecordTable([pa.int64()], [Kind.COUNT])
    table.reserve(count)
    capacity = table.capacity
    assert capacity <= 64 + count * 1.8
    table.accumulate(encode_keys([pa.array(range(count))]), [None], [None])
    assert table.capacity == capacity
    assert len(table) == count


@both
def test_removal_keeps_displaced_records_reachable(kernels: Kernels) -> None:
    generator = np.random.default_rng(5)
    for _ in range(30):
        keys = generator.permutation(200)[:38]  # 64 slots: long runs of neighbours
        table = RecordTable([pa.int64()], [Kind.SUM_INT64])
        table.accumulate(encode_keys([pa.array(keys)]), [keys], [None])
        table.remove(encode_keys([pa.array(keys[::3])]))
        kept = np.setdiff1d(keys, keys[::3])
        gathered = table.gather(encode_keys([pa.array(kept)]))
        assert gathered.present.all()
        assert gathered.accumulators[0].tolist() == kept.tolist()
        assert not table.contains(encode_keys([pa.array(keys[::3])])).any()


@both
def test_validity_appears_with_the_first_invalid_row(kernels: Kernels) -> None:
    table = RecordTable([pa.string()], [Kind.MAX_INT64, Kind.COUNT])
    batch = encode_keys([pa.array(["a", "b"])])
    table.accumulate(batch, [np.array([1, 2]), None], [np.array([True, True]), None])
    assert table.rows().validity == [None, None]
    batch = encode_keys([pa.array(["b", "c"])])
    table.accumulate(batch, [np.array([9, 9]), None], [np.array([False, False]), None])
    assert as_dict(table) == {("a",): [1, 1], ("b",): [2, 2], ("c",): [None, 1]}
    gathered = table.gather(encode_keys([pa.array(["c", "a"])]))
    assert gathered.validity[0] is not None
    assert gathered.validity[0].tolist() == [False, True]


@both
def test_many_accumulators_share_seen_words(kernels: Kernels) -> None:
    kinds = [Kind.MIN_INT64] * 130
    table = RecordTable([pa.int64()], kinds)
    values = [np.array([j]) for j in range(130)]
    valid = [np.array([j % 2 == 0]) for j in range(130)]
    table.accumulate(encode_keys([pa.array([7])]), values, valid)
    assert as_dict(table) == {(7,): [j if j % 2 == 0 else None for j in range(130)]}


@both
def test_overflow_is_found_at_its_row(kernels: Kernels) -> None:
    top = 2**63 - 1
    for first, values, row in ((top, [0, 1], 1), (-top - 1, [5, -6], 1), (0, [top, -1, 2], 2)):
        table = RecordTable([pa.int64()], [Kind.COUNT, Kind.SUM_INT64])
        one = encode_keys([pa.array([3])])
        table.accumulate(one, [None, np.array([first])], [None, None])
        batch = encode_keys([pa.array([3] * len(values))])
        with pytest.raises(AccumulatorOverflowError, match="leaves the range of int64") as caught:
            table.accumulate(batch, [None, np.array(values)], [None, None])
        assert (caught.value.accumulator, caught.value.row) == (1, row)


@both
def test_sums_up_to_the_bounds_are_exact(kernels: Kernels) -> None:
    table = RecordTable([pa.int64()], [Kind.SUM_INT64])
    values = np.array([2**63 - 1, -(2**63 - 1), -(2**63)])
    table.accumulate(encode_keys([pa.array([1, 1, 1])]), [values], [None])
    assert as_dict(table) == {(1,): [-(2**63)]}


@both
@examples(60)
@given(name=st.sampled_from(sorted(KEY_POOLS)), data=st.data())
def test_distinct_against_a_dict(kernels: Kernels, name: str, data: st.DataObject) -> None:
    types, keys = KEY_POOLS[name]
    rows = data.draw(st.lists(keys, max_size=60))
    first, inverse = distinct(key_batch(types, rows))
    ordinals: dict[Any, int] = {}
    expected = [ordinals.setdefault(canonical(row), len(ordinals)) for row in rows]
    assert inverse.tolist() == expected
    assert first.tolist() == [expected.index(group) for group in range(len(ordinals))]


@both
def test_equal_hashes_of_different_keys_stay_apart(kernels: Kernels) -> None:
    batch = encode_keys([pa.array(["left", "right", "left"])])
    collided = KeyBatch(
        batch.types, None, None, batch.data, batch.offsets, np.full(3, 5, np.uint64)
    )
    table = RecordTable([pa.string()], [Kind.COUNT], with_index=True)
    assert table.lookup_or_insert(collided).tolist() == [0, 1, 0]
    assert distinct(collided)[1].tolist() == [0, 1, 0]
    table.remove(collided.slice(0, 1))
    assert table.lookup(collided).tolist() == [-1, 1, -1]


@both
def test_wrong_arguments_are_refused(kernels: Kernels) -> None:
    table = RecordTable([pa.int64()], [Kind.SUM_INT64])
    batch = encode_keys([pa.array([1, 2])])
    with pytest.raises(ValueError, match="1 accumulators, but 0 value"):
        table.accumulate(batch, [], [])
    with pytest.raises(ValueError, match="batch of 2 keys"):
        table.accumulate(batch, [np.array([1])], [None])
    with pytest.raises(ValueError, match="needs values"):
        table.accumulate(batch, [None], [None])
    with pytest.raises(TypeError, match="Cannot cast"):
        table.accumulate(batch, [np.array([1.5, 2.5])], [None])
    with pytest.raises(TypeError, match="holds fixed-width keys"):
        table.contains(encode_keys([pa.array(["a"])]))
    texts = RecordTable([pa.string()], [])
    with pytest.raises(TypeError, match="holds byte keys"):
        texts.contains(batch)


@both
def test_read_only_strided_and_narrow_values_are_taken(kernels: Kernels) -> None:
    table = RecordTable([pa.int64()], [Kind.SUM_INT64, Kind.MAX_FLOAT64])
    batch = encode_keys([pa.array([1, 1, 2])])
    matrix = np.arange(6, dtype=np.float64).reshape(3, 2)
    table.accumulate(batch, [np.array([1, 2, 3], np.int8), matrix[:, 1]], [None, None])
    table.accumulate(
        batch, [pa.array([1, 1, 1]).to_numpy(), matrix[:, 0]], [None, np.array([True, False, True])]
    )
    assert as_dict(table) == {(1,): [5, 3.0], (2,): [4, 5.0]}
