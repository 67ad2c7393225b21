"""What has become of a job so far, as one JobManager leaves it to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

from jobmanager.checkpoint.statistics import NOTHING_KEPT, KeptCheckpoints
from jobmanager.failover.restart_counts import KeptFailures
from jobmanager.job.checkpoint_gauges import CheckpointNumbers


@dataclass(frozen=True, slots=True)
class JobHistory:
    """The history of one job.

    Attributes:
        failures: and restarts.
        checkpoints: those that have ended.
        numbers: of these, for metrics.
        rivals_started: attempts beside slow ones that there have been.
        rivals_won: those of them that took their place.
        running_at_ms: when all of it ran for the first time; 0 = it has not.
    """

    failures: KeptFailures = field(default_factory=KeptFailures)
    checkpoints: KeptCheckpoints = NOTHING_KEPT
    numbers: CheckpointNumbers = field(default_factory=CheckpointNumbers)
    rivals_started: int = 0
    rivals_won: int = 0
    running_at_ms: int = 0
