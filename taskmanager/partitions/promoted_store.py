"""Complete partitions that outlive their job, by the name they were given.

Below the spill directory of a TaskManager, ``.promoted/<name>`` is laid out like the directory itself.
To promote a partition gives its files a second name there (hard links): it takes no space, readers are
not disturbed, and the job's own names go with the job.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from penstock.errors import StoreNotFound
from penstock.partition_id import PartitionId
from taskmanager.partitions.sealed_partition import SealedPartition
from taskmanager.partitions.sealed_store import Held, SealedStore, remove_partition
from taskmanager.partitions.spill_layout import INDEX_NAME, partition_directory

_DIRECTORY: Final = ".promoted"
"""No job id begins with a dot."""


class PromotedStore:
    """The promoted partitions below a spill directory. One thread uses an instance.

    Args:
        root: the spill directory of a TaskManager.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._directory = root / _DIRECTORY
        self._stores: dict[str, SealedStore] = {}

    def promote(self, job_id: str, partition_ids: Sequence[PartitionId], name: str) -> None:
        """Lets partitions outlive their job, all or none; repeating it is harmless.

        Args:
            job_id: whose they are.
            partition_ids: complete ones.
            name: safe as the name of a directory.

        Raises:
            StoreNotFound: one of them is not here.
            OSError: a file cannot be linked.
        """
        added: list[Path] = []
        try:
            for partition_id in partition_ids:
                source = partition_directory(self._root, job_id, partition_id)
                target = partition_directory(self._directory / name, job_id, partition_id)
                if (target / INDEX_NAME).exists():
                    continue
                added.append(target)
                _link(source, target)
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

    def drop(self, name: str) -> int:
        """Removes everything under a name; returns how many partitions that were.

        Raises:
            OSError: something cannot be removed.
        """
        count = len(self._store(name).held())
        del self._stores[name]
        if (self._directory / name).exists():
            shutil.rmtree(self._directory / name)
        return count

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
