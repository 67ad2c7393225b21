"""The environment: where a job's sources are, and how the job is run."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from typing_extensions import override

from penstock.client.credentials import load_token
from penstock.client.job import JobHandle, wait_or_cancel
from penstock.client.job_result import JobResult, job_result
from penstock.client.looped_job import LoopedJob
from penstock.client.start_configuration import check_start, start_configuration
from penstock.client.submission import PlanCollected, current_override
from penstock.client.termination import terminates_as_exception
from penstock.config import Configuration
from penstock.errors import ConfigurationError, JobRejected
from penstock.graph.job_graph import explain, plan_dict
from penstock.local.embedded import EmbeddedClusters
from penstock.pb import client_pb2, graph_pb2
from penstock.planner import PlannedJob, plan_job
from penstock.pushdown.part_compiler import PENSTOCK, SPARK
from penstock.storage.open_store import use_s3
from penstock.storage.s3.settings import S3Settings
from penstock.streams.job_builder import JobBuilder
from penstock.streams.restart_strategies import RestartStrategyChoice
from penstock.streams.sources import Sources
from penstock.streams.stream_engines import check_engine, sinks_on_spark

if TYPE_CHECKING:
    from penstock.client.client import Client

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


class Environment(Sources):
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
        if address is not None and not isinstance(address, str):
            raise ConfigurationError(
                f"address is {address!r}; write 'host:port', several as 'host:port,host:port'"
            )
        if config is not None and not isinstance(config, Mapping):
            raise ConfigurationError(
                f"config is {config!r}; it must be a dict: {{'execution.checkpointing.interval': '1s'}}"
            )
        values = dict(config or {})
        if parallelism is not None:
            if isinstance(parallelism, bool) or not isinstance(parallelism, int):
                raise ConfigurationError(
                    f"parallelism is {parallelism!r}; it must be a whole number"
                )
            values["parallelism.default"] = parallelism
        self._address = address
        self._config = Configuration.from_mapping(values)
        if self.config.s3 != S3Settings():
            use_s3(lambda: self.config.s3)  # files there are looked at while a job is built
        self._builder = JobBuilder(lambda: self.execute("collect"), self._submit_for_rows)
        self._embedded = EmbeddedClusters()
        self._clients: dict[str, Client] = {}
        self._is_closed = False

    @property
    def config(self) -> Configuration:
        """The configuration in force, options of the command included."""
        return self._config.merged(current_override().config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes connections and ends an embedded cluster; also happens at the end of the process.

        No other job can be run then; rows that are here stay readable. Harmless to repeat.
        """
        self._is_closed = True
        while self._clients:
            self._clients.popitem()[1].close()
        self._embedded.close()

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

    def plan(self, name: str = "job", *, engine: str = "penstock") -> JobPlan:
        """The job as it would be submitted; nothing runs.

        Args:
            engine: as for ``submit``.

        Raises:
            JobRejected: it could not be.
        """
        return JobPlan(self._plan(name, engine=engine).graph)

    def submit(
        self,
        name: str = "job",
        *,
        engine: str = "penstock",
        from_savepoint: Path | None = None,
        claim: bool = False,
    ) -> JobHandle:
        """Submits the job and returns at once; the environment can then build another.

        Args:
            engine: "spark": everything between sources and sinks is compiled for Spark, in batch mode; what does
                not compile is refused (``Stream.engine``).
            from_savepoint: what to start from: a savepoint, the directory of a job's checkpoints, or one
                ``chk-<n>`` in it.
            claim: that belongs to the job from then on, which removes what it needs no more; else it is left
                alone, and not needed any more from the job's first own checkpoint on.

        Raises:
            JobRejected: the job cannot run; the environment has forgotten it and can build another.
            ConfigurationError: something was said of a start, but not from what.
            JobManagerUnreachable: there is no cluster at the address.
        """
        _check_job_name(name)
        try:
            planned = self._plan(name, start_configuration(from_savepoint, claim=claim), engine)
            override = current_override()
            if override.plan_only:
                raise PlanCollected(planned.graph)
            for warning in (*planned.warnings, *self._config.without_effect(of_job=True)):
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
        engine: str = "penstock",
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
            handle = self.submit(name, engine=engine, from_savepoint=from_savepoint, claim=claim)
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

    def _check_open(self, call: str) -> None:
        if self._is_closed:
            raise JobRejected(
                f"{call}: this environment has been closed, with its connections and its embedded cluster; make "
                "another one, ps.Environment(...), or close it later"
            )

    @override
    def _find_persisted(self, name: str) -> client_pb2.PersistedDetails:
        self._check_open("read_persisted")
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

    def _plan(
        self, name: str, start: Mapping[str, object] | None = None, engine: str = PENSTOCK
    ) -> PlannedJob:
        _check_job_name(name)
        check_engine("execute", engine)
        sinks = self._builder.sinks
        if engine == SPARK:
            sinks = sinks_on_spark(self._builder, sinks)
        override, start = current_override(), start or {}
        config = self._config.merged(start).merged(override.config)
        check_start({**start, **override.config}, config.execution_state_recovery_path)
        if config.execution_state_recovery_path:
            # However it was said, a relative one is meant from here.
            config = config.merged(start_configuration(config.execution_state_recovery_path))
        return plan_job(
            name,
            sinks,
            config,
            py_files=override.py_files,
            requirements=override.requirements,
        )

    def _client_for(self, graph: graph_pb2.JobGraph) -> Client:
        self._check_open(f"job {graph.name!r}")
        address = current_override().address or self._address
        if address is None:
            return self._embedded.client_for(graph, self.config)
        if self.config.spark_secrets:
            raise JobRejected(
                f"{', '.join(self.config.spark_secrets)} is not sent with a job: set it in the configuration of the "
                "cluster's daemons (penstock.yaml)"
            )
        if in_vain := self.config.said_in_vain():
            _log.warning(
                "%s: the daemons at %s run already, and no job changes that; it counts where they are started "
                "(penstock cluster start -D, penstock.yaml)",
                ", ".join(in_vain),
                address,
            )
        return self._client_at(address)

    def _client_at(self, address: str) -> Client:
        if address not in self._clients:
            from penstock.client.client import Client
            from penstock.client.client_tls import ClientTls

            token = load_token(self.config.security_token_file)
            self._clients[address] = Client(
                address,
                token or None,
                leader_timeout_s=self.config.client_timeout_ms / 1000,
                tls=ClientTls.of(self.config),
            )
        return self._clients[address]


def _check_job_name(name: object) -> None:
    """Refuses what is no name.

    Raises:
        JobRejected: it is none.
    """
    if not isinstance(name, str) or not name.strip():
        raise JobRejected(f"the job's name is {name!r}; give it one: env.execute('hot-items')")
