"""Writers of sinks on real directories, what they are given, and what readers find there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from penstock.connectors.globs import is_hidden
from penstock.connectors.sink import SinkContext
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME
from taskmanager.connectors.factory import build_sink_writer
from taskmanager.connectors.file_sink import FileSinkWriter
from taskmanager.connectors.sink_writer import SinkWriter


def context(
    job: str = "a" * 32, subtask: int = 0, attempt: int = 0, uid: str = "out"
) -> SinkContext:
    """The place of a sink; jobs have ids of 32 digits."""
    return SinkContext(job, "sink", uid, subtask, 2, attempt)


_writers: list[SinkWriter] = []


def opened(spec: graph_pb2.SinkSpec, **place: Any) -> SinkWriter:
    """A writer that is open."""
    writer = build_sink_writer(spec, graph_pb2.Operator(uid="out", name="sink"))
    _writers.append(writer)
    writer.open(context(**place))
    return writer


def release_killed() -> None:
    """Closes the files of writers that were dropped as if their process had been killed."""
    while _writers:
        writer = _writers.pop()
        if isinstance(writer, FileSinkWriter):
            for file in [*writer._open.values(), *(one[1] for one in writer._prepared._files)]:
                file.release()


def prepare(writer: SinkWriter, checkpoint_id: int = 1) -> list[bytes]:
    """Both parts of a prepare, one right after the other."""
    committables = writer.prepare_commit(checkpoint_id)
    finish(writer)
    return writer.described(committables)


def finish(writer: SinkWriter) -> None:
    """The part of an I/O thread: all that has ended becomes safe."""
    work = writer.finish_prepared()
    if work is not None:
        work()


def batch(start: int = 0, rows: int = 100) -> pa.RecordBatch:
    """Rows with an id, a text that needs quoting, and a column to partition by."""
    numbers = range(start, start + rows)
    return pa.record_batch(
        {
            "id": pa.array(numbers, pa.int64()),
            "name": [None if i % 9 == 0 else f'n"{i}\n,' for i in numbers],
            "k": [["x y", None, "a/b"][i % 3] for i in numbers],
            EVENT_TIME: pa.array(numbers, pa.int64()),
        }
    )


def user(*batches: pa.RecordBatch) -> pa.Table:
    """The rows as a user sees them."""
    return pa.Table.from_batches(batches).drop_columns([EVENT_TIME])


def visible(directory: Path) -> list[Path]:
    """The files that readers of a data set see."""
    return sorted(
        p
        for p in directory.rglob("*")
        if p.is_file() and not any(map(is_hidden, p.relative_to(directory).parts))
    )


def everything(directory: Path) -> list[Path]:
    """All files and directories."""
    return sorted(directory.rglob("*"))


def read(format: str, directory: Path) -> list[dict[str, Any]]:
    """The rows of the visible files."""
    rows: list[dict[str, Any]] = []
    for path in visible(directory):
        if format == "parquet":
            rows += pq.ParquetFile(path).read().to_pylist()
        elif format == "csv":
            nulls = pc.ConvertOptions(strings_can_be_null=True, quoted_strings_can_be_null=False)
            lines = pc.ParseOptions(newlines_in_values=True)
            rows += pc.read_csv(path, convert_options=nulls, parse_options=lines).to_pylist()
        else:
            rows += [json.loads(line) for line in path.read_text().splitlines()]
    return rows


def files_of(writer: SinkWriter, directory: Path) -> tuple[int, int]:
    """How many hidden files are open, and how many complete."""
    names = [p.name for p in everything(directory)]
    return (
        sum(name.endswith(".inprogress") for name in names),
        sum(name.endswith(".pending") for name in names),
    )
