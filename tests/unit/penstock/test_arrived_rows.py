"""Aim: rows that wait for their reader are there once, in order, within bounds. Method: the queue alone, with small bounds."""

from __future__ import annotations

import threading

import pyarrow as pa
import pytest

from penstock.client import arrived_rows
from penstock.client.arrived_rows import ArrivedRows
from penstock.errors import JobRejected, StreamError


def batch(n: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array([n] * 100, pa.int64())})


def numbers(rows: ArrivedRows) -> list[int]:
    return [one.column("n")[0].as_py() for one in rows]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrived_rows, "MEMORY_BYTES_MAX", 2000)


def test_all_rows_are_read_again_and_again_by_subtask_once_they_are_there() -> None:
    rows = ArrivedRows("collect-0")
    for n in range(20):
        rows.put(n % 2, batch(n))
    assert rows.memory_bytes <= 2000, "the rest lies in files"
    rows.end()
    assert numbers(rows) == numbers(rows) == [*range(0, 20, 2), *range(1, 20, 2)]


def test_a_loop_over_rows_that_still_come_gives_back_what_it_has_seen() -> None:
    rows = ArrivedRows("collect-0")
    for n in range(10):
        rows.put(0, batch(n))
    seen = iter(rows)
    assert [next(seen).column("n")[0].as_py() for _ in range(10)] == list(range(10))
    assert rows.memory_bytes == 0
    later = threading.Thread(target=lambda: (rows.put(0, batch(10)), rows.end()))
    later.start()
    assert [one.column("n")[0].as_py() for one in seen] == [10]
    later.join()
    with pytest.raises(JobRejected, match="as they come"):
        numbers(rows)


def test_more_than_there_is_room_for_is_dropped_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrived_rows, "SPILLED_BYTES_MAX", 5000)
    rows = ArrivedRows("collect-0")
    for n in range(20):
        rows.put(0, batch(n))
    rows.end()
    assert rows.memory_bytes == 0
    with pytest.raises(JobRejected, match=r"wait to be read.*'collect-0' were dropped.*zip"):
        numbers(rows)


def test_an_error_of_the_fetch_is_told_to_readers() -> None:
    rows = ArrivedRows("collect-0")
    rows.put(0, batch(1))
    rows.end(StreamError("broke off"))
    with pytest.raises(StreamError, match="broke off"):
        rows.wait()
