"""From a deployment to a running subtask: builds its outputs, its input, its operators.

Outputs are made at once, so that consumers can subscribe; input and operators follow in state
INITIALIZING. Everything shared by the subtasks of a slot comes from ``SlotServices``.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from common.clock import Clock
from common.pb import internal_pb2
from penstock.config import Configuration
from penstock.pb import client_pb2, graph_pb2
from taskmanager.alignment.origins import Origins
from taskmanager.network.exchange import DataExchange
from taskmanager.network.result_partition import ResultPartition
from taskmanager.operators.factory import build_operator
from taskmanager.operators.operator import Operator, OperatorContext
from taskmanager.operators.sink import CollectOperator
from taskmanager.operators.source import SourceOperator
from taskmanager.operators.user_failure import failure_of_operator
from taskmanager.state.hashmap.store import HashMapStateBackend
from taskmanager.task.execution import Execution
from taskmanager.task.metrics import SubtaskCounters
from taskmanager.task.operator_chain import SOURCE, OperatorChain, Output
from taskmanager.task.subtask import GateInput, Input, SourceInput, Subtask


@dataclass(frozen=True, slots=True)
class SlotServices:
    """What the subtasks of a slot share.

    Attributes:
        post: adds mail; any thread.
        executor: the slot's I/O threads.
        report: sends a report to the daemon.
    """

    config: Configuration
    clock: Clock
    exchange: DataExchange
    executor: Executor
    post: Callable[[Callable[[], None]], None]
    report: Callable[[internal_pb2.SlotReport], None]
    artifact_paths: dict[str, str]


class Deployment:
    """One subtask in the making."""

    def __init__(
        self,
        deployment: internal_pb2.TaskDeployment,
        services: SlotServices,
        schedule: Callable[[], None],
    ) -> None:
        self._deployment = deployment
        self._services = services
        self._schedule = schedule
        self._origins = Origins()
        self.counters = SubtaskCounters()
        self.source: SourceOperator | None = None
        self.collects: list[CollectOperator] = []
        self._partitions: list[ResultPartition] = []
        self._is_waking = False

    def create_partitions(self, execution: Execution) -> None:
        """Makes the outputs, so that consumers find them."""
        for edge in self._deployment.outputs:
            self._partitions.append(
                self._services.exchange.create_partition(
                    self._deployment.attempt,
                    edge,
                    self._deployment.attempt.subtask_index,
                    self.counters,
                    self._schedule,
                    execution.fail_later,
                )
            )

    def build(self, execution: Execution) -> Subtask:
        """Opens the input and the operators."""
        vertex = self._deployment.vertex
        has_source = vertex.operators[0].WhichOneof("spec") == "source"
        specs = list(vertex.operators[1:] if has_source else vertex.operators)
        first = 1 if has_source else 0  # index of specs[0] within the vertex
        operators = [build_operator(spec) for spec in specs]
        parents = [
            (spec.input.operator_index - first, spec.input.side_tag)
            if spec.HasField("input")
            else (SOURCE, "")
            for spec in specs
        ]
        outputs: list[tuple[int, str, Output]] = [
            (
                edge.edge.source_output.operator_index - first,
                edge.edge.source_output.side_tag,
                partition,
            )
            for edge, partition in zip(self._deployment.outputs, self._partitions, strict=True)
        ]
        names = dict(enumerate((spec.name for spec in vertex.operators), start=-first))
        chain = OperatorChain(operators, parents, outputs, names)
        chain_input: Input
        if has_source:
            self.source = SourceOperator(
                vertex.operators[0], _event_time_column(list(vertex.operators))
            )
            chain_input = SourceInput(self.source)
        else:
            chain_input = self._gate(execution)
        subtask = Subtask(
            chain, operators, chain_input, self._partitions, self.counters, self._services.clock
        )
        self.collects = [op for op in operators if isinstance(op, CollectOperator)]
        try:
            self._open(subtask, execution, operators, specs)
        except BaseException:
            subtask.close()
            raise
        return subtask

    def _open(
        self,
        subtask: Subtask,
        execution: Execution,
        operators: list[Operator],
        specs: list[graph_pb2.Operator],
    ) -> None:
        for node in reversed(range(len(operators))):
            context = self._context(subtask, execution, node, specs[node])
            try:
                operators[node].open(context)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - raised again, with a name
                failure = failure_of_operator(error, specs[node].name)
                raise failure from (error.__cause__ if failure is error else error)
        if self.source is not None:
            spec = self._deployment.vertex.operators[0]
            self.source.open(
                self._context(subtask, execution, SOURCE, spec), execution.report_splits
            )

    def _gate(self, execution: Execution) -> GateInput:
        gate = self._services.exchange.create_gate(
            self._deployment.attempt,
            list(self._deployment.inputs),
            self.counters,
            self._schedule,
            execution.fail_later,
        )
        for origin in gate.origins:
            self._origins.start(origin)
        self._origins.all_known = True
        has_own_event_time = any(
            operator.WhichOneof("spec") == "event_time"
            for operator in self._deployment.vertex.operators
        )
        return GateInput(gate, self._origins, None if has_own_event_time else self.counters)

    def _context(
        self, subtask: Subtask, execution: Execution, node: int, spec: graph_pb2.Operator
    ) -> OperatorContext:
        services, vertex = self._services, self._deployment.vertex
        attempt = self._deployment.attempt

        def run_in_background(call: Callable[[], Any], on_done: Callable[[Any], None]) -> None:
            def work() -> None:
                try:
                    result = call()
                except BaseException as error:  # noqa: BLE001 - handed to the task's boundary
                    failure = error
                    execution.fail_later(failure)
                else:
                    services.post(lambda: execution.run(lambda: on_done(result)))

            services.executor.submit(work)

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
            counters=self.counters,
            state=HashMapStateBackend(
                attempt.subtask_index, vertex.parallelism, vertex.max_parallelism
            ),
            register_timer=lambda at_ms: subtask.register_timer(node, at_ms),
            wake=self._wake,
            run_in_background=run_in_background,
            send_results=send_results,
            origins=self._origins,
            artifact_paths=services.artifact_paths,
        )

    def _wake(self) -> None:
        """Asks for a step, from any thread; one request is under way at most."""
        if not self._is_waking:
            self._is_waking = True
            self._services.post(self._woken)

    def _woken(self) -> None:
        self._is_waking = False
        self._schedule()

    def release(self) -> None:
        """Releases the outputs of a subtask that was never built."""
        for partition in self._partitions:
            partition.release()


def _event_time_column(operators: list[graph_pb2.Operator]) -> str:
    """The source's column that event time is taken from, "" where that is not one plain column of it."""
    columns = set()
    for operator in operators:
        if operator.WhichOneof("spec") != "event_time":
            continue
        columns.add(operator.event_time.column)
        parent = operator
        while parent.HasField("input"):
            parent = operators[parent.input.operator_index]
            if parent.WhichOneof("spec") not in ("source", "filter", "pass"):
                return ""
    return columns.pop() if len(columns) == 1 else ""
