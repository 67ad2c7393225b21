"""Protocol messages to plans and events, and plans to protocol messages.

The machines know no protobuf; this is where their words become messages and back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from common.cause_chain import cause_chain, public_class
from common.pb import internal_pb2
from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.snapshot_convert import last_state_of, references_of, summary_of
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.graph.deployment import ChannelPlan, Endpoint, TaskPlan
from jobmanager.graph.execution_attempt import AttemptKey, AttemptState
from jobmanager.graph.job_plan import EdgePlan, Exchange, JobPlan, Partitioning, VertexPlan
from jobmanager.messages import job_effects, job_events
from jobmanager.rpc.persisted_convert import persisted_edges, persisted_source
from penstock.connectors.source import Split
from penstock.errors import JobRejected, StreamError
from penstock.graph.job_graph import commits_output
from penstock.graph.operator_checks import is_partial, is_spark_operator
from penstock.graph.speculation import why_not_speculative
from penstock.pb import client_pb2, graph_pb2
from penstock.storage.manifest import properties_message

_PARTITIONING = {
    graph_pb2.PARTITIONING_FORWARD: Partitioning.FORWARD,
    graph_pb2.PARTITIONING_HASH: Partitioning.HASH,
    graph_pb2.PARTITIONING_REBALANCE: Partitioning.REBALANCE,
    graph_pb2.PARTITIONING_RESCALE: Partitioning.RESCALE,
    graph_pb2.PARTITIONING_BROADCAST: Partitioning.BROADCAST,
}

_EXCHANGES = {
    graph_pb2.RESULT_PARTITION_TYPE_PIPELINED: Exchange.PIPELINED,
    graph_pb2.RESULT_PARTITION_TYPE_BLOCKING: Exchange.BLOCKING,
    graph_pb2.RESULT_PARTITION_TYPE_CACHING: Exchange.CACHING,
    graph_pb2.RESULT_PARTITION_TYPE_CACHING_MEMORY: Exchange.CACHING_MEMORY,
}


_Command = job_effects.Command | job_effects.CancelTasks | c.CheckpointCommand

_NOBODY = graph_pb2.Vertex(parallelism=1, max_parallelism=1)
"""Reads what outlives the job, as long as that runs."""


def plan_of(graph: graph_pb2.JobGraph) -> JobPlan:
    """The shape of a graph.

    Raises:
        JobRejected: it names a partitioning or a type of exchange that this version does not know.
    """
    edges = [*graph.edges, *persisted_edges(graph)]
    obstacles = why_not_speculative(graph)
    for edge in edges:
        for what, value, known in (
            ("partitioning", edge.partitioning, _PARTITIONING),
            ("type of exchange", edge.partition_type, _EXCHANGES),
        ):
            if value not in known:
                raise JobRejected(
                    f"edge {edge.id} has the unknown {what} {value}: client and JobManager are of "
                    "different versions"
                )
    return JobPlan(
        vertices=tuple(
            VertexPlan(
                id=vertex.id,
                parallelism=vertex.parallelism,
                slot_group=vertex.slot_group or "default",
                source_uids=tuple(
                    operator.uid
                    for operator in vertex.operators
                    if operator.HasField("source")
                    and persisted_source(vertex) is None
                    and not is_spark_operator(operator)
                ),
                colocation_group=vertex.colocation_group,
                commits_output=commits_output(vertex),
                allows_rivals=not obstacles[vertex.id],
                pre_aggregates=any(map(is_partial, vertex.operators)),
            )
            for vertex in graph.vertices
        ),
        edges=tuple(
            EdgePlan(
                edge.id,
                edge.source_vertex,
                edge.target_vertex,
                _PARTITIONING[edge.partitioning],
                _EXCHANGES[edge.partition_type],
                is_deterministic=edge.deterministic,
                is_reproducible=edge.reproducible,
                load_first=edge.load_first,
            )
            for edge in edges
        ),
        is_batch=graph.config.get("execution.runtime-mode") == "batch",
    )


def attempt_key(attempt: internal_pb2.AttemptId) -> AttemptKey:
    """The key without the job's id."""
    return AttemptKey(attempt.vertex, attempt.subtask_index, attempt.attempt)


def attempt_id(job_id: str, key: AttemptKey) -> internal_pb2.AttemptId:
    """Inverse of ``attempt_key``."""
    return internal_pb2.AttemptId(
        job_id=job_id, vertex=key.vertex, subtask_index=key.subtask_index, attempt=key.attempt
    )


def partition_id(edge_id: str, producer: AttemptKey) -> internal_pb2.PartitionId:
    """One attempt's output on an edge."""
    return internal_pb2.PartitionId(
        edge_id=edge_id,
        vertex=producer.vertex,
        subtask_index=producer.subtask_index,
        attempt=producer.attempt,
    )


def _written(partitions: Iterable[internal_pb2.WrittenPartition]) -> tuple[tuple[str, int], ...]:
    return tuple((one.edge_id, one.size_bytes) for one in partitions)


def event_of(event: internal_pb2.TaskEvent, now_ms: int) -> job_events.JobEvent | None:
    """What a TaskManager reports, as an event of the job; None = a kind this version ignores."""
    key = attempt_key(event.attempt)
    match event.WhichOneof("event"):
        case "state_changed":
            changed = event.state_changed
            failed = changed.state == client_pb2.ATTEMPT_STATE_FAILED
            failure = cause_of(changed.failure, key, now_ms) if failed else None
            missing = None
            if changed.HasField("missing_partition"):
                named = changed.missing_partition
                producer = AttemptKey(named.vertex, named.subtask_index, named.attempt)
                missing = job_events.MissingPartition(named.edge_id, producer)
            last = last_state_of(changed.last_states)
            written = _written(changed.written)
            return job_events.AttemptReported(
                key, AttemptState(changed.state), failure, missing, last, written
            )
        case "splits_discovered":
            discovered = event.splits_discovered
            splits = tuple(split_of(split) for split in discovered.splits)
            return job_events.SplitsReported(key, discovered.operator_uid, splits, discovered.final)
        case "end_of_data":
            return job_events.EndOfDataReported(key, _written(event.end_of_data.written))
        case "side_loaded":
            return job_events.SideLoaded(key)
        case "checkpoint_acknowledged":
            acked = event.checkpoint_acknowledged
            return c.AckReceived(
                key=key,
                checkpoint_id=acked.checkpoint_id,
                snapshot=acked.snapshot,
                references=references_of(acked.snapshot),
                summary=summary_of(acked.snapshot.metrics),
                now_ms=now_ms,
                leader_epoch=acked.leader_epoch,
                has_finished=acked.snapshot.finished,
            )
        case "checkpoint_declined":
            said = event.checkpoint_declined
            fields = {field.name: getattr(said, field.name) for field in said.DESCRIPTOR.fields}
            return c.DeclineReceived(key=key, now_ms=now_ms, **fields)
        case "checkpoint_committed":
            return job_events.OutputCommitted(key, event.checkpoint_committed.checkpoint_id)
        case "kept_rows_lost":
            reason = f"what {key} had left for its consumers is gone: {event.kept_rows_lost.reason}"
            lost = client_pb2.FailureCause(error_class="PartitionUnavailable", message=reason)
            return job_events.KeptRowsLost(key, cause_of(lost, key, now_ms))
        case _:
            return None


def split_of(split: internal_pb2.Split) -> Split:
    """One part of a source's input."""
    known = split.HasField("min_event_time_ms")
    bound = split.min_event_time_ms if known else None
    return Split(split.id, split.payload, split.size, bound, tuple(split.replaces))


def cause_of(cause: client_pb2.FailureCause, key: AttemptKey, now_ms: int) -> FailureCause:
    """A reported cause, completed with where and when."""
    return FailureCause(
        error_class=cause.error_class or "TaskFailure",
        message=cause.message or "the attempt failed without a message",
        traceback=cause.traceback,
        vertex=cause.vertex or key.vertex,
        subtask_index=key.subtask_index,
        attempt=key.attempt,
        operator=cause.operator,
        row=cause.row,
        position=cause.position,
        taskmanager_id=cause.taskmanager_id,
        timestamp_ms=cause.timestamp_ms or now_ms,
        cause_chain=tuple(cause.cause_chain),
    )


def cause_message(cause: FailureCause) -> client_pb2.FailureCause:
    """Inverse of ``cause_of``."""
    return client_pb2.FailureCause(
        error_class=cause.error_class,
        message=cause.message,
        traceback=cause.traceback,
        vertex=cause.vertex,
        subtask_index=cause.subtask_index,
        attempt=cause.attempt,
        operator=cause.operator,
        row=cause.row,
        position=cause.position,
        taskmanager_id=cause.taskmanager_id,
        timestamp_ms=cause.timestamp_ms,
        cause_chain=cause.cause_chain,
    )


def cause_of_error(error: StreamError, now_ms: int, taskmanager_id: str = "") -> FailureCause:
    """An error of ours as the cause of a failure."""
    return FailureCause(
        public_class(error),
        str(error),
        taskmanager_id=taskmanager_id,
        timestamp_ms=now_ms,
        cause_chain=tuple(cause_chain(error)),
    )


def endpoint_of(endpoint: internal_pb2.DataEndpoint) -> Endpoint:
    """Where a slot listens."""
    return Endpoint(
        endpoint.slot_id,
        endpoint.host_id,
        endpoint.unix_path,
        endpoint.tcp_host,
        endpoint.tcp_port,
    )


def _endpoint_message(endpoint: Endpoint) -> internal_pb2.DataEndpoint:
    return internal_pb2.DataEndpoint(
        slot_id=endpoint.slot_id,
        host_id=endpoint.host_id,
        unix_path=endpoint.unix_path,
        tcp_host=endpoint.tcp_host,
        tcp_port=endpoint.tcp_port,
    )


class DeploymentMessages:
    """Turns the plans of one job's tasks into messages.

    Args:
        graph: its graph; vertices and edges are copied from it unread.
        leader_epoch: fence of every message.
        takes_checkpoints: output is committed by them.
        checkpoint_directory: the job's, "" = snapshots travel inline.
        shared_spill: name of the shared storage of its blocking partitions, "" = TaskManagers keep them.
    """

    def __init__(
        self,
        job_id: str,
        graph: graph_pb2.JobGraph,
        leader_epoch: int,
        *,
        takes_checkpoints: bool = False,
        checkpoint_directory: str = "",
        shared_spill: str = "",
    ) -> None:
        self._shared_spill = shared_spill
        self._job_id = job_id
        self._job_name = graph.name
        self._takes_checkpoints = takes_checkpoints
        self._checkpoint_directory = checkpoint_directory
        self._leader_epoch = leader_epoch
        self._vertices = {vertex.id: vertex for vertex in graph.vertices}
        self._edges = {edge.id: edge for edge in (*graph.edges, *persisted_edges(graph))}

    def task(
        self,
        plan: TaskPlan,
        restore: internal_pb2.RestoredTask | None = None,
        first_checkpoint_id: int = 0,
    ) -> internal_pb2.TaskDeployment:
        """One attempt's deployment.

        Args:
            restore: what it starts from; None = from nothing.
            first_checkpoint_id: it takes no part in checkpoints before this one.
        """
        deployment = internal_pb2.TaskDeployment(
            attempt=attempt_id(self._job_id, plan.attempt),
            slot_id=plan.slot_id,
            leader_epoch=self._leader_epoch,
            vertex=self._vertices[plan.attempt.vertex],
            job_name=self._job_name,
            restore=restore,
            takes_checkpoints=self._takes_checkpoints,
            checkpoint_directory=self._checkpoint_directory,
            first_checkpoint_id=first_checkpoint_id,
            beside=plan.beside,
        )
        for read in plan.inputs:
            edge = self._edges[read.edge_id]
            deployment.inputs.add(
                edge_id=edge.id,
                partition_type=edge.partition_type,
                schema=edge.schema,
                target_input=edge.target_input,
                reproducible=edge.reproducible,
                load_first=edge.load_first,
                follows=edge.follows,
                spill_format=edge.spill_format,
                channels=[self._channel(edge, channel) for channel in read.channels],
            )
        for written in plan.outputs:
            edge = self._edges[written.edge_id]
            target = self._vertices.get(edge.target_vertex, _NOBODY)
            deployment.outputs.add(
                edge=edge,
                subpartition_count=written.subpartition_count,
                target_parallelism=target.parallelism,
                target_max_parallelism=target.max_parallelism,
                finished_subpartitions=written.finished_subpartitions,
                shared_directory=self._shared_directory(edge),
            )
        return deployment

    def _shared_directory(self, edge: graph_pb2.Edge) -> str:
        is_blocking = edge.partition_type == graph_pb2.RESULT_PARTITION_TYPE_BLOCKING
        return self._shared_spill if is_blocking else ""

    def _channel(self, edge: graph_pb2.Edge, channel: ChannelPlan) -> internal_pb2.InputChannel:
        return internal_pb2.InputChannel(
            producer=_endpoint_message(channel.producer),
            producer_attempt=attempt_id(self._job_id, channel.producer_attempt),
            edge_id=edge.id,
            subpartition_index=channel.subpartition_index,
            shared_directory=self._shared_directory(edge),
        )

    def commands(self, commands: Iterable[_Command]) -> list[internal_pb2.TaskCommand]:
        """What running attempts are told."""
        messages = []
        for command in commands:
            said = self._said(command)
            for key in job_effects.receivers(command):
                message = internal_pb2.TaskCommand(attempt=attempt_id(self._job_id, key))
                message.MergeFrom(said)
                messages.append(message)
        return messages

    def _said(self, command: _Command) -> internal_pb2.TaskCommand:
        """The words of a command, but for whom they are for."""
        pb = internal_pb2
        match command:
            case job_effects.AddSplits(_, uid, splits, final):
                given = pb.AddSplits(
                    operator_uid=uid, splits=map(_split_message, splits), final=final
                )
                return pb.TaskCommand(add_splits=given)
            case job_effects.CommitOutput():
                return pb.TaskCommand(commit_output=pb.CommitOutput())
            case job_effects.ReplaceProducer(_, edge_id, channel):
                replaced = pb.ReplaceProducer(channel=self._channel(self._edges[edge_id], channel))
                return pb.TaskCommand(replace_producer=replaced)
            case job_effects.CancelTasks(is_final=is_final):
                return pb.TaskCommand(cancel=pb.CancelTask(is_final=is_final))
            case c.TriggerTasks(checkpoint_id, triggered_at_ms, _, properties):
                trigger = pb.TriggerCheckpoint(
                    checkpoint_id=checkpoint_id,
                    timestamp_ms=triggered_at_ms,
                    leader_epoch=self._leader_epoch,
                    properties=properties_message(properties),
                )
                return pb.TaskCommand(trigger_checkpoint=trigger)
            case c.NotifyCompleted(checkpoint_id, is_awaited=is_awaited):
                completed = pb.CheckpointCompleted(checkpoint_id=checkpoint_id, awaited=is_awaited)
                return pb.TaskCommand(checkpoint_completed=completed)
            case c.NotifySaved(checkpoint_id):
                saved = pb.CheckpointCompleted(checkpoint_id=checkpoint_id, savepoint=True)
                return pb.TaskCommand(checkpoint_completed=saved)
            case c.NotifyAborted(checkpoint_id, first_id=first_id):
                aborted = pb.CheckpointAborted(
                    checkpoint_id=checkpoint_id, first_checkpoint_id=first_id
                )
                return pb.TaskCommand(checkpoint_aborted=aborted)
            case _:
                assert_never(command)


def _split_message(split: Split) -> internal_pb2.Split:
    message = internal_pb2.Split(id=split.id, payload=split.payload, size=split.size)
    if split.min_event_time_ms is not None:
        message.min_event_time_ms = split.min_event_time_ms
    return message
