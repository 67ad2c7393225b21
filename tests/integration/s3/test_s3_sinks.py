"""Aim: a file sink's rows appear below a prefix of S3 exactly once, whatever it is killed at.

Method: writers on a real server: what readers see before and behind commits, commits that were cut off at each of their
requests, leftovers of dead attempts and of other jobs, files of several parts, savepoints; then jobs.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.connectors.files import file_sink, file_source
from penstock.connectors.sink import SinkContext
from penstock.errors import JobRejected, TaskFailure, Unrecoverable
from penstock.pb import graph_pb2
from penstock.storage.s3.bucket import S3Bucket
from taskmanager.connectors.factory import build_sink_writer
from taskmanager.connectors.hidden_files import output_tag
from taskmanager.connectors.sink_writer import SinkWriter
from taskmanager.connectors.swept_output import sweep_output
from tests.integration.s3.conftest import BUCKET, settings_of
from tests.support.file_sinks import batch, context, prepare
from tests.support.radosgw import RadosGateway, s3_options
from tests.support.source_harness import SourceHarness

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

FORMATS = ("parquet", "csv", "json")


class Output:
    """A prefix that a sink writes to."""

    def __init__(self, prefix: str, settings: Any) -> None:
        self.prefix = prefix
        self.uri = f"s3://{BUCKET}/{prefix}"
        self.bucket = S3Bucket(BUCKET, settings)
        self._writers: list[SinkWriter] = []

    def opened(self, format: str = "json", roll: int = 64 << 20, **place: Any) -> SinkWriter:
        """A writer that is open."""
        options = {key: place.pop(key) for key in ("partition_by",) if key in place}
        spec = file_sink(format, self.uri, roll=roll, **options)
        writer = build_sink_writer(spec, graph_pb2.Operator(uid="out", name="sink"))
        writer.open(context(**place))
        self._writers.append(writer)
        return writer

    def names(self) -> list[str]:
        """All objects."""
        return [found.key[len(self.prefix) + 1 :] for found in self.bucket.below(f"{self.prefix}/")]

    def visible(self) -> list[str]:
        return [name for name in self.names() if not name.startswith("_")]

    def content(self, name: str) -> bytes:
        found = self.bucket.find(f"{self.prefix}/{name}")
        assert found is not None
        return self.bucket.read(found, 0, found.size_bytes)

    def rows(self) -> list[int]:
        """The ids of all rows that readers of JSON lines see."""
        lines = [line for name in self.visible() for line in self.content(name).splitlines()]
        return sorted(json.loads(line)["id"] for line in lines)


@pytest.fixture
def output(s3_server: RadosGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Output:
    settings = settings_of(s3_server.endpoint)
    monkeypatch.setattr("penstock.storage.open_store._s3", lambda: settings)
    return Output(tmp_path.name, settings)


@pytest.mark.parametrize("form", FORMATS)
def test_rows_appear_at_the_commit_and_nothing_else_stays(output: Output, form: str) -> None:
    writer = output.opened(form, partition_by="k")
    writer.write(batch())
    writer.write(batch(100))
    committables = prepare(writer)
    assert output.visible() == []
    assert len(output.names()) == len(committables) == 3
    writer.commit(committables)
    assert sorted({name.split("/")[0] for name in output.names()}) == [
        "k=__HIVE_DEFAULT_PARTITION__", "k=a%2Fb", "k=x%20y",
    ]  # fmt: skip
    writer.close()
    rows = SourceHarness().rows(file_source(form, output.uri))
    assert sorted(row["id"] for row in rows) == list(range(200))
    assert {row["id"]: row["k"] for row in rows}[5] == "a/b"
    writer.commit(committables)  # once more
    assert len(output.names()) == 3


class Cut(Exception):  # noqa: N818 - named after what happened
    """The process is killed."""


@pytest.mark.parametrize("step", ["copy", "delete"])
def test_a_commit_that_is_cut_off_is_done_by_the_next_attempt(
    output: Output, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = output.opened(roll=1_000)
    for start in range(0, 400, 100):
        writer.write(batch(start))
    committables = prepare(writer)
    assert len(committables) == 4
    real_copy = S3Bucket.copy

    def cut_copy(bucket: S3Bucket, keys: Any) -> Any:
        real_copy(bucket, list(keys)[:2])
        raise Cut

    def cut_delete(bucket: S3Bucket, keys: Any) -> Any:
        raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(S3Bucket, step, cut_copy if step == "copy" else cut_delete)
        with pytest.raises(Cut):
            writer.commit(committables)
    seen = output.visible()
    assert len(seen) == (2 if step == "copy" else 4)
    etags = {one: output.bucket.find(f"{output.prefix}/{one}") for one in seen}

    second = output.opened(attempt=1)
    second.recover(committables)
    assert output.rows() == list(range(400))
    assert len(output.names()) == 4
    assert {one: output.bucket.find(f"{output.prefix}/{one}") for one in seen} == etags
    second.recover(committables)
    assert output.rows() == list(range(400))


def test_output_that_is_gone_under_both_names_is_an_error(output: Output) -> None:
    writer = output.opened()
    writer.write(batch())
    committables = prepare(writer)
    output.bucket.delete(f"{output.prefix}/{name}" for name in output.names())
    with pytest.raises(TaskFailure, match="cannot be committed"):
        writer.commit(committables)


@pytest.mark.parametrize("is_held", [False, True])
def test_a_prepared_object_that_is_not_what_was_prepared_is_never_shown(
    output: Output, is_held: bool
) -> None:
    writer = output.opened()
    writer.write(batch())
    named = prepare(writer)
    if is_held:
        bare = writer.hold(7, named)
        writer.keep_held(7, named)
        named = writer.described(bare)
    uri = json.loads(named[0])["pending"]
    name = uri.removeprefix(f"{output.uri}/")
    content = output.content(name)
    other = output.opened(job="c" * 32)
    for damaged, why in ((content[:-1], "are there"), (b"?" + content[1:], "altered")):
        output.bucket.put(f"{output.prefix}/{name}", damaged)
        told = re.escape(f"{uri}: {len(content)} bytes")
        with pytest.raises(Unrecoverable, match=f"{told}.*{why}"):
            other.recover(named)
    output.bucket.delete([f"{output.prefix}/{name}"])
    with pytest.raises(Unrecoverable, match="neither under this name nor hidden"):
        other.recover(named)
    assert output.visible() == []
    _put_in_parts(output, name, content)  # the same bytes, which the server calls otherwise
    other.recover(named)
    assert output.rows() == list(range(100))


def _put_in_parts(output: Output, name: str, content: bytes) -> None:
    writer = output.bucket.writer(f"{output.prefix}/{name}")
    writer.write(memoryview(content))
    writer._send(bytearray(content))
    writer._content.clear()
    writer.complete()
    found = output.bucket.find(f"{output.prefix}/{name}")
    assert found is not None
    assert found.etag.endswith('-1"')


def test_a_file_of_many_parts_is_streamed_and_copied_in_parts(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.storage.s3 import copying

    copied: list[int] = []
    real = copying.copy_in_parts

    def by_parts(*arguments: Any) -> None:
        copied.append(1)
        real(*arguments, part_bytes=5 << 20)

    monkeypatch.setattr("penstock.storage.s3.bucket.copy", by_parts)
    writer = output.opened("csv", roll=1 << 30)
    wide = pa.record_batch({"id": range(100_000), "text": ["x" * 150] * 100_000})
    begun = []
    for _ in range(2):
        writer.write(wide)
        begun.append(len(output.bucket.uploads(f"{output.prefix}/_pending/")))
    assert begun[-1] == 1, "it is not held until the end"
    committables = prepare(writer)
    assert output.bucket.uploads(f"{output.prefix}/") == []
    writer.commit(committables)
    [name] = output.names()
    assert copied
    table = pyarrow.csv.read_csv(io.BytesIO(output.content(name)))
    assert table["id"].to_pylist() == list(range(100_000)) * 2


def test_memory_is_bounded_however_many_partitions_there_are(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskmanager.connectors.file_sink.BUFFERED_BYTES_MAX", 1 << 20)
    monkeypatch.setattr("taskmanager.connectors.file_sink.START_BYTES", 64 << 10)
    writer = output.opened("json", partition_by="k")
    for start in range(0, 40_000, 8_000):
        writer.write(
            pa.record_batch(
                {
                    "id": range(start, start + 8_000),
                    "k": [i % 4 for i in range(8_000)],
                    "text": ["x" * 100] * 8_000,
                }
            )
        )
        held = [*writer._open.values(), *writer._held.values()]  # type: ignore[attr-defined]
        assert sum(file.buffered_bytes for file in held) < 2 << 20
    writer.commit(prepare(writer))
    assert output.rows() == list(range(40_000))


def test_leftovers_are_swept_by_their_own_job_only(output: Output) -> None:
    for place in ({"job": "a" * 32}, {"job": "c" * 32}):
        killed = output.opened("csv", roll=1 << 30, **place)
        killed.write(batch())
        prepare(killed)
        killed.write(pa.record_batch({"text": ["x" * 1_000_000] * 6}))
    below = f"{output.prefix}/_pending/"
    assert len(output.names()) == 2
    assert len(output.bucket.uploads(below)) == 2
    second = output.opened(attempt=1)
    second.recover([])
    others = output_tag("c" * 32, "out")
    [left] = output.names()
    assert others in left
    assert [others in upload.key for upload in output.bucket.uploads(below)] == [True]
    assert sweep_output(output.uri, others) == 2
    assert output.names() == []
    assert output.bucket.uploads(below) == []


def test_what_is_given_up_goes(output: Output) -> None:
    writer = output.opened(roll=1_000)
    writer.write(batch())
    aborted = prepare(writer)
    writer.write(batch(100))
    writer.write(batch(200, 1))
    writer.abort(aborted)
    writer.close()
    assert output.names() == []


def test_what_a_savepoint_names_stays_until_it_is_committed(output: Output) -> None:
    writer = output.opened()
    writer.write(batch())
    committables = prepare(writer)
    held = writer.hold(7, committables)
    writer.keep_held(7, committables)
    # The job is cancelled, and another one starts from the savepoint.
    tag = output_tag("a" * 32, "out")
    (pending,) = [name for name in output.names() if name.startswith("_pending/")]
    assert sweep_output(output.uri, tag, [pending.rpartition("/")[2]]) == 0
    assert pending in output.names()
    writer.abort(committables)
    sweep_output(output.uri, tag)
    assert output.visible() == []
    other = output.opened(job="c" * 32)
    other.recover(held)
    assert output.rows() == list(range(100))
    assert output.names() == output.visible()
    other.recover(held)

    # Or it goes on and commits.
    writer = output.opened(attempt=3)
    writer.write(batch(100))
    committables = prepare(writer, 8)
    writer.keep_held(8, committables)
    writer.commit(committables)
    assert len(output.names()) == 3
    writer.let_go(8, committables)
    assert output.rows() == list(range(200))
    assert len(output.names()) == 2

    # Or it is killed in between.
    writer = output.opened(attempt=4)
    writer.write(batch(200))
    committables = prepare(writer, 9)
    writer.keep_held(9, committables)
    writer.commit(committables)
    writer.keep_held(9, committables)
    again = output.opened(attempt=5)
    again.recover(committables)
    assert output.rows() == list(range(300))
    assert output.names() == output.visible()


def test_a_place_that_cannot_be_written_is_said_at_once(output: Output) -> None:
    with pytest.raises(JobRejected, match="name a prefix"):
        file_sink("csv", f"s3://{BUCKET}")
    writer = build_sink_writer(
        file_sink("csv", "s3://no-such-bucket/a"), graph_pb2.Operator(uid="out", name="sink")
    )
    with pytest.raises(TaskFailure, match="NoSuchBucket"):
        writer.open(SinkContext("a" * 32, "sink", "out", 0, 1, 0))


@pytest.mark.parametrize("mode", ["streaming", "batch"])
def test_a_job_writes_to_s3(output: Output, s3_server: RadosGateway, mode: str) -> None:
    with ps.Environment(parallelism=2, config=s3_options(s3_server.endpoint)) as env:
        env.set_runtime_mode(mode)
        rows = env.from_rows([{"n": n, "k": n % 3} for n in range(1_000)])
        rows.key_by("k").aggregate(total=ps.sum("n")).write_parquet(f"{output.uri}/totals")
        rows.write_csv(f"{output.uri}/rows", partition_by="k")
        env.execute("to S3")
    names = output.names()
    assert not [name for name in names if "_pending" in name]
    totals = [
        row
        for name in names
        if name.startswith("totals")
        for row in pq.read_table(io.BytesIO(output.content(name))).to_pylist()
    ]
    assert {row["k"]: max(r["total"] for r in totals if r["k"] == row["k"]) for row in totals} == {
        k: sum(range(k, 1_000, 3)) for k in range(3)
    }
    rows = SourceHarness().rows(file_source("csv", f"{output.uri}/rows"))
    assert sorted(row["n"] for row in rows) == list(range(1_000))
