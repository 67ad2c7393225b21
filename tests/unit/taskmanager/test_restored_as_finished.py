"""A subtask restored as finished ends its outputs, and that is all.

Where the next checkpoint finds it before it has, its splits must be named by that checkpoint too: a split that
no snapshot names is discovered, assigned and read again. What it reads was taken before it had finished.
"""

from concurrent.futures import Executor, Future
from pathlib import Path
from types import SimpleNamespace

from common.elements import CheckpointBarrier, EndOfData, StreamStatus, Watermark
from common.pb import internal_pb2
from penstock.config import Configuration
from penstock.pb import checkpoint_pb2, graph_pb2
from taskmanager.harness.manual_clock import ManualClock
from taskmanager.operators.metrics import SubtaskCounters
from taskmanager.state.memory import ManagedMemory
from taskmanager.task.deployment import Deployment
from taskmanager.task.slot_services import SlotServices
from taskmanager.task.subtask import SubtaskPhase
from tests.support.exchange_slots import (
    CACHING,
    Simulation,
    attempt_id,
    configuration,
    drain,
    end,
    input_edge,
    numbers,
    output_edge,
)


class AtOnce(Executor):
    def submit(self, call, /, *args, **kwargs):
        future = Future()
        future.set_result(call(*args, **kwargs))
        return future


def unread_partition() -> SimpleNamespace:
    return SimpleNamespace(
        is_available=lambda: True,
        is_complete=True,
        emit_control=lambda element: None,
        end_data=lambda: None,
        finish=lambda: None,
        is_drained=lambda: False,
        release=lambda: None,
        positions=list,
        flush=lambda: None,
        flush_deadline_ns=None,
    )


def services_of(exchange: object) -> SlotServices:
    return SlotServices(
        config=Configuration(),
        clock=ManualClock(0),
        exchange=exchange,
        executor=AtOnce(),
        background_executor=AtOnce(),
        snapshot_executor=AtOnce(),
        memory=ManagedMemory(1 << 20),
        work_directory=Path("/nonexistent"),
        post=lambda mail: mail(),
        report=lambda report: None,
        artifact_paths={},
        open_store=lambda directory: None,
    )


def test_its_acknowledgement_holds_what_it_was_restored_with() -> None:
    vertex = graph_pb2.Vertex(id="v0", parallelism=2)
    vertex.operators.add(uid="source").source.bounded = True
    done = checkpoint_pb2.SplitSnapshot(id="b", done=True)
    restored = internal_pb2.RestoredOperator(operator_uid="source", splits=[done])
    deployment = internal_pb2.TaskDeployment(
        attempt=internal_pb2.AttemptId(vertex="v0", subtask_index=1, attempt=1),
        vertex=vertex,
        restore=internal_pb2.RestoredTask(checkpoint_id=1, finished=True, operators=[restored]),
        takes_checkpoints=True,
    )
    deployment.outputs.add()
    exchange = SimpleNamespace(create_partition=lambda *arguments: unread_partition())
    services = services_of(exchange)
    acknowledged = []
    execution = SimpleNamespace(
        fail_later=None, acknowledge=lambda _id, snapshot: acknowledged.append(snapshot)
    )
    parts = Deployment(deployment, services, lambda: None)
    parts.create_partitions(execution)
    parts.open_state(execution, lambda: None)
    subtask = parts.build(execution)
    while subtask.phase is not SubtaskPhase.DRAINING:
        subtask.step()
    subtask.trigger(CheckpointBarrier(2, 0))
    (snapshot,) = acknowledged
    assert snapshot.finished
    assert [(op.operator_uid, list(op.splits)) for op in snapshot.operators] == [("source", [done])]


def test_rows_that_its_producer_still_keeps_are_not_its_affair() -> None:
    """The producer has finished as well, and goes on serving what it wrote since the start of the job."""
    simulation = Simulation(1)
    config = configuration(buffer_timeout_ms=0)
    producer, own, consumer = (simulation.slot(name, config) for name in "poc")
    first = producer.partition(output_edge(partition_type=CACHING), attempt_id("v0"))
    first.emit_control(StreamStatus(active=True))
    first.emit(numbers(0, 10))
    first.emit_control(Watermark(7))
    end(first)
    vertex = graph_pb2.Vertex(id="v1", parallelism=1)
    vertex.operators.add(uid="sums").process.SetInParent()
    read = input_edge([(producer.endpoint, attempt_id("v0"))], partition_type=CACHING)
    written = output_edge(edge_id="e1", partition_type=CACHING)
    ends = checkpoint_pb2.ChannelPosition(edge_id="e1", index=0, rows=3)
    deployment = internal_pb2.TaskDeployment(
        attempt=attempt_id("v1", 0, 1),
        vertex=vertex,
        inputs=[read],
        outputs=[written],
        restore=internal_pb2.RestoredTask(checkpoint_id=1, finished=True, outputs=[ends]),
        takes_checkpoints=True,
    )
    acknowledged: list[checkpoint_pb2.SubtaskSnapshot] = []
    execution = SimpleNamespace(
        fail_later=own.errors.append,
        acknowledge=lambda _id, snapshot: acknowledged.append(snapshot),
    )
    parts = Deployment(deployment, services_of(own.exchange), lambda: None)
    parts.create_partitions(execution)
    parts.open_state(execution, lambda: None)
    subtask = parts.build(execution)
    reader = consumer.exchange.create_gate(
        attempt_id("v2"),
        [input_edge([(own.endpoint, attempt_id("v1", 0, 1))], 0, "e1", CACHING)],
        SubtaskCounters(),
        consumer.wake,
        consumer.errors.append,
        positions=[checkpoint_pb2.ChannelPosition(edge_id="e1", index=0, rows=3)],
    )
    found = []
    while subtask.phase is not SubtaskPhase.ENDED:
        simulation.pass_time(10_000_000)
        subtask.step()
    simulation.pass_time(10_000_000)
    found += drain(reader)
    assert not own.errors
    assert [type(element) for element in found] == [Watermark, EndOfData]
    subtask.trigger(CheckpointBarrier(2, 0))
    (snapshot,) = acknowledged
    assert snapshot.finished
    assert [position.rows for position in snapshot.outputs] == [3]


def test_a_blocking_exchange_that_it_has_read_may_be_gone() -> None:
    vertex = graph_pb2.Vertex(id="v1", parallelism=1)
    vertex.operators.add(uid="history").process.SetInParent()
    nowhere = internal_pb2.DataEndpoint(slot_id="gone")
    blocking = graph_pb2.RESULT_PARTITION_TYPE_BLOCKING
    deployment = internal_pb2.TaskDeployment(
        attempt=attempt_id("v1", 0, 1),
        vertex=vertex,
        inputs=[input_edge([(nowhere, attempt_id("v0"))], partition_type=blocking)],
        restore=internal_pb2.RestoredTask(checkpoint_id=1, finished=True),
        takes_checkpoints=True,
    )
    deployment.outputs.add()
    exchange = SimpleNamespace(create_partition=lambda *arguments: unread_partition())
    acknowledged = []
    execution = SimpleNamespace(
        fail_later=None, acknowledge=lambda _id, snapshot: acknowledged.append(snapshot)
    )
    parts = Deployment(deployment, services_of(exchange), lambda: None)
    parts.create_partitions(execution)
    parts.open_state(execution, lambda: None)
    subtask = parts.build(execution)
    while subtask.phase is not SubtaskPhase.DRAINING:
        subtask.step()
    subtask.trigger(CheckpointBarrier(2, 0))
    (snapshot,) = acknowledged
    assert snapshot.finished
