"""A process without a job of its own: whom it lets in, and which partition a request means."""

from __future__ import annotations

from common.pb import internal_pb2
from penstock.errors import PartitionUnavailable
from taskmanager.network.connection_pool import ConnectionPool
from taskmanager.network.partition_registry import PartitionRequest
from tests.support.exchange_slots import (
    Simulation,
    attempt_id,
    configuration,
    identity,
    input_edge,
)


class Shelf:
    """Notes what is asked for, and has nothing."""

    next_deadline_ns: int | None = None

    def __init__(self) -> None:
        self.requests: list[PartitionRequest] = []

    def expire(self, now_ns: int) -> None:
        """Nobody waits here."""

    def withdraw(self, request: PartitionRequest) -> None:
        """Nobody waits here."""

    def request(self, request: PartitionRequest) -> None:
        self.requests.append(request)
        request.refused(PartitionUnavailable(f"{request.partition_id} is not held here"))


def serve(simulation: Simulation, shelf: Shelf) -> internal_pb2.DataEndpoint:
    pool = ConnectionPool(
        configuration(),
        identity("partitions", job_id=""),
        shelf,
        simulation.loop.post,
        simulation.loop,
        simulation.network.transport(),
    )
    return pool.listen("/partitions", "", "")


def test_slots_of_every_job_are_let_in_and_name_theirs() -> None:
    simulation, shelf = Simulation(1), Shelf()
    endpoint = serve(simulation, shelf)
    for job_id in ("one", "two"):
        producer = attempt_id("v0", 2, attempt=5)
        producer.job_id = job_id
        consumer = simulation.slot(f"slot of {job_id}", job_id=job_id)
        consumer.gate(input_edge([(endpoint, producer)], subpartition_index=3))
        simulation.loop.run()
        (error,) = consumer.errors
        assert "e0 of v0/2 (attempt 5) is not held here" in str(error)
    assert [request.job_id for request in shelf.requests] == ["one", "two"]
    assert {request.subpartition_index for request in shelf.requests} == {3}


def test_a_slot_may_not_read_for_another_job() -> None:
    simulation, shelf = Simulation(2), Shelf()
    endpoint = serve(simulation, shelf)
    producer = attempt_id("v0")
    producer.job_id = "other"
    consumer = simulation.slot("c", job_id="job")
    consumer.gate(input_edge([(endpoint, producer)]))
    simulation.loop.run()
    assert len(consumer.errors) == 1
    assert all(request.is_foreign for request in shelf.requests), (
        "who serves it knows that it is foreign"
    )


def test_tokens_and_leaders_count_there_too() -> None:
    simulation, shelf = Simulation(3), Shelf()
    endpoint = serve(simulation, shelf)
    for values, words in (({"token": "wrong"}, "token"), ({"leader_epoch": 1}, "is over")):
        consumer = simulation.slot(f"c {words}", **values)
        consumer.gate(input_edge([(endpoint, attempt_id("v0"))]))
        simulation.loop.run()
        assert words in str(consumer.errors[0])
    assert not shelf.requests
