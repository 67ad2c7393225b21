"""Aim: a snapshot never refers to a file that may be gone, or that is not its to refer to.

Method: single backends, driven by hand into the few situations that random histories hardly come to.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from taskmanager.kernels import AccumulatorKind
from taskmanager.state.backend import AggregateDescriptor
from taskmanager.state.row_table import RowDescriptor, part_rows
from tests.support.backend_job import BACKENDS
from tests.support.one_backend import KEYS, OneBackend, add_counts, counts_of

COUNTS = AggregateDescriptor(KEYS, (AccumulatorKind.COUNT,), list)


@pytest.fixture(params=BACKENDS)
def one(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OneBackend]:
    opened = OneBackend(request.param, tmp_path)
    yield opened
    opened.close()


def files_of(snapshot: Any) -> set[str]:
    return {file.name for file in snapshot.files}


def test_files_that_were_written_without_increments_are_written_again(one: OneBackend) -> None:
    backend = one.open(is_incremental=False)
    add_counts(backend, COUNTS, range(100))
    whole = one.checkpoint(backend)
    backend = one.open(whole)
    described = one.checkpoint(backend, 2)
    mine, theirs = (
        {f.handle.path for f in snapshot.files if f.handle.path} for snapshot in (described, whole)
    )
    assert mine
    assert not mine & theirs
    later = one.checkpoint(backend, 3)
    one.keep_only([later])
    assert counts_of(one.open(later), COUNTS) == dict.fromkeys(range(100), 1)


def test_what_a_snapshot_on_its_way_has_replaced_is_not_referred_to(tmp_path: Path) -> None:
    one = OneBackend("hashmap", tmp_path)
    backend = one.open()
    add_counts(backend, COUNTS, range(1000), 1)
    add_counts(backend, COUNTS, range(20), 2)
    first = files_of(one.checkpoint(backend, 1))
    add_counts(backend, COUNTS, range(1000), 3)
    add_counts(backend, COUNTS, range(5), 4)
    second = files_of(one.checkpoint(backend, 2)) - first
    backend.drop("counts", 1)
    of_first = backend.snapshot(3)
    # Now there is even less in the other file: this time it is that one which is given up.
    backend.drop("counts", 3)
    of_second = backend.snapshot(4)
    third = one.write(of_first)
    assert not files_of(third) & first
    assert files_of(third) >= second
    fourth = one.write(of_second)
    assert not files_of(fourth) & first
    one.keep_only([third, fourth])
    restored = one.open(fourth)
    assert counts_of(restored, COUNTS, 2) == dict.fromkeys(range(20), 1)
    assert counts_of(restored, COUNTS, 4) == dict.fromkeys(range(5), 1)
    one.close()


def test_entries_of_partitions_that_a_snapshot_does_not_know_are_dropped(tmp_path: Path) -> None:
    one = OneBackend("rocksdb", tmp_path)
    backend = one.open()
    add_counts(backend, COUNTS, range(10), 1)
    add_counts(backend, COUNTS, range(10), 2)
    snapshot = one.checkpoint(backend)
    [forgotten] = [s for s in snapshot.segments if s.namespace == 2]
    snapshot.segments.remove(forgotten)
    restored = one.open(snapshot)
    # It gets the number that the other one had.
    add_counts(restored, COUNTS, range(5), 3)
    written = one.checkpoint(restored, 2)
    assert forgotten.offset in {segment.offset for segment in written.segments}
    again = one.open(written)
    assert counts_of(again, COUNTS, 1) == dict.fromkeys(range(10), 1)
    assert counts_of(again, COUNTS, 3) == dict.fromkeys(range(5), 1)
    one.close()


def test_a_table_of_rows_without_rows_has_a_batch_without_rows(one: OneBackend) -> None:
    schema = pa.schema([("key", pa.int64()), ("words", pa.dictionary(pa.int32(), pa.string()))])
    rows = part_rows([one.open().row_table("rows", 0, RowDescriptor(schema, ("key",)))], 0, 1)
    assert rows.schema == schema
    assert rows.num_rows == 0
