"""Aim: rows of two contents of one file never come out of one split; the same content always goes on.

Method: files of every format are replaced, overwritten, copied, touched and appended to, between
discovery, opening and two reads, at every position.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.connectors import file_source
from penstock.connectors.source import END
from penstock.errors import Unrecoverable
from taskmanager.connectors import arrow_reader, file_identity, file_splits, parquet_reader

SCHEMA = pa.schema([("a", pa.int64()), ("b", pa.string())])
ROWS = 40


def content(path: Path, format: str, first: int) -> bytes:
    """A file of ROWS rows; those of another first row have the same size."""
    numbers = range(first, first + ROWS)
    if format in ("parquet", "arrow", "arrow stream"):
        # The smallest and largest values are the same, so that a footer may be.
        values = [100, *(first + i for i in range(ROWS - 2)), 999]
        table = pa.table({"a": pa.array(values, pa.int64()), "b": ["x"] * ROWS}, SCHEMA)
        if format == "parquet":
            options = {"compression": "none", "use_dictionary": False}
            pq.write_table(table, path, row_group_size=8, **options)
        else:
            new = pa.ipc.new_stream if format == "arrow stream" else pa.ipc.new_file
            with new(path, SCHEMA) as writer:
                writer.write_table(table, max_chunksize=7)
    elif format == "csv":
        path.write_text("a,b\n" + "".join(f"{n},x\n" for n in numbers))
    else:
        objects = [f'{{"a":{n},"b":"x"}}' for n in numbers]
        text = f"[{','.join(objects)}]\n" if format == "array" else "\n".join(objects) + "\n"
        path.write_text(text)
    return path.read_bytes()


FORMATS = ["csv", "json", "array", "parquet", "arrow", "arrow stream"]
STOPS = [1, 2, 3, 5, 9]


def as_read(format: str) -> str:
    return "json" if format == "array" else format.split(maxsplit=1)[0]


class Replaced:
    """A source of one file, and another content for it."""

    def __init__(self, harness: Any, path: Path, format: str) -> None:
        self.path = path
        self.new = content(path, format, 500)
        self.old = content(path, format, 200)
        assert len(self.old) == len(self.new)
        self.harness = harness
        self.source = harness.start(*file_source(as_read(format), path, schema=SCHEMA))
        (self.split,) = harness.discover(self.source)

    def read(self, stop: int | None = None, position: bytes | None = None) -> Any:
        batches, position = self.harness.read_split(
            self.source, self.split, 6, stop_after=stop, position=position
        )
        return [value for batch in batches for value in batch.column("a").to_pylist()], position


def move_over(path: Path, data: bytes) -> None:
    other = path.with_name("_other")
    other.write_bytes(data)
    other.rename(path)


def overwrite(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


def read_out(reader: Any) -> None:
    while reader.read(6) is not END:
        pass


CHANGES = [move_over, overwrite]


@pytest.fixture(autouse=True)
def tiny_blocks(monkeypatch: Any, small_blocks: None) -> None:
    monkeypatch.setattr(parquet_reader, "_DECODE_ROWS", 10)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("format", FORMATS)
def test_another_content_is_refused_at_every_position(
    harness: Any, tmp_path: Path, format: str, change: Callable[[Path, bytes], None]
) -> None:
    for stop in STOPS:
        file = Replaced(harness, tmp_path / "data", format)
        _, position = file.read(stop)
        change(file.path, file.new)
        with pytest.raises(Unrecoverable, match=r"data: was replaced or changed while"):
            file.read(position=position)


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_content_goes_on(harness: Any, tmp_path: Path, format: str) -> None:
    file = Replaced(harness, tmp_path / "data", format)
    whole, _ = file.read()
    for stop in STOPS:
        first, position = file.read(stop)
        move_over(file.path, file.old)
        second, position = file.read(stop, position)
        overwrite(file.path, file.old)
        rest, _ = file.read(position=position)
        assert first + second + rest == whole


@pytest.mark.parametrize("format", FORMATS)
def test_a_change_in_what_is_left_is_none_of_what_was_read(
    harness: Any, tmp_path: Path, format: str
) -> None:
    file = Replaced(harness, tmp_path / "data", format)
    first, position = file.read(1)
    changed = file.old.replace(b"235", b"735") if b"235" in file.old else file.old
    move_over(file.path, changed)
    rest, _ = file.read(position=position)
    assert len(first + rest) == ROWS
    assert (735 in rest) == (changed != file.old)


@pytest.mark.parametrize("takes_checkpoints", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_is_overwritten_while_it_is_open(
    harness: Any, tmp_path: Path, format: str, takes_checkpoints: bool
) -> None:
    harness.takes_checkpoints = takes_checkpoints
    file = Replaced(harness, tmp_path / "data", format)
    reader = file.source.open(file.split, None)
    assert reader.read(6).num_rows > 0
    overwrite(file.path, file.new)
    with pytest.raises(Unrecoverable, match=r"data: was replaced or changed while"):
        read_out(reader)
    reader.close()


@pytest.mark.parametrize("takes_checkpoints", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_is_replaced_while_it_is_open_is_read_as_it_was(
    harness: Any, tmp_path: Path, format: str, takes_checkpoints: bool
) -> None:
    harness.takes_checkpoints = takes_checkpoints
    file = Replaced(harness, tmp_path / "data", format)
    reader = file.source.open(file.split, None)
    first = reader.read(6)
    move_over(file.path, file.new)
    rows = first.num_rows
    while isinstance(batch := reader.read(6), pa.RecordBatch):
        rows += batch.num_rows
    assert rows == ROWS
    reader.close()


@pytest.mark.parametrize("format", ["csv", "json", "array", "arrow", "arrow stream"])
def test_a_file_replaced_before_it_is_opened_is_read_as_one(
    harness: Any, tmp_path: Path, format: str
) -> None:
    file = Replaced(harness, tmp_path / "data", format)
    move_over(file.path, file.new)
    rows, _ = file.read()
    assert len(rows) == ROWS
    assert rows[5] >= 500


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_replaced_by_a_larger_one_before_it_is_opened_is_refused(
    harness: Any, tmp_path: Path, format: str
) -> None:
    file = Replaced(harness, tmp_path / "data", format)
    move_over(file.path, file.new + b" " * 1000)
    with pytest.raises(Unrecoverable, match="it was cut off or replaced while the job ran"):
        file.read()


@pytest.mark.parametrize("change", CHANGES)
def test_a_parquet_file_with_other_statistics_is_refused_before_it_is_opened(
    harness: Any, tmp_path: Path, change: Callable[[Path, bytes], None]
) -> None:
    # The splits of it, and their event times, were made from the old footer.
    file = Replaced(harness, tmp_path / "data", "parquet")
    other = pa.table({"a": pa.array(range(ROWS)), "b": ["x"] * ROWS}, SCHEMA)
    pq.write_table(
        other, tmp_path / "_o", row_group_size=8, compression="none", use_dictionary=False
    )
    data = (tmp_path / "_o").read_bytes()
    assert len(data) == len(file.old)
    change(file.path, data)
    with pytest.raises(Unrecoverable, match=r"data: was replaced or changed while"):
        file.read()


@pytest.mark.parametrize("format", ["csv", "json"])
def test_a_file_that_grows_is_read_as_far_as_it_was_found(
    harness: Any, tmp_path: Path, format: str
) -> None:
    file = Replaced(harness, tmp_path / "data", format)
    position, found = None, []
    reader = file.source.open(file.split, None)
    while isinstance(batch := reader.read(6), pa.RecordBatch):
        with file.path.open("ab") as more:
            more.write(b'{"a":1}\n' if format == "json" else b"1,y\n")
        found += batch.column("a").to_pylist()
        position = reader.position()
        rest, _ = file.read(position=position)
        assert found + rest == list(range(200, 240))
    assert found == list(range(200, 240))
    reader.close()


@pytest.mark.parametrize("text", [False, True])
def test_each_byte_of_the_rows_read_from_one_large_arrow_batch_counts(
    harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, text: bool
) -> None:
    monkeypatch.setattr(arrow_reader, "_PIECE_ROWS", 16)
    rows, path = 100, tmp_path / "large.arrow"
    words = pa.array([f"{'word' * (1 + i % 3)}-{i}" for i in range(rows)])
    columns = {"a": pa.array(range(rows), pa.int64()), "b": words}

    def write(changed: int | None) -> None:
        values = [v.upper() if i == changed else v for i, v in enumerate(words.to_pylist())]
        numbers = [-v if i == changed else v for i, v in enumerate(range(rows))]
        table = pa.table(
            columns | ({"b": values} if text else {"a": pa.array(numbers, pa.int64())})
        )
        other = path.with_suffix(".new")
        with pa.ipc.new_file(other, SCHEMA) as writer:
            writer.write_table(table)
        other.replace(path)

    write(None)
    source = harness.start(*file_source("arrow", path, schema=SCHEMA))
    (split,) = harness.discover(source)
    batches, position = harness.read_split(source, split, 6, stop_after=5)
    given = sum(batch.num_rows for batch in batches)
    assert 16 < given < 48
    refused = []
    for changed in range(1, rows):
        write(changed)
        try:
            harness.read_split(source, split, 6, position=position)
        except Unrecoverable:
            refused.append(changed)
    assert set(refused) >= set(range(1, given))
    assert max(refused) < given + 2 * 16, "what is left is none of what was read"


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_overwritten_with_its_old_time_is_noticed(
    harness: Any, tmp_path: Path, format: str
) -> None:
    file = Replaced(harness, tmp_path / "data", format)
    before = file.path.stat()
    _, position = file.read(2)
    while file.path.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of files has ticks
        file.path.write_bytes(file.new)
        os.utime(file.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.path.stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(Unrecoverable, match=r"data: was replaced or changed while"):
        file.read(position=position)


def test_an_arrow_file_overwritten_with_its_old_time_is_noticed_without_sums(
    harness: Any, tmp_path: Path
) -> None:
    harness.takes_checkpoints = False
    file = Replaced(harness, tmp_path / "data", "arrow")
    before = file.path.stat()
    reader = file.source.open(file.split, None)
    assert reader.read(6).num_rows > 0
    while file.path.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of files has ticks
        file.path.write_bytes(file.new)
        os.utime(file.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(Unrecoverable, match=r"data: was replaced or changed while"):
        read_out(reader)
    reader.close()


class ParquetParts:
    """A Parquet file of several splits, and another content with the same footer."""

    def __init__(self, harness: Any, path: Path) -> None:
        self.harness, self.path = harness, path
        self.old, self.new = content(path, "parquet", 200), b""
        found = self.old.index(bytes([210, 0, 0, 0, 0, 0, 0, 0]))
        self.new = self.old[:found] + bytes([211]) + self.old[found + 1 :]
        path.write_bytes(self.old)
        self.source = harness.start(*file_source("parquet", path, schema=SCHEMA))
        self.first, *self.others = harness.discover(self.source)
        assert self.others

    def numbers(self, split: Any) -> list[int]:
        batches, _ = self.harness.read_split(self.source, split)
        return [value for batch in batches for value in batch.column("a").to_pylist()]


@pytest.fixture
def parts(harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ParquetParts:
    monkeypatch.setattr(file_splits, "SPLIT_BYTES", 1)
    harness.now = time.time_ns() // 1_000_000 + 60_000
    return ParquetParts(harness, tmp_path / "data")


@pytest.mark.parametrize("change", CHANGES)
def test_an_unread_part_of_a_parquet_file_with_the_same_footer_is_refused(
    parts: ParquetParts, change: Callable[[Path, bytes], None]
) -> None:
    assert parts.numbers(parts.first)
    change(parts.path, parts.new)
    for part in parts.others:
        with pytest.raises(Unrecoverable, match=r"data: was replaced or changed while .* in parts"):
            parts.numbers(part)


def test_the_parts_of_another_hosts_copy_are_read(
    parts: ParquetParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_over(parts.path, parts.old)  # as it lies on the other host, since before the job
    monkeypatch.setattr(file_identity, "this_host", lambda: "another")
    found = [n for split in (parts.first, *parts.others) for n in parts.numbers(split)]
    assert len(found) == ROWS


def test_a_copy_that_came_to_another_host_while_the_job_ran_is_refused(
    parts: ParquetParts, harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.now -= 120_000
    source = harness.start(*file_source("parquet", parts.path, schema=SCHEMA))
    part = harness.discover(source)[1]
    move_over(parts.path, parts.old)
    monkeypatch.setattr(file_identity, "this_host", lambda: "another")
    with pytest.raises(Unrecoverable, match=r"data: was replaced or changed while .* in parts"):
        harness.read_split(source, part)


def test_a_column_with_a_dot_in_its_name_is_compared(harness: Any, tmp_path: Path) -> None:
    """It was taken for a part of a struct that is not read, and a replaced file went on in silence."""
    path = tmp_path / "data"
    pq.write_table(pa.table({"a.b": range(100)}), path, row_group_size=50)
    source = harness.start(*file_source("parquet", path))
    (split,) = harness.discover(source)
    _, position = harness.read_split(source, split, 6, stop_after=1)
    path.unlink()
    pq.write_table(pa.table({"a.b": range(500, 600)}), path, row_group_size=50)
    with pytest.raises(Unrecoverable, match=r"data: was replaced or changed while"):
        harness.read_split(source, split, 6, position=position)


def test_a_dictionary_within_another_column_is_compared(harness: Any, tmp_path: Path) -> None:
    """Only those of whole columns were: the same numbers with other words were the same rows."""
    path = tmp_path / "data"

    def write(words: list[str]) -> None:
        indices = pa.array([index % 2 for index in range(100)], pa.int32())
        coded = pa.DictionaryArray.from_arrays(indices, pa.array(words))
        lists = pa.ListArray.from_arrays(pa.array(range(101), pa.int32()), coded)
        path.unlink(missing_ok=True)
        columns = {"a": pa.StructArray.from_arrays([lists], ["l"])}
        with pa.ipc.new_file(path, pa.table(columns).schema) as writer:
            writer.write_table(pa.table(columns))

    write(["xx", "yy"])
    source = harness.start(*file_source("arrow", path))
    (split,) = harness.discover(source)
    _, position = harness.read_split(source, split, 6, stop_after=1)
    write(["xx", "zz"])
    with pytest.raises(Unrecoverable, match=r"data: was replaced or changed while"):
        harness.read_split(source, split, 6, position=position)
