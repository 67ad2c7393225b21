"""The slots of one attempt of a job: asked for, granted, listening, given back.

Invariants: slots are granted once; each is freed exactly once, unless it is lost with its TaskManager;
nothing is deployed before every slot process listens.
"""

from __future__ import annotations

from collections.abc import Iterable

from jobmanager.dispatcher import job_messages as m
from jobmanager.scheduler.deployment import Endpoint
from jobmanager.scheduler.slots import Slot
from penstock.errors import InvariantViolation


class SlotLease:
    """What one attempt has of the slot pool; a restart begins a new one."""

    def __init__(self) -> None:
        self.waits = False
        self.slots: tuple[Slot, ...] = ()
        self.freed = False
        self.endpoint_of_slot: dict[str, Endpoint] = {}
        self._allocating: set[str] = set()
        self._lost: set[str] = set()

    def request(self, count: int) -> list[m.JobEffect]:
        """Asks for slots."""
        self.waits = True
        return [m.RequestSlots(count)]

    def withdraw(self) -> list[m.JobEffect]:
        """Asks no longer, where nothing has come yet."""
        if not self.waits:
            return []
        self.waits = False
        return [m.WithdrawRequest()]

    def take(self, slots: tuple[Slot, ...]) -> None:
        """The pool has granted the request."""
        if self.slots:
            raise InvariantViolation("slots were granted twice")
        self.waits = False
        self.slots = slots

    def allocate(self) -> list[m.JobEffect]:
        """Has the processes started."""
        own = by_taskmanager(self.slots)
        self._allocating = set(own)
        return [
            m.AllocateSlots(taskmanager_id, tuple(slot.slot_id for slot in slots))
            for taskmanager_id, slots in own.items()
        ]

    def note_endpoints(self, taskmanager_id: str, endpoints: Iterable[Endpoint]) -> bool:
        """The processes of a TaskManager listen; False = nobody waits for them (any more)."""
        if taskmanager_id not in self._allocating:
            return False
        self._allocating.remove(taskmanager_id)
        self.endpoint_of_slot |= {endpoint.slot_id: endpoint for endpoint in endpoints}
        return True

    @property
    def all_listen(self) -> bool:
        """True when every TaskManager has answered."""
        return not self._allocating

    @property
    def without_address(self) -> list[str]:
        """Slots that no answer has named."""
        return sorted({slot.slot_id for slot in self.slots} - self.endpoint_of_slot.keys())

    def uses(self, taskmanager_id: str) -> bool:
        """Whether it has slots of a TaskManager."""
        return any(slot.taskmanager_id == taskmanager_id for slot in self.slots)

    def lose(self, taskmanager_id: str) -> None:
        """A TaskManager is gone: its slots are not given back."""
        self._lost.add(taskmanager_id)

    def expect_no_more_of(self, taskmanager_id: str) -> None:
        """Its answer will not come."""
        self._allocating.discard(taskmanager_id)

    def free(self) -> list[m.JobEffect]:
        """Gives all back."""
        if self.freed:
            raise InvariantViolation("slots were freed twice")
        self.freed = bool(self.slots)
        return [
            m.FreeSlots(own)
            for taskmanager_id, own in by_taskmanager(self.slots).items()
            if taskmanager_id not in self._lost
        ]


def by_taskmanager(slots: Iterable[Slot]) -> dict[str, tuple[Slot, ...]]:
    """Slots grouped by where they are."""
    grouped: dict[str, tuple[Slot, ...]] = {}
    for slot in slots:
        grouped[slot.taskmanager_id] = (*grouped.get(slot.taskmanager_id, ()), slot)
    return grouped
