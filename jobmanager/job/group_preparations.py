"""What groups that begin, or begin again, go on from.

Groups that are on their way at the same time go on from the same checkpoint: none is taken until all run, what was
being stored when the first failed is settled before the first is prepared, and where one that others have gone on
from cannot be read any more, they are all taken back.

Invariants: a checkpoint that a task has found damaged is restored no more; what was done under another JobManager
is adopted before anything has begun here, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from jobmanager.checkpoint.restored_checkpoint import RestoredCheckpoint
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.graph.execution_attempt import AttemptState, SubtaskId
from jobmanager.job.failover import ALL
from jobmanager.job.groups import UNDEPLOYED, Group, GroupEvent, GroupPhase
from jobmanager.job.job_causes import being_restarted, not_begun_again, where_damaged
from jobmanager.job.job_parts import Dropped, Failed, JobParts, PartEffect
from jobmanager.job.slot_lease import free_stray
from jobmanager.job.source_splits import SourceSplits
from jobmanager.job.takeover import Takeover
from jobmanager.messages import job_effects, job_events
from penstock.errors import require_invariant


class GroupPreparations:
    """Prepares the groups of one job."""

    def __init__(self, parts: JobParts) -> None:
        self._parts = parts
        self._found: RestoredCheckpoint | None = None
        """What the job goes on from, while it is asked for what was done before it."""
        self._seeks_attempts = parts.options.seeks_attempts
        """What another JobManager has deployed may run, and has not been found yet."""
        self._goes_back = False
        """What runs is further than the job can go on from."""
        self._has_waited = False
        """The rest of a restart's delay, of which everybody has been told."""
        self._takeover = Takeover(parts)

    def begin(self, group: Group) -> list[PartEffect]:
        """Attempts of a group are to begin; a job that nobody goes on with has nothing to find."""
        parts = self._parts
        group.attempt = parts.graph.attempt
        group.restored_id = 0
        elsewhere = parts.groups.all - group.subtasks
        group.begins_whole = elsewhere <= parts.groups.subtasks(GroupPhase.INPUTS)
        if not parts.options.survives and group.attempt == parts.options.first_attempt:
            self._let_go(group)  # nothing is stored, and nothing of earlier attempts is held
            return []
        unusable = tuple(sorted(parts.unusable))
        if group.begins_whole:
            return [job_effects.PrepareStart(group.attempt, unusable, may_run=self._seeks_attempts)]
        others = [
            other.subtasks
            for other in parts.groups.in_phase(*UNDEPLOYED, GroupPhase.INPUTS)
            if other is not group and other.restored_id not in parts.unusable
        ]
        kept = frozenset[SubtaskId]().union(*others)
        return [job_effects.PrepareStart(group.attempt, unusable, group.subtasks, kept)]

    def _let_go(self, group: Group) -> None:
        groups = self._parts.groups
        groups.move(group, GroupEvent.PREPARED)
        waiting = groups.subtasks(GroupPhase.INPUTS)
        self._parts.graph.renumber(waiting, group.attempt)

    def take(
        self, event: job_events.StartPrepared | job_events.StartNotPrepared
    ) -> list[PartEffect]:
        """What a group goes on from is known, or cannot be found."""
        parts = self._parts
        if parts.wiring is not None and isinstance(event, job_events.StartPrepared):
            # What it says of HEAD holds whether or not somebody still waits for it.
            parts.wiring.open(event)
        group = self._waiting(event.attempt, GroupPhase.PREPARING)
        if group is None:
            return [Dropped()]
        if isinstance(event, job_events.StartNotPrepared):
            return [Failed(where_damaged(event.cause, parts.unusable), group.subtasks)]
        restored = event.restored
        id = restored.checkpoint_id if restored else 0
        require_invariant(id not in parts.unusable, "what is damaged is skipped")
        newest = self._newest_of_others(group)
        if id < newest:
            message = f"checkpoint {newest}, which others go on from, cannot be read any more"
            cause = FailureCause("StoreCorrupt", message)
            return [Failed(cause, ALL, is_free=True, goes_back=True)]
        parts.restored_checkpoint_id = group.restored_id = id
        if not self._seeks_attempts:
            return self._begin_from(group, restored)
        self._found, self._goes_back = restored, event.goes_back
        parts.groups.move(group, GroupEvent.PINNED)
        pinned = parts.failover.pinned(restored) if restored else ()
        return [job_effects.FindAttempts(group.attempt, pinned)]

    def _waiting(self, attempt: int, phase: GroupPhase) -> Group | None:
        waiting = self._parts.groups.in_phase(phase)
        return next((group for group in waiting if group.attempt == attempt), None)

    def _newest_of_others(self, group: Group) -> int:
        """The newest checkpoint that others have gone on from, or are about to, or that covers what they have done."""
        parts = self._parts
        there = parts.groups.subtasks(GroupPhase.RESTORE, GroupPhase.RUNNING) - group.subtasks
        newest = max(
            (attempt.restored_from for attempt in parts.graph.attempts_of(there)), default=0
        )
        coordinator = parts.wiring.coordinator if parts.wiring is not None else None
        if there and coordinator is not None and coordinator.latest_completed is not None:
            newest = max(newest, coordinator.latest_completed.checkpoint_id)
        if parts.groups.in_phase(GroupPhase.SLOTS, GroupPhase.PROCESSES):
            newest = max(newest, parts.restored_checkpoint_id)
        return newest

    def take_found(self, event: job_events.AttemptsFound) -> list[PartEffect]:
        """What another JobManager has deployed is known: it goes on, or the job begins again, without what it has
        done and left."""
        group = self._waiting(event.attempt, GroupPhase.LOCATING)
        if group is None:  # the job ends, or begins again and asks once more what is left
            return [*free_stray(tuple(dict.fromkeys(one.slot for one in event.found))), Dropped()]
        self._seeks_attempts = False
        restored, self._found = self._found, None
        if self._goes_back:
            event = replace(event, reason="its newest checkpoint cannot be read")
        effects = self._takeover.take(group, restored, event)
        if group.phase is not GroupPhase.LOCATING:
            return effects
        options = self._parts.options
        if options.begins_again and not options.has_committed:
            failover, has_begun = self._parts.failover, options.has_begun
            if has_begun and failover.takes_up_restart(self._parts.now_ms):
                # Asked for once more behind the delay: some of what is left may go meanwhile.
                self._seeks_attempts = self._has_waited = True
                return [*effects, Failed(being_restarted(), ALL, resumes=True)]
            if restored is not None:
                self._adopt(restored, event.located)
            if has_begun and not self._has_waited:
                failover.note_begun_again(event.reason, self._parts.now_ms)
            return effects + self._begin_from(group, restored)
        self._parts.failover.go_on()
        cause = not_begun_again(has_committed=options.has_committed)
        return [*effects, Failed(cause, ALL)]

    def _adopt(
        self, restored: RestoredCheckpoint, located: Iterable[job_events.LocatedPartition]
    ) -> None:
        """What was done under another JobManager, and is still there, is not done again."""
        for one in located:
            self._parts.lease.note_partition_endpoint(one.taskmanager_id, one.endpoint)
        self._parts.failover.adopt(restored, located)

    def _begin_from(self, group: Group, restored: RestoredCheckpoint | None) -> list[PartEffect]:
        parts = self._parts
        parts.failover.begin_from(restored)
        if restored is not None:
            restored = restored.without(parts.failover.begins_from_nothing)
            problem = parts.failover.unreadable(restored, parts.graph.unstarted)
            if problem is not None:
                return [Failed(problem, group.subtasks)]
            parts.graph.resume(restored.subtasks)
        if group.begins_whole:
            parts.splits = SourceSplits(parts.plan, restored)
        else:
            parts.splits.restart(group.subtasks, restored)
        if parts.wiring is not None:
            if restored is not None and not group.begins_whole:
                restored = restored.without(parts.failover.is_rebuilt)
            parts.wiring.restored(restored, group.subtasks)
        adopted = group.subtasks & parts.graph.in_state(AttemptState.FINISHED)
        if adopted:
            parts.groups.take(adopted, GroupEvent.ADOPTED)
        if group.subtasks - adopted:
            self._let_go(group)
        return []
