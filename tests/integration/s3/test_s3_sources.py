"""Aim: files on S3 are read as files on a disk are, by ranges; an object that was replaced is noticed.

Method: sources of every format over prefixes, globs and ``key=value`` prefixes of a real server; bytes received are
counted; objects are replaced before, between and behind reads; one job runs on a cluster.
"""

from __future__ import annotations

import bz2
import gzip
import io
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.connectors.files import file_source
from penstock.connectors.source import END, Reader, Source, Split
from penstock.connectors.text_options import text_options
from penstock.errors import JobRejected, TaskFailure, Unrecoverable
from penstock.storage.request_counts import S3_REQUESTS
from taskmanager.connectors import file_splits, text_splits
from tests.integration.s3.conftest import BUCKET, settings_of
from tests.support.radosgw import RadosGateway, s3_options
from tests.support.source_harness import SourceHarness

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

FORMATS = ("parquet", "csv", "json", "arrow")


def encoded(form: str, table: pa.Table, **options: Any) -> bytes:
    """A file of the format."""
    out = io.BytesIO()
    if form == "parquet":
        pq.write_table(table, out, **options)
    elif form == "csv":
        pyarrow.csv.write_csv(table, out)
    elif form == "arrow":
        with pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=50)
    else:
        out.write(table.to_pandas().to_json(orient="records", lines=True).encode())
    return out.getvalue()


def numbers(start: int, count: int) -> pa.Table:
    return pa.table({"n": range(start, start + count), "m": range(count)})


class Place:
    """A prefix of the test's own."""

    def __init__(self, server: RadosGateway, prefix: str) -> None:
        self.client = server.client()
        self.prefix = prefix
        self.uri = f"s3://{BUCKET}/{prefix}"

    def put(self, name: str, content: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=f"{self.prefix}/{name}", Body=content)


@pytest.fixture
def place(s3_server: RadosGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr("penstock.storage.open_store._s3", lambda: settings_of(s3_server.endpoint))
    return Place(s3_server, tmp_path.name)


@pytest.mark.parametrize("form", FORMATS)
def test_prefixes_globs_and_directories_of_values(place: Place, form: str) -> None:
    for name, start in (
        ("in/day=1/a", 0),
        ("in/day=2/b", 10),
        ("in/day=2/deeper/c", 20),
        ("in/_pending/d", 30),
        ("in/.hidden", 40),
        ("in/day=3/_e", 50),
        ("in-other/f", 60),
    ):
        place.put(f"{name}.{form}", encoded(form, numbers(start, 10)))
    place.put("in/", b"")

    def read(path: str, **options: Any) -> list[dict[str, Any]]:
        rows = SourceHarness().rows(file_source(form, f"{place.uri}/{path}", **options))
        return sorted(rows, key=lambda row: row["n"])

    everything = read("in")
    assert [row["n"] for row in everything] == list(range(30))
    assert [row["day"] for row in everything] == [1] * 10 + [2] * 20
    assert [row["n"] for row in read("in/")] == list(range(30))
    assert [row["n"] for row in read(f"in/*/*.{form}")] == list(range(20))
    assert [row["n"] for row in read(f"in/**/[bc].{form}")] == list(range(10, 30))
    assert [row["n"] for row in read("in*")] == [*range(30), *range(60, 70)]
    assert [row["n"] for row in read(f"in/day=2/b.{form}")] == list(range(10, 20))
    assert read("in", columns=["n"])[0] == {"n": 0}
    with pytest.raises(JobRejected, match="matches no file"):
        read("nothing/here")


@pytest.mark.parametrize("form", ["csv", "json"])
@pytest.mark.parametrize(
    ("suffix", "compress"),
    [
        ("gz", gzip.compress),
        ("bz2", bz2.compress),
        ("zst", lambda data: pa.compress(data, "zstd", asbytes=True)),
    ],
)
def test_compressed_text(
    place: Place, form: str, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    place.put(f"a.{form}.{suffix}", compress(encoded(form, numbers(0, 5_000))))
    rows = SourceHarness().rows(file_source(form, place.uri, options=text_options()))
    assert [row["n"] for row in rows] == list(range(5_000))


def received_while(call: Callable[[], object]) -> int:
    before = S3_REQUESTS.bytes()[1]
    call()
    return S3_REQUESTS.bytes()[1] - before


def test_only_the_columns_and_pieces_that_are_read_are_fetched(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = pa.table({f"c{i}": pa.array(range(i, i + 200_000)) for i in range(8)})
    content = encoded(
        "parquet", wide, use_dictionary=False, compression="none", row_group_size=50_000
    )
    place.put("wide.parquet", content)
    opened = file_source("parquet", place.uri, columns=["c3"])
    received = received_while(lambda: SourceHarness().rows(opened))
    assert received < len(content) / 4

    monkeypatch.setattr(text_splits, "SPLIT_OVER_BYTES", 1 << 20)
    monkeypatch.setattr(text_splits, "PIECE_BYTES", 10 << 20)
    place.client.delete_object(Bucket=BUCKET, Key=f"{place.prefix}/wide.parquet")
    text = encoded("csv", numbers(0, 2_500_000))
    place.put("long.csv", text)
    harness = SourceHarness()
    spec, schema = file_source("csv", place.uri)
    source = harness.start(spec, schema)
    splits = harness.discover(source)
    assert len(splits) > 2
    batches: list[pa.RecordBatch] = []
    received = received_while(lambda: batches.extend(harness.read_split(source, splits[1])[0]))
    assert received < splits[1].size + (6 << 20)
    rows = sum(batch.num_rows for batch in batches)
    assert batches[0]["n"][0].as_py() + rows - 1 == batches[-1]["n"][-1].as_py()


def begun(
    place: Place, form: str, *, stop_after: int = 2
) -> tuple[SourceHarness, Source, Split, bytes, int]:
    """A source that has read a part of its one split: its position, and how many rows that was."""
    harness = SourceHarness(batch_rows=20)
    source = harness.start(*file_source(form, place.uri))
    [split] = harness.discover(source)
    batches, position = harness.read_split(source, split, 20, stop_after)
    return harness, source, split, position, sum(batch.num_rows for batch in batches)


@pytest.mark.parametrize("form", FORMATS)
def test_a_position_is_gone_on_from_and_an_object_replaced_behind_it_is_noticed(
    place: Place, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskmanager.connectors.text_blocks.BLOCK_BYTES", 96)
    place.put(f"a.{form}", encoded(form, numbers(1_000, 200)))
    harness, source, split, position, count = begun(place, form)
    assert 0 < count < 200
    rest = harness.read_split(source, split, position=position)[0]
    assert pa.Table.from_batches(rest)["n"].to_pylist() == list(range(1_000 + count, 1_200))

    place.put(f"a.{form}", encoded(form, numbers(5_000, 200)))
    with pytest.raises(Unrecoverable, match="was replaced or changed while the job read it"):
        harness.read_split(source, split, position=position)
    place.client.delete_object(Bucket=BUCKET, Key=f"{place.prefix}/a.{form}")
    with pytest.raises(TaskFailure, match="is not there any more"):
        harness.read_split(source, split, position=position)


def read_to_the_end(reader: Reader) -> None:
    rows = 20
    while (batch := reader.read(20)) is not END:
        assert isinstance(batch, pa.RecordBatch)
        assert max(batch["n"].to_pylist()) < 5_000
        rows += batch.num_rows
    assert rows == 2_000


@pytest.mark.parametrize("form", FORMATS)
def test_an_object_that_is_replaced_under_an_open_reader_gives_no_row_of_the_other(
    place: Place, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BLOCK_BYTES", "_AHEAD_BYTES", "_LEAST_BYTES"):
        monkeypatch.setattr(f"penstock.storage.s3.ranges.{name}", 128)
    monkeypatch.setattr("taskmanager.connectors.text_blocks.BLOCK_BYTES", 96)
    monkeypatch.setattr("taskmanager.connectors.text_blocks.HEAD_BYTES", 96)
    monkeypatch.setattr("taskmanager.connectors.reading_ahead.STEP_ROWS", 20)
    monkeypatch.setattr("taskmanager.connectors.opened_object._BUFFER_BYTES", 128)
    monkeypatch.setattr("taskmanager.connectors.parquet_reader._DECODE_ROWS", 20)
    place.put(
        f"a.{form}",
        encoded(
            form, numbers(1_000, 2_000), **({"row_group_size": 100} if form == "parquet" else {})
        ),
    )
    harness = SourceHarness(batch_rows=20)
    source = harness.start(*file_source(form, place.uri))
    [split] = harness.discover(source)
    reader = source.open(split, None)
    try:
        assert isinstance(reader.read(20), pa.RecordBatch)
        place.put(f"a.{form}", encoded(form, numbers(5_000, 2_000)))
        # Of Parquet all columns of the split have been fetched at once.
        is_there = form == "parquet"
        noticed = pytest.raises(Unrecoverable, match="was replaced or changed")
        with nullcontext() if is_there else noticed:
            read_to_the_end(reader)
    finally:
        reader.close()


def test_parts_of_a_parquet_file_are_of_one_object(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_splits, "SPLIT_BYTES", 1)
    place.put("a.parquet", encoded("parquet", numbers(0, 200), row_group_size=100))
    harness = SourceHarness()
    source = harness.start(*file_source("parquet", place.uri))
    first, second = harness.discover(source)
    assert sum(batch.num_rows for batch in harness.read_split(source, first)[0]) == 100
    # The same rows, but other bytes.
    place.put(
        "a.parquet", encoded("parquet", numbers(0, 200), row_group_size=100, compression="none")
    )
    with pytest.raises(Unrecoverable, match="replaced"):
        harness.read_split(source, second)


def test_a_watched_prefix_gives_objects_as_they_come(place: Place) -> None:
    schema = pa.schema([("n", pa.int64()), ("m", pa.int64())])
    harness = SourceHarness()
    source = harness.start(*file_source("csv", place.uri, schema=schema, watch_ms=1_000))
    assert harness.discover(source) == []
    place.put("a.csv", encoded("csv", numbers(0, 1)))
    assert [split.id for split in harness.discover(source)] == [f"{place.uri}/a.csv"]
    place.put("sub/b.csv", encoded("csv", numbers(0, 1)))
    assert [split.id for split in harness.discover(source)] == [f"{place.uri}/sub/b.csv"]
    assert harness.discover(source) == []
    with pytest.raises(JobRejected, match="watch needs a directory or a glob"):
        file_source("csv", f"{place.uri}/a.csv", schema=schema, watch_ms=1_000)


@pytest.mark.parametrize("form", FORMATS)
def test_declared_columns_are_looked_for_when_the_job_is_built(place: Place, form: str) -> None:
    place.put(f"a.{form}", encoded(form, pa.table({"amount": [1, 2], "n": [1, 2]})))
    with pytest.raises(JobRejected, match="amuont"):
        file_source(form, place.uri, schema=pa.schema([("amuont", pa.int64())]))


def test_what_cannot_be_there_is_refused_when_the_job_is_built(place: Place) -> None:
    with pytest.raises(JobRejected, match="names no bucket"):
        file_source("csv", "s3://")
    with pytest.raises(JobRejected, match="NoSuchBucket"):
        file_source("csv", "s3://no-such-bucket/a")


def test_a_job_reads_from_s3_and_its_script_says_how_s3_is_reached(
    place: Place, s3_server: RadosGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("penstock.storage.open_store._s3", lambda: None)
    for form in FORMATS:
        for day in (1, 2):
            place.put(f"{form}/day={day}/a.{form}", encoded(form, numbers(100 * day, 100)))
    with ps.Environment(parallelism=2, config=s3_options(s3_server.endpoint)) as env:
        streams = [
            getattr(env, f"read_{form}")(f"{place.uri}/{form}").select("n", "day")
            for form in FORMATS
        ]
        rows = (
            streams[0]
            .union(*streams[1:])
            .map(lambda row: {"n": row.n + row.day, "day": row.day})
            .collect()
        )
        assert sorted((row.n, row.day) for row in rows) == sorted(
            (n + day, day)
            for day in (1, 2)
            for n in range(100 * day, 100 * day + 100)
            for _ in FORMATS
        )
