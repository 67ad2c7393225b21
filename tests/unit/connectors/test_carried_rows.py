"""Aim: rows too few for a file go on in checkpoints until there are enough or they have waited, each once.

Method: sinks in a harness on real directories: with checkpoints that complete or are lost, restores at the same and at
other parallelism, savepoints; histories drawn at random against the rows that completed checkpoints cover.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import penstock as ps
import penstock.testing as pt
from penstock.connectors import file_sink
from penstock.errors import JobRejected, TaskFailure
from taskmanager.connectors.carried_rows import CarriedRows
from tests.support.examples import examples
from tests.support.file_sinks import batch, finish, opened, read, visible

SCHEMA = pa.schema([("id", pa.int64()), ("k", pa.string())])


def rows(*ids: int) -> list[dict[str, Any]]:
    return [{"id": id, "k": f"k{id % 2}"} for id in ids]


def writing(directory: Path, form: str = "json", **options: Any) -> Callable[[Any], Any]:
    options = {"min_size": "64kb", "max_delay": "10s"} | options
    return lambda stream: getattr(stream, f"write_{form}")(str(directory), **options)


def ids(directory: Path, form: str = "json") -> list[int]:
    return sorted(int(row["id"]) for row in read(form, directory))


@pytest.mark.parametrize("form", ["json", "csv", "parquet"])
@pytest.mark.parametrize("partition_by", [None, ["k"]])
def test_few_rows_wait_for_their_time_and_are_one_file(
    tmp_path: Path, form: str, partition_by: list[str] | None
) -> None:
    with pt.harness(writing(tmp_path, form, partition_by=partition_by), schema=SCHEMA) as h:
        for id in range(0, 6, 2):
            h.push_many(rows(id, id + 1))
            h.snapshot()
            assert not visible(tmp_path)
            h.advance("3s")
        h.advance("1s")
        h.snapshot()
        assert ids(tmp_path, form) == list(range(6))
        assert len(visible(tmp_path)) == (2 if partition_by else 1)
        h.push_many(rows(6))
        h.snapshot()
        assert ids(tmp_path, form) == list(range(6))
        h.end()
    assert ids(tmp_path, form) == list(range(7))


def test_enough_rows_are_written_at_once(tmp_path: Path) -> None:
    with pt.harness(writing(tmp_path, min_size="4kb"), schema=SCHEMA) as h:
        h.push_many(rows(*range(10)))
        h.snapshot()
        assert not visible(tmp_path)
        h.push_many(rows(*range(10, 1_000)))
        h.snapshot()
        assert ids(tmp_path) == list(range(1_000))
    assert len(visible(tmp_path)) == 1


def test_what_is_carried_on_outlives_failures(tmp_path: Path) -> None:
    build = writing(tmp_path, partition_by=["k"])
    with pt.harness(build, schema=SCHEMA) as h:
        h.push_many(rows(1, 2))
        h.snapshot()
        h.push_many(rows(3))
        second = h.snapshot(complete=False)
        h.push_many(rows(99))
    with pt.harness(build, schema=SCHEMA, restore=second) as h:
        h.push_many(rows(4))
        third = h.snapshot()
        assert not visible(tmp_path)
    # Not younger for having been restored.
    with pt.harness(build, schema=SCHEMA, restore=third) as h:
        h.advance("10s")
        h.snapshot()
        assert ids(tmp_path) == [1, 2, 3, 4]
        h.push_many(rows(5))
        h.end()
    assert ids(tmp_path) == [1, 2, 3, 4, 5]


def test_the_age_goes_on_over_a_restart(tmp_path: Path) -> None:
    writer = opened(file_sink("json", tmp_path, min_size_bytes=1 << 16, max_delay_ms=10_000))
    writer.write(batch(0, 3))
    writer.roll(1_000)
    items = writer.carry(5_000)
    assert [(one.directory, one.created_ms) for one in map(CarriedRows.decode, items)] == [
        ("", 1_000)
    ]
    writer.prepare_commit(1)
    second = opened(
        file_sink("json", tmp_path, min_size_bytes=1 << 16, max_delay_ms=10_000), attempt=1
    )
    second.take_carried(items)
    assert second.carry(10_999)
    second.prepare_commit(2)
    assert not second.carry(11_000)
    committables = second.prepare_commit(3)
    finish(second)
    second.commit(committables)
    assert ids(tmp_path) == [0, 1, 2]


def test_they_are_dealt_out_to_other_subtasks_once(tmp_path: Path) -> None:
    build = writing(tmp_path, partition_by=["k"])
    with pt.harness(build, schema=SCHEMA) as h:
        h.push_many(rows(*range(10)))
        snapshot = h.snapshot()
    for subtask in range(3):
        with pt.harness(
            build, schema=SCHEMA, restore=snapshot, subtask=subtask, parallelism=3
        ) as h:
            h.end()
    assert ids(tmp_path) == list(range(10))


def test_rows_of_other_columns_get_files_of_their_own(tmp_path: Path) -> None:
    old = opened(file_sink("json", tmp_path, min_size_bytes=1 << 16))
    old.write(batch(0, 3))
    old.roll(1)
    items = old.carry(2)
    new = opened(file_sink("json", tmp_path, min_size_bytes=1 << 16), attempt=1)
    new.take_carried(items)
    new.write(pa.record_batch({"id": [7], "more": ["x"]}))
    committables = new.prepare_commit(1)
    finish(new)
    new.commit(committables)
    assert ids(tmp_path) == [0, 1, 2, 7]
    assert len(visible(tmp_path)) == 2


def test_what_is_carried_on_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskmanager.connectors.carried_rows.CARRIED_BYTES_MAX", 20_000)
    writer = opened(file_sink("json", tmp_path, ["k"], min_size_bytes=1 << 20))
    for k, count in (("a", 10), ("b", 100), ("c", 5_000)):
        writer.write(pa.record_batch({"id": range(count), "k": [k] * count}))
    writer.roll(1)
    kept = [CarriedRows.decode(item).directory for item in writer.carry(2)]
    assert kept == ["k=a", "k=b"]
    assert len(writer.prepare_commit(1)) == 1


def test_a_sink_without_files_refuses_them() -> None:
    writer = opened(file_sink("json", "/nowhere-at-all").__class__(discard={}))
    writer.take_carried([])
    with pytest.raises(TaskFailure, match="this sink writes no files"):
        writer.take_carried([b"x"])
    with pytest.raises(TaskFailure, match="cannot be read"):
        CarriedRows.decode(b"x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_size": "17mb"}, "it may be up to 16777216"),
        ({"min_size": "2mb", "roll": "1mb"}, "it may be up to 1048576"),
        ({"min_size": 0, "max_delay": "1s"}, "give min_size, too"),
        ({"max_delay": 0}, "longer than zero"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with ps.Environment() as env:
        stream = env.from_rows(rows(1))
        with pytest.raises(JobRejected, match=message):
            writing(tmp_path, **options)(stream)


@examples(60)
@example(["complete", "fail", 1, "complete", "fail", 1], None)
@given(
    st.lists(
        st.one_of(
            st.integers(1, 30),
            st.sampled_from(["complete", "lost", "fail", "late", "advance"]),
        ),
        max_size=14,
    ),
    st.sampled_from([None, ["k"]]),
)
def test_any_history_has_every_row_once(history: list[Any], partition_by: list[str] | None) -> None:
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        build = writing(directory, min_size="1kb", partition_by=partition_by)
        next_id, safe, snapshot = 0, 0, None
        h = pt.harness(build, schema=SCHEMA)
        for step in history:
            match step:
                case int():
                    h.push_many(rows(*range(next_id, next_id + step)))
                    next_id += step
                case "complete" | "lost":
                    snapshot, safe = h.snapshot(complete=step == "complete"), next_id
                case "advance":
                    h.advance("4s")
                case _:
                    h.close()
                    h, next_id = pt.harness(build, schema=SCHEMA, restore=snapshot), safe
            found = ids(directory)
            assert found == sorted(set(found))
            assert set(found) <= set(range(next_id))
        h.end()
        h.close()
        assert ids(directory) == list(range(next_id))
