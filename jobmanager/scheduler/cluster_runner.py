"""The actor that owns the TaskManagers: who is registered, alive, and whose slots they are.

It holds two machines, ``SlotPool`` and ``HeartbeatMonitor``, and one client per TaskManager. Its
methods are synchronous where they decide, so that nothing can come between reading and changing
state; jobs hear of grants and losses through their inboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from typing import Any

import structlog

from common.clock import Clock
from common.pb import internal_pb2
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.graph.slot import Slot
from jobmanager.liveness.heartbeat import HeartbeatMonitor
from jobmanager.liveness.loss_reason import LossReason
from jobmanager.messages import job_events
from jobmanager.messages.job_effects import RequestSlots
from jobmanager.rpc.partition_convert import holdings_of
from jobmanager.rpc.taskmanager_client import TaskManagerClient
from jobmanager.scheduler import slots as s
from jobmanager.scheduler.admission import TaskManagerFacts
from jobmanager.scheduler.held_partitions_runner import HeldPartitionsRunner
from jobmanager.scheduler.registered_client import (
    JobInbox,
    RegisteredTaskManager,
    SlotCounts,
    check_registration,
    facts_of,
    slot_wait,
)
from jobmanager.scheduler.sought_attempts import SoughtAttempts
from jobmanager.scheduler.taskmanager_watch_runner import TaskManagerWatch
from penstock.config import Configuration
from penstock.errors import InvariantViolation, JobRejected, StreamError, TaskManagerLost
from penstock.pb import client_pb2

_REGISTRATION_RETRY_MS = 2_000
"""TaskManagers that look for their JobManager let no more time go by between two attempts."""


class ClusterRunner:
    """Registered TaskManagers and their slots.

    Args:
        config: of the cluster.
        connect: makes the client of a TaskManager of this id, address and incarnation.
        tell_leader: tells the TaskManager of an address, within a time in seconds, who leads.
    """

    def __init__(
        self,
        config: Configuration,
        connect: Callable[[str, str, str], TaskManagerClient],
        clock: Clock,
        tell_leader: Callable[[str, float], Awaitable[None]],
    ) -> None:
        self.tell_leader = tell_leader
        self._config = config
        self._connect = connect
        self._clock = clock
        self._log = structlog.get_logger(__name__)
        self._pool = s.SlotPool()
        self._monitor = HeartbeatMonitor(config.heartbeat_interval_ms, config.heartbeat_timeout_ms)
        self._taskmanagers: dict[str, RegisteredTaskManager] = {}
        self._inboxes: dict[str, JobInbox] = {}
        self._wait_ms_by_job: dict[str, int] = {}
        self._deadlines_changed = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._freeing: set[tuple[str, str, str]] = set()
        # Slots whose end their TaskManagers have not confirmed, and the jobs that gave them up.
        self._unconfirmed: dict[Slot, str] = {}
        self.sought = SoughtAttempts()
        self._registrations = asyncio.Event()
        self._answers_since_ms: int | None = None
        """When TaskManagers could register for the first time; None = they cannot yet."""
        self.partitions = HeldPartitionsRunner(self.client, self._start, lambda: self.settles_in_s)
        self.counts = SlotCounts()
        self.drained: dict[str, str] = {}
        """TaskManagers that are given no more tasks, as long as they are registered as this incarnation."""
        self.losses: Mapping[LossReason, int] = {}
        """TaskManagers lost since the start; replaced as a whole, like ``counts``."""

    async def run(self, started: asyncio.Event) -> None:
        """Watches deadlines and connections until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                started.set()
                await self._watch_deadlines()
        finally:
            self._tasks = None
            for taskmanager in self._taskmanagers.values():
                await taskmanager.client.close()

    async def _watch_deadlines(self) -> None:
        while True:
            self._deadlines_changed.clear()
            deadlines = self._monitor.next_deadline_ms(), self._pool.next_deadline_ms()
            due = min((one for one in deadlines if one is not None), default=None)
            delay_s = None if due is None else max(0.0, (due - self._now_ms()) / 1000)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._deadlines_changed.wait()
            now_ms = self._now_ms()
            for silent in self._monitor.expire(now_ms):
                loss = silent.loss(self._config.heartbeat_timeout_ms)
                self._lose(silent.taskmanager_id, *loss)
            self._step(s.TimePassed(now_ms))

    def _now_ms(self) -> int:
        return self._clock.monotonic_ns() // 1_000_000

    @property
    def heartbeat_age_ms(self) -> int:
        """Of the TaskManager that was heard of longest ago; any thread."""
        return self._monitor.silence_max_ms(self._now_ms())

    def register(self, request: internal_pb2.RegisterTaskManagerRequest) -> tuple[str, ...]:
        """A TaskManager has come, or has come back.

        Returns:
            Slots with what an earlier JobManager has deployed that may go on; the others are to be ended.

        Raises:
            JobRejected: it says nothing that could be used, a living one elsewhere has its id, or there are as many
                as there may be.
            ProtocolMismatch: it speaks another protocol of daemons.
        """
        check_registration(request)
        id, incarnation = request.taskmanager_id, request.incarnation
        known = self._taskmanagers.get(id)
        if known is not None:
            if known.incarnation == incarnation and known.address == request.rpc_address:
                self._monitor.register(id, incarnation, self._now_ms())
                return known.taken_over
            is_elsewhere = known.address != request.rpc_address
            if is_elsewhere and self._monitor.is_alive(id, self._now_ms()):
                raise JobRejected(
                    f"taskmanager.id {id} is in use by {known.address} (pid "
                    f"{known.pid}): give the TaskManager at {request.rpc_address} another one"
                )
            self._lose(id, LossReason.RESTARTED, "it was restarted")
        elif len(self._taskmanagers) >= self._config.jobmanager_taskmanagers_max:
            raise JobRejected(
                f"TaskManager {id} at {request.rpc_address} is one too many: "
                f"{len(self._taskmanagers)} are registered, which is jobmanager.taskmanagers.max; raise it and "
                "restart the JobManager, or stop others"
            )
        self._add(request)
        self._monitor.register(id, incarnation, self._now_ms())
        self._log.info(
            "taskmanager.registered",
            taskmanager_id=id,
            incarnation=incarnation,
            address=request.rpc_address,
            slots=request.slots,
        )
        self.partitions.observe(id, holdings_of(request.holdings))
        held = self.sought.told(id, incarnation, request.held_attempts, request.ended_attempts)
        # Before the pool gives away any of the others.
        self._taskmanagers[id].taken_over = taken_over = tuple(held)
        is_drained = self._taskmanagers[id].is_drained = self.drained.get(id) == incarnation
        if not is_drained:
            self.drained.pop(id, None)  # what another JobManager knew of an earlier one
        slots = tuple(held.items())
        self._step(s.TaskManagerAdded(id, incarnation, request.slots, slots, is_drained))
        self._registrations.set()
        return taken_over

    def _add(self, request: internal_pb2.RegisterTaskManagerRequest) -> None:
        """Connects to a TaskManager, and watches it."""
        client = self._connect(request.taskmanager_id, request.rpc_address, request.incarnation)
        if request.HasField("partition_endpoint"):
            client.note_partition_endpoint(request.partition_endpoint)
        watch = self._watch(request.taskmanager_id, request.incarnation, client)
        self._taskmanagers[request.taskmanager_id] = RegisteredTaskManager(
            facts=facts_of(request),
            address=request.rpc_address,
            incarnation=request.incarnation,
            pid=request.pid,
            client=client,
            watch=watch,
            watching=self._start_contained(watch.run()),
            last_heartbeat_ms=self._clock.now_ms(),
        )

    def heartbeat(self, request: internal_pb2.HeartbeatRequest) -> bool:
        """A heartbeat came; False = the TaskManager must register again."""
        if not self._monitor.beat(request.taskmanager_id, request.incarnation, self._now_ms()):
            return False
        taskmanager = self._taskmanagers[request.taskmanager_id]
        taskmanager.last_heartbeat_ms = self._clock.now_ms()
        taskmanager.slots = tuple(request.held_slots)
        taskmanager.memory_bytes = request.memory_bytes
        taskmanager.spill_bytes = request.spill_bytes
        self.partitions.observe(request.taskmanager_id, holdings_of(request.holdings))
        held = dict.fromkeys((slot.job_id, slot.slot_id) for slot in request.held_slots)
        given_up = {
            (job_id, slot.slot_id): slot
            for slot, job_id in self._unconfirmed.items()
            if slot.taskmanager_id == request.taskmanager_id
        }
        for (job_id, slot_id), slot in given_up.items():
            if (job_id, slot_id) not in held:
                self.take_back(job_id, (slot,))
        for job_id, slot_id in held:
            is_wanted = self._pool.holds(job_id, request.taskmanager_id, slot_id)
            if not is_wanted or (job_id, slot_id) in given_up:
                self._free_again(taskmanager.client, job_id, slot_id)
        return True

    def goodbye(self, request: internal_pb2.GoodbyeRequest) -> None:
        """A TaskManager leaves."""
        if self.is_registered(request.taskmanager_id, request.incarnation):
            reason = request.reason or "it was stopped"
            self._lose(
                request.taskmanager_id,
                LossReason.GOODBYE if request.is_planned else LossReason.GAVE_UP,
                reason,
                is_planned=request.is_planned,
            )

    def peer_unreachable(self, reporter_id: str, report: internal_pb2.PeerUnreachable) -> None:
        """A slot of one TaskManager cannot reach a process of another: that one is probed."""
        for taskmanager_id, taskmanager in self._taskmanagers.items():
            if taskmanager.client.serves(report.peer):
                self._log.info(
                    "taskmanager.doubted",
                    taskmanager_id=taskmanager_id,
                    witness=reporter_id,
                    reason=report.reason,
                )
                taskmanager.watch.ask(reporter_id)
                return

    def is_registered(self, taskmanager_id: str, incarnation: str) -> bool:
        """Whether this very start of a TaskManager is known."""
        taskmanager = self._taskmanagers.get(taskmanager_id)
        return taskmanager is not None and taskmanager.incarnation == incarnation

    def client(self, taskmanager_id: str) -> TaskManagerClient:
        """The client of a TaskManager.

        Raises:
            TaskManagerLost: it is not registered (any more).
        """
        taskmanager = self._taskmanagers.get(taskmanager_id)
        if taskmanager is None:
            raise TaskManagerLost(
                f"TaskManager {taskmanager_id} is not registered any more: it was lost, or stopped"
            )
        return taskmanager.client

    def facts(self, taskmanager_ids: Iterable[str] | None = None) -> list[TaskManagerFacts]:
        """What some TaskManagers said of themselves; None = all."""
        ids = self._taskmanagers if taskmanager_ids is None else taskmanager_ids
        return [self._taskmanagers[id].facts for id in ids if id in self._taskmanagers]

    def details(self) -> list[client_pb2.TaskManagerDetails]:
        """What clients see."""
        counts, held = self._pool.counts, self.partitions.of
        known = sorted(self._taskmanagers.items())
        return [taskmanager.details(*counts(id), held(id)) for id, taskmanager in known]

    def _watch(
        self, taskmanager_id: str, incarnation: str, client: TaskManagerClient
    ) -> TaskManagerWatch:
        def on_refused() -> None:
            if self.is_registered(taskmanager_id, incarnation):
                reason = f"{client.address} refuses connections"
                self._lose(taskmanager_id, LossReason.CONNECTION_REFUSED, reason)

        def on_doubt(witness: str) -> None:
            is_current = self.is_registered(taskmanager_id, incarnation)
            if is_current and self._monitor.suspect(taskmanager_id, witness):
                self._log.warning(
                    "taskmanager.suspected", taskmanager_id=taskmanager_id, witness=witness
                )
                self._deadlines_changed.set()

        return TaskManagerWatch(client.reachability, on_refused, on_doubt)

    def _lose(
        self, taskmanager_id: str, loss: LossReason, reason: str, *, is_planned: bool = False
    ) -> None:
        taskmanager = self._taskmanagers.pop(taskmanager_id)
        self.drained.pop(taskmanager_id, None)
        self.losses = Counter(self.losses) + Counter([loss])
        self._monitor.remove(taskmanager_id)
        self.sought.lost(taskmanager_id)
        self.partitions.lost(taskmanager_id)
        self._unconfirmed = {
            slot: job_id
            for slot, job_id in self._unconfirmed.items()
            if slot.taskmanager_id != taskmanager_id
        }
        self._log.warning(
            "taskmanager.lost", taskmanager_id=taskmanager_id, loss=loss.value, reason=reason
        )
        cause = FailureCause(
            "TaskManagerLost",
            f"TaskManager {taskmanager_id} at {taskmanager.address} was lost: {reason}"
            f"{': ' if loss.advice else ''}{loss.advice}",
            taskmanager_id=taskmanager_id,
            timestamp_ms=self._clock.now_ms(),
        )
        for inbox in list(self._inboxes.values()):
            inbox.post(job_events.TaskManagerGone(taskmanager_id, cause, is_planned))
        if self._tasks is not None:
            self._start(self._disconnect(taskmanager))
        self._step(s.TaskManagerRemoved(taskmanager_id))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        _ = self._start_contained(work)

    def _start_contained(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._tasks is not None, "work begins while the cluster runs"
        task = self._tasks.create_task(self._contained(work))
        # A task that is cancelled before its first step has not begun its work either.
        task.add_done_callback(lambda _: work.close())
        return task

    async def _contained(self, work: Coroutine[Any, Any, None]) -> None:
        """Work for one TaskManager; whatever goes wrong in it must not end the others."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 - the boundary of a TaskManager
            # Heartbeats go on: a TaskManager that is not watched any more is lost when it is silent.
            self._log.error("taskmanager.work_crashed", work=str(work), exc_info=error)

    async def _disconnect(self, taskmanager: RegisteredTaskManager) -> None:
        # The watch may be the one that noticed; then it has ended by itself.
        taskmanager.watching.cancel()
        await taskmanager.client.close()

    def _free_again(self, client: TaskManagerClient, job_id: str, slot_id: str) -> None:
        """Ends a slot that a TaskManager holds for a job that does not want it."""
        slot = (client.taskmanager_id, job_id, slot_id)
        if slot in self._freeing or self._tasks is None:
            return
        self._freeing.add(slot)

        async def free() -> None:
            try:
                await client.free_slots(job_id, [slot_id])
            except StreamError as error:
                # The next heartbeat asks again.
                self._log.warning(
                    "slot.not_freed", slot_id=slot_id, job_id=job_id, reason=str(error)
                )
            finally:
                self._freeing.discard(slot)

        self._start(free())

    async def wait_for_registration(self) -> None:
        """Returns when another TaskManager has registered."""
        self._registrations.clear()
        await self._registrations.wait()

    @property
    def settles_in_s(self) -> float:
        """How long TaskManagers that are not there may still take to register; 0 or less = they are gone."""
        now_ms, config = self._now_ms(), self._config
        patience_ms = config.heartbeat_timeout_ms + config.heartbeat_interval_ms
        since_ms = now_ms if self._answers_since_ms is None else self._answers_since_ms
        return (since_ms + patience_ms + _REGISTRATION_RETRY_MS - now_ms) / 1000

    def note_answering(self) -> None:
        """TaskManagers can register from now on."""
        self._answers_since_ms = self._now_ms()

    def addresses(self, taskmanager_ids: Iterable[str]) -> dict[str, str]:
        """Where some TaskManagers are called, as far as they are registered."""
        return {
            id: self._taskmanagers[id].address for id in taskmanager_ids if id in self._taskmanagers
        }

    # ------------------------------------------------------------ slots

    def join(self, job_id: str, inbox: JobInbox) -> None:
        """A job wants to hear of its slots and of lost TaskManagers."""
        self._inboxes[job_id] = inbox

    def leave(self, job_id: str) -> None:
        """A job's actor has ended, one way or the other: it no longer waits for slots."""
        for request in self._pool.open_requests(job_id):
            self._step(s.RequestWithdrawn(job_id, request.group))
        self._inboxes.pop(job_id, None)
        self._wait_ms_by_job.pop(job_id, None)

    def request_slots(self, job_id: str, wanted: RequestSlots, timeout_ms: int) -> None:
        """Asks for slots for a group of subtasks; answered by ``SlotsGranted`` or ``SlotsRefused``."""
        self._wait_ms_by_job[job_id] = timeout_ms
        due_ms = self._now_ms() + timeout_ms
        self._step(s.SlotsRequested(job_id, wanted.count, due_ms, wanted.group, wanted.near))

    def slot_wait(self, job_id: str) -> client_pb2.SlotWait | None:
        """What clients see of a job's open requests, from the oldest on; None = it waits for none."""
        requests = self._pool.open_requests(job_id)
        if not requests:
            return None
        timeout_ms = self._wait_ms_by_job[job_id]
        return slot_wait(requests, self.counts, self._pool.drained, timeout_ms, self._now_ms())

    def withdraw_request(self, job_id: str, group: int) -> None:
        """Asks no longer."""
        self._step(s.RequestWithdrawn(job_id, group))

    def take_spare_slot(self, job_id: str, avoided: Collection[str]) -> Slot | None:
        """Gives a job a slot that nobody waits for, now or not at all; see ``SlotPool.take_spare``."""
        slot = self._pool.take_spare(job_id, avoided)
        self._count()
        return slot

    def offered(self, taskmanager_id: str) -> tuple[int, int]:
        """All slots, and free ones, that a TaskManager offers now."""
        return (0, 0) if self.drained.get(taskmanager_id) else self._pool.counts(taskmanager_id)

    def take_back(self, job_id: str, slots: tuple[Slot, ...]) -> None:
        """Slots whose processes have ended."""
        for slot in slots:
            self._unconfirmed.pop(slot, None)
        self._step(s.SlotsFreed(job_id, slots))

    def take_back_later(self, job_id: str, slots: tuple[Slot, ...]) -> None:
        """Slots that may still be held: the first heartbeat that does not name them gives them back.

        Those of a TaskManager that is lost are lost with it.
        """
        known = [
            slot for slot in slots if self.is_registered(slot.taskmanager_id, slot.incarnation)
        ]
        self._unconfirmed |= dict.fromkeys(known, job_id)

    def drain(self, taskmanager_id: str, *, is_drained: bool) -> None:
        """Gives a TaskManager no more tasks, or gives it tasks again."""
        taskmanager = self._taskmanagers[taskmanager_id]
        taskmanager.is_drained = is_drained
        self.drained[taskmanager_id] = taskmanager.incarnation if is_drained else ""
        self._step(s.TaskManagerOffers(taskmanager_id, is_drained))

    def held_slots(self, job_id: str) -> Mapping[str, tuple[Slot, ...]]:
        """TaskManager -> the slots of it that a job has."""
        held: dict[str, tuple[Slot, ...]] = {}
        for slot in self._pool.held_by(job_id):
            held[slot.taskmanager_id] = (*held.get(slot.taskmanager_id, ()), slot)
        return held

    def _step(self, event: s.SlotEvent) -> None:
        waiting = self._pool.waiting_jobs
        try:
            effects = self._pool.step(event)
        except InvariantViolation as error:
            self._log.error("slots.inconsistent", reason=str(error), exc_info=error)
            self._fail_concerned(getattr(event, "job_id", ""), waiting, error)
            effects = []
        for effect in effects:
            inbox = self._inboxes.get(effect.job_id)
            assert inbox is not None, "who waits for slots has joined"
            match effect:
                case s.GrantSlots():
                    inbox.post(job_events.SlotsGranted(effect.slots, effect.group))
                case s.RefuseRequest():
                    there = effect.needed, effect.total, effect.free, effect.taskmanagers
                    waited_ms = self._wait_ms_by_job[effect.job_id]
                    inbox.post(
                        job_events.SlotsRefused(*there, waited_ms, effect.group, effect.drained)
                    )
        self._count()
        self._deadlines_changed.set()

    def _fail_concerned(
        self, job_id: str, waiting: Collection[str], error: InvariantViolation
    ) -> None:
        """Whoever a bug in here concerns ends: the job that the event was about, else those that wait."""
        message = (
            f"the JobManager's own account of the slots is wrong: {error}; its log has the story "
            "(slots.inconsistent)"
        )
        cause = FailureCause("Unrecoverable", message, timestamp_ms=self._clock.now_ms())
        for concerned in (job_id,) if job_id else waiting:
            inbox = self._inboxes.get(concerned)
            if inbox is not None:
                inbox.post(job_events.FailureRequested(cause))

    def _count(self) -> None:
        pool, known = self._pool, len(self._taskmanagers)
        self.counts = SlotCounts(
            pool.total, pool.free, known, len(pool.waiting_jobs), pool.dropped_events
        )
