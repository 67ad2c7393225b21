"""Complete partitions that outlive their job, by the name they were given.

Below the spill directory of a TaskManager, ``.promoted/<name>`` is laid out like the directory itself; each
job's directory there holds a file ``about`` as well, which says what its partitions are together.
To promote a partition gives its files a second name there (hard links): it takes no space, readers are
not disturbed, and the job's own names go with the job.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog

from common.pb import internal_pb2
from common.spill_paths import INDEX_NAME
from penstock.errors import StoreCorrupt, StoreNotFound
from penstock.partition_id import PartitionId
from penstock.storage.framing import FrameFormat, decode_frame, encode_frame
from taskmanager.partitions.sealed_partition import SealedPartition
from taskmanager.partitions.sealed_store import Held, SealedStore, remove_partition
from taskmanager.partitions.spill_layout import job_directory, partition_directory

_log = structlog.get_logger()

_DIRECTORY: Final = ".promoted"
"""No job id begins with a dot."""

_ABOUT: Final = "about"
_ABOUT_FORMAT: Final = FrameFormat("a description of promoted partitions", b"PSTKPROM", 1)


class PromotedStore:
    """The promoted partitions below a spill directory. One thread uses an instance.

    Args:
        root: the spill directory of a TaskManager.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._directory = root / _DIRECTORY
        self._stores: dict[str, SealedStore] = {}
        self._damaged: set[Path] = set()

    def promote(
        self, promoted: internal_pb2.PromotedSet, partition_ids: Sequence[PartitionId]
    ) -> None:
        """Lets partitions outlive their job, all or none; repeating it is harmless.

        Args:
            promoted: whose they are, and under what name, which is safe as that of a directory.
            partition_ids: complete ones.

        Raises:
            StoreNotFound: one of them is not here.
            OSError: a file cannot be linked or written.
        """
        job_id, name = promoted.job_id, promoted.name
        added: list[Path] = []
        try:
            for partition_id in partition_ids:
                source = partition_directory(self._root, job_id, partition_id)
                target = partition_directory(self._directory / name, job_id, partition_id)
                if (target / INDEX_NAME).exists():
                    continue
                added.append(target)
                _link(source, target)
            self._describe(promoted)
        except BaseException:
            for target in added:
                remove_partition(target)
            raise

    def held(self) -> list[tuple[str, Held]]:
        """Name and partition of all that are promoted."""
        return [(name, held) for name in self._names() for held in self._store(name).held()]

    def find(self, job_id: str, partition_id: PartitionId) -> SealedPartition | None:
        """The partition under any name; None where it is not promoted.

        Raises:
            StoreCorrupt: its index is damaged.
            StoreTransient: its index cannot be read.
        """
        for name in self._names():
            found = self._store(name).find(job_id, partition_id)
            if found is not None:
                return found
        return None

    def sets(self) -> list[internal_pb2.PromotedSet]:
        """What the promoted partitions are together; damaged descriptions are left out and logged once.

        Raises:
            OSError: one cannot be read.
        """
        sets = []
        for path in sorted(self._directory.glob(f"*/*/{_ABOUT}")):
            try:
                _, content = decode_frame(_ABOUT_FORMAT, path.read_bytes(), str(path))
            except StoreCorrupt as error:
                if path not in self._damaged:
                    self._damaged.add(path)
                    _log.error("partitions.damaged", reason=str(error))
                continue
            sets.append(internal_pb2.PromotedSet.FromString(content))
        return sets

    def drop(self, name: str, job_id: str = "") -> int:
        """Removes what is under a name; returns how many partitions that were.

        Args:
            job_id: whose; "" = of all jobs.

        Raises:
            OSError: something cannot be removed.
        """
        store = self._store(name)
        count = sum(job_id in ("", held[0]) for held in store.held())
        del self._stores[name]
        directory = job_directory(store.root, job_id) if job_id else store.root
        if directory.exists():
            shutil.rmtree(directory)
        if store.root.exists() and not any(store.root.iterdir()):
            store.root.rmdir()
        return count

    def _describe(self, promoted: internal_pb2.PromotedSet) -> None:
        path = job_directory(self._directory / promoted.name, promoted.job_id) / _ABOUT
        temporary = path.with_name(f".{_ABOUT}.tmp")
        temporary.write_bytes(encode_frame(_ABOUT_FORMAT, promoted.SerializeToString()))
        temporary.replace(path)

    def _names(self) -> list[str]:
        if not self._directory.is_dir():
            return []
        return sorted(path.name for path in self._directory.iterdir())

    def _store(self, name: str) -> SealedStore:
        if name not in self._stores:
            self._stores[name] = SealedStore(self._directory / name)
        return self._stores[name]


def _link(source: Path, target: Path) -> None:
    """Gives the files of a complete partition a second name, the index last.

    Raises:
        StoreNotFound: it is not there.
    """
    if not (source / INDEX_NAME).exists():
        raise StoreNotFound(
            f"{source} holds no complete partition: it was not written here, or has been released"
        )
    if target.exists():
        shutil.rmtree(target)  # what a failure left
    for path in sorted(source.glob("sub=*/*")):
        link = target / path.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, link)
    target.mkdir(parents=True, exist_ok=True)
    os.link(source / INDEX_NAME, target / INDEX_NAME)
