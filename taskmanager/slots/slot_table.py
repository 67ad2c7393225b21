"""Who holds which slot of this TaskManager (pure).

Invariants (``check``): at most ``capacity`` slots are held; a slot is held by one job at a time; all
allocated slots are one leader's, given out or taken over by it: the newest epoch known of the cluster that this
TaskManager has registered with (epochs of different clusters say nothing about each other); a slot that is stopping
is held until its process has ended.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from common.names import require_name
from penstock.errors import Fenced, NoResourceAvailable, require_invariant

_CALLS_UNHEARD_MAX: Final = 100_000
"""So many calls of one registration may be lost before the next one is believed to be of it."""


class SlotState(enum.Enum):
    """What a held slot is doing."""

    ALLOCATED = "allocated"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class Allocation:
    """What is to be done for a request.

    Attributes:
        new: slots to start.
        existing: slots the job holds already, from an earlier request.
        wait_for: slots whose processes must end first; the request is then made again.
    """

    new: tuple[str, ...] = ()
    existing: tuple[str, ...] = ()
    wait_for: tuple[str, ...] = ()


@dataclass(slots=True)
class _Held:
    job_id: str
    state: SlotState


class SlotTable:
    """The slots of one TaskManager.

    Example: a slot is not given out again before its process has ended, nor by a call that comes late.
        >>> table = SlotTable(capacity=1)
        >>> table.allocate("job-1", ["s"], allocation_id=1).new
        ('s',)
        >>> table.stop("job-1", ["s"], allocation_id=2)
        ('s',)
        >>> table.allocate("job-2", ["s"], allocation_id=3).wait_for
        ('s',)
        >>> table.released("s")
        >>> table.is_late("s", allocation_id=1)
        True
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._cluster_id = ""
        self._leader_epoch = 0
        self._held: dict[str, _Held] = {}
        self._newest_calls: dict[str, int] = {}

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self._capacity

    @property
    def free_count(self) -> int:
        """Slots that nobody holds."""
        return self._capacity - len(self._held)

    @property
    def leader_epoch(self) -> int:
        """The epoch of the leader that is followed."""
        return self._leader_epoch

    def held(self) -> tuple[tuple[str, str], ...]:
        """Slot id and job id of each slot that is allocated; not of those that are stopping."""
        return tuple(
            (slot_id, held.job_id)
            for slot_id, held in self._held.items()
            if held.state is SlotState.ALLOCATED
        )

    def holders(self) -> tuple[tuple[str, str], ...]:
        """Slot id and job id of each slot that is held, also while it is stopping."""
        return tuple((slot_id, held.job_id) for slot_id, held in self._held.items())

    def slots_of(self, job_id: str) -> tuple[str, ...]:
        """The allocated slots of a job."""
        return tuple(slot_id for slot_id, holder in self.held() if holder == job_id)

    def is_allocated(self, slot_id: str) -> bool:
        """True while a job holds the slot and it is not stopping."""
        held = self._held.get(slot_id)
        return held is not None and held.state is SlotState.ALLOCATED

    def follow(
        self, cluster_id: str, leader_epoch: int, kept: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Follows the leader with which this TaskManager has registered.

        Args:
            kept: slots of an earlier leader that it takes over.

        Returns:
            The slots to stop: those of an earlier leader that this one does not want, or of another cluster.

        Raises:
            Fenced: it is an earlier leader of the same cluster.
        """
        self._newest_calls = {}  # each registration numbers its calls anew
        if (cluster_id, leader_epoch) == (self._cluster_id, self._leader_epoch):
            return ()
        if cluster_id == self._cluster_id:
            self._refuse_older(leader_epoch)
        else:
            kept = ()
        self._cluster_id, self._leader_epoch = cluster_id, leader_epoch
        return self._stop(slot_id for slot_id, _ in self.held() if slot_id not in kept)

    def check_epoch(self, leader_epoch: int) -> None:
        """Checks the fence of a call.

        Raises:
            Fenced: the caller is not the leader that is followed.
        """
        self._refuse_older(leader_epoch)
        if leader_epoch > self._leader_epoch:
            raise Fenced(
                f"this TaskManager follows leader epoch {self._leader_epoch} and has not registered "
                f"with epoch {leader_epoch}"
            )

    def _refuse_older(self, leader_epoch: int) -> None:
        if leader_epoch < self._leader_epoch:
            raise Fenced(
                f"leader epoch {leader_epoch} is over: this TaskManager follows epoch "
                f"{self._leader_epoch}"
            )

    def is_late(self, slot_id: str, allocation_id: int) -> bool:
        """Whether something newer than this call has been done with a slot.

        Raises:
            Fenced: the call has no number, or none that could come next.
        """
        if allocation_id < 1:
            raise Fenced(
                f"a call about slot {slot_id} has no allocation_id: it cannot be told from a late one"
            )
        newest = max(self._newest_calls.values(), default=0)
        if allocation_id > newest + _CALLS_UNHEARD_MAX:
            raise Fenced(
                f"a call about slot {slot_id} is numbered {allocation_id}, and the newest before it {newest}: all that "
                "come next would be late"
            )
        return allocation_id < self._newest_calls.get(slot_id, 0)

    def allocate(self, job_id: str, slot_ids: Sequence[str], allocation_id: int) -> Allocation:
        """Gives slots to a job; repeating it is harmless.

        Args:
            job_id: whose they are from now on.
            allocation_id: number of the call.

        Raises:
            Fenced: the call is late (one of them has been freed, or given out again, since) or has no number that
                could come next.
            NoResourceAvailable: another job holds one of them, or there are not so many.
            JobRejected: an id is not usable as a name.
        """
        require_name("job id", job_id)
        wanted = tuple(dict.fromkeys(slot_ids))
        existing: list[str] = []
        new: list[str] = []
        wait_for: list[str] = []
        for slot_id in wanted:
            require_name("slot id", slot_id)
            if self.is_late(slot_id, allocation_id):
                raise Fenced(
                    f"slot {slot_id} has been freed, or given out again, since it was asked for"
                )
            held = self._held.get(slot_id)
            if held is None:
                new.append(slot_id)
            elif held.state is SlotState.STOPPING:
                wait_for.append(slot_id)
            elif held.job_id == job_id:
                existing.append(slot_id)
            else:
                raise NoResourceAvailable(
                    f"slot {slot_id} is held by job {held.job_id}; job {job_id} cannot have it"
                )
        if wait_for:
            return Allocation(wait_for=tuple(wait_for))
        if len(new) > self.free_count:
            stopping = self.stopping()
            if len(new) <= self.free_count + len(stopping):
                return Allocation(wait_for=stopping)
            raise NoResourceAvailable(
                f"job {job_id} asks for {len(new)} slots, {self.free_count} of {self._capacity} "
                "are free"
            )
        self._newest_calls |= dict.fromkeys(wanted, allocation_id)
        for slot_id in new:
            self._held[slot_id] = _Held(job_id, SlotState.ALLOCATED)
        self.check_step()
        return Allocation(tuple(new), tuple(existing))

    def stop(self, job_id: str, slot_ids: Sequence[str], allocation_id: int) -> tuple[str, ...]:
        """Marks slots of a job as stopping.

        Args:
            job_id: the job that gives them up; slots of other jobs are left alone.
            slot_ids: the slots, empty = all of the job.
            allocation_id: number of the call; what has been given out since is left alone.

        Returns:
            The slots that were allocated until now.

        Raises:
            Fenced: the call has no number that could come next.
        """
        chosen = [
            slot_id
            for slot_id in slot_ids or self.slots_of(job_id)
            if not self.is_late(slot_id, allocation_id)
        ]
        self._newest_calls |= dict.fromkeys(chosen, allocation_id)
        return self._stop(
            slot_id
            for slot_id in chosen
            if slot_id in self._held and self._held[slot_id].job_id == job_id
        )

    def stop_all(self) -> tuple[str, ...]:
        """Marks every slot as stopping; returns those that were allocated until now."""
        return self._stop(slot_id for slot_id, _ in self.held())

    def stopping(self) -> tuple[str, ...]:
        """Slots whose processes are being ended."""
        return tuple(
            slot_id for slot_id, held in self._held.items() if held.state is SlotState.STOPPING
        )

    def released(self, slot_id: str) -> None:
        """The slot's process has ended: the slot is free."""
        self._held.pop(slot_id, None)

    def _stop(self, slot_ids: Iterable[str]) -> tuple[str, ...]:
        stopped: list[str] = []
        for slot_id in list(slot_ids):
            held = self._held[slot_id]
            if held.state is SlotState.ALLOCATED:
                held.state = SlotState.STOPPING
                stopped.append(slot_id)
        return tuple(stopped)

    def check_step(self) -> None:
        """The part of ``check`` that costs the same whatever is held: run when something more is.

        Raises:
            InvariantViolation: it does not hold.
        """
        require_invariant(
            len(self._held) <= self._capacity,
            f"{len(self._held)} slots are held, of {self._capacity}: {self._held}",
        )

    def check(self) -> None:
        """Asserts the invariants named at the head of the file."""
        self.check_step()
        assert set(self.stopping()).isdisjoint(slot_id for slot_id, _ in self.held())
