"""Takes the rows of a DataFrame over from Spark, as batches.

Where its executors are on this machine they leave files of Arrow in the directory for temporary files. From elsewhere rows
come through the driver; one partition, and the next one, are in memory then.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_MAX_BYTES: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
_NO_LIMIT: Final = str(2**31 - 1)
_OBSERVED: Final = "CollectMetrics"
_FIXED_WIDTH: Final = frozenset(
    [
        "boolean",
        "byte",
        "short",
        "integer",
        "long",
        "float",
        "double",
        "decimal",
        "date",
        "timestamp",
        "timestamp_ntz",
    ]
)
_COLUMN_BYTES_MAX: Final = 32
"""A value of these in a row of Spark, with its share of the row's head."""


def is_frame(data: Any) -> bool:
    """Whether something is a DataFrame of Spark, which need not be there for that."""
    return type(data).__module__.startswith("pyspark.") and hasattr(data, "mapInArrow")


def frame_batches(frame: DataFrame) -> Iterator[pa.RecordBatch]:
    """The rows."""
    if not _is_local(frame):
        yield from _through_driver(frame)
        return
    with tempfile.TemporaryDirectory(prefix="penstock-frame-") as directory:
        rows = without_idle_limit(frame)
        for row in rows.mapInArrow(_leaving_files(directory), "path string").collect():
            with pa.memory_map(row.path) as file, pa.ipc.open_stream(file) as reader:
                yield from reader


def is_local_session(session: SparkSession) -> bool:
    """Whether executors are threads of a process that this one has started."""
    if ".connect." in type(session).__module__:
        return False
    return str(session.sparkContext.master).split("[")[0] == "local"


def without_idle_limit(frame: DataFrame) -> DataFrame:
    """The same without Spark's limit of bytes per batch, where that of rows leaves nothing for it to cut.

    Spark 4 adds up the sizes of all rows for it, which is a third of what handing them over takes. The limit of the user's
    session stays: it is lifted in a copy, which Python knows nothing of. Other versions, which have not all that is asked
    for here, are left as they are.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    fields = frame.schema.fields
    if any(field.dataType.typeName() not in _FIXED_WIDTH for field in fields):
        return frame
    session: Any = frame.sparkSession
    try:
        from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

        limits = session._jsparkSession.sessionState().conf()
        rows, size_bytes = limits.arrowMaxRecordsPerBatch(), limits.arrowMaxBytesPerBatch()
        if not 0 < rows * _COLUMN_BYTES_MAX * len(fields) <= size_bytes:
            return frame
        plan = frame._jdf.queryExecution().analyzed()
        if _OBSERVED in plan.toString():  # whose session hears of it alone
            return frame
        copy = session._jsparkSession.cloneSession()
        copy.conf().set(_MAX_BYTES, _NO_LIMIT)
        made = session._jvm.org.apache.spark.sql.classic.Dataset.ofRows(copy, plan)
    except (ImportError, AttributeError, TypeError, Py4JError):
        return frame
    return ClassicDataFrame(made, session)


def _is_local(frame: DataFrame) -> bool:
    return is_local_session(frame.sparkSession)


def _leaving_files(directory: str) -> Any:
    """What a partition is mapped by: into a file, whose path it gives. It is made here so that it travels by value."""

    def left(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import itertools
        import uuid

        import pyarrow as pa

        batches = iter(batches)
        first = next(batches, None)
        if first is None:
            return
        path = f"{directory}/{uuid.uuid4().hex}.arrow"  # a second attempt has one of its own
        with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, first.schema) as writer:
            for batch in itertools.chain([first], batches):
                writer.write_batch(batch)
        yield pa.record_batch({"path": [path]})

    return left


def _through_driver(frame: DataFrame) -> Iterator[pa.RecordBatch]:
    def encoded(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for batch in batches:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            yield pa.record_batch({"rows": pa.array([sink.getvalue().to_pybytes()])})

    rows = frame.mapInArrow(encoded, "rows binary").toLocalIterator(prefetchPartitions=True)
    for row in rows:
        with pa.ipc.open_stream(row.rows) as reader:
            yield from reader
