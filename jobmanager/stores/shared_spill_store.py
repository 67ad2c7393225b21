"""What jobs of the cluster have written to shared storage: found, removed, swept.

Everything lies below the cluster's id, so that nobody removes what belongs to another cluster. A partition is
there when its index is; what a killed attempt has left without one goes with its job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from common.spill_paths import index_path, job_path, partition_path
from penstock.errors import ConfigurationError, StoreNotFound
from penstock.partition_id import PartitionId
from penstock.storage.object_store import ObjectStore, delete_all
from penstock.storage.open_store import has_scheme, open_store, substore

_KEY = "taskmanager.spill.shared-dir"


class SharedSpillStore:
    """The cluster's part of the storage. Every call blocks.

    Args:
        store: it.
        uri: its name, as TaskManagers are told.
    """

    def __init__(self, store: ObjectStore, uri: str) -> None:
        self._store = store
        self.uri = uri

    def check_writable(self) -> None:
        """Says early what the first write would say.

        Raises:
            StoreTransient, Unrecoverable: nothing can be written there.
        """
        self._store.check_writable()

    def found(self, job_id: str, wanted: Collection[PartitionId]) -> frozenset[PartitionId]:
        """Which partitions of a job are complete there.

        Raises:
            StoreTransient: that cannot be told now.
        """
        paths = {index_path(job_id, partition_id): partition_id for partition_id in wanted}
        return frozenset(paths[path] for path in self._store.sizes(paths))

    def release(self, job_id: str, partition_ids: Collection[PartitionId] = ()) -> None:
        """Removes partitions of a job, complete or not; none named = everything of the job.

        Raises:
            StoreTransient: something cannot be removed now.
        """
        prefixes = [partition_path(job_id, partition_id) for partition_id in partition_ids]
        for prefix in prefixes or [job_path(job_id)]:
            paths = [found.path for found in self._store.list(f"{prefix}/")]
            indices = [path for path in paths if path.endswith("/index")]
            delete_all(self._store, indices)
            delete_all(self._store, [path for path in paths if path not in set(indices)])

    def sweep(self, is_needed: Callable[[str], bool]) -> list[str]:
        """Removes what belongs to no job; returns whose it was.

        Args:
            is_needed: whether a job is known and has not ended.

        Raises:
            StoreTransient: something cannot be removed now.
        """
        try:
            job_ids = self._store.first_parts()
        except StoreNotFound:
            return []
        unneeded = [job_id for job_id in job_ids if not is_needed(job_id)]
        for job_id in unneeded:
            self.release(job_id)
        self._store.sweep_temporaries()
        return unneeded


def open_shared_spill(directory: str, cluster_id: str) -> SharedSpillStore | None:
    """The storage of ``taskmanager.spill.shared-dir``; None where there is none.

    Raises:
        ConfigurationError: it is no absolute path and no URI.
    """
    if not directory:
        return None
    if not directory.startswith("/") and not has_scheme(directory):
        raise ConfigurationError(
            f"{_KEY}: {directory} must be an absolute path that all machines see, or s3://bucket/prefix"
        )
    uri = substore(directory, cluster_id)
    return SharedSpillStore(open_store(uri), uri)
