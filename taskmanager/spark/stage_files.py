"""The files of one attempt of a Spark stage: its input, its output, and the index that says the output is complete.

    <directory>/<job>/<vertex>-<subtask>-<attempt>/function
                                                   in-<input>/<number>.parquet
                                                   out/...
                                                   index.json

The index is written last, and by the driver: what it does not name does not count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import TaskFailure, Unrecoverable
from penstock.rows.spark_types import carried_schema, converted
from penstock.storage.os_errors import store_error

FUNCTION = "function"
OUTPUT = "out"
_INDEX = "index.json"
_OTHER_CALENDAR = b"org.apache.spark.legacyDateTime"
_FILE_BYTES = 64 << 20
"""Of rows in memory: a file of the input has about as many, so that Spark can share the work out."""


_AT_ONCE_MAX = 8


@dataclass(frozen=True, slots=True)
class SparkOutputFile:
    """One file of a stage's output."""

    path: str
    rows: int
    size_bytes: int


class StageInputFiles:
    """Collects the rows of one input until they fill a file."""

    def __init__(self, directory: Path, schema: pa.Schema, where: str) -> None:
        self.schema = carried_schema(schema)
        self.files: list[str] = []
        self._directory = directory
        self._given = schema
        self._where = where
        self._batches: list[pa.RecordBatch] = []
        self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Takes rows, of columns of the schema's types, whatever fields within them are called and may be null."""
        columns = batch.select(self._given.names).columns
        self._batches.append(pa.RecordBatch.from_arrays(columns, schema=self._given))
        self._bytes += batch.get_total_buffer_size()

    @property
    def is_full(self) -> bool:
        """Whether the rows should be written now."""
        return self._bytes >= _FILE_BYTES

    @property
    def is_open(self) -> bool:
        """Whether something is left to be written: Spark wants a file also where there are no rows."""
        return bool(self._batches) or not self.files

    def take(self) -> pa.Table:
        """The rows that are to be written next."""
        table = pa.Table.from_batches(self._batches, schema=self._given)
        self._batches, self._bytes = [], 0
        return table

    def write(self, table: pa.Table) -> None:
        """Writes rows that were taken; any thread, one call at a time.

        Raises:
            Unrecoverable: a value is none that Spark can have: it would be met again.
            TaskFailure: the file cannot be written.
        """
        path = self._directory / f"{len(self.files)}.parquet"
        try:
            rows = converted(table, self.schema, self._where)
        except TaskFailure as error:
            raise Unrecoverable(str(error)) from error
        with writing(path):
            self._directory.mkdir(parents=True, exist_ok=True)
            pq.write_table(rows, path, store_schema=False)
        self.files.append(str(path))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """For the time in which a file of a stage is written.

    Raises:
        TaskFailure: it cannot be.
    """
    try:
        yield
    except OSError as error:
        raise TaskFailure(str(store_error("written", path, error))) from error


def written_output(directory: Path, *, is_kept: bool = False) -> list[SparkOutputFile]:
    """What Spark has written, looked at file by file, several at a time.

    Args:
        is_kept: the files are to be safe from a crash of the machine as well.

    Raises:
        TaskFailure: it has not said that it is done, or a file is none.
    """
    if not (directory / "_SUCCESS").exists():
        raise TaskFailure(
            f"Spark has not marked its output as complete: {directory} has no _SUCCESS"
        )
    with ThreadPoolExecutor(_AT_ONCE_MAX) as threads:
        look = partial(_looked_at, is_kept=is_kept)
        return list(threads.map(look, sorted(directory.glob("*.parquet"))))


def _looked_at(path: Path, *, is_kept: bool) -> SparkOutputFile:
    try:
        with path.open("rb") as file:
            if is_kept:
                os.fsync(file.fileno())
            metadata = pq.read_metadata(file)
            if has_other_calendar(metadata):
                message = (
                    "Spark has written its output with spark.sql.parquet.datetimeRebaseModeInWrite = LEGACY, in which days "
                    "before 1582-10-15 are others: leave that key as it is, in the configuration and in the function"
                )
                raise TaskFailure(message, user_traceback=message)
            return SparkOutputFile(str(path), metadata.num_rows, os.fstat(file.fileno()).st_size)
    except (OSError, pa.ArrowException) as error:
        raise TaskFailure(f"what Spark has written cannot be read: {path}: {error}") from error


def has_other_calendar(metadata: pq.FileMetaData) -> bool:
    """Whether days before 1582-10-15 are in a file as Spark 2 wrote them, and are others to everybody else."""
    return _OTHER_CALENDAR in (metadata.metadata or {})


def write_index(directory: Path, files: list[SparkOutputFile]) -> None:
    """Makes the output of an attempt count, at once.

    Raises:
        TaskFailure: it cannot be written.
    """
    temporary = directory / f".{_INDEX}"
    with writing(temporary), temporary.open("w") as file:
        json.dump([asdict(one) for one in files], file)
        file.flush()
        os.fsync(file.fileno())
    with writing(directory / _INDEX):
        temporary.replace(directory / _INDEX)


def indexed_output(directory: Path) -> list[SparkOutputFile]:
    """The output of an attempt.

    Raises:
        TaskFailure: there is none, or a file is not as it was.
    """
    try:
        files = [SparkOutputFile(**one) for one in json.loads((directory / _INDEX).read_text())]
        for file in files:
            size_bytes = Path(file.path).stat().st_size
            if size_bytes != file.size_bytes:
                raise TaskFailure(
                    f"{file.path} has {size_bytes} bytes, and had {file.size_bytes} when it was complete"
                )
    except (OSError, ValueError, TypeError) as error:
        raise TaskFailure(f"the output of the Spark stage is gone: {error}") from error
    return files


def read_rows(
    file: SparkOutputFile, schema: pa.Schema, batch_rows: int, where: str
) -> Iterator[pa.RecordBatch]:
    """The rows of a file of the output, with the types that were declared.

    Raises:
        TaskFailure: it cannot be read, a value is none of its type, or rows are missing.
    """
    rows = 0
    try:
        with pq.ParquetFile(file.path) as opened:
            for batch in opened.iter_batches(batch_rows):
                rows += batch.num_rows
                table = converted(pa.Table.from_batches([batch]), schema, where)
                yield from table.to_batches()
    except (OSError, pa.ArrowException) as error:
        raise TaskFailure(
            f"the output of the Spark stage cannot be read: {file.path}: {error}"
        ) from error
    if rows != file.rows:
        raise TaskFailure(f"{file.path} has {rows} rows, and had {file.rows} when it was complete")


def earlier_attempts(directory: Path) -> list[Path]:
    """Directories that earlier attempts of the same subtask have left behind."""
    name, _, attempt = directory.name.rpartition("-")
    return [
        path
        for path in directory.parent.glob(f"{name}-*")
        if (number := path.name.rpartition("-")[2]).isdecimal() and int(number) < int(attempt)
    ]
