"""State as DataFrames of Spark: ``ps.read_state``, and the format "penstock-state" behind ``ps.register``.

A Python data source reads: the files go from where they are to Spark's executors, through our readers there. What is sent
to executors is the source itself, by value, so that one without Penstock can say so.

Nothing of Spark is imported before one of these is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, astuple, replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from penstock.state_tables.spark_rows_client import is_local_session
from penstock.storage.open_store import s3_settings
from penstock.storage.s3.settings import S3Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.datasource import DataSource, DataSourceReader
    from pyspark.sql.types import StructType

FORMAT: Final = "penstock-state"

_SESSIONS: Final[WeakKeyDictionary[Any, S3Settings]] = WeakKeyDictionary()
"""Those that know the format, and how it reaches S3 for them."""


def register(spark: SparkSession) -> None:
    """Makes the format ``penstock-state`` known to a session.

    Example:
        penstock.register(spark)
        spark.read.format("penstock-state").option("uid", "hot").option("state", "running").load("savepoints/one")

    Spark's Python reaches S3 as this process does now; credentials go along where it runs in this process only.
    """
    settings = s3_settings()
    if not is_local_session(spark):
        settings = replace(settings, access_key="", secret_key="")
    if _SESSIONS.get(spark) != settings:
        spark.dataSource.register(data_source(settings))
        _SESSIONS[spark] = settings


def read_state(
    spark: SparkSession,
    path: str | PathLike[str],
    uid: str,
    state: str,
    *,
    key_groups: range | None = None,
) -> DataFrame:
    """A state of a checkpoint or savepoint as a DataFrame, with the columns that ``open_state`` gives.

    Args:
        path: of a savepoint, of a job's checkpoints (its newest one is meant), or of one ``chk-<n>``; also ``s3://``. Both
            this process and Spark's executors have to see it.
        key_groups: whose rows are wanted; None = all.

    Raises:
        StateError: there is no such state, ``key_groups`` is no range of them, or a column has a type that Spark has not.
    """
    from penstock.state_tables.opened_state import checked_range
    from penstock.state_tables.state_partitions import asked_state

    options = {"uid": uid, "state": state}
    if key_groups is not None:
        wanted = checked_range(key_groups)
        options["key_groups"] = f"{wanted.start}-{wanted.stop - 1}"
    asked = asked_state({"path": fspath(path), **options})
    register(spark)
    return spark.read.format(FORMAT).options(**options).load(asked.path)


def data_source(s3: S3Settings | None = None) -> type[DataSource]:
    """The data source.

    Args:
        s3: how it reaches S3; None = as the environment of Spark's Python says.

    Its classes are made in functions since what is made there travels by value: what they need of Penstock they import
    when they are used.
    """
    from pyspark.sql.datasource import DataSource
    from pyspark.sql.types import StructType

    needed = _needed({} if s3 is None or s3 == S3Settings() else asdict(s3))
    reader_class = _reader_class(needed)

    class StateSource(DataSource):  # type: ignore[misc]
        @classmethod
        def name(cls) -> str:
            return "penstock-state"

        def schema(self) -> StructType:
            return StructType.fromJson(needed().asked_state(self.options).spark_json)

        def reader(self, schema: StructType) -> DataSourceReader:
            asked = needed().asked_state(self.options, is_known=True)
            asked.check_schema(is_own=schema == StructType.fromJson(asked.spark_json))
            return reader_class(asked.path, asked.uid, asked.name, asked.key_groups)

    return StateSource


def _needed(s3: Mapping[str, Any]) -> Callable[[], Any]:
    """A function that gives what reads parts of state, wherever it is called; or says what is missing there.

    Args:
        s3: what has been said of how S3 is reached, as plain values.
    """
    from penstock.state_tables.state_partitions import installed_version

    version = installed_version()

    def needed() -> Any:
        try:
            from penstock.state_tables import state_partitions
        except ImportError as error:
            raise RuntimeError(
                f"Spark reads state with Penstock, and its Python {sys.executable} has not all of that ({error}): install "
                f"penstock {version} for the Python that PYSPARK_PYTHON or spark.pyspark.python names, or ship an "
                "environment that has it with spark.archives"
            ) from error
        found = state_partitions.installed_version()
        if found != version:
            raise RuntimeError(
                f"Spark's Python {sys.executable} reads state with Penstock {found}, the session has {version}: install "
                "the same"
            )
        if s3:
            state_partitions.reach_s3(s3)
        return state_partitions

    return needed


def _reader_class(needed: Callable[[], Any]) -> Any:
    from pyspark.sql.datasource import DataSourceReader, InputPartition

    # It has no pushFilters: Spark 4 reads what the last query with filters of a DataFrame has wanted in the others as well.
    class StateReader(DataSourceReader):  # type: ignore[misc]
        def __init__(self, path: str, uid: str, state: str, key_groups: range | None) -> None:
            self.path, self.uid, self.state, self.key_groups = path, uid, state, key_groups

        def partitions(self) -> list[InputPartition]:
            tasks = needed().partitions_of(self.path, self.uid, self.state, self.key_groups)
            return [InputPartition([astuple(part) for part in parts]) for parts in tasks]

        def read(self, partition: InputPartition) -> Iterator[Any]:
            partitions = needed()
            if partition.value is None:  # Spark's own, where there are no parts
                return iter(())
            parts = [partitions.StatePartition(*part) for part in partition.value]
            return partitions.spark_batches(self.path, self.uid, self.state, parts)

    return StateReader
