"""Aim: generators and shipped tables give each row exactly once, whatever the splits and cuts.

Method: rows are compared with the function itself or the table; time is a number that the test moves.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from penstock.client.artifacts import table_artifact
from penstock.connectors import arrow_source, generator_source, nexmark_source
from penstock.errors import JobRejected, TaskFailure
from penstock.nexmark import generator as nexmark
from penstock.pb import graph_pb2
from taskmanager.connectors import artifact_source
from taskmanager.connectors.row_blocks import BlockSplit, RowCursor, block_splits
from tests.support.examples import examples

SCHEMA = pa.schema([("n", pa.int64()), ("t", pa.string())])
SETTINGS = examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def numbers(start: int, count: int) -> Any:
    """The rows of the tests; pickled by name."""
    n = np.arange(start, start + count)
    return pa.record_batch({"n": n, "t": [str(i) for i in n]}, schema=SCHEMA)


class Returns:
    """A function that returns what it is told to, or raises it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, start: int, count: int) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def function(fn: Any) -> graph_pb2.Function:
    import sys

    sys.modules.setdefault(
        __name__, sys.modules.get(__name__) or __import__("types").ModuleType(__name__)
    )
    for value in (numbers, Returns):
        setattr(sys.modules[__name__], value.__name__, value)
    return graph_pb2.Function(pickled=pickle.dumps(fn), display_name="job.rows")


@given(st.integers(1, 9), st.integers(1, 7), st.integers(0, 300), st.integers(0, 5))
def test_blocks_cover_every_row_once(
    block_rows: int, split_count: int, total: int, start_cut: int
) -> None:
    seen: list[int] = []
    for index in range(split_count):
        split = BlockSplit.decode(BlockSplit(index, split_count, block_rows).encode())
        done = 0
        while True:
            start, count = split.run_at(done, total)
            if not count:
                break
            taken = max(count - start_cut, 1)
            seen.extend(range(start, start + taken))
            done += taken
        assert done == split.rows(total)
    assert sorted(seen) == list(range(total))


@SETTINGS
@given(
    rows=st.integers(0, 100),
    parallelism=st.integers(1, 4),
    batch_rows=st.integers(1, 20),
    stop=st.integers(0, 10),
)
def test_a_generator_resumes(
    harness: Any, rows: int, parallelism: int, batch_rows: int, stop: int
) -> None:
    harness.parallelism, harness.batch_rows = parallelism, batch_rows
    source = harness.start(*generator_source(function(numbers), SCHEMA, rows))
    values: list[int] = []
    for split in harness.discover(source):
        first, position = harness.read_split(source, split, 7, stop_after=stop)
        rest, _ = harness.read_split(source, split, 9, position=position)
        values += [value for batch in first + rest for value in batch.column(0).to_pylist()]
    assert sorted(values) == list(range(rows))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (ZeroDivisionError("no"), "job.rows(0, 5) raised ZeroDivisionError: no"),
        (3, "job.rows(0, 5) returned int, not a pyarrow.RecordBatch"),
        (pa.record_batch({"n": [1]}), "returned 1 rows"),
    ],
)
def test_a_generator_that_breaks_its_promise(harness: Any, value: Any, words: str) -> None:
    with pytest.raises(TaskFailure) as failure:
        harness.rows(generator_source(function(Returns(value)), SCHEMA, 5))
    assert words in str(failure.value)
    assert failure.value.operator == "source"
    if isinstance(value, Exception):
        assert "in __call__" in failure.value.user_traceback
        assert "calling_user_code" not in failure.value.user_traceback


def test_a_pickle_that_cannot_be_loaded(harness: Any) -> None:
    broken = graph_pb2.Function(pickled=b"cno_such_module\nx\n.", display_name="job.rows")
    with pytest.raises(TaskFailure, match=r"loading job\.rows raised ModuleNotFoundError"):
        harness.rows(generator_source(broken, SCHEMA, 5))


@pytest.mark.parametrize("rate", [0.5, 100, 1000, 33_333])
def test_a_rate_is_kept_by_the_clock(harness: Any, rate: float) -> None:
    harness.parallelism = 2
    source = harness.start(*generator_source(function(numbers), SCHEMA, None, rate))
    started = harness.now
    total = 0
    for split in harness.discover(source):
        harness.now = started
        reader = source.open(split, None)
        rows = 0
        while harness.now < started + 4000:
            batch = reader.read(8192)
            if batch is None:
                due = reader.next_read_at_ms()
                assert harness.now < due <= harness.now + max(40, 2000 / rate + 1)
                harness.now = due
                continue
            rows += batch.num_rows
            assert rows <= (harness.now - started) * rate / 2000 + 1e-6
        total += rows
    assert total == pytest.approx(rate * 4, rel=0.01, abs=2)


def test_paced_splits_advance_side_by_side(harness: Any) -> None:
    harness.parallelism = 2
    source = harness.start(*generator_source(function(numbers), SCHEMA, None, 1000))
    newest = []
    for split in harness.discover(source):
        reader = source.open(split, None)
        reader.read(8192)
        harness.now += 500
        rows = 0
        last = 0
        while (batch := reader.read(8192)) is not None:
            rows, last = rows + batch.num_rows, batch.column(0)[-1].as_py()
        assert rows == 240, "whole blocks of 20"
        newest.append(last)
    assert abs(newest[0] - newest[1]) <= 20


@SETTINGS
@given(
    lengths=st.lists(st.integers(0, 30), max_size=6),
    parallelism=st.integers(1, 5),
    piece=st.integers(1, 12),
    stop=st.integers(0, 8),
)
def test_a_shipped_table_resumes(
    harness: Any,
    tmp_path: Path,
    monkeypatch: Any,
    lengths: list[int],
    parallelism: int,
    piece: int,
    stop: int,
) -> None:
    monkeypatch.setattr(artifact_source, "PIECE_ROWS_MAX", piece)
    path = tmp_path / "table"
    rows = sum(lengths)
    whole = numbers(0, rows)
    with pa.ipc.new_file(path, SCHEMA) as writer:
        start = 0
        for length in lengths:
            writer.write_batch(whole.slice(start, length))
            start += length
    harness.artifact_paths["x"] = str(path)
    harness.parallelism = parallelism
    spec, _ = arrow_source("x", SCHEMA)
    pruned = pa.schema([SCHEMA.field("t")])
    for schema in (SCHEMA, pruned):
        source = harness.start(spec, schema)
        values = []
        for split in harness.discover(source):
            first, position = harness.read_split(source, split, 5, stop_after=stop)
            rest, _ = harness.read_split(source, split, 7, position=position)
            values += [value for batch in first + rest for value in batch.column("t").to_pylist()]
        assert sorted(map(int, values)) == list(range(rows))
        if parallelism == 1:
            assert values == whole.column("t").to_pylist()


def test_a_table_that_is_not_there(harness: Any) -> None:
    with pytest.raises(TaskFailure, match="artifact x is not on this TaskManager"):
        harness.rows(arrow_source("x", SCHEMA))


# ---------------------------------------------------------------- nexmark


@pytest.mark.parametrize("kind", nexmark.KINDS)
@examples(25)
@given(start=st.integers(0, 10**9), count=st.integers(0, 300), cut=st.integers(0, 300))
def test_any_range_of_events_can_be_made_by_itself(
    kind: str, start: int, count: int, cut: int
) -> None:
    whole = nexmark.nexmark_batch(kind, 3, start, count)
    assert whole.schema.equals(nexmark.nexmark_schema(kind))
    assert whole.num_rows == count
    cut = min(cut, count)
    parts = [
        nexmark.nexmark_batch(kind, 3, start, cut),
        nexmark.nexmark_batch(kind, 3, start + cut, count - cut),
    ]
    assert pa.Table.from_batches(parts).equals(pa.Table.from_batches([whole]))
    names = whole.schema.names[::-2]
    pruned = nexmark.nexmark_batch(kind, 3, start, count, columns=names)
    assert pruned.equals(whole.select(names))


@given(st.integers(0, 500))
def test_kinds_have_their_share(events: int) -> None:
    mixed = nexmark.nexmark_batch("", 1, 0, events)
    kinds = mixed.column("kind").to_pylist()
    for kind in ("bid", "auction", "person"):
        count = nexmark.kind_count(kind, events)
        assert kinds.count(kind) == count
        alone = nexmark.nexmark_batch(kind, 1, 0, count).to_pylist()
        assert [row for row in mixed.column(kind).to_pylist() if row is not None] == alone


def test_events_refer_to_what_exists_and_some_are_hot() -> None:
    bids = nexmark.nexmark_batch("bid", 1, 50_000, 46_000)
    newest_auction = (
        nexmark.nexmark_batch("auction", 1, 6260, 1, columns=["id"]).column(0)[0].as_py()
    )
    auctions = bids.column("auction").to_numpy()
    assert auctions.min() >= 1000
    assert auctions.max() <= newest_auction + nexmark.ID_LEAD
    hot = (auctions % 100 == 0).mean()
    assert 0.45 < hot < 0.6
    assert 0.7 < (bids.column("bidder").to_numpy() % 100 == 1).mean() < 0.85
    prices = bids.column("price").to_numpy()
    assert 100 <= prices.min() < prices.max() < 10**8
    assert 2.4 < np.log10(prices / 100).mean() + 0 < 3.6
    assert (np.diff(bids.column("ts").to_numpy()) >= 0).all()
    sold = nexmark.nexmark_batch("auction", 1, 0, 3000).to_pylist()
    assert [row["id"] for row in sold] == list(range(1000, 4000))
    assert all(row["expires"] > row["ts"] and row["reserve"] > row["initial_bid"] for row in sold)
    people = nexmark.nexmark_batch("person", 1, 0, 1000).column("id").to_pylist()
    assert people == list(range(1000, 2000))
    assert not nexmark.nexmark_batch("bid", 2, 50_000, 46_000).equals(bids)


def test_events_are_the_same_on_every_machine() -> None:
    (row,) = nexmark.nexmark_batch("bid", 1, 1_000_000, 1).to_pylist()
    assert (row["auction"], row["bidder"], row["price"]) == (66138, 22701, 104851)
    assert row["ts"] == 1436918508696
    assert row["url"] == "https://www.nexmark.com/lulgd/hpuvb/iunkc/item.htm?query=1"


def test_nexmark_as_a_source(harness: Any) -> None:
    harness.parallelism, harness.batch_rows, harness.event_time_column = 3, 100, "ts"
    spec, schema = nexmark_source(5000, seed=4, kind="bid", columns=["price", "ts"])
    source = harness.start(spec, schema)
    splits = harness.discover(source)
    found = [batch for split in splits for batch in harness.read_split(source, split, 33)[0]]
    expected = nexmark.nexmark_batch("bid", 4, 0, 4600, columns=["price", "ts"])
    key = [("ts", "ascending"), ("price", "ascending")]
    assert (
        pa.Table.from_batches(found)
        .sort_by(key)
        .equals(pa.Table.from_batches([expected]).sort_by(key))
    )
    assert [split.min_event_time_ms for split in splits] == [
        expected.column("ts")[number].as_py() for number in (0, 100, 200)
    ]


def test_nexmark_files(tmp_path: Path) -> None:
    nexmark.write_nexmark(1000, tmp_path, seed=2, files=3)
    rows = nexmark.write_nexmark(1000, tmp_path, seed=2, files=3)
    assert rows == {"bid": 920, "auction": 60, "person": 20}
    assert len(list((tmp_path / "bids").iterdir())) == 3
    expected = pa.Table.from_batches([nexmark.nexmark_batch("bid", 2, 0, 920)])
    assert pq.read_table(tmp_path / "bids").equals(expected)
    with pytest.raises(JobRejected, match="would mix with the new files"):
        nexmark.write_nexmark(1000, tmp_path, files=2)
    with pytest.raises(JobRejected, match="files >= 1"):
        nexmark.write_nexmark(1, tmp_path, files=0)


def test_files_are_not_written_through_links_that_lie_there(tmp_path: Path) -> None:
    other, link = tmp_path / "other", tmp_path / "bids" / ".part-00000.parquet.inprogress"
    other.write_text("somebody's")
    link.parent.mkdir()
    link.symlink_to(other)
    nexmark.write_nexmark(50, tmp_path, files=1)
    assert other.read_text() == "somebody's"
    assert not (tmp_path / "bids" / "part-00000.parquet").is_symlink()


def test_what_a_killed_process_has_left_goes_a_day_later(tmp_path: Path) -> None:
    old, young = (tmp_path / "bids" / f".inprogress-{name}" for name in ("old", "young"))
    for directory in (old, young):
        directory.mkdir(parents=True)
    os.utime(old, (0, 0))
    nexmark.write_nexmark(50, tmp_path, files=1)
    assert young.exists()
    assert not old.exists()


@pytest.mark.parametrize(("rate", "reads_max"), [(500, 51), (2000, 51), (64_000, 501)])
def test_a_slow_stream_is_not_read_row_by_row_however_often_it_is_asked(
    rate: float, reads_max: int
) -> None:
    split = BlockSplit.decode(block_splits(-1, rate, 2, 8192)[1].payload)
    cursor = RowCursor(split, -1, rate, None)
    rows, reading_times = 0, set()
    for now_ms in range(1000):
        while (run := cursor.next_run(8192, now_ms)) is not None and run[1]:
            cursor.advance(run[1])
            rows += run[1]
            reading_times.add(now_ms)
    assert rows == pytest.approx(rate / 2, rel=0.05)
    assert len(reading_times) <= reads_max


def test_a_clock_that_is_set_back_stops_no_stream() -> None:
    cursor = RowCursor(BlockSplit(0, 1, 100), -1, 1000.0, None)
    rows = {3_600_000: 0, 0: 0}
    for begun_ms in rows:
        for now_ms in range(begun_ms, begun_ms + 1_000):
            while (run := cursor.next_run(8192, now_ms)) is not None and run[1]:
                cursor.advance(run[1])
                rows[begun_ms] += run[1]
            assert cursor.next_due_ms() <= now_ms + 100
    assert rows[0] == pytest.approx(rows[3_600_000], abs=100) != 0


@pytest.mark.parametrize("done", [None, 3])
@pytest.mark.parametrize(("rate", "total"), [(500.0, -1), (333.0, -1), (50.0, -1), (500.0, 777)])
def test_a_slow_stream_gives_whole_blocks(rate: float, total: int, done: int | None) -> None:
    """Where the clock's pace cuts a block, one read would give two batches; asked late, nothing is left behind."""
    split = BlockSplit.decode(block_splits(total, rate, 2, 8192)[1].payload)
    position = None if done is None else done.to_bytes(8, "little")
    cursor = RowCursor(split, total, rate, position)
    now_ms, rows, runs = 0, done or 0, 0
    while now_ms < 4_000:
        run = cursor.next_run(8192, now_ms)
        if run is None:
            break
        if run[1]:
            cursor.advance(run[1])
            rows += run[1]
            runs += 1
        else:
            assert cursor.next_due_ms() > now_ms
            now_ms = cursor.next_due_ms() + runs % 2  # a little late, every other time
    expected = rate / 2 * 4 + (done or 0) if total < 0 else split.rows(total)
    assert rows == pytest.approx(expected, rel=0.05)
    assert runs <= 2 + (rows / split.block_rows)


@pytest.mark.parametrize("count", [2, 200])
def test_a_shipped_table_may_have_a_dictionary_in_each_chunk(
    harness: Any, tmp_path: Path, count: int
) -> None:
    kind = pa.dictionary(pa.int8(), pa.string())
    halves = [[str(i) for i in range(first, first + count // 2)] for first in (0, count // 2)]
    chunks = [pa.array(half).dictionary_encode().cast(kind) for half in halves]
    table = pa.table({"n": pa.chunked_array(chunks)})
    path = tmp_path / "table"
    path.write_bytes(table_artifact(table, name="table").data)
    harness.artifact_paths["x"] = str(path)
    spec, schema = arrow_source("x", table.schema)
    assert schema == pa.schema({"n": pa.string()})
    source = harness.start(spec, schema)
    values = [
        value
        for split in harness.discover(source)
        for batch in harness.read_split(source, split, 50)[0]
        for value in batch.column("n").to_pylist()
    ]
    assert values == [str(i) for i in range(count)]
