"""Takes the rows of a DataFrame over from Spark, as batches.

Where its executors are on this machine they leave files of Arrow in the directory for temporary files. From elsewhere rows
come through the driver; one partition, and the next one, are in memory then.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_MAX_BYTES: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
_NO_LIMIT: Final = str(2**31 - 1)
_OBSERVED: Final = "CollectMetrics"
_TEXT: Final = "string"
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
_TEXT_BYTES_WORTH_IT: Final = 1 << 10
"""Texts that may only be shorter are likely to be longer now and then, and all is done twice then."""
_TOO_LONG: Final = "penstock: a text is too long for batches without a limit of bytes"


def is_frame(data: Any) -> bool:
    """Whether something is a DataFrame of Spark, which need not be there for that."""
    return type(data).__module__.startswith("pyspark.") and hasattr(data, "mapInArrow")


def frame_batches(frame: DataFrame) -> Iterator[pa.RecordBatch]:
    """The rows."""
    names = frame.columns
    # Spark hands over no column whose name has a point in it, or is there twice but for its case.
    numbered = frame.toDF(*(f"c{place}" for place in range(len(names))))
    through = _through_files if _is_local(frame) else _through_driver
    for batch in through(numbered):
        yield batch.rename_columns(names)


def _through_files(frame: DataFrame) -> Iterator[pa.RecordBatch]:
    with tempfile.TemporaryDirectory(prefix="penstock-frame-") as directory:
        for row in _rows_of_files(frame, directory):
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
    session stays: it is lifted in a copy, which Python knows nothing of. A text that is so long that the limit might cut is
    an error that says ``_TOO_LONG``. Other versions, which have not all that is asked for here, are left as they are.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    fields = frame.schema.fields
    texts = [field.name for field in fields if field.dataType.typeName() == _TEXT]
    if any(field.dataType.typeName() not in {_TEXT, *_FIXED_WIDTH} for field in fields):
        return frame
    session: Any = frame.sparkSession
    try:
        from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

        limits = session._jsparkSession.sessionState().conf()
        rows, size_bytes = limits.arrowMaxRecordsPerBatch(), limits.arrowMaxBytesPerBatch()
        needed = _COLUMN_BYTES_MAX * len(fields) + _TEXT_BYTES_WORTH_IT * len(texts)
        if not 0 < rows * needed <= size_bytes:
            return frame
        if texts:
            left = size_bytes // rows - _COLUMN_BYTES_MAX * len(fields)
            checked = _with_texts_up_to(left // len(texts), frame)
        else:
            checked = frame
        plan = checked._jdf.queryExecution().analyzed()
        if _OBSERVED in plan.toString():  # whose session hears of it alone
            return frame
        copy = session._jsparkSession.cloneSession()
        copy.conf().set(_MAX_BYTES, _NO_LIMIT)
        made = session._jvm.org.apache.spark.sql.classic.Dataset.ofRows(copy, plan)
    except (ImportError, AttributeError, TypeError, Py4JError):
        return frame
    return ClassicDataFrame(made, session)


def _with_texts_up_to(bytes_max: int, frame: DataFrame) -> DataFrame:
    """The same rows; a longer text is an error."""
    from pyspark.sql import functions as fn

    columns = [frame[field.name] for field in frame.schema.fields]
    return frame.select(
        *(
            fn.when(fn.octet_length(column) > bytes_max, fn.raise_error(_TOO_LONG))
            .otherwise(column)
            .alias(field.name)
            if field.dataType.typeName() == _TEXT
            else column
            for column, field in zip(columns, frame.schema.fields, strict=True)
        )
    )


def _rows_of_files(frame: DataFrame, directory: str) -> list[Any]:
    """Paths of what the frame's partitions have left; where a text is too long, after another time with Spark's limit."""
    from pyspark.errors import PySparkException

    leaving = _leaving_files(directory)
    lifted = without_idle_limit(frame)
    try:
        return lifted.mapInArrow(leaving, "path string").collect()
    except PySparkException as error:
        if lifted is frame or _TOO_LONG not in str(error):
            raise
    for left in Path(directory).iterdir():
        left.unlink()
    return frame.mapInArrow(leaving, "path string").collect()


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
