"""The jobs that a JobManager knows: those that run, those that ended among the last, those that cannot be read yet."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from common.metrics import NamedMetrics
from jobmanager.job.checkpoint_gauges import JobCheckpointNumbers
from jobmanager.job.job_master_runner import JobMasterRunner
from jobmanager.job.job_record import JobRecord
from penstock.errors import JobNotFound

METRICS_AFTER_END_MS = 60_000


@dataclass(slots=True)
class Unreadable:
    """A job of an earlier JobManager that cannot be gone on with yet."""

    problem: str = ""
    again: asyncio.Event = field(default_factory=asyncio.Event)
    """It is to be tried at once."""


@dataclass(slots=True)
class KnownJob:
    """One job.

    Attributes:
        runner: its actor; None before and after its life.
        unreadable: why it is not gone on with; None = it is, or has ended.
        is_clean: it has ended, and nothing is left of it that is still to be deleted.
        last_numbers: of an actor that is gone.
    """

    record: JobRecord
    runner: JobMasterRunner | None
    unreadable: Unreadable | None = None
    is_clean: bool = False
    last_numbers: JobCheckpointNumbers | None = None

    @property
    def numbers(self) -> JobCheckpointNumbers | None:
        """Of its checkpoints and restarts; None for a job that this JobManager has not run."""
        runner = self.runner
        if runner is None:
            return self.last_numbers
        return JobCheckpointNumbers(
            self.record.job_id,
            self.record.name,
            self.record.ended,
            runner.master.restarts,
            runner.master.speculation.started,
            runner.master.speculation.won,
            runner.master.restarts_by_region,
            runner.dropped,
            runner.checkpoints.gauges.numbers,
        )

    def forget_runner(self) -> None:
        """Its actor's life is over."""
        self.last_numbers, self.runner = self.numbers, None

    def is_measured(self, now_ms: int) -> bool:
        """It runs, or ended within the last minute."""
        return not self.record.ended or self.record.ended_at_ms >= now_ms - METRICS_AFTER_END_MS


class KnownJobs(dict[str, KnownJob]):
    """By id, in order of submission.

    Args:
        retained_max: how many ended ones are kept.
    """

    def __init__(self, retained_max: int) -> None:
        super().__init__()
        self._retained_max = retained_max
        self.counts: dict[str, int] = {}
        """State's name -> jobs, as of the last ``count``; replaced as a whole: any thread may read it."""

    def count(self) -> None:
        """A job has come, gone, or changed its state."""
        self.counts = dict(Counter(job.record.state.name for job in self.values()))

    def find(self, job_id: str) -> KnownJob:
        """The job of this id, or of this unique beginning of an id.

        Raises:
            JobNotFound: there is none, or more than one.
        """
        job = self.get(job_id)
        if job is not None:
            return job
        matches = [id for id in self if job_id and id.startswith(job_id)]
        if len(matches) == 1:
            return self[matches[0]]
        if matches:
            raise JobNotFound(f"{job_id} is the beginning of {len(matches)} jobs: write more of it")
        raise JobNotFound(
            f"there is no job {job_id or '(empty id)'}; only the last {self._retained_max} ended jobs are "
            "kept (jobmanager.retained-jobs)"
        )

    def has_unended(self, job_id: str) -> bool:
        """True for a job that is known and has not ended."""
        job = self.get(job_id)
        return job is not None and not job.record.ended

    def has_ended(self, job_id: str) -> bool:
        """True for a job that is known and has ended."""
        job = self.get(job_id)
        return job is not None and job.record.ended

    def reads(self) -> frozenset[tuple[str, str]] | None:
        """Name and job of what other jobs have left and jobs read that have not ended; None where that is not known of one
        that cannot be read."""
        unended = [job for job in self.values() if not job.record.ended]
        if any(job.unreadable is not None for job in unended):
            return None
        return frozenset().union(*(job.record.reads for job in unended))

    def needing(self, uri: str) -> str | None:
        """A job that has not ended, and was started from what lies there or below, and needs it still; None = none does."""
        for job_id, job in self.items():
            path = job.record.needs()
            if path == uri or path.startswith(f"{uri}/"):
                return job_id
        return None

    def claimant(self, uri: str) -> str | None:
        """The job that was started from what lies there, and has claimed it; None = none is known. Any thread may ask."""
        claimed = (job_id for job_id, job in tuple(self.items()) if job.record.claimed() == uri)
        return next(claimed, None)

    def running(self) -> Iterator[tuple[str, JobMasterRunner]]:
        """Those that have an actor."""
        for job_id, job in self.items():
            if job.runner is not None:
                yield job_id, job.runner

    def surplus(self) -> list[str]:
        """Ended jobs that are too many, those that ended first."""
        ended = [id for id, job in self.items() if job.record.ended and job.runner is None]
        ended.sort(key=lambda job_id: self[job_id].record.ended_at_ms)
        return ended[: max(0, len(ended) - self._retained_max)]

    def artifacts_in_use(self) -> frozenset[str] | None:
        """What their code consists of; None where that is not known of one that cannot be read."""
        if any(job.unreadable is not None for job in self.values()):
            return None
        return frozenset().union(*(job.record.artifact_ids for job in self.values()))

    def checkpoint_numbers(self, now_ms: int) -> tuple[JobCheckpointNumbers, ...]:
        """Of jobs that run or ended within the last minute; any thread may ask."""
        jobs = [job for job in tuple(self.values()) if job.is_measured(now_ms)]
        return tuple(numbers for job in jobs if (numbers := job.numbers) is not None)

    def recent_metrics(self, now_ms: int) -> tuple[NamedMetrics, ...]:
        """Counters of jobs that run or ended within the last minute; any thread may ask."""
        return tuple(
            named
            for job in tuple(self.values())
            if job.is_measured(now_ms)
            for named in job.record.named_metrics()
        )
