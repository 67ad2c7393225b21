"""A subtask restored as finished that is found by the next checkpoint while it still ends its outputs.

Its splits must be named by that checkpoint too: a split that no snapshot names is discovered, assigned
and read again.
"""

from concurrent.futures import Executor, Future
from pathlib import Path
from types import SimpleNamespace

from common.elements import CheckpointBarrier
from common.pb import internal_pb2
from penstock.config import Configuration
from penstock.pb import checkpoint_pb2, graph_pb2
from taskmanager.harness.manual_clock import ManualClock
from taskmanager.state.memory import ManagedMemory
from taskmanager.task.deployment import Deployment, SlotServices
from taskmanager.task.subtask import Phase


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
    services = SlotServices(
        config=Configuration(),
        clock=ManualClock(0),
        exchange=SimpleNamespace(create_partition=lambda *arguments: unread_partition()),
        executor=AtOnce(),
        snapshot_executor=AtOnce(),
        memory=ManagedMemory(1 << 20),
        work_directory=Path("/nonexistent"),
        post=lambda mail: mail(),
        report=lambda report: None,
        artifact_paths={},
        open_store=lambda directory: None,
    )
    acknowledged = []
    execution = SimpleNamespace(
        fail_later=None, acknowledge=lambda _id, snapshot: acknowledged.append(snapshot)
    )
    parts = Deployment(deployment, services, lambda: None)
    parts.create_partitions(execution)
    parts.open_state(execution, lambda: None)
    subtask = parts.build(execution)
    while subtask.phase is not Phase.DRAINING:
        subtask.step()
    subtask.trigger(CheckpointBarrier(2, 0))
    (snapshot,) = acknowledged
    assert snapshot.finished
    assert [(op.operator_uid, list(op.splits)) for op in snapshot.operators] == [("source", [done])]
