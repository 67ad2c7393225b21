"""What the operators of a subtask are opened with: their state, restored where there is something to restore, and
the services of the slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import structlog

from common.pb import internal_pb2
from penstock.pb import client_pb2, graph_pb2
from taskmanager.alignment.origins import Origins
from taskmanager.operators.metrics import SubtaskCounters
from taskmanager.operators.operator import Operator, OperatorContext
from taskmanager.processes.hanging_calls_runner import OwnedCall
from taskmanager.snapshot.snapshot_files_store import SnapshotFiles
from taskmanager.state.backend import BackendEnvironment, KeyedStateBackend
from taskmanager.state.factory import keeps_keyed_state, open_backend
from taskmanager.state.operator_state import OperatorStateStore
from taskmanager.task.execution import Execution
from taskmanager.task.inputs_in_place import InputsInPlace
from taskmanager.task.operator_chain import SOURCE
from taskmanager.task.slot_services import SlotServices
from taskmanager.task.state_opening import StateOpening
from taskmanager.user_code.user_failure import failure_of_operator

_log = structlog.get_logger()

NO_STATE = cast("KeyedStateBackend", None)
"""What operators without keyed state have in its place."""


class OperatorContexts:
    """The contexts of one subtask's operators.

    Args:
        origins: whose watermarks it hears.
        state: gets the backends that are opened.
        files: from which state is restored.
        in_place: which inputs are given as files.
        has_source: its first operator is a source that reads splits.
        register_timer: has an operator, by its node, called at a time of the wall clock in ms.
        call_after: has an operator, by its node, called when so many ms have passed.
        schedule: asks for a step; on the mailbox thread.

    Attributes:
        by_node: those that are open, by place in the chain.
    """

    def __init__(
        self,
        deployment: internal_pb2.TaskDeployment,
        services: SlotServices,
        counters: SubtaskCounters,
        origins: Origins,
        state: StateOpening,
        files: SnapshotFiles,
        in_place: InputsInPlace,
        *,
        has_source: bool,
        register_timer: Callable[[int, int], None],
        call_after: Callable[[int, int], None],
        schedule: Callable[[], None],
    ) -> None:
        self._deployment = deployment
        self._services = services
        self._counters = counters
        self._origins = origins
        self._state = state
        self._files = files
        self._in_place = in_place
        self._has_source = has_source
        self._register_timer = register_timer
        self._call_after = call_after
        self._schedule = schedule
        self._is_waking = False
        self._restored = {
            operator.operator_uid: operator for operator in deployment.restore.operators
        }
        self.by_node: dict[int, OperatorContext] = {}

    def restored_operator(self, spec: graph_pb2.Operator) -> internal_pb2.RestoredOperator:
        """What an operator goes on from; empty where it begins."""
        return self._restored.get(spec.uid) or internal_pb2.RestoredOperator()

    def open(
        self, execution: Execution, operators: list[Operator], specs: list[graph_pb2.Operator]
    ) -> None:
        """Opens and restores the state of all operators, the last first; any thread."""
        started_ns = self._services.clock.monotonic_ns()
        for node in reversed(range(len(operators))):
            spec = specs[node]
            with naming(spec.name):
                context = self.by_node[node] = self._context(execution, node, spec)
                if self.restored_operator(spec).keyed:
                    operators[node].restore(context)
        if self._has_source:
            spec = self._deployment.vertex.operators[0]
            self.by_node[SOURCE] = self._context(execution, SOURCE, spec)
        if self._deployment.restore.operators:
            local_bytes, store_bytes = self._files.count_restored()
            attempt = self._deployment.attempt
            _log.info(
                "state.restored",
                job_id=attempt.job_id,
                vertex=attempt.vertex,
                subtask_index=attempt.subtask_index,
                attempt=attempt.attempt,
                checkpoint_id=self._deployment.restore.checkpoint_id,
                local_bytes=local_bytes,
                store_bytes=store_bytes,
                duration_ms=(self._services.clock.monotonic_ns() - started_ns) // 1_000_000,
            )

    def _backend(self, spec: graph_pb2.Operator) -> KeyedStateBackend:
        services, vertex = self._services, self._deployment.vertex
        attempt = self._deployment.attempt
        name = f"{attempt.vertex}-{attempt.subtask_index}-{attempt.attempt}-{len(self._state.backends)}"
        backend = open_backend(
            services.config,
            BackendEnvironment(
                operator_uid=spec.uid,
                operator_name=spec.name,
                subtask_index=attempt.subtask_index,
                parallelism=vertex.parallelism,
                max_parallelism=vertex.max_parallelism,
                clock=services.clock,
                memory=services.memory,
                work_directory=services.work_directory / "state" / name,
                is_incremental=services.config.execution_checkpointing_incremental,
                restored=tuple(self.restored_operator(spec).keyed),
                reader=self._files.reader,
            ),
        )
        self._state.backends.append(backend)
        return backend

    def _context(
        self, execution: Execution, node: int, spec: graph_pb2.Operator
    ) -> OperatorContext:
        services, vertex = self._services, self._deployment.vertex
        attempt = self._deployment.attempt

        def send_results(collect_id: str, chunk: client_pb2.ResultChunk) -> None:
            results = internal_pb2.SlotResults(attempt=attempt, collect_id=collect_id, chunk=chunk)
            services.report(internal_pb2.SlotReport(results=results))

        return OperatorContext(
            job_id=attempt.job_id,
            job_name=self._deployment.job_name,
            vertex_id=vertex.id,
            operator_uid=spec.uid,
            operator_name=spec.name,
            subtask_index=attempt.subtask_index,
            parallelism=vertex.parallelism,
            max_parallelism=vertex.max_parallelism,
            attempt=attempt.attempt,
            config=services.config,
            clock=services.clock,
            counters=self._counters,
            state=self._backend(spec) if keeps_keyed_state(spec) else NO_STATE,
            operator_state=OperatorStateStore(
                self._files.restored_lists(self.restored_operator(spec))
            ),
            memory=services.memory,
            register_timer=partial(self._register_timer, node),
            call_after=partial(self._call_after, node),
            wake=self._wake,
            run_in_background=partial(self._run_in_background, execution),
            post=partial(self._post, execution),
            submit=partial(self._submit, execution, services.executor),
            submit_apart=partial(self._submit, execution, services.background_executor),
            send_results=send_results,
            origins=self._origins,
            artifact_paths=services.artifact_paths,
            restored_checkpoint_id=self._deployment.restore.checkpoint_id,
            takes_checkpoints=self._deployment.takes_checkpoints,
            is_speculative=self._deployment.HasField("beside"),
            spark=services.spark,
            in_place=self._in_place.partitions if node == 0 else {},
            work_directory=services.work_directory
            / "operators"
            / f"{attempt.vertex}-{attempt.subtask_index}-{attempt.attempt}-{node}",
        )

    def _post(self, execution: Execution, work: Callable[[], None]) -> None:
        self._services.post(lambda: execution.run(work))

    def _run_in_background(
        self, execution: Execution, call: Callable[[], Any], on_done: Callable[[Any], None]
    ) -> None:
        def work() -> None:
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - handed to the task's boundary
                failure = error
                execution.fail_later(failure)
            else:
                self._post(execution, lambda: on_done(result))

        self._submit(execution, self._services.background_executor, work)

    def _submit(
        self, execution: Execution, executor: Executor, call: Callable[[], Any]
    ) -> Future[Any]:
        return executor.submit(OwnedCall(call, lambda: execution.has_ended))

    def _wake(self) -> None:
        """Asks for a step, from any thread; one request is under way at most."""
        if not self._is_waking:
            self._is_waking = True
            self._services.post(self._woken)

    def _woken(self) -> None:
        self._is_waking = False
        self._schedule()


@contextmanager
def naming(operator: str) -> Iterator[None]:
    """Turns what opening an operator raises into a failure that names it."""
    try:
        yield
    except (Exception, SystemExit) as error:  # noqa: BLE001 - raised again, with a name
        failure = failure_of_operator(error, operator)
        raise failure from (error.__cause__ if failure is error else error)
