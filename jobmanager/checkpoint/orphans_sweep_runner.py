"""What dead attempts have left in the directory of a job is removed, beside what goes on from there."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import structlog

from jobmanager.checkpoint.claimed_head_store import ClaimedHeadStore
from jobmanager.checkpoint.completed_checkpoint import CompletedCheckpoint
from jobmanager.checkpoint.orphans import orphans
from jobmanager.graph.execution_attempt import SubtaskId
from penstock.storage.object_store import ObjectStore, delete_all

_SWEPT_PREFIXES = ("chk-", "shared/")


class OrphansSweepRunner:
    """Sweeps one directory."""

    def __init__(self, job_id: str, store: ObjectStore, heads: ClaimedHeadStore) -> None:
        self._store = store
        self._heads = heads
        self._log = structlog.get_logger(__name__).bind(job_id=job_id)

    def sweep(
        self,
        completed: Sequence[CompletedCheckpoint],
        ended_id: int,
        alone: Collection[SubtaskId] | None,
        first_attempt: int,
        brought: Collection[str] = (),
    ) -> None:
        """Removes it.

        Args:
            completed: what HEAD names.
            ended_id: up to this one no checkpoint can be under way any more.
            alone: as of ``prepare``.
            first_attempt: number of the attempts that are about to begin.
            brought: what was written since for the start.

        Raises:
            Fenced: another leader has the job.
            StreamError: something stays.
        """
        present = [one.path for prefix in _SWEPT_PREFIXES for one in self._store.list(prefix)]
        # A leader that has been deposed meanwhile must not take what its successor has written.
        self._heads.check_is_ours()
        kept = {checkpoint.manifest_path for checkpoint in completed} | set(brought)
        kept |= {
            reference.location.path
            for checkpoint in completed
            for reference in checkpoint.references
        }
        swept = orphans(present, kept, ended_id, alone, first_attempt)
        delete_all(self._store, swept)
        if swept:
            self._log.info("checkpoint.orphans_swept", count=len(swept))
        if alone is None:
            self._sweep_temporaries()

    def _sweep_temporaries(self) -> None:
        if swept := self._store.sweep_temporaries():
            self._log.info("checkpoint.temporaries_swept", count=len(swept))
