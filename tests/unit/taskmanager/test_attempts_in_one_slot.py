"""Attempts of one subtask, one after the other, in one slot process: each goes on where the checkpoint says,
and nothing of it stays when it is over.

A real slot on simulated time runs the second vertex of a keyed job; its producer is a caching partition in
another slot, which lives on.
"""

from __future__ import annotations

import collections
import itertools
from pathlib import Path

from common.elements import CheckpointBarrier, EndOfData
from common.pb import internal_pb2
from penstock.config import Configuration
from penstock.pb import checkpoint_pb2
from penstock.pb.client_pb2 import AttemptState
from tests.support.exchange_slots import (
    CACHING,
    Simulation,
    attempt_id,
    configuration,
    input_edge,
    output_edge,
)
from tests.support.in_memory_network import InMemoryNetwork, SimulatedLoop
from tests.support.simulated_jobs import events, keyed_process
from tests.support.simulated_slot import SimulatedSlot
from tests.support.simulated_store import AuditedStore, StoreAccess
from tests.support.simulated_world import World

ROWS = 60


class Host:
    """What the slot needs of its surroundings."""

    def __init__(self, simulation: Simulation, config: Configuration, directory: Path) -> None:
        self.loop: SimulatedLoop = simulation.loop
        self.network: InMemoryNetwork = simulation.network
        self.config = config
        self.work_directory = directory
        self.partition_wait_ms = 10_000
        self.events: list[internal_pb2.TaskEvent] = []
        self._names = itertools.count()

    def background_delay_ns(self, is_snapshot: bool) -> int:
        return 1_000_000 if is_snapshot else 0

    def open_store(self) -> StoreAccess:
        return StoreAccess(AuditedStore(), self.network.random)

    def new_name(self) -> str:
        return f"{next(self._names):012x}"

    def tell(self, process: str, text: str) -> None:
        pass

    def slot_ended(self, name: str) -> None:
        """Nobody asks."""

    def broke(self, error: BaseException) -> None:
        raise error

    def take_report(self, slot: SimulatedSlot, report: internal_pb2.SlotReport) -> None:
        if report.WhichOneof("report") == "task_event":
            self.events.append(report.task_event)


class Line:
    """Between the slot and a daemon that is not there."""

    def report(self, report: internal_pb2.SlotReport | None) -> None:
        """Nobody listens."""

    def exited(self, channel: object, status: int) -> None:
        """Nobody waits for it."""


class Cluster:
    """The slot, its producer, and a JobManager that is the test."""

    def __init__(self, world: str, directory: Path, **config: object) -> None:
        self.simulation = Simulation(7)
        self.config = configuration(network_buffer_timeout_ms=0, **config)
        self.producer = self.simulation.slot("p", self.config, token="")
        self.partition = self.producer.partition(
            output_edge(partition_type=CACHING), attempt_id("v0")
        )
        self.host = Host(self.simulation, self.config, directory)
        self.slot = SimulatedSlot(self.host, "tm", "s", Line(), Line())
        configure = internal_pb2.SlotConfiguration(
            job_id="job",
            slot_id="s",
            host_id="host",
            leader_epoch=3,
            unix_socket_path="/s",
            spill_directory=str(directory / "spill"),
            work_directory=str(directory / "s"),
            config=self.config.to_mapping(),
        )
        self.slot.handle(internal_pb2.SlotCommand(configure=configure))
        self.graph = keyed_process(world, ROWS, None, 1).graph
        self.attempt = -1

    def emit(self, start: int, count: int) -> None:
        self.partition.emit(events(start, count))
        self.partition.flush()
        self.run()

    def run(self) -> None:
        """Everything that can happen now happens."""
        for _ in range(100):
            self.simulation.pass_time(20_000_000)
            while self.slot.runtime.run_one():
                pass

    def attempt_id(self) -> internal_pb2.AttemptId:
        return attempt_id("v1", 0, self.attempt)

    def deploy(self, snapshot: checkpoint_pb2.SubtaskSnapshot | None = None) -> None:
        self.attempt += 1
        edge = input_edge([(self.producer.endpoint, attempt_id("v0"))], partition_type=CACHING)
        edge.schema = self.graph.edges[0].schema
        task = internal_pb2.TaskDeployment(
            attempt=self.attempt_id(),
            vertex=self.graph.vertices[1],
            inputs=[edge],
            takes_checkpoints=True,
        )
        if snapshot is not None:
            task.restore.checkpoint_id = 1
            task.restore.inputs.extend(snapshot.inputs)
            for each in snapshot.operators:
                restored = task.restore.operators.add(operator_uid=each.operator_uid)
                restored.lists.extend(each.lists)
                if each.HasField("keyed"):
                    restored.keyed.append(each.keyed)
        self.slot.handle(internal_pb2.SlotCommand(deploy=task))
        self.run()

    def command(self, **kind: object) -> None:
        command = internal_pb2.TaskCommand(attempt=self.attempt_id(), **kind)  # type: ignore[arg-type]
        self.slot.handle(internal_pb2.SlotCommand(task_command=command))
        self.run()

    def cancel(self) -> None:
        self.command(cancel=internal_pb2.CancelTask())

    def barrier(self, checkpoint_id: int) -> None:
        self.partition.emit_control(CheckpointBarrier(checkpoint_id, 0))
        self.run()

    def checkpoint(self, checkpoint_id: int) -> checkpoint_pb2.SubtaskSnapshot:
        self.barrier(checkpoint_id)
        self.complete(checkpoint_id)
        return self.acknowledged()[-1]

    def complete(self, checkpoint_id: int) -> None:
        completed = internal_pb2.CheckpointCompleted(checkpoint_id=checkpoint_id)
        self.command(checkpoint_completed=completed)
        self.partition.checkpoint_completed(checkpoint_id)

    def acknowledged(self) -> list[checkpoint_pb2.SubtaskSnapshot]:
        return [
            event.checkpoint_acknowledged.snapshot
            for event in self.host.events
            if event.HasField("checkpoint_acknowledged")
        ]

    @property
    def last_state(self) -> str:
        states = [e.state_changed for e in self.host.events if e.HasField("state_changed")]
        return AttemptState.Name(states[-1].state)

    def assert_nothing_stays(self) -> None:
        slot = self.slot
        assert not slot.runtime._executions
        assert not slot._services.memory._users
        assert slot._services.memory.used_bytes() == 0
        assert slot._exchange.next_deadline_ns is None
        assert not slot._exchange._connector._supplies
        state = self.host.work_directory / "s" / "state"
        assert not state.exists() or not list(state.iterdir())


def test_each_attempt_goes_on_where_the_checkpoint_says(tmp_path: Path) -> None:
    world = World("attempts in one slot")
    cluster = Cluster("attempts in one slot", tmp_path)
    cluster.deploy()
    cluster.emit(0, 20)
    snapshot = cluster.checkpoint(1)
    (position,) = snapshot.inputs
    assert (position.edge_id, position.index, position.rows) == ("e0", 0, 20)
    assert position.checksum != 0
    for start in (20, 30, 40):
        cluster.emit(start, 10)
        cluster.cancel()
        assert cluster.last_state == "ATTEMPT_STATE_CANCELED"
        cluster.assert_nothing_stays()
        cluster.deploy(snapshot)
        assert cluster.last_state == "ATTEMPT_STATE_RUNNING"
    cluster.emit(50, 10)
    cluster.partition.emit_control(EndOfData())
    cluster.run()
    last = cluster.checkpoint(2)
    assert last.inputs[0].rows == ROWS
    cluster.partition.finish()
    cluster.run()
    assert cluster.last_state == "ATTEMPT_STATE_FINISHED"
    cluster.assert_nothing_stays()
    assert cluster.partition.is_drained()
    expected = keyed_process("attempts in one slot", ROWS, None, 1).expected
    assert collections.Counter(world.visible()) == expected


def test_an_attempt_that_cannot_read_on_says_what_is_missing(tmp_path: Path) -> None:
    World("missing")
    cluster = Cluster("missing", tmp_path)
    cluster.deploy()
    cluster.emit(0, 20)
    cluster.checkpoint(1)
    cluster.cancel()
    cluster.deploy()  # from the start, of which nothing is left
    failed = cluster.host.events[-1].state_changed
    assert cluster.last_state == "ATTEMPT_STATE_FAILED"
    assert failed.failure.error_class == "PartitionUnavailable"
    missing = failed.missing_partition
    assert (missing.edge_id, missing.vertex, missing.subtask_index, missing.attempt) == (
        "e0",
        "v0",
        0,
        0,
    )
    cluster.assert_nothing_stays()


def test_a_running_attempt_reads_on_from_a_replaced_producer(tmp_path: Path) -> None:
    World("replaced")
    cluster = Cluster("replaced", tmp_path)
    cluster.deploy()
    cluster.emit(0, 20)
    cluster.checkpoint(1)
    cluster.emit(20, 10)
    cluster.simulation.kill(cluster.producer)
    cluster.run()
    unreachable = [e for e in cluster.host.events if e.HasField("peer_unreachable")]
    # All of it: the JobManager compares it with where processes have said that they listen.
    lost = cluster.producer.endpoint
    assert [e.peer_unreachable.peer for e in unreachable] == [lost]
    assert lost.host_id
    assert unreachable[0].attempt == cluster.attempt_id()
    cluster.producer = cluster.simulation.slot("q", cluster.config, token="")
    attempt = attempt_id("v0", 0, 1)
    cluster.partition = cluster.producer.partition(
        output_edge(partition_type=CACHING),
        attempt,
        [checkpoint_pb2.ChannelPosition(edge_id="e0", index=0, rows=20)],
    )
    (channel,) = input_edge([(cluster.producer.endpoint, attempt)]).channels
    cluster.command(replace_producer=internal_pb2.ReplaceProducer(channel=channel))
    cluster.emit(20, 5)
    cluster.barrier(2)
    declined = cluster.host.events[-1].checkpoint_declined
    assert (declined.checkpoint_id, declined.is_comparing) == (2, True)
    assert "are still being compared" in declined.reason
    cluster.command(checkpoint_aborted=internal_pb2.CheckpointAborted(checkpoint_id=2))
    cluster.emit(25, 20)
    assert cluster.last_state == "ATTEMPT_STATE_RUNNING"
    assert cluster.checkpoint(3).inputs[0].rows == 45
    assert cluster.acknowledged()[-1].inputs[0].producer_attempt == 1
    cluster.cancel()
    cluster.assert_nothing_stays()


def test_databases_go_with_their_attempt(tmp_path: Path) -> None:
    World("databases")
    cluster = Cluster("databases", tmp_path, state_backend_type="rocksdb")
    cluster.deploy()
    cluster.emit(0, 20)
    assert list((tmp_path / "s" / "state").iterdir())
    cluster.cancel()
    cluster.assert_nothing_stays()
