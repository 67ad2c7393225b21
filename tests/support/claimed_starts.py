"""What keeps the claims of submitted jobs, for tests that have no JobManager."""

from __future__ import annotations

import asyncio
from pathlib import Path

from jobmanager.dispatcher.claimed_starts_runner import ClaimedStartsRunner
from jobmanager.dispatcher.known_jobs import KnownJobs
from jobmanager.dispatcher.submissions_runner import SubmissionsRunner
from jobmanager.stores.job_store import JobStore
from jobmanager.stores.leader_store import LeaderStore
from penstock.storage.local_store import LocalStore
from penstock.storage.memory_store import MemoryStore


def claimed_starts(directory: Path | None, jobs: KnownJobs) -> tuple[ClaimedStartsRunner, JobStore]:
    """Those of a new leader that keeps them in a directory; None = in memory."""
    kept, records = (
        (MemoryStore(1 << 20), MemoryStore(1 << 20))
        if directory is None
        else (LocalStore(directory), LocalStore(directory / "jobs"))
    )
    leader = LeaderStore(kept, "kept")
    leader.take_over()
    store = JobStore(records, "jobs", leader)
    turn = SubmissionsRunner(lambda _: None).turn
    return ClaimedStartsRunner(jobs, store, turn, asyncio.ensure_future), store
