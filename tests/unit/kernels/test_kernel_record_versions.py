"""Aim: an export holds exactly what changed between two versions, whatever happens to the table meanwhile.

Method: random batches, removals, seals and steps of exports by hand on tables of both implementations;
the oracle is a dict per sealed version. Applying an export to the content at its beginning must give the
content at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.storage.key_encoding import KeyBatch, encode_keys
from taskmanager.kernels import AccumulatorKind, RecordTable, Rows, record_versions
from taskmanager.kernels.compiled import Kernels
from taskmanager.kernels.layout import EMPTY_WORD
from taskmanager.kernels.record_versions import RecordExport, ReleasedError
from tests.support.examples import examples
from tests.support.kernel_twins.implementations import load

IMPLEMENTATIONS = [
    pytest.param(load(compiled=True), id="compiled"),
    pytest.param(load(compiled=False), id="numpy"),
]
KINDS = [AccumulatorKind.COUNT, AccumulatorKind.SUM_INT64]
Content = dict[Any, tuple[int, int | None]]

FIXED = [None, EMPTY_WORD, *range(60)]
STRINGS = [None, "", *(f"key-{i}" * (i % 4) for i in range(60))]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_versions, "CHUNK_SLOTS", 24)


@dataclass
class Reading:
    """An export that is being read."""

    export: RecordExport
    rows: Iterator[Rows]
    expected: Content
    base: Content
    found: Content = field(default_factory=dict)

    def step(self) -> bool:
        rows = next(self.rows, None)
        if rows is not None:
            self.found |= content_of(rows)
        return rows is not None

    def finish(self) -> None:
        while self.step():
            pass
        content = {} if self.export.since_version == 0 else dict(self.base)
        for keys in self.buried:
            for key in keys.to_arrays()[0].to_pylist():
                content.pop(key, None)
        assert content | self.found == self.expected

    def __post_init__(self) -> None:
        self.buried = list(self.export.tombstones)


def content_of(rows: Rows) -> Content:
    keys = rows.keys.to_arrays()[0].to_pylist()
    assert len(set(keys)) == len(keys)
    valid = rows.validity[1]
    sums: list[int | None] = rows.accumulators[1].tolist()
    if valid is not None:
        sums = [value if ok else None for value, ok in zip(sums, valid.tolist(), strict=True)]
    return dict(zip(keys, zip(rows.accumulators[0].tolist(), sums, strict=True), strict=True))


def add(content: Content, keys: list[Any], values: list[int | None]) -> None:
    for key, value in zip(keys, values, strict=True):
        count, total = content.get(key, (0, None))
        total = total if value is None else (total or 0) + value
        content[key] = (count + 1, total)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(0, 61), max_size=40), st.booleans()),
        st.tuples(st.just("remove"), st.lists(st.integers(0, 61), max_size=12)),
        st.tuples(st.just("seal"), st.integers(0, 3)),
        st.tuples(st.just("step"), st.integers(0, 1)),
        st.tuples(st.just("finish"), st.integers(0, 1)),
        st.tuples(st.just("release")),
        st.tuples(st.just("clear")),
    ),
    max_size=30,
)


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("pool", [FIXED, STRINGS], ids=["fixed", "strings"])
@examples(60)
@given(operations=OPERATIONS)
def test_exports_give_the_content_at_their_seal(
    kernels: Kernels, with_index: bool, pool: list[Any], operations: list[tuple[Any, ...]]
) -> None:
    type_ = pa.int64() if pool is FIXED else pa.string()
    table = RecordTable([type_], KINDS, with_index=with_index, with_versions=True)
    table.resize(67)  # any size will do
    content: Content = {}
    sealed: dict[int, Content] = {0: {}}
    readings: list[Reading] = []
    for operation, *arguments in operations:
        if operation in ("add", "remove"):
            keys = [pool[index] for index in arguments[0]]
            batch = encode_keys([pa.array(keys, type_)])
            if operation == "remove":
                table.remove(batch)
                for key in keys:
                    content.pop(key, None)
                continue
            values = [None if arguments[1] and i % 3 == 0 else i for i in range(len(keys))]
            numbers = np.array([value or 0 for value in values], np.int64)
            valid = np.array([value is not None for value in values], np.bool_)
            table.accumulate(batch, [None, numbers], [None, valid])
            add(content, keys, values)
        elif operation == "seal" and len(readings) < 2:
            since = sorted(sealed)[-1 - min(arguments[0], len(sealed) - 1)]
            export = table.seal(since)
            sealed[export.version] = dict(content)
            readings.append(Reading(export, table.exported(export), dict(content), sealed[since]))
            assert not table.versions.is_changed(export.version)
        elif operation == "step" and readings:
            readings[arguments[0] % len(readings)].step()
        elif operation == "finish" and readings:
            readings.pop(arguments[0] % len(readings)).finish()
        elif operation == "release" and readings:
            readings.pop(0).export.release()
        elif operation == "clear":
            table.clear()
            content = {}
            sealed = {0: {}}
    for reading in readings:
        reading.finish()
    assert content_of(table.rows()) == content


def test_sealing_touches_no_record() -> None:
    table = RecordTable([pa.int64()], KINDS, with_versions=True)
    keys = encode_keys([pa.array(range(1000))])
    table.accumulate(keys, [None, np.arange(1000)], [None, None])
    before = table._slots.records.copy()
    export = table.seal(0)
    assert (table._slots.records == before).all()
    assert (export.cursor, export.saved) == (0, [])


def test_a_released_export_cannot_be_read_on() -> None:
    table = RecordTable([pa.int64()], KINDS, with_versions=True)
    table.accumulate(encode_keys([pa.array(range(100))]), [None, np.arange(100)], [None, None])
    export = table.seal(0)
    rows = table.exported(export)
    next(rows)
    export.release()
    export.release()
    with pytest.raises(ReleasedError):
        list(rows)


def test_tombstones_are_forgotten_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_versions, "_TOMBSTONES_MIN", 10)
    table = RecordTable([pa.int64()], KINDS, with_versions=True)
    keys = encode_keys([pa.array(range(9))])

    def add_and_remove() -> None:
        table.accumulate(keys, [None, np.arange(9)], [None, None])
        table.remove(keys)

    add_and_remove()
    first = table.seal(0)
    assert first.tombstones == []
    add_and_remove()
    second = table.seal(first.version)
    assert [len(batch) for batch in second.tombstones] == [9]
    table.versions.forget(second.version)
    add_and_remove()
    third = table.seal(second.version)
    assert third.since_version == second.version
    add_and_remove()
    add_and_remove()
    # Too many were kept: the next export is a whole one, and then they begin anew.
    fourth = table.seal(third.version)
    assert fourth.since_version == 0
    add_and_remove()
    fifth = table.seal(fourth.version)
    assert fifth.since_version == fourth.version
    assert [len(batch) for batch in fifth.tombstones] == [9]


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_restored_numbers_are_those_of_their_kind(kernels: Kernels) -> None:
    kinds = [AccumulatorKind.COUNT, AccumulatorKind.SUM_FLOAT64, AccumulatorKind.MAX_UINT64]
    table = RecordTable([pa.int64()], kinds, with_versions=True)
    keys = encode_keys([pa.array([5, None, -7])])
    huge = 2**64 - 1
    numbers: list[Any] = [
        np.array([1, 2, 250], np.uint8),
        np.array([0.5, -0.0, np.inf]),
        np.array([0, huge, 3], np.uint64),
    ]
    table.put(Rows(keys, numbers, [None] * 3))
    numbers[0] = numbers[0][::-1]
    table.put(Rows(keys.slice(0, 1), [column[:1] for column in numbers], [None] * 3))
    found = table.gather(keys)
    assert [column.tolist() for column in found.accumulators] == [
        [250, 2, 250],
        [0.5, 0.0, np.inf],
        [0, huge, 3],
    ]
    with pytest.raises(TypeError, match="safe"):
        table.put(Rows(keys, [np.array([1.5, 2, 3]), *numbers[1:]], [None] * 3))


def test_restored_records_are_no_changes() -> None:
    table = RecordTable([pa.int64()], KINDS, with_versions=True)
    other = RecordTable([pa.int64()], KINDS, with_versions=True)
    keys = encode_keys([pa.array([1, 2, None])])
    valid = np.array([True, False, True])
    other.accumulate(keys, [None, np.array([5, 6, 7])], [None, valid])
    for rows in other.exported(other.seal(0)):
        table.put(rows)
    assert content_of(table.rows()) == {1: (1, 5), 2: (1, None), None: (1, 7)}
    assert not table.versions.is_changed(0)
    assert sum(len(rows.keys) for rows in table.exported(table.seal(1))) == 0
    assert sum(len(rows.keys) for rows in table.exported(table.seal(0))) == 3


def test_of_records_that_are_written_once_those_that_no_export_holds_leave_no_tombstone() -> None:
    table = RecordTable([pa.int64()], [], with_versions=True)
    table.versions.are_written_once = True
    table.versions.gives_up_tombstones = False

    def keys(*values: int) -> KeyBatch:
        return encode_keys([pa.array(values, pa.int64())])

    def told(export: RecordExport) -> list[int]:
        return sorted(key for one in export.tombstones for key in one.to_arrays()[0].to_pylist())

    table.put(Rows(keys(1, 2), [], []))
    table.seal(0).release()
    table.accumulate(keys(3, 4), [], [])
    exported = table.seal(1)
    table.accumulate(keys(5, 6), [], [])
    table.remove(keys(1, 3, 5, 9))
    table.remove(keys(6, 7), may_be_exported=True)
    assert told(table.seal(1)) == [1, 3, 6, 7]
    found = [
        key for rows in table.exported(exported) for key in rows.keys.to_arrays()[0].to_pylist()
    ]
    assert sorted(found) == [3, 4]
    assert sorted(table.keys()[0].to_pylist()) == [2, 4]


def test_records_that_move_while_an_export_is_read_leave_tombstones_all_the_same() -> None:
    table = RecordTable([pa.int64()], [], with_versions=True)
    table.versions.are_written_once = True
    numbers = list(range(500))
    table.accumulate(encode_keys([pa.array(numbers)]), [], [])
    exported = table.seal(0)
    for number in numbers:  # others take its place in the table
        table.remove(encode_keys([pa.array([number])]))
    removed = table.seal(1).tombstones
    assert sorted(n for keys in removed for n in keys.to_arrays()[0].to_pylist()) == numbers
    rows = [rows.keys.to_arrays()[0].to_pylist() for rows in table.exported(exported)]
    assert sorted(n for part in rows for n in part) == numbers


def test_tombstones_in_many_small_batches_are_counted_as_what_they_take() -> None:
    sizes = []
    for step in (1000, 1):
        table = RecordTable([pa.int64()], [], with_versions=True)
        table.accumulate(encode_keys([pa.array(range(1000))]), [], [])
        table.seal(0).release()
        before = table.memory_bytes()
        for start in range(0, 1000, step):
            table.remove(encode_keys([pa.array(range(start, start + step))]))
        sizes.append(table.memory_bytes() - before)
        table.versions.forget(table.versions.current)
        assert table.memory_bytes() == before
    assert sizes[0] >= 16_000
    assert sizes[1] > sizes[0] + 250_000


@given(
    st.lists(st.integers(0, 30), max_size=60),
    st.lists(st.booleans(), min_size=31, max_size=31),
    st.lists(st.booleans(), min_size=31, max_size=31),
)
def test_marked_slots_are_stamped_once(
    slots: list[int], marks: list[bool], there: list[bool]
) -> None:
    results = []
    for compiled in (True, False):
        given = [np.array(marks), np.array(there), np.full(31, -1), np.zeros(31, np.bool_)]
        gone = np.empty(len(slots), np.int64)
        counts = load(compiled=compiled).stamp_changed(np.array(slots, np.int64), *given, 5, gone)
        results.append([[part.tolist() for part in given], gone[: counts[1]].tolist(), counts])
    assert results[0] == results[1]
    marked = {slot for slot in slots if marks[slot]}
    versions = results[0][0][2]
    assert {slot for slot in range(31) if versions[slot] == 5} == {s for s in marked if there[s]}
    assert sum(results[0][2]) == len(marked)
