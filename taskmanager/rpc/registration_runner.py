"""This TaskManager's registration with the JobManager: made, kept, lost, made again.

While it holds, heartbeats go out and events are reported, in order, until acknowledged. It is lost
when the JobManager does not know this TaskManager any more: then whatever ran for it is
ended, and registering begins again, for ever. A JobManager that does not answer at all is waited for:
after ``heartbeat.timeout`` it counts as away, and what runs is kept for
``taskmanager.jobmanager-grace``. Where it answers within that time and still knows this TaskManager,
everything goes on, and the events that have waited are delivered.

So it does where another JobManager has taken over: that one is told what runs, says what of it may go on, and gets
the events that the one before has not acknowledged. It is found by asking other addresses while the JobManager is
silent, or by ``newer_leader_runner.py`` where that one answers still or is late.

Invariants: each registration has an incarnation of its own, so that the JobManager knows the same, and nothing of
an earlier one is left at it (slots, events), unless a later leader takes these over; nothing is given up before the
JobManager was asked once more (the daemon itself may have been paused).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from common.clock import Clock
from common.daemon_protocol import check_protocol
from common.log import get_logger
from common.outage_log import OutageLog
from common.pb import internal_pb2
from penstock.client.protocol import DAEMON_PROTOCOL_VERSION, MESSAGE_SIZE_MAX_BYTES
from penstock.errors import (
    Fenced,
    JobManagerUnreachable,
    JobRejected,
    ProtocolMismatch,
    StreamError,
    Unauthenticated,
)
from taskmanager.daemon.held_partitions import HeldPartitionsReport
from taskmanager.daemon.identity import TaskManagerIdentity
from taskmanager.processes.process_usage import memory_bytes
from taskmanager.rpc.event_outbox import EventOutbox
from taskmanager.rpc.jobmanager_client import JobManagerClient, is_transient
from taskmanager.rpc.jobmanager_silence import JobManagerSilence, Presence
from taskmanager.rpc.newer_leader_runner import NewerLeaderRunner
from taskmanager.rpc.registration import LeaderReplaced, Registration, RegistrationLost
from taskmanager.task.lifecycle import TERMINAL

_RETRY_FIRST_S = 0.1
_RETRY_MAX_S = 2.0
_RETRY_REPORT_S = 0.2
_SEEK_S, _SEEK_PATIENCE_S = 0.2, 1.5
"""Between two calls while nobody leads, and for each."""


class RegistrationRunner:
    """Keeps this TaskManager registered.

    Args:
        identity: what the JobManager is told.
        clock: measures silence.
        grace_s: how long what runs is kept after the JobManager has been silent for
            ``heartbeat.timeout``.
        new_incarnation: makes a fresh id.
        metrics: latest metrics of all attempts.
        held_slots: slots held for jobs.
        held_attempts: what runs in them, for a JobManager that takes over.
        ended_attempts: what has run in processes that have ended, for the same.
        held_partitions: complete partitions on disk.
        see_partitions: has that say what is there now, for a JobManager that takes over; None = it always does.
        spill_bytes: size of all files under the spill directory.
        follow: told cluster id and leader epoch of each registration, and the slots that are kept; ends what else
            ran for another leader; raises ``Fenced`` for an earlier leader of the same cluster.
        event_arrived: told each event that the JobManager has taken over.
        drop_all: ends everything that runs, with the reason; returns when it has ended.
    """

    def __init__(
        self,
        *,
        identity: TaskManagerIdentity,
        client: JobManagerClient,
        clock: Clock,
        grace_s: float,
        new_incarnation: Callable[[], str],
        metrics: Callable[[], Sequence[internal_pb2.AttemptMetrics]],
        held_slots: Callable[[], Sequence[internal_pb2.HeldSlot]],
        held_attempts: Callable[[], Sequence[internal_pb2.HeldAttempt]] = tuple,
        ended_attempts: Callable[[], Sequence[internal_pb2.AttemptId]] = tuple,
        see_partitions: Callable[[], Awaitable[None]] | None = None,
        held_partitions: Callable[[], HeldPartitionsReport],
        spill_bytes: Callable[[], int] = int,
        follow: Callable[[str, int, Sequence[str]], Awaitable[None]],
        drop_all: Callable[[str], Awaitable[None]],
        event_arrived: Callable[[internal_pb2.TaskEvent], None] = lambda _event: None,
    ) -> None:
        self._identity = identity
        self._client = client
        self._clock = clock
        self._grace_s = grace_s
        self._new_incarnation = new_incarnation
        self._metrics = metrics
        self._held_slots = held_slots
        self._held_attempts = held_attempts
        self._ended_attempts = ended_attempts
        self._see_partitions = see_partitions
        self._held_partitions = held_partitions
        self._spill_bytes = spill_bytes
        self._follow = follow
        self._drop_all = drop_all
        self._event_arrived = event_arrived
        self._outbox = EventOutbox()
        self._events_waiting = asyncio.Event()
        self._is_cut = asyncio.Event()
        """The connection has just broken."""
        self._seeks = False
        """Another JobManager may lead."""
        self._newer_leader = NewerLeaderRunner(client)
        self._registered = asyncio.Event()
        self._registration: Registration | None = None
        self._is_leaving = self._was_registered = False
        self._silence = JobManagerSilence(0, grace_s, 0)
        log = self._log = get_logger(__name__)
        self._retries = OutageLog(log, "registration.retried", "registration.answered", "info")
        self._refusals = OutageLog(log, "registration.refused", "registration.accepted", "error")
        self._refused_leaders = OutageLog(log, "leader.refused", "leader.followed", "error")
        self._reports = OutageLog(log, "report.retried", "report.answered_again", "info")
        self._heartbeats = OutageLog(log, "heartbeat.failed", "heartbeat.answered_again", "info")

    # ------------------------------------------------------------ for the rest of the daemon

    @property
    def registration(self) -> Registration | None:
        """The registration that holds, None while there is none."""
        return self._registration

    @property
    def dropped_events(self) -> int:
        """Events that the JobManager did not take in time: the registration was given up for them."""
        return self._outbox.dropped_count

    @property
    def heartbeat_age_s(self) -> float:
        """Since the JobManager has answered; 0 where none has registered this TaskManager."""
        return self._silence.silent_s(self._now_s()) if self._registration else 0.0

    async def wait_registered(self) -> None:
        """Returns when a registration holds."""
        await self._registered.wait()

    def check_incarnation(self, incarnation: str) -> None:
        """Checks that a call is for the registration that holds.

        Raises:
            Fenced: it is for an earlier one, what it is about has ended; or it names none; or this TaskManager ends.
        """
        if self._is_leaving:
            raise Fenced(f"TaskManager {self._identity.taskmanager_id} ends: it has said goodbye")
        if not incarnation:
            raise Fenced(
                f"a call to TaskManager {self._identity.taskmanager_id} names no incarnation: it cannot be "
                "told from a late one"
            )
        own = self._registration
        if own is None or own.incarnation != incarnation:
            raise Fenced(
                f"the call is for incarnation {incarnation} of TaskManager "
                f"{self._identity.taskmanager_id}, which is over: it has registered anew since"
            )

    def report(self, event: internal_pb2.TaskEvent) -> None:
        """Queues an event for the JobManager."""
        self._outbox.append(event)
        self._events_waiting.set()

    def hear_of_leader(self, told: internal_pb2.HearOfLeaderRequest) -> None:
        """A JobManager says that it leads; it is asked before anything is believed."""
        own = self._registration
        if own is not None and own.is_over_by(told.cluster_id, told.leader_epoch):
            self._newer_leader.hear(told.rpc_address)

    async def say_goodbye(self, reason: str, timeout_s: float, *, is_planned: bool) -> None:
        """Tells the JobManager that this TaskManager ends; it may not hear. Nothing registers again.

        Args:
            timeout_s: for the JobManager to answer.
            is_planned: it was told to.
        """
        self._is_leaving = True
        registration = self._registration
        if registration is None:
            return
        try:
            await self._client.goodbye(
                internal_pb2.GoodbyeRequest(
                    taskmanager_id=self._identity.taskmanager_id,
                    incarnation=registration.incarnation,
                    reason=reason,
                    is_planned=is_planned,
                ),
                timeout_s,
            )
        except StreamError as error:
            self._log.info("goodbye.unheard", reason=str(error))

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Registers, serves, and registers again, until cancelled or until goodbye has been said.

        A cancellation alone would not do: a task group whose child fails in the same turn of the event
        loop swallows it, and the JobManager forgets this TaskManager just when it says goodbye. Nor does
        ``Task.cancelling`` tell, which Python 3.11 counts up at each failing child.

        Raises:
            JobRejected: the JobManager does not take it: another daemon has its id.
            ProtocolMismatch: one of the two speaks another protocol of daemons.
            Unauthenticated: the token is missing or wrong, and was so from the beginning.
        """
        incarnation, is_kept = self._new_incarnation(), False
        while True:
            try:
                registration = await self._register(incarnation, is_kept=is_kept)
            except RegistrationLost as error:
                await self._give_up(error)
                incarnation, is_kept = self._new_incarnation(), False
                continue
            self._log.info(
                "taskmanager.registered",
                jobmanager=self._client.address,
                leader_epoch=registration.leader_epoch,
                cluster_id=registration.cluster_id,
            )
            lost = await self._serve(registration)
            if self._is_leaving:
                return
            self._registered.clear()
            self._registration = None
            is_kept = isinstance(lost, LeaderReplaced)
            if is_kept:
                self._log.info("jobmanager.replaced", reason=str(lost))
            else:
                await self._give_up(lost)
                incarnation = self._new_incarnation()

    async def _give_up(self, lost: RegistrationLost) -> None:
        self._log.warning("jobmanager.lost", reason=str(lost))
        await self._drop_all(str(lost))
        self._outbox.clear()

    async def _register(self, incarnation: str, *, is_kept: bool) -> Registration:
        """Registers, however long that takes.

        Args:
            incarnation: as which.
            is_kept: attempts of an earlier leader are to go on.

        Raises:
            RegistrationLost: these are, and nobody has taken them over in time.
        """
        retry_s = _RETRY_FIRST_S
        while True:
            if is_kept and self._see_partitions is not None:
                await self._see_partitions()
            try:
                answer = await self._client.register(self._request(incarnation))
                check_protocol(
                    f"the JobManager at {self._client.address}",
                    answer.version,
                    answer.protocol_version,
                    "this TaskManager",
                    self._identity.version,
                )
                await self._follow(answer.cluster_id, answer.leader_epoch, answer.kept_slot_ids)
            except (JobRejected, ProtocolMismatch):
                raise
            except Fenced as error:
                address, reason = self._client.address, str(error)
                self._refused_leaders.failed(address + reason, jobmanager=address, reason=reason)
                if is_kept:
                    self._bear_silence()
                await self._client.switch(error)
            except StreamError as error:
                is_refused = isinstance(error, Unauthenticated)
                if is_refused and not (self._was_registered and self._client.token_may_change):
                    raise
                is_away = is_transient(error) or isinstance(error, JobManagerUnreachable)
                outage = self._retries if is_away and not is_refused else self._refusals
                outage.failed(str(error), reason=str(error))
                if is_kept:
                    self._bear_silence()
                await self._client.switch(error)
            else:
                for outage in (self._retries, self._refusals, self._refused_leaders):
                    outage.worked()
                self._registration = Registration.answered(incarnation, answer)
                timeout_s = self._registration.heartbeat_timeout_s
                self._silence = JobManagerSilence(timeout_s, self._grace_s, self._now_s())
                self._was_registered = True
                self._registered.set()
                return self._registration
            await asyncio.sleep(retry_s)
            retry_s = min(retry_s * 2, _RETRY_MAX_S)

    def _request(self, incarnation: str) -> internal_pb2.RegisterTaskManagerRequest:
        own = self._identity
        return internal_pb2.RegisterTaskManagerRequest(
            taskmanager_id=own.taskmanager_id,
            rpc_address=own.rpc_address,
            slots=own.slots,
            python_version=own.python_version,
            cloudpickle_version=own.cloudpickle_version,
            version=own.version,
            pid=own.pid,
            incarnation=incarnation,
            packages=own.packages,
            java_version=own.java_version,
            partition_endpoint=own.partition_endpoint,
            holdings=self._held_partitions().to_message(),
            held_attempts=_within_one_message(self._held_attempts()),
            ended_attempts=self._ended_attempts(),
            protocol_version=DAEMON_PROTOCOL_VERSION,
        )

    async def _serve(self, registration: Registration) -> RegistrationLost:
        """Keeps the registration; returns why it was lost."""
        reason: RegistrationLost | None = None
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send_heartbeats(registration))
                group.create_task(self._report_events(registration))
                group.create_task(self._watch_connection())
                group.create_task(
                    self._newer_leader.find(
                        registration,
                        lambda: self._heartbeat_request(registration),
                        lambda: not self._held_slots(),
                    )
                )
        except* RegistrationLost as lost:
            first = lost.exceptions[0]
            reason = first if isinstance(first, RegistrationLost) else None
        assert reason is not None, "the loops end only by losing the registration"
        return reason

    # ------------------------------------------------------------ heartbeats

    async def _send_heartbeats(self, registration: Registration) -> None:
        while True:
            is_answered = await self._heartbeat(registration)
            # Who leads is looked for at once where the connection has broken, and soon where nobody has led.
            self._seeks = self._client.has_alternatives and not is_answered
            interval_s = registration.heartbeat_interval_s
            with suppress(TimeoutError):
                async with asyncio.timeout(min(interval_s, _SEEK_S) if self._seeks else interval_s):
                    await self._is_cut.wait()
            self._is_cut.clear()

    async def _watch_connection(self) -> None:
        """Has the next heartbeat sent at once when the connection breaks."""
        await self._client.wait_broken()
        self._is_cut.set()

    def _heartbeat_request(self, registration: Registration) -> internal_pb2.HeartbeatRequest:
        return internal_pb2.HeartbeatRequest(
            taskmanager_id=self._identity.taskmanager_id,
            incarnation=registration.incarnation,
            leader_epoch=registration.leader_epoch,
            metrics=self._metrics(),
            held_slots=self._held_slots(),
            holdings=self._held_partitions().to_message(),
            memory_bytes=memory_bytes(self._identity.pid),
            spill_bytes=self._spill_bytes(),
        )

    async def _heartbeat(self, registration: Registration) -> bool:
        """Whether it was answered by who leads."""
        request = self._heartbeat_request(registration)
        try:
            with self._newer_leader.asking_while_late():
                response = await self._client.heartbeat(request, self._patience_s())
        except StreamError as error:
            self._raise_unless_transient(error)
            self._heartbeats.failed(reason=str(error))
            self._bear_silence()
            if self._client.has_alternatives:  # another may lead by now
                await self._client.switch(error)
            return False
        self._heartbeats.worked()
        if not response.known and response.cluster_id == registration.cluster_id:
            if registration.is_over_by(response.cluster_id, response.leader_epoch):
                raise LeaderReplaced(f"leader epoch {response.leader_epoch} has begun")
            if response.leader_epoch < registration.leader_epoch:
                # One that leads no more, and has not noticed.
                self._bear_silence()
                await self._client.switch(Fenced(f"leader epoch {response.leader_epoch} is over"))
                return False
        if not response.known:
            raise RegistrationLost("the JobManager does not know this TaskManager any more")
        self._note_answer()
        return True

    def _patience_s(self) -> float:
        """For one call; a JobManager that has been silent is asked beside others, and not waited for for long."""
        patience_s = self._silence.patience_s(self._now_s())
        return min(patience_s, _SEEK_PATIENCE_S) if self._seeks else patience_s

    def _note_answer(self) -> None:
        silence, now_s = self._silence, self._now_s()
        if silence.is_away:
            self._log.info(
                "jobmanager.returned",
                jobmanager=self._client.address,
                silent_s=round(silence.silent_s(now_s), 1),
            )
        silence.answered(now_s)

    def _bear_silence(self) -> None:
        """The JobManager has once more not answered.

        Raises:
            RegistrationLost: the grace is over.
        """
        was_away, now_s = self._silence.is_away, self._now_s()
        presence = self._silence.unanswered(now_s)
        silent_s = round(self._silence.silent_s(now_s), 1)
        if presence is Presence.GIVEN_UP:
            raise RegistrationLost(
                f"the JobManager at {self._client.address} has not answered for {silent_s:g} s "
                "(heartbeat.timeout and taskmanager.jobmanager-grace)"
            )
        if presence is Presence.PRESENT:
            return
        if not was_away:
            self._log.warning(
                "jobmanager.silent",
                jobmanager=self._client.address,
                silent_s=silent_s,
                kept_s=self._grace_s,
            )

    def _now_s(self) -> float:
        return self._clock.monotonic_ns() / 1e9

    def _raise_unless_transient(self, error: StreamError) -> None:
        if not is_transient(error):
            raise RegistrationLost(f"the JobManager refused: {error}") from error

    # ------------------------------------------------------------ events

    async def _report_events(self, registration: Registration) -> None:
        while True:
            await self._events_waiting.wait()
            if self._outbox.is_overfull:
                raise RegistrationLost("the JobManager does not take task events any more")
            batch = self._outbox.next_batch()
            if not batch:
                self._events_waiting.clear()
                continue
            request = internal_pb2.ReportTaskEventsRequest(
                taskmanager_id=self._identity.taskmanager_id,
                incarnation=registration.incarnation,
                leader_epoch=registration.leader_epoch,
                events=batch,
            )
            if any(_is_last_word(event) for event in batch):
                # Ahead of the end of an attempt, its last metrics.
                await self._heartbeat(registration)
            try:
                await self._client.report(request)
            except StreamError as error:
                if isinstance(error, Fenced):
                    await self._heartbeat(registration)  # whose answer tells whether another leads
                self._raise_unless_transient(error)
                self._reports.failed(reason=str(error))
                await asyncio.sleep(_RETRY_REPORT_S)
                continue
            self._reports.worked()
            self._note_answer()
            self._outbox.acknowledge(len(batch))
            for event in batch:
                self._event_arrived(event)


def _is_last_word(event: internal_pb2.TaskEvent) -> bool:
    return event.WhichOneof("event") == "state_changed" and event.state_changed.state in TERMINAL


def _within_one_message(
    attempts: Sequence[internal_pb2.HeldAttempt],
) -> Sequence[internal_pb2.HeldAttempt]:
    """The same, without splits where these would make the message too large."""
    if sum(attempt.ByteSize() for attempt in attempts) > MESSAGE_SIZE_MAX_BYTES // 2:
        for attempt in attempts:
            attempt.is_incomplete = attempt.is_incomplete or bool(attempt.found or attempt.given)
            del attempt.found[:], attempt.given[:]
    return attempts
