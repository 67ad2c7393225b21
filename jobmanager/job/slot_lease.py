"""The slots of a job: asked for, granted, listening, given back.

A seat is a place of a slot sharing group: seat i holds subtask i of every vertex of the group. A seat keeps
its slot over the restarts of its subtasks, so that they find their TaskManager again, until the slot is
lost or given back. Slots *apart* are in no seat: those of rivals, and those that seats have left for the
slot of a rival that has won, and that are still in use.

Groups of subtasks ask, and have processes started, one by one: each hears of its own alone. Where two lack the
same seat one asks for it, and both have it when it comes.

Invariants: a slot is in one seat, or apart; each is freed exactly once, unless it is lost with its TaskManager; a
seat is asked for once at a time, and by nobody while it has a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from jobmanager.graph.deployment import Endpoint
from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.graph.job_plan import JobPlan
from jobmanager.graph.slot import Slot
from jobmanager.messages import job_effects, job_events
from jobmanager.scheduler.placement import Seat, nearest, place_again, seat_of

_Tenant = Seat | str
"""A seat, or the id of a slot apart."""


@dataclass(slots=True)
class _Tenure:
    """What is known of a slot while the job has it.

    Attributes:
        since: number of the job's newest attempt when the slot was taken.
    """

    slot: Slot
    since: int
    endpoint: Endpoint | None = None


class SlotLease:
    """What a job has of the slot pool.

    Example: two vertices share the slots of their group.
        >>> from jobmanager.graph.job_plan import VertexPlan
        >>> vertices = (VertexPlan("read", parallelism=2), VertexPlan("count", parallelism=1))
        >>> lease = SlotLease(JobPlan(vertices))
        >>> everyone = [SubtaskId("read", 0), SubtaskId("read", 1), SubtaskId("count", 0)]
        >>> lease.request(7, everyone, lambda subtask: {})
        [RequestSlots(count=2, group=7, near=())]
        >>> lease.take((Slot("1", "tm-1", "a"), Slot("1", "tm-2", "a")), group=7, attempt=0)
        >>> lease.slot_of(everyone[0]) == lease.slot_of(everyone[2])
        True
    """

    def __init__(self, plan: JobPlan) -> None:
        self._plan = plan
        self._tenures: dict[_Tenant, _Tenure] = {}
        self._last_slots: dict[Seat, Slot] = {}
        self._partition_endpoints: dict[str, Endpoint] = {}
        self._asked: dict[int, Mapping[Seat, str]] = {}
        """Group -> the seats that it has asked for, and the TaskManager of what each reads; "" = anywhere."""
        self._allocating: dict[int, dict[str, int]] = {}
        """Group -> TaskManager that has not answered -> number of the call."""
        self._calls = 0

    # ------------------------------------------------------------ slots

    @property
    def waits(self) -> bool:
        """Whether any group has asked for slots."""
        return bool(self._asked)

    def waits_for(self, group: int) -> bool:
        """Whether a group has asked for slots."""
        return group in self._asked

    def request(
        self,
        group: int,
        subtasks: Collection[SubtaskId],
        inputs_of: Callable[[SubtaskId], Mapping[str, int]],
    ) -> list[job_effects.JobEffect]:
        """Asks for the slots that seats of a group's subtasks lack, and no other group has asked for.

        Args:
            inputs_of: TaskManager -> bytes there that a subtask reads, and had best be near.
        """
        assert group not in self._asked, "one request at a time"
        asked = {seat for seats in self._asked.values() for seat in seats}
        missing = [seat for seat in self._missing(subtasks) if seat not in asked]
        if not missing:
            return []
        read: dict[Seat, list[Mapping[str, int]]] = {}
        for subtask in subtasks:
            read.setdefault(seat_of(self._plan, subtask), []).append(inputs_of(subtask))
        self._asked[group] = {seat: nearest(read[seat]) for seat in missing}
        near = tuple(id for id in self._asked[group].values() if id)
        return [job_effects.RequestSlots(len(missing), group, near)]

    def withdraw(self, group: int) -> list[job_effects.JobEffect]:
        """A group asks no longer, where nothing has come yet, and waits for no process."""
        self._allocating.pop(group, None)
        return [job_effects.WithdrawRequest(group)] if self._asked.pop(group, None) else []

    def refuse(self, group: int) -> None:
        """The pool has refused what a group has asked for."""
        del self._asked[group]

    def take(self, slots: tuple[Slot, ...], group: int, attempt: int) -> None:
        """The pool has granted a group's request; more may be missing by now."""
        asked = self._asked.pop(group)
        near = {seat: id for seat, id in asked.items() if id}
        placed = place_again(tuple(asked), slots, self._last_slots, near)
        for seat, slot in placed.items():
            self._tenures[seat] = _Tenure(slot, attempt)
        self._last_slots |= placed

    def adopt(self, subtask: SubtaskId, slot: Slot, endpoint: Endpoint, attempt: int) -> bool:
        """A subtask runs in a slot that another JobManager has given it; False = its seat has another one."""
        seat = seat_of(self._plan, subtask)
        tenure = self._tenures.setdefault(seat, _Tenure(slot, attempt, endpoint))
        self._last_slots[seat] = tenure.slot
        return tenure.slot == slot

    def has_all(self, subtasks: Iterable[SubtaskId]) -> bool:
        """Whether the seats of these subtasks have their slots."""
        return not self._missing(subtasks)

    def _missing(self, subtasks: Iterable[SubtaskId]) -> list[Seat]:
        seats = {seat_of(self._plan, subtask) for subtask in subtasks}
        return sorted(seats - self._tenures.keys())

    def slot_of(self, subtask: SubtaskId) -> Slot:
        """The slot of a subtask's seat; it has one."""
        return self._tenures[seat_of(self._plan, subtask)].slot

    def uses(self, taskmanager_id: str) -> bool:
        """Whether it has slots of a TaskManager."""
        return bool(self._on(taskmanager_id))

    def since(self, taskmanager_id: str) -> int:
        """Number of the job's newest attempt when it took its oldest slot there."""
        return min((tenure.since for tenure in self._on(taskmanager_id).values()), default=0)

    def slots_on(self, taskmanager_id: str) -> list[str]:
        """Ids of its slots on a TaskManager."""
        return [tenure.slot.slot_id for tenure in self._on(taskmanager_id).values()]

    def _on(self, taskmanager_id: str) -> dict[_Tenant, _Tenure]:
        return {
            tenant: tenure
            for tenant, tenure in self._tenures.items()
            if tenure.slot.taskmanager_id == taskmanager_id
        }

    # ------------------------------------------------------------ slots apart

    def take_apart(self, slot: Slot, attempt: int, endpoint: Endpoint | None = None) -> None:
        """A slot is the job's, and of no seat: the pool has granted it for the rival of this number, or what runs in it
        is of a seat that has another."""
        self._tenures[slot.slot_id] = _Tenure(slot, attempt, endpoint)

    def reseat(self, subtask: SubtaskId, slot_id: str) -> None:
        """A subtask's seat moves to a slot apart; the slot that it had, if it had one, is apart from now on."""
        seat = seat_of(self._plan, subtask)
        left = self._tenures.pop(seat, None)
        taken = self._tenures[seat] = self._tenures.pop(slot_id)
        self._last_slots[seat] = taken.slot
        if left is not None:
            self._tenures[left.slot.slot_id] = left

    @property
    def apart(self) -> list[str]:
        """Ids of the slots that are in no seat."""
        return [tenant for tenant in self._tenures if isinstance(tenant, str)]

    # ------------------------------------------------------------ processes

    def allocate(self, group: int, subtasks: Iterable[SubtaskId]) -> list[job_effects.JobEffect]:
        """Has processes started for a group's subtasks where there are none; all are to say where they listen."""
        seats = sorted({seat_of(self._plan, subtask) for subtask in subtasks})
        slots = [self._tenures[seat].slot for seat in seats]
        self._calls += 1
        effects: list[job_effects.JobEffect] = []
        waiting = self._allocating[group] = {}
        for taskmanager_id, own in by_taskmanager(slots).items():
            waiting[taskmanager_id] = self._calls
            slot_ids = tuple(slot.slot_id for slot in own)
            effects.append(job_effects.AllocateSlots(taskmanager_id, slot_ids, self._calls))
        return effects

    def asked_by(self, event: job_events.SlotsAllocated) -> int | None:
        """The group that waits for this answer; None = nobody does (any more)."""
        for group, waiting in self._allocating.items():
            if waiting.get(event.taskmanager_id) == event.call:
                return group
        return None

    def note_endpoints(self, group: int, event: job_events.SlotsAllocated) -> list[str]:
        """The processes of a group on a TaskManager listen; returns the slots whose process is another than before."""
        waiting = self._allocating[group]
        del waiting[event.taskmanager_id]
        if not waiting:
            del self._allocating[group]
        if event.partition_endpoint is not None:
            self.note_partition_endpoint(event.taskmanager_id, event.partition_endpoint)
        by_slot = {
            tenure.slot.slot_id: tenure for tenure in self._on(event.taskmanager_id).values()
        }
        replaced = []
        for endpoint in event.endpoints:
            tenure = by_slot.get(endpoint.slot_id)
            if tenure is None:
                continue
            if tenure.endpoint not in (None, endpoint):
                replaced.append(endpoint.slot_id)
            tenure.endpoint = endpoint
        return replaced

    def note_partition_endpoint(self, taskmanager_id: str, endpoint: Endpoint) -> None:
        """Where a TaskManager serves the partitions of attempts that have finished."""
        self._partition_endpoints[taskmanager_id] = endpoint

    def all_listen(self, group: int) -> bool:
        """True when every TaskManager that was asked for a group has answered."""
        return group not in self._allocating

    def endpoint_of(self, slot_id: str) -> Endpoint | None:
        """Where a slot's process listens; None = it was never said, or the slot is gone."""
        return next((t.endpoint for t in self._tenures.values() if t.slot.slot_id == slot_id), None)

    def partition_endpoint_of(self, taskmanager_id: str) -> Endpoint | None:
        """Where a TaskManager serves the partitions of attempts that have finished."""
        return self._partition_endpoints.get(taskmanager_id)

    def without_address(self, slot_ids: Iterable[str]) -> list[str]:
        """Those of these slots that no answer has named."""
        return sorted(id for id in set(slot_ids) if self.endpoint_of(id) is None)

    # ------------------------------------------------------------ the end

    def lose(self, taskmanager_id: str) -> None:
        """A TaskManager is gone: its slots are not given back."""
        for tenant in self._on(taskmanager_id):
            del self._tenures[tenant]
        self._partition_endpoints.pop(taskmanager_id, None)

    def give_back(self, slot_ids: Iterable[str]) -> list[job_effects.JobEffect]:
        """Ends some slots: nobody knows what their processes do."""
        wanted = frozenset(slot_ids)
        given = {s: t for s, t in self._tenures.items() if t.slot.slot_id in wanted}
        for tenant in given:
            del self._tenures[tenant]
        return _free(tenure.slot for tenure in given.values())

    def give_back_all(self) -> list[job_effects.JobEffect]:
        """Ends all slots."""
        return self.give_back([tenure.slot.slot_id for tenure in self._tenures.values()])

    def leave_all(self) -> None:
        """Leaves all slots to another JobManager."""
        self._tenures.clear()

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All slots of the job."""
        return tuple(tenure.slot for tenure in self._tenures.values())


def free_stray(slots: tuple[Slot, ...]) -> list[job_effects.JobEffect]:
    """Gives back a grant that nobody waits for any more."""
    return _free(slots)


def _free(slots: Iterable[Slot]) -> list[job_effects.JobEffect]:
    return [job_effects.FreeSlots(own) for own in by_taskmanager(slots).values()]


def by_taskmanager(slots: Iterable[Slot]) -> dict[str, tuple[Slot, ...]]:
    """Slots grouped by where they are."""
    grouped: dict[str, tuple[Slot, ...]] = {}
    for slot in slots:
        grouped[slot.taskmanager_id] = (*grouped.get(slot.taskmanager_id, ()), slot)
    return grouped
