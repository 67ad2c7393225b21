"""What others see of the machine of a job."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from jobmanager.checkpoint.coordinator import CheckpointCoordinator
from jobmanager.failover.exceptions_history import ExceptionsHistory
from jobmanager.failover.restart_counts import KeptFailures
from jobmanager.graph.execution_attempt import AttemptKey
from jobmanager.graph.execution_graph import ExecutionGraph
from jobmanager.job.groups import Groups
from jobmanager.job.job_parts import JobParts
from jobmanager.job.job_phases import JobPhase
from jobmanager.job.speculation import Speculation


class JobMasterViews:
    """Reads the parts of one job."""

    def __init__(self, parts: JobParts) -> None:
        self._parts = parts
        self._phase = JobPhase.NEW
        self.dropped_events = 0

    @property
    def ended(self) -> bool:
        """True when the job has reached its end, here at least."""
        return self._phase is JobPhase.ENDED

    @property
    def unusable_checkpoints(self) -> Collection[int]:
        """Those that tasks have found damaged."""
        return self._parts.unusable

    @property
    def graph(self) -> ExecutionGraph:
        """Its attempts."""
        return self._parts.graph

    @property
    def groups(self) -> Groups:
        """How far its subtasks are."""
        return self._parts.groups

    @property
    def speculation(self) -> Speculation:
        """Its rivals."""
        return self._parts.speculation

    @property
    def restored_checkpoint_id(self) -> int:
        """What those have gone on from that have begun last; 0 = from nothing."""
        return self._parts.restored_checkpoint_id

    @property
    def was_taken_over(self) -> bool:
        """Whether what another JobManager has deployed goes on here, all of it or what was left."""
        return self._parts.was_taken_over

    def oldest_heard(self) -> list[AttemptKey]:
        """Of each subtask the oldest attempt that counts; of those that begin again none that there is."""
        stopped = self._parts.groups.stopped
        return [
            replace(one.key, attempt=one.key.attempt + (one.key.subtask in stopped))
            for one in self.graph.current()
        ]

    @property
    def attempt(self) -> int:
        """Number of the newest attempts."""
        return self.graph.attempt

    @property
    def restarts(self) -> int:
        """How often failures have restarted subtasks; going on after another JobManager is one."""
        return self._parts.failover.restarts

    @property
    def restarts_by_region(self) -> Mapping[str, int]:
        """How often each region has begun again, named after its first subtask."""
        return self._parts.failover.restarts_by_region

    @property
    def dropped(self) -> dict[str, int]:
        """What was dropped because it came too late, twice, or from nobody who was asked: part -> events."""
        return {"job": self.dropped_events} | self._parts.dropped

    @property
    def exceptions(self) -> ExceptionsHistory:
        """The last failures, for views."""
        return self._parts.failover.exceptions

    @property
    def history_changes(self) -> tuple[int, ...]:
        """Differs where the next JobManager is to be told something new; the first number, where something has failed, or
        begins elsewhere.

        () = what was noted stays as it is: it is not known yet what of the job goes on, or it ends.
        """
        if self._phase not in (JobPhase.ACTIVE, JobPhase.COMMITTED):
            return ()
        return (
            self.exceptions.changes + self._parts.failover.moves,
            self._parts.groups.changes,
            self.speculation.started + self.speculation.won,
        )

    def kept_failures(self) -> KeptFailures:
        """What the next JobManager is to know of failures."""
        return self._parts.failover.kept(self._parts.groups)

    @property
    def coordinator(self) -> CheckpointCoordinator | None:
        """For views; None where the job takes no checkpoints, or before HEAD is known."""
        return self._parts.wiring.coordinator if self._parts.wiring is not None else None
