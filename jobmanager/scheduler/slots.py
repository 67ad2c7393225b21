"""The slot pool: whose slots there are, who has them, who waits.

Requests are all or nothing and are served in order of arrival, so that a large job is not starved by
small ones; only a request for more slots than the cluster has holds nobody up while it waits for more
TaskManagers. A grant is spread: each slot comes from the TaskManager that is least loaded
at that moment, but for those that had best be near something: where that TaskManager has a free one now, it is taken, and
else nobody waits for it. A spare slot is for whoever can do without: it is given only where nobody waits.

Groups of a job's subtasks ask one by one: none of them waits for slots of another.

A TaskManager that is drained offers nothing: its slots count for nobody but those who have them.

Invariants (``check``): a slot is held by at most one job; a group of a job has at most one open request; a
request is granted exactly what it asked for, or times out, or is withdrawn; slots of a TaskManager
that was lost, or that came back as a new incarnation, are held by nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import assert_never

from jobmanager.graph.slot import Slot
from penstock.errors import InvariantViolation, require_invariant

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class TaskManagerAdded:
    """A TaskManager offers slots; the same incarnation again changes nothing.

    Attributes:
        held: slots in which attempts of an earlier JobManager run: slot id and job id.
        is_drained: it offers nothing.
    """

    taskmanager_id: str
    incarnation: str
    slot_count: int
    held: tuple[tuple[str, str], ...] = ()
    is_drained: bool = False


@dataclass(frozen=True, slots=True)
class TaskManagerRemoved:
    """A TaskManager is lost or has said goodbye."""

    taskmanager_id: str


@dataclass(frozen=True, slots=True)
class TaskManagerOffers:
    """A TaskManager offers its slots again, or no longer."""

    taskmanager_id: str
    is_drained: bool


@dataclass(frozen=True, slots=True)
class SlotsRequested:
    """A group of a job needs ``count`` slots and waits for them until ``deadline_ms``.

    Attributes:
        near: TaskManagers that some of the slots had best be on, one of each time that one is named.
    """

    job_id: str
    count: int
    deadline_ms: int
    group: int = 0
    near: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestWithdrawn:
    """A group of a job no longer waits."""

    job_id: str
    group: int = 0


@dataclass(frozen=True, slots=True)
class SlotsFreed:
    """A job gives slots back."""

    job_id: str
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class TimePassed:
    """It is ``now_ms``."""

    now_ms: int


SlotEvent = (
    TaskManagerAdded
    | TaskManagerRemoved
    | TaskManagerOffers
    | SlotsRequested
    | RequestWithdrawn
    | SlotsFreed
    | TimePassed
)


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class GrantSlots:
    """The job has these slots from now on."""

    job_id: str
    slots: tuple[Slot, ...]
    group: int = 0


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """The deadline has passed; what there was at that moment.

    Attributes:
        taskmanagers: that offer slots.
        drained: that do not.
    """

    job_id: str
    needed: int
    total: int
    free: int
    taskmanagers: int
    group: int = 0
    drained: int = 0


SlotEffect = GrantSlots | RefuseRequest


@dataclass(slots=True)
class _TaskManager:
    incarnation: str
    free: list[Slot]
    holder: dict[Slot, str] = field(default_factory=dict)
    is_drained: bool = False

    @property
    def total(self) -> int:
        return len(self.free) + len(self.holder)


class SlotPool:
    """All slots of the cluster.

    Example: a request waits until all of it can be granted, and is spread over the TaskManagers.
        >>> pool = SlotPool()
        >>> pool.step(SlotsRequested("job", count=2, deadline_ms=1_000))
        []
        >>> pool.step(TaskManagerAdded("tm-1", "first", slot_count=1))
        []
        >>> [grant] = pool.step(TaskManagerAdded("tm-2", "first", slot_count=4))
        >>> [slot.taskmanager_id for slot in grant.slots]
        ['tm-1', 'tm-2']

    Example: what reads files of tm-2 goes there, though more is free elsewhere.
        >>> [grant] = pool.step(SlotsRequested("other", count=1, deadline_ms=9, near=("tm-2",)))
        >>> [slot.taskmanager_id for slot in grant.slots]
        ['tm-2']
    """

    def __init__(self) -> None:
        self._taskmanagers: dict[str, _TaskManager] = {}
        self._queue: dict[tuple[str, int], SlotsRequested] = {}
        self.total = 0
        """Slots of all TaskManagers that are not drained."""
        self.free = 0
        """Those of them that nobody has."""
        self.dropped_events = 0
        """Frees of slots that the job does not hold, and other events that come too late."""

    # ------------------------------------------------------------ what it says

    @property
    def waiting_jobs(self) -> tuple[str, ...]:
        """Whose requests are in the queue."""
        return tuple(dict.fromkeys(job_id for job_id, _ in self._queue))

    @property
    def drained(self) -> int:
        """How many TaskManagers offer nothing."""
        return len(self._taskmanagers) - len(self._offering())

    def open_requests(self, job_id: str) -> tuple[SlotsRequested, ...]:
        """What groups of a job wait for, the oldest request first."""
        return tuple(request for request in self._queue.values() if request.job_id == job_id)

    def counts(self, taskmanager_id: str) -> tuple[int, int]:
        """Total and free slots of one TaskManager; zeros where it is unknown."""
        taskmanager = self._taskmanagers.get(taskmanager_id)
        return (taskmanager.total, len(taskmanager.free)) if taskmanager else (0, 0)

    def held_by(self, job_id: str) -> tuple[Slot, ...]:
        """The slots of one job."""
        return tuple(
            slot
            for taskmanager in self._taskmanagers.values()
            for slot, holder in taskmanager.holder.items()
            if holder == job_id
        )

    def holds(self, job_id: str, taskmanager_id: str, slot_id: str) -> bool:
        """Whether a job has a slot."""
        taskmanager = self._taskmanagers.get(taskmanager_id)
        return taskmanager is not None and any(
            slot.slot_id == slot_id and holder == job_id
            for slot, holder in taskmanager.holder.items()
        )

    def next_deadline_ms(self) -> int | None:
        """When ``TimePassed`` is due next; None = nobody waits."""
        return min((request.deadline_ms for request in self._queue.values()), default=None)

    # ------------------------------------------------------------ what it decides

    def step(self, event: SlotEvent) -> list[SlotEffect]:
        """Takes one event and returns what follows from it.

        Raises:
            InvariantViolation: our bug; names the event.
        """
        effects = self._handle(event)
        try:
            self.check_step()
        except InvariantViolation as error:
            raise InvariantViolation(f"{error}, after {event}") from error
        return effects

    def _handle(self, event: SlotEvent) -> list[SlotEffect]:
        match event:
            case TaskManagerAdded():
                self._add(event)
            case TaskManagerRemoved():
                if not self._remove(event.taskmanager_id):
                    self.dropped_events += 1
            case TaskManagerOffers():
                self._note_drained(event)
            case SlotsRequested():
                assert event.count >= max(1, len(event.near)), "a job needs at least one slot"
                key = event.job_id, event.group
                assert key not in self._queue, "one open request per group"
                self._queue[key] = event
            case RequestWithdrawn():
                if self._queue.pop((event.job_id, event.group), None) is None:
                    self.dropped_events += 1
            case SlotsFreed():
                for slot in event.slots:
                    self._free(event.job_id, slot)
            case TimePassed():
                # First serve: a request that can be granted now has not waited in vain.
                return [*self._grant(), *self._refuse_overdue(event.now_ms)]
            case _:
                assert_never(event)
        return self._grant()

    def take_spare(self, job_id: str, avoided: Collection[str]) -> Slot | None:
        """Gives a job a slot beyond what it needs; None = there is none that nobody waits for.

        Args:
            job_id: whose it is from now on.
            avoided: TaskManagers that it must not be on.
        """
        if self._queue or not (free := self._with_free() - set(avoided)):
            return None
        return self._take(job_id, free)

    def _with_free(self) -> set[str]:
        offering = self._offering()
        return {id for id, taskmanager in offering.items() if taskmanager.free}

    def _offering(self) -> dict[str, _TaskManager]:
        return {id: one for id, one in self._taskmanagers.items() if not one.is_drained}

    def _note_drained(self, event: TaskManagerOffers) -> None:
        taskmanager = self._taskmanagers.get(event.taskmanager_id)
        if taskmanager is None or taskmanager.is_drained == event.is_drained:
            self.dropped_events += 1
            return
        taskmanager.is_drained = event.is_drained
        self._count(taskmanager, -1 if event.is_drained else 1)

    def _count(self, taskmanager: _TaskManager, times: int) -> None:
        self.total += times * taskmanager.total
        self.free += times * len(taskmanager.free)

    def _add(self, event: TaskManagerAdded) -> None:
        known = self._taskmanagers.get(event.taskmanager_id)
        if known is not None and known.incarnation == event.incarnation:
            return
        self._remove(event.taskmanager_id)
        slots = [
            Slot(f"{event.taskmanager_id}-{index}", event.taskmanager_id, event.incarnation)
            for index in range(event.slot_count)
        ]
        held = dict(event.held)
        added = self._taskmanagers[event.taskmanager_id] = _TaskManager(
            event.incarnation,
            free=[slot for slot in slots if slot.slot_id not in held],
            holder={slot: held[slot.slot_id] for slot in slots if slot.slot_id in held},
            is_drained=event.is_drained,
        )
        if not added.is_drained:
            self._count(added, 1)

    def _remove(self, taskmanager_id: str) -> bool:
        """Forgets a TaskManager and its slots; False = it is unknown."""
        taskmanager = self._taskmanagers.pop(taskmanager_id, None)
        if taskmanager is None:
            return False
        if not taskmanager.is_drained:
            self._count(taskmanager, -1)
        return True

    def _free(self, job_id: str, slot: Slot) -> None:
        taskmanager = self._taskmanagers.get(slot.taskmanager_id)
        if taskmanager is None or taskmanager.holder.get(slot) != job_id:
            self.dropped_events += 1
            return
        del taskmanager.holder[slot]
        self.free += not taskmanager.is_drained
        taskmanager.free.append(slot)
        taskmanager.free.sort(key=lambda free: free.slot_id)

    def _grant(self) -> list[SlotEffect]:
        effects: list[SlotEffect] = []
        for request in list(self._queue.values()):
            if request.count > self.total:
                continue
            if request.count > self.free:
                break
            del self._queue[request.job_id, request.group]
            effects.append(GrantSlots(request.job_id, self._choose(request), request.group))
        return effects

    def _choose(self, request: SlotsRequested) -> tuple[Slot, ...]:
        job_id = request.job_id
        slots = [self._take(job_id, [id]) for id in request.near if id in self._with_free()]
        while len(slots) < request.count:
            slots.append(self._take(job_id, self._with_free()))
        return tuple(slots)

    def _take(self, job_id: str, candidates: Iterable[str]) -> Slot:
        """The next slot of the least loaded of some TaskManagers that have free ones."""

        def load(taskmanager_id: str) -> tuple[float, str]:
            taskmanager = self._taskmanagers[taskmanager_id]
            return len(taskmanager.holder) / taskmanager.total, taskmanager_id

        taskmanager = self._taskmanagers[min(candidates, key=load)]
        slot = taskmanager.free.pop(0)
        self.free -= 1
        taskmanager.holder[slot] = job_id
        return slot

    def _refuse_overdue(self, now_ms: int) -> list[SlotEffect]:
        overdue = [request for request in self._queue.values() if request.deadline_ms <= now_ms]
        for request in overdue:
            del self._queue[request.job_id, request.group]
        effects: list[SlotEffect] = [
            RefuseRequest(
                request.job_id,
                request.count,
                self.total,
                self.free,
                len(self._offering()),
                request.group,
                self.drained,
            )
            for request in overdue
        ]
        # The next in line may have waited only for the one that is gone.
        return [*effects, *self._grant()] if overdue else effects

    def check_step(self) -> None:
        """The part of ``check`` that costs the same whatever the size of the cluster: run after each step.

        Raises:
            InvariantViolation: it does not hold.
        """
        require_invariant(
            0 <= self.free <= self.total, "as many slots are free as there are, or fewer"
        )
        head = next(iter(self._queue.values()), None)
        require_invariant(
            head is None or head.count > self.free,
            "whoever can be served is served",
        )

    def check(self) -> None:
        """Asserts the invariants named at the head of the file."""
        everywhere = Counter(
            slot
            for taskmanager in self._taskmanagers.values()
            for slot in (*taskmanager.free, *taskmanager.holder)
        )
        assert all(count == 1 for count in everywhere.values()), "a slot is in one place"
        offering = self._offering().values()
        assert self.total == sum(one.total for one in offering), "each slot is counted"
        free = sum(len(taskmanager.free) for taskmanager in offering)
        assert self.free == free, "each free slot is counted"
        for taskmanager_id, taskmanager in self._taskmanagers.items():
            for slot in (*taskmanager.free, *taskmanager.holder):
                assert slot.taskmanager_id == taskmanager_id
                assert slot.incarnation == taskmanager.incarnation
        possible = (request for request in self._queue.values() if request.count <= self.total)
        head = next(possible, None)
        assert head is None or head.count > self.free, "whoever can be served is served"
