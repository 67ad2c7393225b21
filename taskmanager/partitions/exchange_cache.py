"""The memory and the disk that the kept partitions of a slot process share (pure).

Rows are kept in memory as long as there is room. From three quarters of the memory on, the oldest rows
of the largest subpartitions are written to files; they stay readable, and count, until the write is
done. Where nothing can be written (no disk, it is nearly full, its limit is reached, ``CACHING_MEMORY``), the
oldest rows that no attached reader still needs are dropped; their consumers then depend on the producer.

At the bound producers wait
    - while a write is under way, all of them: it ends soon, one way or the other,
    - after that, those whose rows wait for a reader that is absent or catching up.
A producer whose readers keep up never waits for the others' rows: its barriers have to get through, or
no checkpoint would ever release anything. What it has sent is dropped instead.

A blocking partition cannot be dropped in parts: it fails when the limit of the disk is reached, or when it has
waited for the disk in vain.

Invariant: ``memory_bytes`` is the sum over the members, and exceeds the bound by no more than what each
producer emits in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.errors import StoreFull, StreamError
from taskmanager.partitions.retention import Retention
from taskmanager.partitions.spill_layout import SpillFailed, SpillFile
from taskmanager.partitions.spilling import Spilling
from taskmanager.partitions.subpartition_log import LogFile, SpillRun, SubpartitionLog

RUN_BYTES_MAX = 8 << 20
"""One write, and so one file, as long as batches are smaller."""
WRITES_MAX = 2
"""Writes under way at once; the threads also have other things to do."""

WrittenFiles = Sequence[tuple[SpillFile, int]]
"""Each with the number of batches in it."""


class CacheMember(Protocol):
    """A subpartition as the cache sees it."""

    log: SubpartitionLog
    retention: Retention
    is_sealing: bool
    needs_local_disk: bool
    """Its files lie on the disk of the TaskManager, not on shared storage."""
    disk_bytes: int

    @property
    def has_backlog(self) -> bool:
        """True while rows wait for a reader that is absent or catching up."""

    def drop_oldest(self) -> bool:
        """Drops the oldest batch that nobody attached needs; False when there is none."""

    def write(
        self,
        run: SpillRun,
        on_written: Callable[[WrittenFiles], None],
        on_failed: Callable[[], None],
    ) -> None:
        """Starts to write a run; exactly one of the callbacks follows, from the mailbox."""

    def written(self, run: SpillRun, files: WrittenFiles) -> list[LogFile]:
        """A run is in files; returns those that nobody needs any more."""

    def fail(self, error: StreamError) -> None:
        """Fails the producer's attempt."""


class Producer(Protocol):
    """A kept partition as the cache sees it."""

    @property
    def has_backlog(self) -> bool:
        """True while rows of one of its subpartitions wait for a reader."""

    def room_came(self) -> None:
        """It may be able to go on."""


class ExchangeCache:
    """Decides what is written, what is dropped, and who waits.

    Args:
        memory_max: bytes of batches in memory.
        disk_max: bytes of files; 0 = as many as the disk takes.
        can_spill: False where there is no disk.

    Example: where nothing can be written, a full cache holds back those whose rows wait for a reader.
        >>> from types import SimpleNamespace
        >>> cache = ExchangeCache(memory_max=100, can_spill=False)
        >>> slow, fast = SimpleNamespace(has_backlog=True), SimpleNamespace(has_backlog=False)
        >>> cache.settle(memory_change=100)
        >>> cache.blocks(slow), cache.blocks(fast)
        (True, False)
    """

    def __init__(self, memory_max: int, disk_max: int = 0, *, can_spill: bool = True) -> None:
        self.memory_bytes = 0
        self.disk_bytes = 0
        self._memory_max = memory_max
        self._spill_above = memory_max * 3 // 4
        self._run_bytes_max = max(1, min(RUN_BYTES_MAX, memory_max // 4))
        self._disk_max = disk_max
        self._can_spill = can_spill
        self._spilling = Spilling.ALLOWED
        self._writing_bytes = 0
        self._writes = 0
        self._members: list[CacheMember] = []
        self._waiting: list[Producer] = []

    @property
    def is_full(self) -> bool:
        """True at the bound of the memory."""
        return self.memory_bytes >= self._memory_max

    def join(self, member: CacheMember) -> None:
        """A subpartition that keeps rows from now on."""
        self._members.append(member)

    def leave(self, member: CacheMember) -> None:
        """It keeps nothing any more."""
        if member in self._members:
            self._members.remove(member)

    def settle(self, memory_change: int, disk_change: int = 0) -> None:
        """What a member keeps has changed."""
        self.memory_bytes += memory_change
        self.disk_bytes += disk_change
        if memory_change > 0:
            if self.memory_bytes - self._writing_bytes >= self._spill_above:
                self.make_room()
        else:
            self._wake()

    def blocks(self, producer: Producer) -> bool:
        """True when the producer has to wait; ``room_came`` tells it when to ask again."""
        if not self.is_full or not (self._writes or producer.has_backlog):
            return False
        if producer not in self._waiting:
            self._waiting.append(producer)
        return True

    def reader_progressed(self) -> None:
        """A reader has got further, so that more may be dropped, or somebody has no backlog now."""
        if self.is_full:
            self.make_room()
            self._wake()

    def set_spilling(self, spilling: Spilling) -> None:
        """Whether anything may be written to disk from now on; what is being written goes on."""
        self._spilling = spilling
        if spilling is not Spilling.STOPPED:
            self.make_room()
            self._wake()

    def make_room(self) -> None:
        """Starts writes, and drops what cannot be written, until memory is below its bound."""
        while True:
            if self._start_write():
                continue
            if self._writes or not self.is_full or not self._drop():
                return

    def _start_write(self) -> bool:
        if not self._can_spill or self._writes >= WRITES_MAX:
            return False
        is_wanted = self.memory_bytes - self._writing_bytes >= self._spill_above
        candidates = [
            member
            for member in self._members
            if member.log.spillable_bytes
            and member.retention.may_spill
            and not member.log.is_writing
            and (is_wanted or member.is_sealing)
        ]
        while candidates:
            member = max(candidates, key=lambda m: (m.is_sealing, m.log.spillable_bytes))
            if member.needs_local_disk and self._keeps_off_disk(member):
                on_disk = [one for one in candidates if one.needs_local_disk]
                candidates = [one for one in candidates if not one.needs_local_disk]
                if self._spilling is not Spilling.STOPPED:
                    self._give_up(on_disk)
                continue
            self._write(member)
            return True
        return False

    def _write(self, member: CacheMember) -> None:
        run = member.log.begin_run(self._run_bytes_max)
        assert run is not None, "a member with bytes to spill has batches"
        self._writing_bytes += run.size_bytes
        self._writes += 1
        member.write(
            run, lambda files: self._written(member, run, files), lambda: self._not_written(run)
        )

    def _keeps_off_disk(self, member: CacheMember) -> bool:
        """Whether the disk of the TaskManager may not be written to, or not by as much."""
        return not self.has_disk(min(member.log.spillable_bytes, self._run_bytes_max))

    def has_disk(self, size_bytes: int) -> bool:
        """Whether files of that size may be added to the disk of the TaskManager now."""
        taken = self.disk_bytes + self._writing_bytes + size_bytes
        return self._spilling is Spilling.ALLOWED and not 0 < self._disk_max < taken

    def _give_up(self, candidates: list[CacheMember]) -> None:
        """Fails what cannot go on without the disk."""
        if self._spilling is Spilling.GIVEN_UP:
            reason = (
                "the disk of the spill directory had less than taskmanager.spill.min-free left for longer than "
                "taskmanager.spill.wait-timeout: free space there, or use another taskmanager.spill.dir"
            )
        else:
            reason = (
                f"{self.disk_bytes} bytes are spilled, taskmanager.spill.max-size is"
                f" {self._disk_max}; raise it, or set it to 0 for no limit"
            )
        for member in candidates:
            if member.retention is Retention.BLOCKING and (member.is_sealing or self.is_full):
                self.leave(member)
                error = SpillFailed(f"a blocking result partition does not fit: {reason}")
                error.__cause__ = StoreFull(reason)  # what the cluster's operator has to act on
                member.fail(error)

    def _written(self, member: CacheMember, run: SpillRun, files: WrittenFiles) -> None:
        self._write_ended(run)
        member.written(run, files)
        self.make_room()

    def _not_written(self, run: SpillRun) -> None:
        self._write_ended(run)
        self.make_room()
        self._wake()

    def _write_ended(self, run: SpillRun) -> None:
        self._writing_bytes -= run.size_bytes
        self._writes -= 1

    def _drop(self) -> bool:
        members = [member for member in self._members if member.retention is not Retention.BLOCKING]
        members.sort(key=lambda m: m.log.memory_bytes + m.disk_bytes, reverse=True)
        return any(member.drop_oldest() for member in members)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for producer in waiting:
            producer.room_came()
