"""The environment: where a job's sources are, and how the job is run."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
from typing_extensions import override

from penstock.client.artifacts import table_artifact
from penstock.client.credentials import load_token
from penstock.client.job import JobHandle, wait_or_cancel
from penstock.client.job_result import JobResult, job_result
from penstock.client.looped_job import LoopedJob
from penstock.client.start_configuration import start_configuration
from penstock.client.submission import PlanCollected, current_override
from penstock.client.termination import terminates_as_exception
from penstock.config import Configuration
from penstock.connectors.source import Source
from penstock.connectors.text_options import DEFAULTS, TextOptions, text_options
from penstock.errors import ConfigurationError, JobRejected
from penstock.graph.column_checks import check_schema
from penstock.graph.job_graph import explain, plan_dict
from penstock.graph.logical import NodeInput, ReadSource
from penstock.graph.persisted import check_name
from penstock.local.embedded import EmbeddedClusters
from penstock.pb import client_pb2, graph_pb2
from penstock.planner import PlannedJob, plan_job
from penstock.rows.column_types import without_runs
from penstock.rows.schema import schema_from_bytes
from penstock.storage.open_store import use_s3
from penstock.storage.s3.settings import S3Settings
from penstock.streams.function_schemas import declared_schema
from penstock.streams.job_builder import JobBuilder
from penstock.streams.restart_strategies import RestartStrategyChoice
from penstock.streams.sampling import SAMPLE_ROWS_MAX
from penstock.streams.stream import Schema, Stream
from penstock.units import duration_ms

if TYPE_CHECKING:
    from penstock.client.client import Client
    from penstock.streams.windows import Duration

Path = str | os.PathLike[str]

_log = logging.getLogger("penstock")


class JobPlan:
    """What a job will be: ``print(env.plan())``.

    Attributes:
        graph: the job graph.
    """

    def __init__(self, graph: graph_pb2.JobGraph) -> None:
        self.graph = graph

    def to_dict(self) -> dict[str, Any]:
        """The plan for programs, with stable fields."""
        return plan_dict(self.graph)

    @override
    def __str__(self) -> str:
        return explain(self.graph)


class Environment:
    """Builds jobs and runs them.

    Args:
        address: "host:port[,host:port...]" of the JobManager; None embeds a cluster in this process's
            children. Under ``penstock run`` the command's address and options win.
        parallelism: of operators that set none.
        config: configuration keys and values.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        parallelism: int | None = None,
        config: Mapping[str, object] | None = None,
    ) -> None:
        values = dict(config or {})
        if parallelism is not None:
            if isinstance(parallelism, bool) or not isinstance(parallelism, int):
                raise ConfigurationError(f"parallelism is {parallelism!r}; it must be a number")
            values["parallelism.default"] = parallelism
        self._address = address
        self._config = Configuration.from_mapping(values)
        if self.config.s3 != S3Settings():
            use_s3(lambda: self.config.s3)  # files there are looked at while a job is built
        self._builder = JobBuilder(lambda: self.execute("collect"), self._submit_for_rows)
        self._embedded = EmbeddedClusters()
        self._clients: dict[str, Client] = {}

    @property
    def config(self) -> Configuration:
        """The configuration in force, options of the command included."""
        return self._config.merged(current_override().config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes connections and ends an embedded cluster; also happens at the end of the process."""
        while self._clients:
            self._clients.popitem()[1].close()
        self._embedded.close()

    # ------------------------------------------------------------ sources

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
        watch_ms = 0 if watch is None else duration_ms(watch)
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

    def from_rows(self, rows: Sequence[Mapping[str, Any]], schema: Schema = None) -> Stream:
        """Rows that are here, as dicts; None in a column, or a missing key, is null."""
        from penstock.connectors.memory import rows_to_table

        wanted = None if schema is None else declared_schema("from_rows", schema)
        return self._read_table("from_rows", rows_to_table(rows, wanted), is_single=True)

    def from_arrow(self, table: pa.Table | pa.RecordBatch) -> Stream:
        """A table that is here; it travels with the job."""
        if isinstance(table, pa.RecordBatch):
            table = pa.Table.from_batches([table])
        if not isinstance(table, pa.Table):
            raise JobRejected(f"from_arrow: {type(table).__name__} is no pyarrow.Table")
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
            sample=lambda rows: _first_batch(first.slice(0, rows), schema),
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

    def _find_persisted(self, name: str) -> client_pb2.PersistedDetails:
        address = current_override().address or self._address
        if address is not None:
            return self._client_at(address).find_persisted(name)
        found: client_pb2.PersistedDetails | None = None
        reason = (
            "an embedded cluster lives as long as its environment, and this one has run no job yet: name "
            "the address of a cluster that lives on"
        )
        for client in self._embedded.clients:
            try:
                details = client.find_persisted(name)
            except JobRejected as error:
                reason = str(error)
                continue
            if found is None or found.persisted_at_ms < details.persisted_at_ms:
                found = details
        if found is None:
            raise JobRejected(f"read_persisted: {reason}")
        return found

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
        spec = graph_pb2.SourceSpec(custom=graph_pb2.Function(), bounded=bool(source.bounded))
        return self._read(ReadSource(spec, function=source), name, check_schema(name, schema))

    def _read(self, operation: ReadSource, label: str, schema: pa.Schema) -> Stream:
        node = self._builder.add(
            operation, (), label=label, schema=schema.remove_metadata(), has_event_time=False
        )
        return Stream(self._builder, NodeInput(node))

    # ------------------------------------------------------------ running

    def set_runtime_mode(self, mode: str) -> None:
        """How jobs run.

        Args:
            mode: "streaming" (the default): all operators at once; "batch": exchanges are blocking, so
                that a stage starts when its input is complete. Batch needs bounded sources and takes no
                checkpoints unless an interval is set.

        Raises:
            JobRejected: it is another mode.
        """
        if mode not in ("streaming", "batch"):
            raise JobRejected(
                f"set_runtime_mode: {mode!r} is no runtime mode; there are 'streaming' and 'batch'"
            )
        self._config = self._config.merged({"execution.runtime-mode": mode})

    def set_deterministic(self, value: bool = True) -> None:
        """Declares all Python functions and sources of the jobs deterministic.

        As ``.deterministic(True)`` does for one operator, whose own declaration wins. Windows and joins
        are not meant: they declare it for themselves, since it says that no row is late.

        Raises:
            JobRejected: it is neither True nor False.
        """
        if not isinstance(value, bool):
            raise JobRejected(f"set_deterministic: {value!r} is neither True nor False")
        self._config = self._config.merged({"pipeline.deterministic": value})

    def set_restart_strategy(self, strategy: RestartStrategyChoice) -> None:
        """Whether and when jobs are restarted after failures, in place of what was set before.

        Args:
            strategy: one of ``ps.RestartStrategies``.

        Raises:
            JobRejected: it is something else.
        """
        if not isinstance(strategy, RestartStrategyChoice):
            raise JobRejected(
                f"set_restart_strategy: {strategy!r} is no restart strategy; pass for example "
                "ps.RestartStrategies.fixed_delay(3, '10s')"
            )
        self._config = self._config.with_restart_strategy(strategy.config)

    def plan(self, name: str = "job") -> JobPlan:
        """The job as it would be submitted; nothing runs.

        Raises:
            JobRejected: it could not be.
        """
        return JobPlan(self._plan(name).graph)

    def submit(
        self,
        name: str = "job",
        *,
        from_savepoint: Path | None = None,
        claim: bool = False,
    ) -> JobHandle:
        """Submits the job and returns at once; the environment can then build another.

        Args:
            from_savepoint: what to start from: a savepoint, the directory of a job's checkpoints, or one
                ``chk-<n>`` in it.
            claim: that belongs to the job from then on, which removes what it needs no more; else it is left
                alone, and not needed any more from the job's first own checkpoint on.

        Raises:
            JobRejected: the job cannot run; the environment has forgotten it and can build another.
            JobManagerUnreachable: there is no cluster at the address.
        """
        _check_job_name(name)
        try:
            planned = self._plan(name, start_configuration(from_savepoint, claim=claim))
            override = current_override()
            if override.plan_only:
                raise PlanCollected(planned.graph)
            for warning in planned.warnings:
                _log.warning("job %r: %s", name, warning)
            planned.graph.run_options.extend(override.run_options)
            planned.graph.run_arguments.extend(override.run_arguments)
            client = self._client_for(planned.graph)
            client.upload_artifacts(planned.artifacts)
            job_id = client.submit(uuid.uuid4().hex, planned.graph)
        except JobRejected as error:
            self._builder.reject(error)
            raise
        handle = JobHandle(client, job_id, self._builder.collected)
        self._builder.start_next_job()
        override.handles.append(handle)
        return handle

    def execute(
        self,
        name: str = "job",
        *,
        from_savepoint: Path | None = None,
        claim: bool = False,
    ) -> JobResult:
        """Runs the job to its end; arguments as for ``submit``.

        Ctrl-C cancels the job. Under ``penstock run --detach`` it returns once the job is submitted. An endless
        job that does nothing but collect rows up to limits is cancelled when they are here; that is its result.

        Raises:
            JobFailed: the job failed; with the operator, the row and the user's traceback.
            JobCanceled: it was cancelled.
            JobRejected: it cannot run.
        """
        override = current_override()
        ends_with_rows = self._builder.is_limited and self._builder.is_endless
        with terminates_as_exception():
            handle = self.submit(name, from_savepoint=from_savepoint, claim=claim)
            if ends_with_rows:
                handle.end_with_rows()
            if override.detach:
                return job_result(handle.details())
            result = wait_or_cancel(handle, override.on_progress)
        override.results.append(result)
        return result

    def _submit_for_rows(self) -> None:
        """Submits the job for a loop over its rows; a command that leaves its jobs runs it as any other."""
        if current_override().detach:
            self.execute("collect")
            return
        builder, collected = self._builder, self._builder.collected
        is_endless, has_other_sinks = builder.is_endless, not builder.only_collects
        handle = self.submit("collect")
        job = LoopedJob(handle, is_endless, all(rows.limit for rows in collected), has_other_sinks)
        for rows in collected:
            rows.end_with_loop(job)

    def _plan(self, name: str, start: Mapping[str, object] | None = None) -> PlannedJob:
        _check_job_name(name)
        override = current_override()
        config = self._config.merged(start or {}).merged(override.config)
        return plan_job(
            name,
            self._builder.sinks,
            config,
            py_files=override.py_files,
            requirements=override.requirements,
        )

    def _client_for(self, graph: graph_pb2.JobGraph) -> Client:
        address = current_override().address or self._address
        if address is None:
            return self._embedded.client_for(graph, self.config)
        return self._client_at(address)

    def _client_at(self, address: str) -> Client:
        if address not in self._clients:
            from penstock.client.client import Client

            token = load_token(self.config.security_token_file)
            self._clients[address] = Client(address, token or None)
        return self._clients[address]


def _check_job_name(name: object) -> None:
    """Refuses what is no name.

    Raises:
        JobRejected: it is none.
    """
    if not isinstance(name, str) or not name.strip():
        raise JobRejected(f"the job's name is {name!r}; give it one: env.execute('hot-items')")


def _first_batch(table: pa.Table, schema: pa.Schema) -> pa.RecordBatch | None:
    columns = [without_runs(column) for column in table.columns]
    plain = pa.table(columns, names=table.column_names)
    batches = plain.cast(schema).combine_chunks().to_batches()
    return batches[0] if batches else None
