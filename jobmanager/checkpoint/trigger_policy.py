"""When the next checkpoint may start, and for whom.

Order: final ones, then savepoints, then those on demand, then the periodic one. Savepoints and those on
demand are served in order of arrival; one that has to be taken again because a task finished goes first of its
kind. The queues are bounded: beyond that a request is refused. A final one is never refused.

What holds back what:

    holds back                          final   savepoint   on demand   periodic   periodic again
    a savepoint under way               yes     yes         yes         yes        yes
    a savepoint that waits              no      yes         yes         yes        yes
    max-concurrent checkpoints          yes     yes         yes         yes        yes
    any checkpoint under way            no      yes         no          no         no
    interval since the last start       no      no          no          yes        no
    min-pause since the last end        no      no          no          yes        no
    another one under way, min-pause>0  no      no          no          yes        no
    pause after failures in a row       no      no          no          yes        yes

What is said of savepoints holds for the checkpoints behind which a job holds, too: to be stopped, or to leave a
TaskManager. A savepoint aborts nothing and shares nothing with what goes on beside it, so it is alone: it waits for what is
under way, and what comes next waits for it, in both cases no longer than a checkpoint may take (``expired``).

The interval counts from the start of the last checkpoint of the job's own, since any of them makes work safe; a
savepoint does not.
Periodic ones go on after a final one: a task that waits for a checkpoint and has missed the final one is
served by the next. All times are steady.

Source: Flink, CheckpointRequestDecider (what is not periodic ignores the pause but not the bound on
concurrent ones; savepoints first, then on demand, then periodic). Where Flink rejects a periodic request
that comes too early and sets its timer anew, here it is simply not due yet.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from jobmanager.checkpoint.failure_policy import pause_after_failures_ms
from jobmanager.checkpoint.messages import RequestRefused
from jobmanager.checkpoint.settings import CheckpointSettings
from penstock.storage.checkpoint_properties import PLAIN, BehindBarrier, CheckpointProperties

REQUESTS_MAX: Final = 64
"""Requests on demand that wait for their turn."""

DEFAULT_FAILURE_PAUSE_MS: Final = 1_000
"""First pause after a failure where there is no interval."""


class Turn(IntEnum):
    """Why a checkpoint is taken, in the order in which they are served."""

    FINAL = 0
    SAVEPOINT = 1
    ON_DEMAND = 2
    PERIODIC = 3


@dataclass(frozen=True, slots=True)
class Request:
    """A checkpoint that somebody wants; ``request_id`` is "" for the periodic one.

    Attributes:
        deadline_ms: of a savepoint: steady time until which it waits and is taken.
    """

    request_id: str = ""
    properties: CheckpointProperties = PLAIN
    deadline_ms: int = 0

    @property
    def turn(self) -> Turn:
        """Before and behind which others it is served."""
        if not self.request_id:
            return Turn.PERIODIC
        if self.is_alone:
            return Turn.SAVEPOINT
        return Turn.FINAL if self.properties.behind is BehindBarrier.END else Turn.ON_DEMAND

    @property
    def is_savepoint(self) -> bool:
        """Whether it is taken for its user."""
        return self.properties.is_savepoint

    @property
    def is_alone(self) -> bool:
        """Whether nothing else is under way beside it: a savepoint, or one behind whose barrier the job holds."""
        return self.properties.is_alone


PERIODIC: Final = Request()


class TriggerPolicy:
    """Decides when, not how.

    Example: every 100 ms; what is asked for waits for no interval, but for the one under way.
        >>> policy = TriggerPolicy(CheckpointSettings(interval_ms=100))
        >>> policy.begin(now_ms=0)
        >>> policy.due_ms(now_ms=10, under_way=0)
        100
        >>> policy.add(Request("asked"))
        >>> policy.take(now_ms=10, under_way=1)
        >>> policy.take(now_ms=10, under_way=0).request_id
        'asked'
    """

    def __init__(self, settings: CheckpointSettings) -> None:
        self._settings = settings
        self._queues: dict[Turn, deque[Request]] = {
            turn: deque() for turn in Turn if turn is not Turn.PERIODIC
        }
        self._periodic_again = False
        self._last_start_ms = 0
        self._last_end_ms: int | None = None
        self._not_before_ms = 0

    @property
    def queued(self) -> tuple[Request, ...]:
        """Requests that wait, in the order in which they are served."""
        return tuple(request for queue in self._queues.values() for request in queue)

    def begin(self, now_ms: int, *, at_once: bool = False) -> None:
        """Tasks run: the first periodic checkpoint starts an interval from now, or at once."""
        self._last_start_ms = now_ms
        self._periodic_again = at_once and self._settings.interval_ms is not None

    def stop(self) -> tuple[Request, ...]:
        """Tasks do not run: forgets and returns all requests."""
        dropped = self.queued
        for queue in self._queues.values():
            queue.clear()
        self._periodic_again = False
        return dropped

    def add(self, request: Request) -> RequestRefused | None:
        """Queues a request that is not periodic; says why not where it does not."""
        queue = self._queues[request.turn]
        if request.turn is not Turn.FINAL and len(queue) >= REQUESTS_MAX:
            return RequestRefused.QUEUE_FULL
        queue.append(request)
        return None

    def add_again(self, request: Request) -> None:
        """Queues a request whose checkpoint is to be taken again at once."""
        if request.turn is Turn.PERIODIC:
            self._periodic_again = True
        else:
            self._queues[request.turn].appendleft(request)

    def expires_ms(self) -> int | None:
        """When the next savepoint has waited for too long; None = none waits."""
        return min((one.deadline_ms for one in self._queues[Turn.SAVEPOINT]), default=None)

    def expired(self, now_ms: int) -> tuple[Request, ...]:
        """Forgets and returns savepoints that have waited for too long."""
        queue = self._queues[Turn.SAVEPOINT]
        late = tuple(one for one in queue if one.deadline_ms <= now_ms)
        for one in late:
            queue.remove(one)
        return late

    def started(self, now_ms: int) -> None:
        """A checkpoint of the job's own has started."""
        self._last_start_ms = now_ms
        self._periodic_again = False

    def completed(self, now_ms: int) -> None:
        """A checkpoint is complete."""
        self._last_end_ms = now_ms
        self._not_before_ms = 0

    def aborted(self, failed_in_a_row: int, now_ms: int) -> None:
        """A checkpoint was aborted.

        Args:
            failed_in_a_row: failures that count, this one included; 0 = this one does not count.
            now_ms: the time.
        """
        self._last_end_ms = now_ms
        if failed_in_a_row:
            first = self._settings.interval_ms or DEFAULT_FAILURE_PAUSE_MS
            self._not_before_ms = now_ms + pause_after_failures_ms(failed_in_a_row, first)

    def answered(self) -> None:
        """The store, of which nothing was heard, has answered: what has failed before is no reason to wait."""
        self._not_before_ms = 0

    def due_ms(self, now_ms: int, under_way: int, *, is_saving: bool = False) -> int | None:
        """When ``take`` will return a request, not before now; None = not by time alone.

        Args:
            now_ms: the time.
            under_way: checkpoints that have started and not ended.
            is_saving: the one under way is a savepoint.
        """
        if is_saving or under_way >= self._settings.max_concurrent:
            return None
        if self._queues[Turn.SAVEPOINT] and not self._queues[Turn.FINAL]:
            return None if under_way else now_ms
        if any(self._queues.values()):
            return now_ms
        periodic = self._periodic_due_ms(under_way)
        return None if periodic is None else max(periodic, now_ms)

    def take(self, now_ms: int, under_way: int, *, is_saving: bool = False) -> Request | None:
        """The request whose checkpoint is to start now; it is no longer queued."""
        due = self.due_ms(now_ms, under_way, is_saving=is_saving)
        if due is None or due > now_ms:
            return None
        for kind in sorted(self._queues):
            if self._queues[kind]:
                return self._queues[kind].popleft()
        return PERIODIC

    def _periodic_due_ms(self, under_way: int) -> int | None:
        settings = self._settings
        if self._periodic_again:
            return self._not_before_ms
        if settings.interval_ms is None or (settings.min_pause_ms and under_way):
            return None
        due = max(self._last_start_ms + settings.interval_ms, self._not_before_ms)
        if self._last_end_ms is None:
            return due
        return max(due, self._last_end_ms + settings.min_pause_ms)
