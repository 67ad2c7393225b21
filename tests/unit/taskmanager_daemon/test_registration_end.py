"""Aim: a TaskManager that has said goodbye does not register again, and one that was forgotten does; who says that it
leads is believed only once it answers as a newer leader.

Method: the registration loop alone, against a JobManager that forgets it at the worst moment: in the
same turn of the event loop in which the daemon cancels the loop. A task group whose child fails in
that turn swallows the cancellation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import structlog

from common.clock import SystemClock
from common.pb import internal_pb2
from penstock.client.protocol import DAEMON_PROTOCOL_VERSION
from penstock.errors import (
    Fenced,
    JobManagerUnreachable,
    NotLeader,
    StoreNotFound,
    StoreTransient,
    StreamError,
    Unauthenticated,
)
from taskmanager.daemon.held_partitions import HeldPartitionsReport
from taskmanager.daemon.identity import TaskManagerIdentity
from taskmanager.rpc import newer_leader_runner, registration_runner
from taskmanager.rpc.registration_runner import RegistrationRunner
from tests.support.jobs import DEADLINE_S


class ForgetfulJobManager:
    """Answers heartbeats when it is told to, always with "unknown"."""

    address = "jobmanager:1"
    has_alternatives = False

    def __init__(
        self, registrations_max: int, alternatives: Sequence[str] = (), timeout_ms: int = 10
    ) -> None:
        self.alternatives = alternatives
        self._timeout_ms = timeout_ms
        self.registrations = 0
        self._registrations_max = registrations_max
        self.registered = asyncio.Event()
        self.forgets = asyncio.Event()
        self.asked: list[str] = []
        self.was_asked = asyncio.Event()

    async def register(self, _request: Any) -> internal_pb2.RegisterTaskManagerResponse:
        self.registrations += 1
        self.registered.set()
        if self.registrations > self._registrations_max:
            await asyncio.Event().wait()  # a loop that does not end comes to rest here
        return internal_pb2.RegisterTaskManagerResponse(
            leader_epoch=1,
            protocol_version=DAEMON_PROTOCOL_VERSION,
            cluster_id="c",
            heartbeat_interval_ms=10,
            heartbeat_timeout_ms=self._timeout_ms if self.alternatives else 60_000,
        )

    async def heartbeat(self, _request: Any, _timeout_s: float) -> Any:
        await self.forgets.wait()
        return internal_pb2.HeartbeatResponse(known=False)

    async def heartbeat_at(self, address: str, _request: Any, _timeout_s: float) -> Any:
        """At each address a JobManager of the epoch that is its port; nobody at port 0. Standbys name the leader."""
        self.asked.append(address)
        self.was_asked.set()
        if address.startswith("standby"):
            raise NotLeader("it is a standby", address.partition("/")[2])
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


def registration_with(jobmanager: ForgetfulJobManager, slots: int = 0) -> RegistrationRunner:
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
        held_slots=lambda: [internal_pb2.HeldSlot()] * slots,
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
        done, _ = await asyncio.wait([running], timeout=DEADLINE_S)
        assert done, "the loop went on after the goodbye"
        assert jobmanager.registrations == 1

    asyncio.run(work())


def test_one_that_is_forgotten_registers_again_and_again() -> None:
    async def work() -> None:
        jobmanager = ForgetfulJobManager(registrations_max=3)
        jobmanager.forgets.set()
        registration = registration_with(jobmanager)
        running = asyncio.create_task(registration.run())  # noqa: TID251 - cancelled below
        async with asyncio.timeout(DEADLINE_S):
            while jobmanager.registrations < 4:
                jobmanager.registered.clear()
                await jobmanager.registered.wait()
        running.cancel()
        await registration.say_goodbye("it ends", 1, is_planned=True)
        done, _ = await asyncio.wait([running], timeout=DEADLINE_S)
        assert done

    asyncio.run(work())


class AwayJobManager(ForgetfulJobManager):
    """Takes nobody at first, at either of two addresses in turn."""

    def __init__(self, failures: int, error: type[StreamError]) -> None:
        super().__init__(registrations_max=1)
        self.failures = failures
        self.error = error

    async def register(self, request: Any) -> internal_pb2.RegisterTaskManagerResponse:
        if self.failures:
            self.failures -= 1
            raise self.error(f"not at address {self.failures % 2}")
        return await super().register(request)

    async def switch(self, *_: object) -> None:
        """To the other."""


@pytest.mark.parametrize(
    ("error", "begins", "ends"),
    [
        (JobManagerUnreachable, "registration.retried", "registration.answered"),
        (StoreNotFound, "registration.refused", "registration.accepted"),
        (Fenced, "leader.refused", "leader.followed"),
    ],
)
def test_why_it_is_not_registered_is_told_once_by_reason_and_when_it_is(
    error: type[StreamError], begins: str, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        registration = registration_with(AwayJobManager(7, error))
        running = asyncio.create_task(registration.run())  # noqa: TID251 - cancelled below
        await registration.wait_registered()
        running.cancel()
        await asyncio.wait([running], timeout=2)

    monkeypatch.setattr(registration_runner, "_RETRY_FIRST_S", 0.001)
    with structlog.testing.capture_logs() as logs:
        asyncio.run(work())
    told = [one for one in logs if one["log_level"] != "debug"]
    assert [one["reason"] for one in told if one["event"] == begins] == [
        "not at address 0",
        "not at address 1",
    ]
    assert [one["failures"] for one in told if one["event"] == ends] == [7]


class RotatingJobManager(ForgetfulJobManager):
    """Refuses the token of a TaskManager that is registered, for a while."""

    token_may_change = True

    def __init__(self) -> None:
        super().__init__(registrations_max=2)
        self.refused = 0

    async def register(self, request: Any) -> internal_pb2.RegisterTaskManagerResponse:
        if self.forgets.is_set() and self.refused < 9:
            self.refused += 1
            raise Unauthenticated("the cluster's token is missing or wrong")
        self.forgets.clear()
        return await super().register(request)

    async def heartbeat(self, request: Any, timeout_s: float) -> Any:
        if self.registrations == 1 and self.refused < 3:
            self.refused += 1
            raise Unauthenticated("the cluster's token is missing or wrong")
        if self.registrations == 1:
            self.was_asked.set()
        return await super().heartbeat(request, timeout_s)

    async def switch(self, *_: object) -> None:
        """There is no other."""


def test_a_token_that_is_refused_for_a_while_ends_no_registration_and_no_taskmanager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        jobmanager = RotatingJobManager()
        registration = registration_with(jobmanager)
        running = asyncio.create_task(registration.run())  # noqa: TID251 - cancelled below
        async with asyncio.timeout(DEADLINE_S):
            await jobmanager.was_asked.wait()
            assert (jobmanager.registrations, jobmanager.refused) == (1, 3)
            jobmanager.registered.clear()
            jobmanager.forgets.set()
            await jobmanager.registered.wait()
        assert (jobmanager.registrations, jobmanager.refused) == (2, 9)
        running.cancel()
        await asyncio.wait([running], timeout=DEADLINE_S)

    monkeypatch.setattr(registration_runner, "_RETRY_FIRST_S", 0.001)
    with structlog.testing.capture_logs() as logs:
        asyncio.run(work())
    refused = [one for one in logs if one["event"] == "registration.refused"]
    assert len([one for one in refused if one["log_level"] == "error"]) == 1


class DeafJobManager(ForgetfulJobManager):
    """Takes no task events at first."""

    def __init__(self) -> None:
        super().__init__(registrations_max=1)
        self.failures = 7
        self.taken = asyncio.Event()

    async def report(self, _request: Any) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreTransient("connection refused")
        self.taken.set()


def test_task_events_that_are_not_taken_are_told_of_once_and_when_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        jobmanager = DeafJobManager()
        registration = registration_with(jobmanager)
        running = asyncio.create_task(registration.run())  # noqa: TID251 - cancelled below
        async with asyncio.timeout(DEADLINE_S):
            await registration.wait_registered()
            registration.report(internal_pb2.TaskEvent())
            await jobmanager.taken.wait()
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running], timeout=DEADLINE_S)

    monkeypatch.setattr(registration_runner, "_RETRY_REPORT_S", 0.001)
    with structlog.testing.capture_logs() as logs:
        asyncio.run(work())
    told = [one for one in logs if one["event"].startswith("report.")]
    assert [one["reason"] for one in told if one["log_level"] == "info" and "reason" in one] == [
        "connection refused"
    ]
    assert [one["failures"] for one in told if one["event"] == "report.answered_again"] == [7]


@pytest.mark.parametrize("was_registered", [False, True])
def test_a_token_that_was_never_right_or_cannot_change_ends_a_taskmanager(
    was_registered: bool,
) -> None:
    async def work() -> None:
        jobmanager = RotatingJobManager()
        jobmanager.token_may_change = not was_registered
        if was_registered:
            jobmanager.refused = 3
        else:
            jobmanager.forgets.set()
        running = registration_with(jobmanager).run()
        async with asyncio.timeout(DEADLINE_S):
            jobmanager.forgets.set()
            with pytest.raises(Unauthenticated):
                await running

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
        await asyncio.wait([running], timeout=DEADLINE_S)

    asyncio.run(work())


@pytest.mark.parametrize(
    ("others", "leader"),
    [
        (["b:2"], "b:2"),
        (["b:0", "b:2", "b:1"], "b:2"),
        (["standby/b:2"], "b:2"),
        (["standby/standby/b:3", "b:0"], "b:3"),
        (["b:0", "standby", "standby/jobmanager:1", "b:1"], ""),
    ],
    ids=["it leads", "one of them leads", "a standby knows", "through two", "nobody leads"],
)
def test_others_are_asked_who_leads_though_the_jobmanager_answers(
    others: list[str], leader: str
) -> None:
    """It may be cut off from all that knows of a newer leader, but not from this TaskManager."""

    async def work() -> None:
        jobmanager = ForgetfulJobManager(1, others)
        registration = registration_with(jobmanager)
        running = asyncio.create_task(registration.run())  # noqa: TID251 - cancelled below
        await registration.wait_registered()
        async with asyncio.timeout(DEADLINE_S):
            while jobmanager.registrations == 1 and leader:
                jobmanager.registered.clear()
                await jobmanager.registered.wait()
            while len(jobmanager.asked) < 3 * len(others) and not leader:
                jobmanager.was_asked.clear()
                await jobmanager.was_asked.wait()
        assert jobmanager.address == (leader or "jobmanager:1")
        assert jobmanager.registrations == (2 if leader else 1)
        running.cancel()
        await asyncio.wait([running], timeout=DEADLINE_S)

    asyncio.run(work())


@pytest.mark.parametrize(
    ("slots", "period", "leaves"),
    [(0, "_IDLE_S", True), (1, "_IDLE_S", False), (0, "_LATE_S", True), (1, "_LATE_S", True)],
)
def test_others_are_asked_soon_where_an_answer_is_late_or_nothing_is_held(
    monkeypatch: pytest.MonkeyPatch, slots: int, period: str, leaves: bool
) -> None:
    """Long before ``heartbeat.timeout``; of one that holds something the new leader knows."""
    for name in ("_IDLE_S", "_LATE_S"):
        monkeypatch.setattr(newer_leader_runner, name, 0.005 if name == period else 60.0)

    async def work() -> None:
        jobmanager = ForgetfulJobManager(1, ["b:1", "c:2"], timeout_ms=60_000)
        registration = registration_with(jobmanager, slots)
        running = asyncio.create_task(registration.run())  # noqa: TID251 - cancelled below
        await registration.wait_registered()
        async with asyncio.timeout(DEADLINE_S):
            while jobmanager.registrations == 1 and leaves:
                jobmanager.registered.clear()
                await jobmanager.registered.wait()
        if not leaves:
            await asyncio.sleep(0.02)
        assert jobmanager.address == ("c:2" if leaves else "jobmanager:1")
        assert bool(jobmanager.asked) == leaves
        running.cancel()
        await asyncio.wait([running], timeout=DEADLINE_S)

    asyncio.run(work())
