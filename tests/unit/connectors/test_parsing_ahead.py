"""Aim: text is parsed beside the reading: a split whose next block is not parsed yet waits, and is not idle.

Method: what is given to the I/O threads is held until the test runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.connectors import file_source
from penstock.connectors.source import END
from taskmanager.connectors.file_identity import LocalFile

SCHEMA = pa.schema([("a", pa.int64())])
ROWS = 100


class HeldThreads:
    """Runs what was submitted when it is told to."""

    def __init__(self) -> None:
        self.held: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.held.append((future, function))
        return future

    def run(self) -> None:
        while self.held:
            future, function = self.held.pop(0)
            if future.set_running_or_notify_cancel():
                future.set_result(function())


@pytest.fixture
def threads() -> HeldThreads:
    return HeldThreads()


@pytest.fixture
def reader(harness: Any, threads: HeldThreads, tmp_path: Path, small_blocks: None) -> Any:
    path = tmp_path / "data.csv"
    path.write_text("a\n" + "".join(f"{n}\n" for n in range(ROWS)))
    source = harness.start(*file_source("csv", path, schema=SCHEMA))
    source.start(replace(harness.context(), submit=threads.submit))
    (split,) = harness.discover(source)
    return source.open(split, None)


def test_a_split_whose_next_block_is_being_parsed_is_not_idle(
    harness: Any, threads: HeldThreads, reader: Any
) -> None:
    found: list[int] = []
    waits = 0
    while True:
        read = reader.read(7)
        if read is END:
            break
        if read is None:
            assert reader.is_reading()
            assert reader.next_read_at_ms() is None, "the thread wakes the subtask"
            wakes, waits = len(harness.wakes), waits + 1
            threads.run()
            assert len(harness.wakes) > wakes
            assert not reader.is_reading()
        else:
            found += read.column("a").to_pylist()
            assert len(threads.held) == 1, "one block is parsed ahead"
    assert found == list(range(ROWS))
    assert waits > 2
    reader.close()


@pytest.mark.parametrize("is_running", [False, True])
def test_a_file_is_closed_when_nobody_parses_it_any_more(
    threads: HeldThreads, reader: Any, monkeypatch: pytest.MonkeyPatch, *, is_running: bool
) -> None:
    closed: list[str] = []
    close = LocalFile.close

    def note(file: LocalFile) -> None:
        closed.append(file.path)
        close(file)

    monkeypatch.setattr(LocalFile, "close", note)
    future, parse = threads.held[0]
    if is_running:
        future.set_running_or_notify_cancel()
    reader.close()
    assert bool(closed) is not is_running
    if is_running:
        future.set_result(parse())
    assert len(closed) == 1


def test_a_position_waits_for_no_thread_that_is_held_by_others(
    harness: Any, threads: HeldThreads, tmp_path: Path
) -> None:
    path = tmp_path / "data.parquet"
    parquet.write_table(pa.table({"a": range(ROWS)}, SCHEMA), path, row_group_size=10)
    opened = harness.start(*file_source("parquet", path, schema=SCHEMA))
    (split,) = harness.discover(opened)
    _, position = harness.read_split(opened, split, stop_after=3, max_rows=10)

    held = harness.start(*file_source("parquet", path, schema=SCHEMA))
    held.start(replace(harness.context(), submit=threads.submit))
    reader = held.open(split, None)
    for _ in range(3):
        reader.read(10)
    assert reader.position() == position
    threads.run()  # what was done meanwhile is not done again
    assert reader.position() == position
    reader.close()
