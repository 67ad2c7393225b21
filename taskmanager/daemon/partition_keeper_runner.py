"""Keeps what finished attempts left on disk: counts it, releases it, lets it outlive its job.

What is held is what the disk says: once a second the spill directory is looked at. Invariants: a
complete partition goes only when the JobManager says so, or when it has been away for
``taskmanager.partitions.grace``; an incomplete one goes when the slot process that wrote it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.clock import Clock
from common.log import get_logger
from common.names import require_name
from common.pb import internal_pb2
from common.spill_paths import INDEX_NAME
from penstock.errors import StoreTransient
from penstock.partition_id import PartitionId
from taskmanager.daemon.grace_period import GracePeriod
from taskmanager.daemon.held_partitions import (
    HeldPartitionsReport,
    HeldRow,
    partition_id_of,
    summarize,
)
from taskmanager.daemon.partition_server_runner import PartitionServerRunner
from taskmanager.partitions.promoted_store import PromotedStore
from taskmanager.partitions.sealed_store import SealedStore, remove_partition
from taskmanager.partitions.spill_layout import partition_directory

_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class _Found:
    """What is on disk; ``incomplete`` are directories of partitions."""

    own: list[HeldRow]
    promoted: list[tuple[str, HeldRow]]
    sets: list[internal_pb2.PromotedSet]
    incomplete: list[Path]
    incomplete_bytes: int


class PartitionKeeper:
    """The partitions of this TaskManager.

    Args:
        clock: measures the JobManager's absence.
        grace_ms: how long partitions are kept while it is away.
        is_registered: whether it is there now.
        writing: job and partition of everything that living slot processes may be writing.
    """

    def __init__(
        self,
        *,
        directory: Path,
        server: PartitionServerRunner,
        clock: Clock,
        grace_ms: int,
        is_registered: Callable[[], bool],
        writing: Callable[[], Iterable[tuple[str, PartitionId]]],
    ) -> None:
        self._directory = directory
        self._sealed = SealedStore(directory)
        self._promoted = PromotedStore(directory)
        self._server = server
        self._clock = clock
        self._grace_ms = grace_ms
        self._grace = GracePeriod(grace_ms)
        self._given_up: set[str] = set()
        """Jobs whose partitions go, as soon as the disk lets them."""
        self._is_registered = is_registered
        self._writing = writing
        self._lock = asyncio.Lock()  # the stores are used by one thread at a time
        self._log = get_logger(__name__)
        self.held = HeldPartitionsReport()
        """As of the last look; replaced as a whole, so that any thread may read it."""
        self.spill_bytes = 0
        """Of all files under the directory, as of the last look."""

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Looks once a second, until cancelled."""
        while True:
            try:
                await self.look()
            except OSError as error:
                self._log.warning("partitions.not_read", reason=str(error))
            await asyncio.sleep(_INTERVAL_S)

    async def look(self) -> None:
        """Sees what is held, removes what nobody finishes, and what nobody came back for.

        Raises:
            OSError: the disk does not let it.
        """
        async with self._lock:
            found = await self._scan()
            # Asked after the scan: who began to write since then is not in it.
            writing = self._written_directories()
            orphans = [path for path in found.incomplete if path not in writing]
            if orphans:
                await asyncio.to_thread(_remove, orphans)
                self._log.info("partitions.orphans_removed", count=len(orphans))
        now_ms, is_present = self._clock.monotonic_ns() // 1_000_000, self._is_registered()
        if self._grace.observe(now_ms, is_present=is_present):
            self._given_up = {row[0] for row in found.own}
        elif is_present:
            self._given_up = set()
        await self._drop_given_up()

    async def see(self) -> None:
        """Sees what is held now; where the disk does not let it, what was seen last stays."""
        try:
            async with self._lock:
                await self._scan()
        except OSError as error:
            self._log.warning("partitions.not_read", reason=str(error))

    async def _drop_given_up(self) -> None:
        for job_id in sorted(self._given_up):
            try:
                await self.release(job_id, ())
            except StoreTransient as error:
                self._log.warning("partitions.not_dropped", job_id=job_id, reason=str(error))
                continue
            self._given_up.discard(job_id)
            self._log.warning(
                "partitions.dropped",
                job_id=job_id,
                reason=f"no JobManager for {self._grace_ms} ms (taskmanager.partitions.grace)",
            )

    # ------------------------------------------------------------ what the JobManager asks for

    async def release(self, job_id: str, partitions: Sequence[internal_pb2.PartitionId]) -> None:
        """Removes partitions of a job; those that are not here are gone already.

        Args:
            job_id: whose they are.
            partitions: which; empty = all. Promoted ones stay under their name.

        Raises:
            JobRejected: the job id is not usable.
            StoreTransient: something cannot be removed; asking again may help.
        """
        require_name("job id", job_id)
        async with self._lock:
            chosen = [partition_id_of(partition) for partition in partitions] or None
            if chosen is None and any(writer == job_id for writer, _ in self._writing()):
                # What is being written goes with its slot.
                chosen = [row[1] for row in (await self._scan()).own if row[0] == job_id]
            try:
                await asyncio.to_thread(self._sealed.release, job_id, chosen)
                await self._scan()
            except OSError as error:
                raise StoreTransient(
                    f"partitions of job {job_id} cannot be removed from {self._directory}: {error}"
                ) from error
        await self._server.release(job_id, partitions)

    async def promote(
        self, promoted: internal_pb2.PromotedSet, partitions: Sequence[internal_pb2.PartitionId]
    ) -> None:
        """Lets complete partitions outlive their job, all or none; repeating it is harmless.

        Args:
            promoted: whose they are, and under what name they are found from now on.
            partitions: which.

        Raises:
            JobRejected: the name or the job id is not usable.
            StoreNotFound: one of them is not here.
            StoreTransient: the disk does not let it.
        """
        job_id, name = promoted.job_id, promoted.name
        require_name("job id", job_id)
        require_name("the name of promoted partitions", name)
        chosen = [partition_id_of(partition) for partition in partitions]
        async with self._lock:
            try:
                await asyncio.to_thread(self._promoted.promote, promoted, chosen)
                await self._scan()
            except OSError as error:
                raise StoreTransient(
                    f"partitions of job {job_id} cannot be promoted to {name}: {error}"
                ) from error
        self._log.info("partitions.promoted", job_id=job_id, name=name, count=len(chosen))

    async def drop_promoted(self, name: str, job_id: str = "") -> int:
        """Removes what was promoted under a name; returns how many partitions that were.

        Args:
            job_id: whose; "" = of all jobs.

        Raises:
            JobRejected: the name is not usable.
            StoreTransient: something cannot be removed.
        """
        require_name("the name of promoted partitions", name)
        if job_id:
            require_name("job id", job_id)
        async with self._lock:
            try:
                count = await asyncio.to_thread(self._promoted.drop, name, job_id)
                await self._scan()
            except OSError as error:
                raise StoreTransient(f"{name} cannot be removed: {error}") from error
        if count:
            self._log.info("partitions.dropped", name=name, count=count)
        return count

    # ------------------------------------------------------------ the disk

    async def _scan(self) -> _Found:
        found = await asyncio.to_thread(self._read)
        version = self.held.version + 1
        self.held = summarize(found.own, found.promoted, found.sets, version=version)
        self.spill_bytes = self.held.size_bytes + found.incomplete_bytes
        return found

    def _read(self) -> _Found:
        # Incomplete ones first: one that is completed meanwhile is seen twice, none is missed.
        incomplete = [
            path for path in self._directory.glob("*/*/part=*") if not (path / INDEX_NAME).exists()
        ]
        size_bytes = sum(_size_bytes(path) for path in incomplete)
        return _Found(
            self._sealed.held(),
            self._promoted.held(),
            self._promoted.sets(),
            incomplete,
            size_bytes,
        )

    def _written_directories(self) -> set[Path]:
        return {
            partition_directory(self._directory, job_id, partition_id)
            for job_id, partition_id in self._writing()
        }


def _remove(directories: Iterable[Path]) -> None:
    for directory in directories:
        # Its writer has ended: nobody completes it any more, unless it did just before.
        if not (directory / INDEX_NAME).exists():
            remove_partition(directory)


def _size_bytes(directory: Path) -> int:
    size_bytes = 0
    for path in directory.glob("sub=*/*"):
        try:
            size_bytes += path.stat().st_size
        except FileNotFoundError:
            continue
    return size_bytes
