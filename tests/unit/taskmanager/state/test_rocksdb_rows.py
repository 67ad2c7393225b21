"""Aim: rows of windows that do not fit into memory are all there, once, in order, in parts by key.

Method: random tables in parts of a few rows, against lists: slices, windows that take slices over which are
dropped then, rows looked for by key; other parallelism; a table many times as large as memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.storage.key_groups import owners
from taskmanager.kernels import encode_keys
from taskmanager.state.rocksdb import window_rows
from taskmanager.state.row_table import RowDescriptor, RowTable, part_count, part_rows, parts_of
from tests.support.backend_job import MAX_PARALLELISM
from tests.support.one_backend import OneBackend
from tests.support.rocksdb_cluster import fast_directory

TEXT = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema([("k", pa.int64()), ("number", pa.int64()), ("text", TEXT)])
ROWS = RowDescriptor(SCHEMA, ("k",))
Row = tuple[int | None, int]


@pytest.fixture
def one() -> Iterator[OneBackend]:
    with fast_directory() as directory:
        home = OneBackend("rocksdb", directory)
        yield home
        home.close()


def add(table: RowTable, rows: Sequence[Row]) -> None:
    keys, numbers = zip(*rows, strict=True)
    columns = [pa.array(keys, pa.int64()), pa.array(numbers), pa.array(map(str, numbers), TEXT)]
    table.add(pa.record_batch(columns, schema=SCHEMA), np.array(numbers))


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    assert batch.schema == SCHEMA
    keys, numbers, texts = (column.to_pylist() for column in batch.columns)
    assert texts == [str(number) for number in numbers]
    return list(zip(keys, numbers, strict=True))


def check_parts(tables: list[RowTable], expected: list[Row]) -> None:
    """All rows, each part with all rows of its keys in order of arrival."""
    seen: set[int | None] = set()
    found: list[Row] = []
    for batch in parts_of(tables):
        rows = rows_of(batch)
        assert [number for _, number in rows] == sorted(number for _, number in rows)
        keys = {key for key, _ in rows}
        assert not keys & seen, "a key in two parts"
        seen |= keys
        found += rows
    assert sorted(found, key=lambda row: row[1]) == sorted(expected, key=lambda row: row[1])


@pytest.mark.parametrize("seed", range(10))
def test_tables_that_hardly_fit_hold_what_lists_would(
    one: OneBackend, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    generator = random.Random(seed)
    monkeypatch.setattr(window_rows, "PART_ROWS", generator.choice([1, 3, 10]))
    monkeypatch.setattr(window_rows, "_WRITTEN_ROWS", generator.choice([1, 10]))
    backend, number = one.open(), 0
    expected: dict[int, list[Row]] = {}
    for turn in range(120):
        choice, name = generator.random(), generator.randrange(4)
        table = backend.row_table("rows", name, ROWS)
        mine = expected.setdefault(name, [])
        if choice < 0.4:
            keys = [generator.choice([None, *range(9)]) for _ in range(generator.randint(1, 9))]
            rows = [(key, number + place) for place, key in enumerate(keys)]
            number += len(rows)
            add(table, rows)
            mine += rows
        elif choice < 0.55:
            assert len(table) == len(mine)
            check_parts([table], mine)
        elif choice < 0.65:
            _fire(backend, expected, generator)
        elif choice < 0.75:
            _find(table, mine, generator)
        elif choice < 0.85:
            backend._shrink(everything=True)
        elif choice < 0.9:
            backend.drop("rows", name)
            expected[name] = []
        elif choice < 0.95 and len(backend._queue) < 2:
            lost = backend.snapshot(1000 + turn)
            if generator.random() < 0.5:
                lost.discard()
        else:
            backend = one.open(one.checkpoint(backend, turn))
    for name, mine in expected.items():
        check_parts([backend.row_table("rows", name, ROWS)], mine)


def _fire(backend: Any, expected: dict[int, list[Row]], generator: random.Random) -> None:
    """A window of two slices, one of which goes behind it."""
    slices = generator.sample(sorted(expected), min(2, len(expected)))
    window = [backend.row_table("rows", name, ROWS) for name in slices]
    rows = [row for name in slices for row in expected[name]]
    assert sum(map(len, window)) == len(rows)
    count = part_count(window)
    for index in range(count):
        for key, row_number in rows_of(part_rows(window, index, count)):
            rows.remove((key, row_number))
        if generator.random() < 0.3:
            backend._shrink(everything=True)
    assert not rows
    backend.drop("rows", slices[0])
    expected[slices[0]] = []


def _find(table: RowTable, mine: list[Row], generator: random.Random) -> None:
    keys = generator.sample(range(12), 4)
    in_memory = rows_in(table.in_memory())
    found = rows_in(table.find(encode_keys([pa.array(keys, pa.int64())]).hashes))
    assert sorted(found) == sorted(row for row in mine if row[0] in keys and row not in in_memory)


def rows_in(piece: Any) -> list[Row]:
    for batch, sequence in zip(piece.batches, piece.sequences, strict=True):
        assert [number for _, number in rows_of(batch)] == sequence.tolist()
    return [row for batch in piece.batches for row in rows_of(batch)]


def test_rows_go_to_the_subtasks_of_their_keys(one: OneBackend) -> None:
    backend = one.open()
    expected = [(key % 23, key) for key in range(200)]
    add(backend.row_table("rows", 5, ROWS), expected)
    written = [one.checkpoint(backend)]
    assert [table.kind for table in written[0].tables] == ["rows"]
    for parallelism in (1, 3, 2):
        following = []
        found: list[Row] = []
        for index in range(parallelism):
            backend = one.open(*written, subtask_index=index, parallelism=parallelism)
            assert backend.namespaces("rows") == [5]
            table = backend.row_table("rows", 5, ROWS)
            mine = rows_of(part_rows([table], 0, 1))
            assert len(table) == len(mine)
            hashes = encode_keys([pa.array([key for key, _ in mine])]).hashes
            assert (owners(hashes, parallelism, MAX_PARALLELISM) == index).all()
            found += mine
            following.append(one.checkpoint(backend, 2))
            assert [table.kind for table in following[-1].tables] == ["rows"]
        assert sorted(found, key=lambda row: row[1]) == expected
        written = following


def test_a_window_many_times_as_large_as_memory_stays_within_it(one: OneBackend) -> None:
    """120,000 rows of 400 bytes are 48 MB, three times as much as all of the slot's memory."""
    backend = one.open(memory_bytes=16 << 20)
    schema = pa.schema([("k", pa.int64()), ("text", pa.string())])
    descriptor, ledger = RowDescriptor(schema, ("k",)), backend._environment.memory
    count, size, largest = 120_000, 2000, 0
    for start in range(0, count, size):
        numbers = np.arange(start, start + size)
        texts = pa.array([f"{number:0400}" for number in numbers.tolist()])
        table = backend.row_table("rows", 0, descriptor)
        table.add(pa.record_batch([pa.array(numbers % 1000), texts], schema=schema), numbers)
        ledger.check()
        largest = max(largest, ledger.used_bytes())
        if start == count // 2:
            one.checkpoint(backend)
    window = backend.row_table("rows", 0, descriptor)
    seen = np.zeros(count, np.bool_)
    for rows in parts_of([window]):
        assert rows.nbytes < 8 << 20
        numbers = np.array([int(text) for text in rows.column(1).to_pylist()])
        assert (numbers % 1000 == rows.column(0).to_numpy()).all()
        assert not seen[numbers].any()
        seen[numbers] = True
        ledger.check()
    assert seen.all()
    assert largest < 16 << 20
