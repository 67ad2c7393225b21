"""From a deployment to a running subtask: builds its outputs, its input, its operators.

Outputs are made at once, so that consumers can subscribe. In state INITIALIZING the operators get their
state, on an I/O thread (``open_state``); then the mailbox thread opens the input and the operators
(``build``). Everything shared by the subtasks of a slot comes from ``SlotServices``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from common.elements import CheckpointBarrier
from common.pb import internal_pb2
from penstock.errors import InvariantViolation
from penstock.graph.operator_checks import is_spark_operator, late_tag
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.storage.object_store import ObjectStore
from taskmanager.alignment.origins import Origins
from taskmanager.network.input_gate import InputGate
from taskmanager.network.result_partition import ResultPartition
from taskmanager.operators.collect_sink import CollectOperator
from taskmanager.operators.factory import build_operator
from taskmanager.operators.metrics import SubtaskCounters
from taskmanager.operators.operator import Operator
from taskmanager.operators.persisted import reads_partitions
from taskmanager.operators.process_base import StatefulOperator
from taskmanager.operators.source import SourceOperator
from taskmanager.snapshot.snapshot_files_store import SnapshotFiles
from taskmanager.snapshot.subtask_snapshot import (
    Alignment,
    ChannelPositions,
    LastStates,
    SnapshotPart,
    SubtaskSnapshotter,
)
from taskmanager.state.factory import keeps_keyed_state
from taskmanager.state.operator_state import OperatorStateStore
from taskmanager.state.state_sizes import note_sizes
from taskmanager.task.event_time_column import event_time_column
from taskmanager.task.execution import Execution
from taskmanager.task.inputs import EndedInput, GateInput, Input, SourceInput, TakenInput
from taskmanager.task.inputs_in_place import InputsInPlace
from taskmanager.task.operator_chain import SOURCE, OperatorChain, Output
from taskmanager.task.operator_contexts import OperatorContexts, naming
from taskmanager.task.restore_silence import LIMIT_MS_MIN
from taskmanager.task.slot_services import SlotServices
from taskmanager.task.state_opening import StateOpening
from taskmanager.task.subtask import Subtask

_BLOCKING = graph_pb2.RESULT_PARTITION_TYPE_BLOCKING


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
        self._gate: InputGate | None = None
        self._state = StateOpening(
            services.memory, services.snapshot_executor.submit, services.post
        )
        self._operators: list[Operator] = []
        self._subtask: Subtask | None = None
        self._snapshotter: SubtaskSnapshotter | None = None
        self._files = SnapshotFiles(
            _checkpoint_store(deployment.checkpoint_directory, services),
            deployment.attempt,
            services.config.state_inline_max_bytes,
            services.config.execution_checkpointing_jobmanager_max_bytes,
            has_ended=lambda: self._state.is_closed,
            backups=services.local_copies if services.config.writes_local_copies else None,
            local=services.local_copies
            if services.config.execution_state_recovery_from_local
            else None,
            counters=self.counters,
            opened=services.open_store,
            new_name=services.new_name,
        )
        vertex = deployment.vertex
        self._has_source = _reads_splits(vertex)
        self._first = 1 if self._has_source else 0
        """Index within the vertex of the chain's first operator."""
        self._specs = list(vertex.operators[self._first :])
        self._in_place = InputsInPlace(deployment, services.exchange, services.config)
        self._contexts = OperatorContexts(
            deployment,
            services,
            self.counters,
            self._origins,
            self._state,
            self._files,
            self._in_place,
            has_source=self._has_source,
            register_timer=self._register_timer,
            call_after=self._call_after,
            schedule=schedule,
        )

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
                    self._deployment.restore.outputs,
                )
            )

    def open_state(self, execution: Execution, when_open: Callable[[], None]) -> None:
        """Gives the operators their state, restored where there is something to restore.

        Args:
            execution: fails where that fails.
            when_open: called on the mailbox thread, before this returns where there is no state.
        """
        restore = self._deployment.restore
        if restore.finished:
            when_open()
            return
        self._operators = [build_operator(spec) for spec in self._specs]
        for operator, spec in zip(self._operators, self._specs, strict=True):
            if self._contexts.restored_operator(spec).keyed:
                with naming(spec.name):
                    operator.load()
        is_slow = restore.operators or any(map(keeps_keyed_state, self._specs))
        if is_slow or self._in_place.is_sought:
            self._state.start(
                lambda: self._open_contexts(execution),
                lambda: execution.run(when_open),
                execution.fail_later,
            )
        else:
            self._contexts.open(execution, self._operators, self._specs)
            when_open()

    def _open_contexts(self, execution: Execution) -> None:
        """On an I/O thread."""
        if self._in_place.is_sought:
            self._in_place.find()
        self._contexts.open(execution, self._operators, self._specs)

    def build(self, execution: Execution) -> Subtask:
        """Opens the input and the operators, once their state is open."""
        if self._deployment.restore.finished:
            return self._build_finished(execution)
        vertex, operators, first = self._deployment.vertex, self._operators, self._first
        parents = [
            (spec.input.operator_index - first, spec.input.side_tag)
            if spec.HasField("input")
            else (SOURCE, "")
            for spec in self._specs
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
        if self._has_source:
            self.source = SourceOperator(
                vertex.operators[0], event_time_column(list(vertex.operators))
            )
        chain = OperatorChain(
            operators,
            parents,
            outputs,
            names,
            unread=[spec.unread_columns for spec in self._specs],
            position_of=self.source.position_of if self.source is not None else None,
            known_sides=[(late_tag(spec), spec.on_error.tag) for spec in self._specs],
        )
        chain_input: Input
        if self.source is not None:
            chain_input = SourceInput(self.source)
        elif not self._in_place.edges:
            chain_input = EndedInput()  # Spark reads it all
        else:
            chain_input = self._open_gate(execution, self._in_place.edges)
        parts: list[SnapshotPart] = []
        subtask = self._subtask = self._new_subtask(execution, chain, operators, chain_input, parts)
        self.collects = [op for op in operators if isinstance(op, CollectOperator)]
        try:
            self._open(execution, operators, self._specs, parts)
        except BaseException:
            subtask.close()
            raise
        if self._deployment.restore.stopped:
            subtask.stop()
        return subtask

    def _build_finished(self, execution: Execution) -> Subtask:
        """A subtask that had done all its work: it ends its outputs, and that is all."""
        chain = OperatorChain([], [], [(SOURCE, "", output) for output in self._partitions])
        chain_input: Input = EndedInput()
        # Blocking exchanges were complete before it began: there is no end to wait for, and perhaps nothing left.
        edges = [edge for edge in self._in_place.edges if edge.partition_type != _BLOCKING]
        if edges:
            chain_input = self._open_gate(execution, edges, TakenInput)
        # A checkpoint that finds it still ending its outputs gets back what it was restored with.
        of_functions = {spec.uid for spec in self._deployment.vertex.operators if _is_process(spec)}
        parts = [
            SnapshotPart(
                restored.operator_uid,
                None,
                OperatorStateStore(self._files.restored_lists(restored)),
                None,
                partial(_unchanged, restored.splits),
                is_of_function=restored.operator_uid in of_functions,
                split_parallelism=restored.split_parallelism,
            )
            for restored in self._deployment.restore.operators
        ]
        return self._new_subtask(execution, chain, [], chain_input, parts)

    def _new_subtask(
        self,
        execution: Execution,
        chain: OperatorChain,
        operators: list[Operator],
        chain_input: Input,
        parts: list[SnapshotPart],
    ) -> Subtask:
        services, attempt = self._services, self._deployment.attempt
        snapshotter = self._snapshotter = SubtaskSnapshotter(
            attempt.vertex,
            attempt.subtask_index,
            parts,
            new_writer=self._files.writer,
            submit=services.snapshot_executor.submit,
            listener=execution,
            clock=services.clock,
            counters=self.counters,
            inline_max_bytes=services.config.state_inline_max_bytes,
            is_incremental=services.config.execution_checkpointing_incremental,
            on_written=self._files.written,
        )
        has_finished = self._deployment.restore.finished

        def take_snapshot(barrier: CheckpointBarrier, alignment: Alignment | None) -> None:
            comparing = self._gate.comparing() if self._gate is not None else None
            if comparing is not None:
                reason = f"{comparing.name}: rows that come again are still being compared"
                declined = internal_pb2.CheckpointDeclined(reason=reason, is_comparing=True)
                execution.decline_as(barrier, declined)
                return
            finished = has_finished or subtask.has_ended_outputs
            snapshotter.take(
                barrier,
                alignment,
                finished=finished,
                positions=self._mark_positions(barrier.checkpoint_id),
            )

        subtask = Subtask(
            chain,
            operators,
            chain_input,
            self._partitions,
            self.counters,
            services.clock,
            take_snapshot=take_snapshot,
            commits_by_checkpoint=self._deployment.takes_checkpoints,
        )
        return subtask

    def _open(
        self,
        execution: Execution,
        operators: list[Operator],
        specs: list[graph_pb2.Operator],
        parts: list[SnapshotPart],
    ) -> None:
        """Opens the operators, the last first; ``parts`` gets what each adds to a snapshot."""
        for node in reversed(range(len(operators))):
            context = self._contexts.by_node[node]
            with naming(specs[node].name):
                operators[node].open(context)
            backend = context.state if keeps_keyed_state(specs[node]) else None
            parts.append(
                SnapshotPart(
                    specs[node].uid,
                    operators[node],
                    context.operator_state,
                    backend,
                    is_of_function=_has_lists(operators[node]),
                )
            )
        source = self.source
        if source is not None:
            spec = self._deployment.vertex.operators[0]
            context = self._contexts.by_node[SOURCE]
            restored = self._contexts.restored_operator(spec)
            source.open(
                context, execution.report_splits, restored.splits, restored.split_parallelism
            )
            parts.append(
                SnapshotPart(
                    spec.uid,
                    None,
                    context.operator_state,
                    None,
                    source.split_snapshots,
                    split_parallelism=source.split_parallelism,
                )
            )
        parts.reverse()

    def _open_gate(
        self,
        execution: Execution,
        edges: list[internal_pb2.InputEdge],
        kind: type[GateInput] = GateInput,
    ) -> GateInput:
        gate = self._services.exchange.create_gate(
            self._deployment.attempt,
            edges,
            self.counters,
            self._schedule,
            execution.fail_later,
            positions=self._deployment.restore.inputs,
            first_checkpoint_id=self._deployment.first_checkpoint_id,
        )
        self._gate = gate
        for origin in gate.origins:
            self._origins.start(origin)
        self._origins.all_known = True
        has_own_event_time = any(
            operator.WhichOneof("spec") == "event_time"
            for operator in self._deployment.vertex.operators
        )
        return kind(
            gate,
            self._origins,
            self.counters,
            has_own_event_time=has_own_event_time,
            input_of_channel=[edge.target_input for edge in edges for _ in edge.channels],
        )

    def _register_timer(self, node: int, at_ms: int) -> None:
        assert self._subtask is not None, "timers are for operators that are being opened"
        self._subtask.register_timer(node, at_ms)

    def _call_after(self, node: int, pause_ms: int) -> None:
        assert self._subtask is not None, "pauses are for operators that are being opened"
        self._subtask.call_after(node, pause_ms)

    def _mark_positions(self, checkpoint_id: int) -> ChannelPositions:
        """Where the edges that keep their rows are now; the gate goes back there when it has to."""
        inputs: list[checkpoint_pb2.ChannelPosition] = []
        if self._gate is not None:
            marks = self._gate.mark(checkpoint_id)
            inputs += [
                checkpoint_pb2.ChannelPosition(
                    edge_id=channel.spec.edge_id,
                    index=channel.spec.producer_index,
                    rows=mark.rows,
                    checksum=mark.checksum,
                    producer_attempt=channel.producer_attempt,
                )
                for channel, mark in zip(self._gate.kept, marks, strict=True)
            ]
        outputs = [position for partition in self._partitions for position in partition.positions()]
        return ChannelPositions(inputs, outputs)

    @property
    def is_loading(self) -> bool:
        """Whether inputs wait for another one to be read whole."""
        return self._gate is not None and self._gate.is_loading

    @property
    def restore_limit_ms(self) -> int:
        """How long its state may be opened without another byte being read."""
        return max(LIMIT_MS_MIN, self._services.config.execution_checkpointing_timeout_ms)

    @property
    def restored_bytes(self) -> int:
        """What has been read of it so far."""
        return sum(self._files.count_restored())

    def take_last_states(
        self, when_written: Callable[[LastStates | None], None]
    ) -> LastStates | None:
        """The lists of functions as the subtask leaves them, for the checkpoints to come."""
        if self._snapshotter is None or not self._deployment.takes_checkpoints:
            return ()
        return self._snapshotter.take_last(
            lambda states: self._services.post(partial(when_written, states))
        )

    def replace_producer(self, channel: internal_pb2.InputChannel) -> None:
        """Reads an edge that keeps its rows from a new attempt."""
        if self._in_place.has(channel):
            return  # the files of the one before are read, or are missed
        if self._gate is None:
            raise InvariantViolation(f"a producer is replaced for a source: {channel}")
        self._services.exchange.replace_producer(self._gate, channel)

    def checkpoint_completed(self, checkpoint_id: int) -> None:
        """Tells the backends, the gate and the outputs that a checkpoint is complete."""
        if self._gate is not None:
            self._gate.checkpoint_completed(checkpoint_id)
        for backend in self._state.backends:
            backend.checkpoint_completed(checkpoint_id)
        if self.source is not None:
            self.source.checkpoint_completed(checkpoint_id)
        remove_older = self._files.completed(checkpoint_id)
        if remove_older is not None:
            self._services.snapshot_executor.submit(remove_older)
        for partition in self._partitions:
            partition.checkpoint_completed(checkpoint_id)

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """Tells the backends and the outputs that a checkpoint will not complete."""
        for backend in self._state.backends:
            backend.checkpoint_aborted(checkpoint_id)
        if self.source is not None:
            self.source.checkpoint_aborted(checkpoint_id)
        for partition in self._partitions:
            partition.checkpoint_aborted(checkpoint_id)

    def gauges(self) -> internal_pb2.SubtaskGauges:
        """What metrics endpoints show beside the counters."""
        gauges = self.counters.gauges()
        if self._gate is not None:
            gauges.in_queued_bytes, gauges.in_credit_bytes = self._gate.load()
        gauges.out_waiting_batches = sum(one.waiting_batches for one in self._partitions)
        note_sizes(gauges, self._state.sizes())
        return gauges

    def close(self) -> list[BaseException]:
        """Closes the backends, after the operators; returns what went wrong on the way."""
        return self._state.close()

    def release(self) -> None:
        """Releases the outputs: the attempt has not finished."""
        for partition in self._partitions:
            partition.release()


def _checkpoint_store(directory: str, services: SlotServices) -> ObjectStore | None:
    """The job's directory, which the JobManager has made; None = its checkpoints travel inline."""
    if not directory:
        return None
    store = services.open_store(directory)
    store.note_place()
    return store


def _reads_splits(vertex: graph_pb2.Vertex) -> bool:
    head = vertex.operators[0]
    is_source = head.WhichOneof("spec") == "source"
    return is_source and not (reads_partitions(head) or is_spark_operator(head))


def _has_lists(operator: Operator) -> bool:
    return isinstance(operator, StatefulOperator) and operator.states.has_lists


def _is_process(operator: graph_pb2.Operator) -> bool:
    return operator.WhichOneof("spec") == "process"


def _unchanged(
    splits: Iterable[checkpoint_pb2.SplitSnapshot], _checkpoint_id: int
) -> list[checkpoint_pb2.SplitSnapshot]:
    return list(splits)
