"""The sources of an environment: what a job reads."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.client.artifacts import table_artifact
from penstock.connectors.source import Source
from penstock.connectors.text_options import DEFAULTS, TextOptions, text_options
from penstock.errors import JobRejected
from penstock.graph.column_checks import check_schema
from penstock.graph.logical import NodeInput, ReadSource
from penstock.graph.persisted import check_name
from penstock.pb import client_pb2, graph_pb2
from penstock.rows.schema import schema_from_bytes
from penstock.streams.function_schemas import declared_schema
from penstock.streams.job_builder import JobBuilder
from penstock.streams.sampling import SAMPLE_ROWS_MAX
from penstock.streams.stream import Schema, Stream
from penstock.units import argument_ms

if TYPE_CHECKING:
    from penstock.streams.windows import Duration


Path = str | os.PathLike[str]


class Sources(ABC):
    """What ``ps.Environment`` can read."""

    _builder: JobBuilder

    @abstractmethod
    def _find_persisted(self, name: str) -> client_pb2.PersistedDetails:
        """What an earlier job has left behind under a name.

        Raises:
            JobRejected: there is nothing of it.
        """

    def read_parquet(
        self,
        path: Path,
        *,
        schema: Schema = None,
        columns: Sequence[str] | None = None,
        watch: Duration | None = None,
    ) -> Stream:
        """Rows of Parquet files.

        Args:
            path: a file, a directory (read recursively) or a glob.
            schema: the columns; None = as in the files.
            columns: those to read; None = all.
            watch: how often the directory is looked at for new files; None = once, a bounded source.
        """
        return self._read_files("parquet", path, schema, columns, watch)

    def read_csv(
        self,
        path: Path,
        *,
        schema: Schema = None,
        columns: Sequence[str] | None = None,
        watch: Duration | None = None,
        delimiter: str = ",",
        header: bool = True,
        nulls: Sequence[str] | None = None,
        optional: Sequence[str] = (),
        compression: str | None = None,
    ) -> Stream:
        """Rows of CSV files; arguments as for ``read_parquet``, and these.

        Args:
            delimiter: what stands between two fields.
            header: the first row of every file names its columns; without it they are those of
                ``schema``, in order, or f0, f1, ...
            nulls: texts that are null in columns of every type; an empty field that is no text always is.
            optional: columns that a file need not have; they are null there.
            compression: "gzip", "zstd", "bz2" or "none"; None = as the file's suffix says.
        """
        options = text_options(
            delimiter=delimiter,
            header=header,
            nulls=nulls,
            optional=optional,
            compression=compression,
        )
        return self._read_files("csv", path, schema, columns, watch, options)

    def read_json(
        self,
        path: Path,
        *,
        schema: Schema = None,
        columns: Sequence[str] | None = None,
        watch: Duration | None = None,
        optional: Sequence[str] = (),
        compression: str | None = None,
    ) -> Stream:
        """Objects of JSON lines, or of one array per file; arguments as for ``read_parquet``, and these.

        Args:
            optional: columns that no object need have, so that nobody is warned of them.
            compression: as for ``read_csv``.
        """
        options = text_options(optional=optional, compression=compression)
        return self._read_files("json", path, schema, columns, watch, options)

    def read_arrow(
        self,
        path: Path,
        *,
        schema: Schema = None,
        columns: Sequence[str] | None = None,
        watch: Duration | None = None,
    ) -> Stream:
        """Rows of Arrow IPC files; arguments as for ``read_parquet``."""
        return self._read_files("arrow", path, schema, columns, watch)

    def _read_files(
        self,
        form: str,
        path: Path,
        schema: Schema,
        columns: Sequence[str] | None,
        watch: Duration | None,
        options: TextOptions = DEFAULTS,
    ) -> Stream:
        from penstock.connectors.file_samples import sample_files
        from penstock.connectors.files import file_source

        call = f"read_{form}"
        wanted = None if schema is None else declared_schema(call, schema)
        watch_ms = 0 if watch is None else argument_ms(f"{call}: watch", watch)
        if watch is not None and watch_ms == 0:
            raise JobRejected(f"{call}: watch is {watch!r}; it must be longer than zero")
        spec, found = file_source(
            form, path, schema=wanted, columns=columns, watch_ms=watch_ms, options=options
        )
        files = spec.files
        operation = ReadSource(
            spec, sample=lambda rows: sample_files(form, files.path, found, rows, files)
        )
        return self._read(operation, call, found)

    def from_rows(self, rows: Iterable[Mapping[str, Any]], schema: Schema = None) -> Stream:
        """Rows that are here, as dicts; None in a column, or a missing key, is null."""
        from penstock.connectors.memory import rows_to_table

        wanted = None if schema is None else declared_schema("from_rows", schema)
        return self._read_table("from_rows", rows_to_table(rows, wanted), is_single=True)

    def from_arrow(self, table: pa.Table | pa.RecordBatch) -> Stream:
        """A table that is here; it travels with the job."""
        from penstock.connectors.memory import check_nulls

        if isinstance(table, pa.RecordBatch):
            table = pa.Table.from_batches([table])
        if not isinstance(table, pa.Table):
            raise JobRejected(f"from_arrow: {type(table).__name__} is no pyarrow.Table")
        check_nulls(table)
        return self._read_table("from_arrow", table, is_single=False)

    def _read_table(self, call: str, table: pa.Table, *, is_single: bool) -> Stream:
        from penstock.connectors.memory import arrow_source

        artifact = table_artifact(table, name=f"{call}.arrow")
        spec, schema = arrow_source(artifact.id, table.schema)
        check_schema(call, schema)
        first = table.slice(0, SAMPLE_ROWS_MAX)
        operation = ReadSource(
            spec,
            artifacts=(artifact,),
            is_single=is_single,
            sample=lambda rows: _first_batch(first.slice(0, rows)),
        )
        return self._read(operation, call, schema)

    def generate(
        self,
        fn: Callable[[int, int], pa.RecordBatch],
        rows: int | None = None,
        rate: float | None = None,
        schema: Schema = None,
    ) -> Stream:
        """Rows made by a function of the position.

        Args:
            fn: ``fn(start, count)`` returns rows ``start`` to ``start + count``; a pure function.
            rows: how many; None = endless.
            rate: rows per second over all subtasks; None = as fast as it goes.
            schema: the columns; None = as ``fn(0, 1)`` returns them.
        """
        from penstock.connectors.generators import generator_source, sample_generator_schema

        if not callable(fn):
            raise JobRejected(f"generate: {fn!r} is no function")
        found = (
            sample_generator_schema(fn) if schema is None else declared_schema("generate", schema)
        )
        spec, found = generator_source(graph_pb2.Function(), found, rows, rate)
        most = rows if rows is not None else 1 << 62
        operation = ReadSource(
            spec, function=fn, sample=lambda count: fn(0, min(count, most)) if most else None
        )
        return self._read(operation, "generate", check_schema("generate", found))

    def nexmark(
        self,
        events: int | None = None,
        *,
        kind: str = "bid",
        seed: int = 0,
        rate: float | None = None,
        first_event_time_ms: int | None = None,
        event_interval_us: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> Stream:
        """Events of the Nexmark auction benchmark, the same for the same seed and position.

        Args:
            events: how many of all kinds; None = endless.
            kind: "bid" | "auction" | "person" | "" for all, one nested column each.
            rate: rows per second over all subtasks; None = as fast as it goes.
            first_event_time_ms: event time of the first event.
            event_interval_us: event-time distance of two events.
            columns: those to make; None = all.
        """
        from penstock.connectors.generators import nexmark_source, sample_nexmark

        wanted = None if columns is None else list(columns)
        spec, schema = nexmark_source(
            events,
            seed,
            rate,
            kind,
            first_event_time_ms=first_event_time_ms,
            event_interval_us=event_interval_us,
            columns=wanted,
        )
        operation = ReadSource(spec, sample=lambda rows: sample_nexmark(spec.nexmark, schema, rows))
        return self._read(operation, "nexmark", schema)

    def read_persisted(self, name: str) -> Stream:
        """Rows that an earlier job has left behind by ``.persist(name)``.

        The cluster is asked for them now: what gets the name later is not meant.

        Args:
            name: as it was given to ``persist``.

        Raises:
            JobRejected: there is nothing of this name; the message says what there is.
        """
        check_name("read_persisted", name)
        found = self._find_persisted(name)
        spec = graph_pb2.SourceSpec(
            persisted=graph_pb2.PersistedSource(
                name=found.name,
                job_id=found.job_id,
                partition_count=found.partition_count,
                schema=found.schema,
            ),
            bounded=True,
        )
        operation = ReadSource(spec, updates_of=found.updates_of)
        return self._read(operation, "read_persisted", schema_from_bytes(found.schema))

    def spark(
        self,
        fn: Callable[[Any], Any],
        schema: Schema = None,
        timeout: Duration | None = None,
        cores: int | None = None,
    ) -> Stream:
        """Rows that Spark makes or reads: tables of its catalogs, JDBC, whatever its session has; in batch mode, or read first.

        Args:
            fn: ``fn(spark) -> DataFrame``.
            schema: the columns of that DataFrame, in any order there.
            timeout, cores: as of ``Stream.spark``.
        """
        from penstock.streams.spark_stages import spark_source

        operation, found = spark_source(fn, schema, timeout, cores)
        return self._read(operation, "spark", found)

    def read_socket(self, host: str, port: int) -> Stream:
        """Lines of text from a server, in the column ``line``; cannot be replayed."""
        from penstock.connectors.streams import socket_source

        spec, schema = socket_source(host, port)
        return self._read(ReadSource(spec, is_single=True), "read_socket", schema)

    def source(self, source: Source) -> Stream:
        """Rows of a source of the user's own."""
        if not isinstance(source, Source):
            hint = f"{source.__name__}()" if isinstance(source, type) else "an object of it"
            raise JobRejected(
                f"source: {source!r} is no source; derive a class from ps.Source and pass {hint}"
            )
        name = type(source).__name__
        schema = source.schema
        if not isinstance(schema, pa.Schema):
            raise JobRejected(f"source: {name}.schema is {schema!r}; it must be a pyarrow.Schema")
        bounded: object = source.bounded
        if not isinstance(bounded, bool):
            raise JobRejected(f"source: {name}.bounded is {bounded!r}; it must be True or False")
        spec = graph_pb2.SourceSpec(custom=graph_pb2.Function(), bounded=bounded)
        return self._read(ReadSource(spec, function=source), name, check_schema(name, schema))

    def _read(self, operation: ReadSource, label: str, schema: pa.Schema) -> Stream:
        node = self._builder.add(
            operation, (), label=label, schema=schema.remove_metadata(), has_event_time=False
        )
        return Stream(self._builder, NodeInput(node))


def _first_batch(table: pa.Table) -> pa.RecordBatch | None:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else None
