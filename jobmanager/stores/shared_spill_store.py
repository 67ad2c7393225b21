"""What jobs of the cluster have written to shared storage: found, removed, swept.

Everything lies below the cluster's id, so that nobody removes what belongs to another cluster. A partition is
there when its index is; what a killed attempt has left without one goes with its job. What outlives its job is named
in a list (``promoted=<name>/<job>``), which appears and goes at once: as long as it is there, nothing that it names is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from common.pb import internal_pb2
from common.spill_index import index_totals
from common.spill_paths import (
    PROMOTED_PREFIX,
    index_path,
    job_path,
    partition_path,
    promoted_path,
)
from penstock.errors import ConfigurationError, StoreNotFound
from penstock.partition_id import PartitionId
from penstock.storage.framing import FrameFormat, decode_frame, encode_frame
from penstock.storage.object_store import ObjectStore, delete_all
from penstock.storage.open_store import open_store
from penstock.storage.store_names import has_scheme, substore

_LIST_FORMAT: Final = FrameFormat("a list of promoted partitions", b"PSTKPLST", 1)
_KEY = "taskmanager.spill.shared-dir"


class SharedSpillStore:
    """The cluster's part of the storage. Every call blocks.

    Args:
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

    def release(self, job_id: str, partition_ids: Collection[PartitionId] = ()) -> int:
        """Removes partitions of a job, complete or not; returns how many objects.

        Args:
            partition_ids: none named = everything of the job but what outlives it.

        Raises:
            StoreTransient: something cannot be removed now.
        """
        if partition_ids:
            prefixes = [partition_path(job_id, partition_id) for partition_id in partition_ids]
            kept: set[str] = set()
        else:
            prefixes = [job_path(job_id)]
            kept = {
                f"{partition_path(job_id, partition_of(held.partition))}/"
                for listed in self._lists(job_id=job_id).values()
                for held in listed.partitions
            }
        count = 0
        for prefix in prefixes:
            paths = [found.path for found in self._store.list(f"{prefix}/")]
            paths = [path for path in paths if not _is_below(path, kept)]
            indices = [path for path in paths if path.endswith("/index")]
            delete_all(self._store, indices)
            delete_all(self._store, [path for path in paths if path not in set(indices)])
            count += len(paths)
        return count

    def sweep(self, is_needed: Callable[[str], bool]) -> list[str]:
        """Removes what belongs to no job, and does not outlive one; returns whose it was.

        Args:
            is_needed: whether a job is known and has not ended.

        Raises:
            StoreTransient: something cannot be removed now.
        """
        try:
            job_ids = [one for one in self._store.first_parts() if "=" not in one]
        except StoreNotFound:
            return []
        # What a job leaves behind is listed before it ends: first who has ended, then what is listed.
        unneeded = [job_id for job_id in job_ids if not is_needed(job_id)]
        swept = [job_id for job_id in unneeded if self.release(job_id)]
        self._store.sweep_temporaries()
        return swept

    # ------------------------------------------------------------ what outlives its job

    def promote(
        self, promoted: internal_pb2.PromotedSet, partition_ids: Collection[PartitionId]
    ) -> None:
        """Lets partitions outlive their job, all at once; repeating it is harmless.

        Raises:
            StoreNotFound: one of them is not here.
            StoreCorrupt: the index of one is damaged.
            StoreTransient: the storage does not do it now.
        """
        held = [
            self._held(promoted, partition_id)
            for partition_id in sorted(partition_ids, key=lambda one: one.subtask_index)
        ]
        content = internal_pb2.Holdings(partitions=held, promoted=[promoted]).SerializeToString()
        path = promoted_path(promoted.name, promoted.job_id)
        self._store.put(path, [encode_frame(_LIST_FORMAT, content)])

    def _held(
        self, promoted: internal_pb2.PromotedSet, partition_id: PartitionId
    ) -> internal_pb2.HeldPartition:
        path = index_path(promoted.job_id, partition_id)
        rows, size_bytes = index_totals(self._store.get(path), f"{self.uri}/{path}")
        return internal_pb2.HeldPartition(
            job_id=promoted.job_id,
            partition=internal_pb2.PartitionId(
                edge_id=partition_id.edge_id,
                vertex=partition_id.vertex,
                subtask_index=partition_id.subtask_index,
                attempt=partition_id.attempt,
            ),
            rows=rows,
            size_bytes=size_bytes,
            promoted_as=promoted.name,
        )

    def promoted(self) -> internal_pb2.Holdings:
        """What outlives its job, as far as it is there.

        Raises:
            StoreTransient: that cannot be told now.
            StoreCorrupt: a list is damaged.
        """
        found = internal_pb2.Holdings()
        for listed in self._lists().values():
            paths = {
                index_path(held.job_id, partition_of(held.partition)): held
                for held in listed.partitions
            }
            there = self._store.sizes(paths)
            found.promoted.extend(listed.promoted)
            found.partitions.extend(held for path, held in paths.items() if path in there)
        found.count = len(found.partitions)
        found.size_bytes = sum(held.size_bytes for held in found.partitions)
        return found

    def drop(self, name: str, job_id: str, is_needed: Callable[[str], bool]) -> int:
        """Ends what outlives its job; returns how many partitions that were.

        Args:
            name: under which.
            job_id: whose; "" = of all jobs.
            is_needed: whether a job is known and has not ended: it removes its files itself.

        Raises:
            StoreTransient: something cannot be removed now.
        """
        lists = self._lists(name, job_id)
        delete_all(self._store, lists)
        for owner in sorted({path.rsplit("/", 1)[1] for path in lists}):
            if not is_needed(owner):
                self.release(owner)
        return sum(len(listed.partitions) for listed in lists.values())

    def _lists(self, name: str = "", job_id: str = "") -> dict[str, internal_pb2.Holdings]:
        """Lists by their path; of one name, of one job.

        Raises:
            StoreTransient: one cannot be read now.
            StoreCorrupt: one is damaged.
        """
        prefix = f"{PROMOTED_PREFIX}{name}/" if name else PROMOTED_PREFIX
        lists = {}
        for found in self._store.list(prefix):
            if job_id and not found.path.endswith(f"/{job_id}"):
                continue
            try:
                content = self._store.get(found.path)
            except StoreNotFound:
                continue  # dropped meanwhile
            _, payload = decode_frame(_LIST_FORMAT, content, f"{self.uri}/{found.path}")
            lists[found.path] = internal_pb2.Holdings.FromString(payload)
        return lists


def partition_of(message: internal_pb2.PartitionId) -> PartitionId:
    """The id that messages tell."""
    return PartitionId(message.edge_id, message.vertex, message.subtask_index, message.attempt)


def _is_below(path: str, prefixes: Collection[str]) -> bool:
    return any(path.startswith(prefix) for prefix in prefixes)


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
