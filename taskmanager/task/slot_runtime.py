"""The mailbox loop of a slot: runs all the subtasks of one slot on one thread.

``run_one`` does the next piece of work (a mail, a due timer, or one step of a subtask) and returns;
it never waits, so that a test can step the slot from outside and on simulated time. ``run`` is the
loop of a real slot process: it waits for mail when there is nothing to do, and a turn of a subtask is as many
steps as it has to do, up to ``_TURN_NS``: where each of many subtasks has little to do, the time goes to their work,
and not to what lies between two turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from common.clock import Clock
from common.pb import internal_pb2
from penstock.partition_id import PartitionId
from penstock.storage.request_counts import FILE_REQUESTS, S3_REQUESTS, RequestCounts
from taskmanager.partitions.spill_counts import SPILL
from taskmanager.partitions.spilling import Spilling
from taskmanager.processes.mailbox import Mailbox
from taskmanager.task.deadlines import Deadlines
from taskmanager.task.exchange import DataExchange
from taskmanager.task.execution import Execution
from taskmanager.task.flush_pacing import FlushPacing
from taskmanager.task.subtask import Progress
from taskmanager.task.turns import Turns

_MAIL_BEFORE_STEP_MAX = 64
_TURN_NS = 1_000_000
"""A turn ends with the step in which it has taken so long."""
_TICK_NS = 1_000_000
"""A busy slot looks so often whether the exchange waits for anything."""
_METRICS_INTERVAL_NS = 1_000_000_000
_WAIT_NS_MIN = 200_000
"""A shorter wait would end about as late."""

_Key = tuple[int, str, int, int]
"""A subtask, and its place: vertices are numbered from the sources on, ``v9`` comes before ``v10``."""


class ExecutionFactory(Protocol):
    """Builds the execution of a deployment."""

    def __call__(
        self,
        deployment: internal_pb2.TaskDeployment,
        schedule: Callable[[], None],
        deadline_moved: Callable[[], None],
    ) -> Execution:
        """A new execution; ``schedule`` asks for a step, ``deadline_moved`` for a look at its deadlines."""


class SlotRuntime:
    """Owns the subtasks of a slot and gives each of them its turn.

    Args:
        cpu_ns: CPU time that the calling thread has taken so far.
    """

    def __init__(
        self,
        clock: Clock,
        mailbox: Mailbox,
        exchange: DataExchange,
        build_execution: ExecutionFactory,
        report: Callable[[internal_pb2.SlotReport], None],
        cpu_ns: Callable[[], int],
    ) -> None:
        self._clock = clock
        self._cpu_ns = cpu_ns
        self._mailbox = mailbox
        self._exchange = exchange
        self._build_execution = build_execution
        self._report = report
        self._executions: dict[_Key, Execution] = {}
        self._turns = Turns[_Key]()
        self._deadlines = Deadlines[_Key]()
        self._moved: dict[_Key, None] = {}
        """Whose deadlines may be other ones than is known."""
        self._tick_at_ns = 0
        self._out_of_input: dict[_Key, None] = {}
        self._pacing = FlushPacing(clock.monotonic_ns(), cpu_ns())
        self._next_metrics_at_ns = clock.monotonic_ns() + _METRICS_INTERVAL_NS
        self._is_stopped = False

    # -- commands

    def handle(self, command: internal_pb2.SlotCommand) -> None:
        """Carries out a command of the daemon."""
        kind = command.WhichOneof("command")
        if kind == "deploy":
            self._deploy(command.deploy)
        elif kind == "task_command":
            self._task_command(command.task_command)
        elif kind == "results_taken":
            taken = command.results_taken
            self._with_execution(taken.attempt, lambda execution: execution.results_taken(taken))
        elif kind == "release_partitions":
            self._exchange.release_partitions(
                PartitionId(named.edge_id, named.vertex, named.subtask_index, named.attempt)
                for named in command.release_partitions.partitions
            )
        elif kind == "spill_pressure":
            self._exchange.set_spilling(_spilling_of(command.spill_pressure))
        elif kind == "shutdown":
            self.stop()

    def peer_unreachable(self, peer: internal_pb2.DataEndpoint, reason: str) -> None:
        """Reports another process that cannot be reached, in the name of any attempt that runs here."""
        execution = next(iter(self._executions.values()), None)
        if execution is not None:
            event = internal_pb2.TaskEvent(
                attempt=execution.attempt,
                peer_unreachable=internal_pb2.PeerUnreachable(peer=peer, reason=reason),
            )
            self._report(internal_pb2.SlotReport(task_event=event))

    def _deploy(self, deployment: internal_pb2.TaskDeployment) -> None:
        key = _key(deployment.attempt)
        if key in self._executions:
            return
        execution = self._build_execution(
            deployment, lambda: self._schedule(key), lambda: self._deadline_moved(key)
        )
        self._executions[key] = execution
        execution.start()
        self._schedule(key)

    def _task_command(self, command: internal_pb2.TaskCommand) -> None:
        self._with_execution(command.attempt, lambda execution: execution.handle(command))
        self._turns.ended(
            max(
                command.checkpoint_completed.checkpoint_id,
                command.checkpoint_aborted.checkpoint_id,
            )
        )

    def _with_execution(
        self, attempt: internal_pb2.AttemptId, action: Callable[[Execution], None]
    ) -> None:
        execution = self._executions.get(_key(attempt))
        if execution is not None:
            action(execution)
            self._forget_if_ended(_key(attempt))

    def _schedule(self, key: _Key) -> None:
        if key in self._executions:
            self._turns.add(key)

    def _deadline_moved(self, key: _Key) -> None:
        self._moved[key] = None

    def _forget_if_ended(self, key: _Key) -> None:
        execution = self._executions.get(key)
        if execution is not None and execution.has_ended:
            del self._executions[key]
            self._turns.gone(key)

    # -- loop

    def run_one(self) -> bool:
        """Does the next piece of work; False when there is none at this time."""
        begun_ns = self._clock.monotonic_ns()
        has_worked = self._work_once()
        self._note_work(begun_ns)
        return has_worked or self._flush_if_due()

    def _work_once(self) -> bool:
        mail = self._mailbox.take()
        if mail is not None:
            mail()
            return True
        if self._wake_due():
            return True
        if not self._turns:
            return False
        self._step_next()
        return True

    def run(self) -> None:
        """Works until ``stop``; waits for mail where there is nothing to do."""
        while not self._is_stopped:
            begun_ns = self._clock.monotonic_ns()
            while self._take_turn() and not self._must_flush():
                pass
            self._note_work(begun_ns)
            if not (self._flush_if_due() or self._turns or self._is_stopped):
                mail = self._mailbox.wait(self._seconds_to_next_deadline())
                if mail is not None:
                    mail()

    def _take_turn(self) -> bool:
        """Does what has come, then one turn of a subtask; False when there is no other to follow."""
        for _ in range(_MAIL_BEFORE_STEP_MAX):
            mail = self._mailbox.take()
            if mail is None:
                break
            mail()
        self._wake_due()
        if self._turns:
            self._step_next(_TURN_NS)
        return bool(self._turns) and not self._is_stopped

    def _must_flush(self) -> bool:
        due_ns = self._pacing.due_ns(has_work=True)
        return due_ns is not None and due_ns <= self._clock.monotonic_ns()

    def _note_work(self, begun_ns: int) -> None:
        ended_ns, has_more = self._clock.monotonic_ns(), bool(self._turns)
        self._pacing.worked(begun_ns, ended_ns, self._cpu_ns(), has_more=has_more)

    def stop(self) -> None:
        """Ends the loop; every subtask that still runs is cancelled."""
        self._is_stopped = True
        for execution in list(self._executions.values()):
            execution.cancel()
        self._executions.clear()

    def _step_next(self, turn_ns: int = 0) -> None:
        key = self._turns.take()
        execution = self._executions.get(key)
        if execution is None:
            return
        progress = execution.step(turn_ns)
        self._deadline_moved(key)
        self._turns.passed(key, execution.passed_checkpoint_id)
        if progress is Progress.MORE:
            self._schedule(key)
        elif progress is Progress.IDLE:
            self._out_of_input[key] = None
            self._pacing.held(self._clock.monotonic_ns())
        self._forget_if_ended(key)

    def _flush_if_due(self) -> bool:
        """Has subtasks that ran out of input send what they hold back, unless it may wait for more."""
        due_ns = self._pacing.due_ns(has_work=bool(self._turns))
        if due_ns is None or due_ns > self._clock.monotonic_ns():
            return False
        keys, self._out_of_input = self._out_of_input, {}
        for key in keys:
            execution = self._executions.get(key)
            if execution is not None:
                if execution.flush() is Progress.MORE:
                    self._schedule(key)
                self._deadline_moved(key)
                self._forget_if_ended(key)
        self._pacing.flushed(self._clock.monotonic_ns(), self._cpu_ns())
        return True

    def _wake_due(self) -> bool:
        """Schedules what a timer or the buffer timeout is due for."""
        now_ns = self._clock.monotonic_ns()
        self._note_moved(now_ns)
        if now_ns >= self._tick_at_ns or not self._turns:
            self._tick_at_ns = now_ns + _TICK_NS
            self._tick(now_ns)
        has_woken = False
        for key in self._deadlines.take_due(now_ns):
            has_woken = self._call_if_due(key, now_ns) or has_woken
        if now_ns >= self._next_metrics_at_ns:
            self._next_metrics_at_ns = now_ns + _METRICS_INTERVAL_NS
            self._moved.update(dict.fromkeys(self._executions))  # the wall clock may have been set
            self._report_metrics(list(self._executions.values()))
        return has_woken

    def _tick(self, now_ns: int) -> None:
        wait_ns = self._exchange.next_deadline_ns
        if wait_ns is not None and wait_ns <= now_ns:
            self._exchange.tick(now_ns)

    def _call_if_due(self, key: _Key, now_ns: int) -> bool:
        """Sends what is due to be sent, and schedules where that is due; True if it was not to have a turn anyway."""
        execution = self._executions.get(key)
        if execution is None:
            return False
        self._deadline_moved(key)
        execution.flush_if_due(now_ns)
        call_ns = execution.next_call_ns(self._clock.now_ms(), now_ns)
        if call_ns is None or call_ns > now_ns or key in self._turns:
            return False
        self._schedule(key)
        return True

    def _note_moved(self, now_ns: int) -> None:
        if not self._moved:
            return
        now_ms, moved, self._moved = self._clock.now_ms(), self._moved, {}
        for key in moved:
            execution = self._executions.get(key)
            self._deadlines.put(
                key, None if execution is None else execution.deadline_ns(now_ms, now_ns)
            )

    def next_deadline_ms(self) -> int:
        """Wall-clock time at which there is something to do even without mail."""
        return self._clock.now_ms() + self._ns_to_next_deadline() // 1_000_000

    def _seconds_to_next_deadline(self) -> float:
        return max(self._ns_to_next_deadline(), _WAIT_NS_MIN) / 1e9

    def _ns_to_next_deadline(self) -> int:
        now_ns = self._clock.monotonic_ns()
        self._note_moved(now_ns)
        deadlines_ns = (
            self._exchange.next_deadline_ns,
            self._pacing.due_ns(has_work=False),
            self._deadlines.next_ns(),
            self._next_metrics_at_ns,
        )
        next_ns = min(at_ns for at_ns in deadlines_ns if at_ns is not None)
        return max(next_ns - now_ns, 0)

    def _report_metrics(self, executions: list[Execution]) -> None:
        if executions:
            for execution in executions:
                execution.settle_waiting()
            metrics = internal_pb2.SlotMetrics(
                attempts=[execution.metrics() for execution in executions],
                s3=_take(S3_REQUESTS),
                files=_take(FILE_REQUESTS),
                spill=SPILL.take(),
            )
            self._report(internal_pb2.SlotReport(metrics=metrics))


def _take(counts: RequestCounts) -> internal_pb2.StoreTraffic:
    requests, sent_bytes, received_bytes = counts.take()
    return internal_pb2.StoreTraffic(
        requests=[
            internal_pb2.StoreRequests(
                operation=one.operation, outcome=one.outcome, count=one.count
            )
            for one in requests
        ],
        sent_bytes=sent_bytes,
        received_bytes=received_bytes,
    )


def _spilling_of(pressure: internal_pb2.SpillPressure) -> Spilling:
    if not pressure.stop:
        return Spilling.ALLOWED
    return Spilling.GIVEN_UP if pressure.give_up else Spilling.STOPPED


def _key(attempt: internal_pb2.AttemptId) -> _Key:
    return len(attempt.vertex), attempt.vertex, attempt.subtask_index, attempt.attempt
