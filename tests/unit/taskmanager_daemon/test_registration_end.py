"""Aim: a TaskManager that has said goodbye does not register again, and one that was forgotten does; who says that it
leads is believed only once it answers as a newer leader.

Method: the registration loop alone, against a JobManager that forgets it at the worst moment: in the
same turn of the event loop in which the daemon cancels the loop. A task group whose child fails in
that turn swallows the cancellation.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.clock import SystemClock
from common.pb import internal_pb2
from penstock.errors import StoreTransient
from taskmanager.daemon.held_partitions import HeldPartitionsReport
from taskmanager.daemon.identity import TaskManagerIdentity
from taskmanager.rpc.registration_runner import RegistrationRunner


class ForgetfulJobManager:
    """Answers heartbeats when it is told to, always with "unknown"."""

    address = "jobmanager:1"
    has_alternatives = False

    def __init__(self, registrations_max: int) -> None:
        self.registrations = 0
        self._registrations_max = registrations_max
        self.registered = asyncio.Event()
        self.forgets = asyncio.Event()
        self.asked: list[str] = []

    async def register(self, _request: Any) -> internal_pb2.RegisterTaskManagerResponse:
        self.registrations += 1
        self.registered.set()
        if self.registrations > self._registrations_max:
            await asyncio.Event().wait()  # a loop that does not end comes to rest here
        return internal_pb2.RegisterTaskManagerResponse(
            leader_epoch=1, cluster_id="c", heartbeat_interval_ms=10, heartbeat_timeout_ms=60_000
        )

    async def heartbeat(self, _request: Any, _timeout_s: float) -> Any:
        await self.forgets.wait()
        return internal_pb2.HeartbeatResponse(known=False)

    async def heartbeat_at(self, address: str, _request: Any, _timeout_s: float) -> Any:
        """At each address a JobManager of the epoch that is its port; nobody at port 0."""
        self.asked.append(address)
        epoch = int(address.rpartition(":")[2])
        if not epoch:
            raise StoreTransient("nobody is there")
        return internal_pb2.HeartbeatResponse(leader_epoch=epoch, cluster_id="c")

    async def turn_to(self, address: str) -> None:
        self.address = address

    async def goodbye(self, _request: Any, _timeout_s: float) -> None:
        self.forgets.set()

    async def switch(self) -> None:
        pass

    async def wait_broken(self) -> None:
        await asyncio.Event().wait()


def registration_with(jobmanager: ForgetfulJobManager) -> RegistrationRunner:
    async def ignore(*_: object) -> None:
        pass

    identity = TaskManagerIdentity(
        "tm", "tm:1", 1, 1, "1", "3.11", "3", (), internal_pb2.DataEndpoint()
    )
    client: Any = jobmanager
    return RegistrationRunner(
        identity=identity,
        client=client,
        clock=SystemClock(),
        grace_s=0,
        new_incarnation=lambda: "i",
        metrics=list,
        held_slots=list,
        held_partitions=HeldPartitionsReport,
        follow=ignore,
        drop_all=ignore,
    )


@pytest.mark.parametrize("turns", range(6))
def test_goodbye_is_the_last_word_whenever_the_cancellation_comes(turns: int) -> None:
    async def work() -> None:
        jobmanager = ForgetfulJobManager(registrations_max=1)
        registration = registration_with(jobmanager)
        running = asyncio.create_task(registration.run())  # noqa: TID251 - awaited below
        await registration.wait_registered()
        await asyncio.sleep(0)  # the heartbeat is under way
        await registration.say_goodbye("it ends", 1, is_planned=True)
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=2)
        assert done, "the loop went on after the goodbye"
        assert jobmanager.registrations == 1

    asyncio.run(work())


def test_one_that_is_forgotten_registers_again_and_again() -> None:
    async def work() -> None:
        jobmanager = ForgetfulJobManager(registrations_max=3)
        jobmanager.forgets.set()
        registration = registration_with(jobmanager)
        running = asyncio.create_task(registration.run())  # noqa: TID251 - cancelled below
        async with asyncio.timeout(5):
            while jobmanager.registrations < 4:
                jobmanager.registered.clear()
                await jobmanager.registered.wait()
        running.cancel()
        await registration.say_goodbye("it ends", 1, is_planned=True)
        done, _ = await asyncio.wait([running], timeout=2)
        assert done

    asyncio.run(work())


@pytest.mark.parametrize(
    ("told", "asked", "stays"),
    [
        (internal_pb2.HearOfLeaderRequest(leader_epoch=2, cluster_id="c", rpc_address="b:2"), 1, 0),
        (internal_pb2.HearOfLeaderRequest(leader_epoch=2, cluster_id="c", rpc_address="b:1"), 1, 1),
        (internal_pb2.HearOfLeaderRequest(leader_epoch=2, cluster_id="c", rpc_address="b:0"), 1, 1),
        (internal_pb2.HearOfLeaderRequest(leader_epoch=1, cluster_id="c", rpc_address="b:2"), 0, 1),
        (internal_pb2.HearOfLeaderRequest(leader_epoch=2, cluster_id="d", rpc_address="b:2"), 0, 1),
    ],
    ids=["a newer leader", "a deposed one", "nobody", "news of old", "another cluster"],
)
def test_who_says_that_it_leads_is_asked(
    told: internal_pb2.HearOfLeaderRequest, asked: int, stays: int
) -> None:
    async def work() -> None:
        jobmanager = ForgetfulJobManager(registrations_max=1)
        registration = registration_with(jobmanager)
        running = asyncio.create_task(registration.run())  # noqa: TID251 - cancelled below
        await registration.wait_registered()
        registration.hear_of_leader(told)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(jobmanager.asked) == asked
        assert (jobmanager.registrations, registration.registration is not None) == (
            (1, True) if stays else (2, False)
        )
        assert jobmanager.address == ("jobmanager:1" if stays else told.rpc_address)
        running.cancel()
        await asyncio.wait([running], timeout=2)

    asyncio.run(work())
