"""What becomes of the attempts that an earlier JobManager has deployed (pure).

TaskManagers tell what they run; from that, and from the checkpoint that HEAD names, the job is put together as its
JobManager knew it: attempts, slots, kept rows, splits. What is missing, was being ended, or reads the rows of an
attempt that is no more (``found_reads``), has failed, and is restarted as after any failure; where their JobManager had
counted that restart already, the rest of its delay is waited for, and it counts once. What has sent
rows to a client begins again as well: they went with the JobManager that had them. Of two attempts of a subtask the newer counts, and of
an attempt and its rivals the one that is further; the others end. Checkpoints that were under way are void, the newest completed one is told of once more, and the next is taken at once.

Invariants: whoever goes on reads from those who go on; each slot that was found is the job's or is freed; splits are
neither lost nor given twice; what had not begun waits for what it reads, as it did (``found_stages``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.restored_checkpoint import RestoredCheckpoint
from jobmanager.graph.execution_attempt import (
    ON_TASKMANAGER,
    AttemptKey,
    AttemptState,
    ExecutionAttempt,
    SubtaskId,
)
from jobmanager.graph.slot import Slot
from jobmanager.job.failover import ALL
from jobmanager.job.found_reads import Newest, checked_reads, newest_of
from jobmanager.job.found_stages import DoneStage, done_stages, known_stages, unbegun
from jobmanager.job.groups import Group, GroupEvent
from jobmanager.job.job_causes import collected_rows_lost, not_taken_over
from jobmanager.job.job_parts import Failed, JobParts, PartEffect
from jobmanager.job.slot_lease import free_stray
from jobmanager.job.source_splits import SourceSplits
from jobmanager.messages import job_effects, job_events


class Takeover:
    """Takes one job over.

    Args:
        parts: of the job, of which nothing has begun.

    Example: what runs goes on, and what none has told of begins again.
        >>> from jobmanager.graph.deployment import Endpoint
        >>> from jobmanager.graph.job_plan import JobPlan, VertexPlan
        >>> from jobmanager.job.job_options import JobOptions
        >>> options = JobOptions(first_attempt=16, is_recovered=True, goes_on=True)
        >>> parts = JobParts.of(JobPlan((VertexPlan("v1", parallelism=2),)), options)
        >>> [group] = parts.groups
        >>> for event in (GroupEvent.STARTED, GroupEvent.PINNED):
        ...     parts.groups.move(group, event)
        >>> runs = job_events.FoundAttempt(
        ...     AttemptKey("v1", 0, 3), Slot("s", "tm-1", "i"), Endpoint("s"), 1, AttemptState.RUNNING
        ... )
        >>> found = job_events.AttemptsFound(16, (runs,), is_anyone_missing=True)
        >>> for effect in Takeover(parts).take(group, None, found):
        ...     print([str(subtask) for subtask in effect.failed])
        ['v1/1']
        >>> [str(attempt.key) for attempt in parts.graph.current() if attempt.state.name == "RUNNING"]
        ['v1/0 (attempt 3)']
    """

    def __init__(self, parts: JobParts) -> None:
        self._parts = parts

    def take(
        self, group: Group, restored: RestoredCheckpoint | None, event: job_events.AttemptsFound
    ) -> list[PartEffect]:
        """Puts the job together; the group stays where it is if there is nothing that could go on.

        Args:
            group: all subtasks.
            restored: the checkpoint that HEAD names; None = there is none.
        """
        parts, plan = self._parts, self._parts.plan
        newest = newest_of(event.found, plan, parts.options.first_attempt)
        able = {s for s, one in newest.items() if one.goes_on}
        stages = self._done(newest, restored, event)
        done = frozenset(stages)
        if event.reason or not (able or (done and restored is None)):
            return [*free_stray(_slots(event.found))]
        late = self._unbegun(newest, done, restored, event)
        parts.failover.go_on(is_cut=self._is_cut(newest))
        reads = checked_reads(newest, plan, done, parts.failover.spares)
        lost = frozenset(s for s, one in newest.items() if one.sent_rows)
        broken = (parts.groups.all - able - done - late) | reads.broken | lost
        for taskmanager_id, endpoint in event.endpoints:
            parts.lease.note_partition_endpoint(taskmanager_id, endpoint)
        broken |= self._adopt_attempts(newest, broken, stages, late)
        if late:
            parts.groups.take(late, GroupEvent.PREPARED)
        parts.groups.move(group, GroupEvent.FOUND)
        self._note_restored(newest, restored)
        effects = self._end_others(event.found, newest)
        effects += self._tell_replaced(newest, reads.outdated, broken)
        effects += parts.partitions.release_unneeded(broken)
        effects += parts.release_over()
        effects += self._tell_checkpoints()
        effects += parts.sent(
            parts.splits.adopt(
                (report for one in newest.values() for report in one.found),
                ((subtask, given) for subtask, one in newest.items() for given in one.given),
                parts.graph,
            )
        )
        effects += parts.speculation.deployed(parts.groups.all)
        parts.was_taken_over = parts.is_taken_over = True
        if broken:
            failures = [one.failure for one in newest.values() if one.failure is not None]
            gone = sorted(parts.groups.all - newest.keys() - done - late)
            failed = ALL if broken == parts.groups.all else broken
            # What had done its work has not failed: only what checkpoints need of it is known to nobody.
            is_lost = any(subtask not in event.ended for subtask in gone)
            is_free = parts.options.begins_again and not (failures or is_lost)
            cause = failures[0] if failures else not_taken_over(gone, sorted(broken))
            if lost and not (failures or is_lost):
                cause = collected_rows_lost(sorted(lost), begins_again=is_free)
            resumes = parts.failover.was_restarting(broken) or self._were_ended(newest, broken)
            effects.append(Failed(cause, failed, is_free=is_free, resumes=resumes))
        return effects

    @staticmethod
    def _were_ended(newest: Newest, broken: frozenset[SubtaskId]) -> bool:
        """Whether the JobManager before has ended all of these itself, to begin them elsewhere or for a failure that it
        has counted."""
        ended = (AttemptState.CANCELING, AttemptState.CANCELED)
        return all(s in newest and newest[s].state in ended for s in broken)

    # ------------------------------------------------------------ attempts and slots

    def _done(
        self, newest: Newest, restored: RestoredCheckpoint | None, event: job_events.AttemptsFound
    ) -> Mapping[SubtaskId, DoneStage]:
        """What has finished and need not be found (``found_stages``)."""
        parts, regions = self._parts, self._parts.regions
        if parts.wiring is None:
            restarts = parts.failover.was_restarting
            return done_stages(regions, newest, event.located, lambda s: restarts(frozenset([s])))
        return known_stages(regions, newest, restored, event.located) if restored else {}

    def _unbegun(
        self,
        newest: Newest,
        done: Collection[SubtaskId],
        restored: RestoredCheckpoint | None,
        event: job_events.AttemptsFound,
    ) -> frozenset[SubtaskId]:
        """What waits for its inputs, as it did under the JobManager before."""
        resumed = restored.subtasks if restored is not None else frozenset[SubtaskId]()
        restarts = self._parts.failover.was_restarting
        return unbegun(
            self._parts.regions,
            newest,
            done,
            lambda s: s in resumed or s in event.ended or restarts(frozenset([s])),
            is_anyone_missing=event.is_anyone_missing,
        )

    def _adopt_attempts(
        self,
        newest: Newest,
        broken: Collection[SubtaskId],
        done: Mapping[SubtaskId, DoneStage],
        late: frozenset[SubtaskId],
    ) -> frozenset[SubtaskId]:
        """Takes in what there is; returns those whose seat another attempt's slot has."""
        parts, displaced = self._parts, set[SubtaskId]()
        # Who goes on has its slot first.
        for subtask in sorted(parts.groups.all - late, key=lambda s: (s in broken, s)):
            one = newest.get(subtask)
            if (stage := done.get(subtask)) is not None:
                key = AttemptKey(subtask.vertex, subtask.subtask_index, stage.attempt)
                holder = next(iter(stage.held.values()), "")
                attempt = ExecutionAttempt(key, AttemptState.FINISHED, holder)
                parts.graph.adopt(attempt)
                parts.partitions.adopt(attempt, stage.held)
                if parts.wiring is None or parts.failover.is_rebuilt(subtask):
                    parts.failover.tie(subtask)
                continue
            if one is None or not self._adopt_slot(one, is_broken=subtask in broken):
                displaced |= {subtask}
                parts.graph.current_of(subtask).become(AttemptState.FAILED)
                continue
            attempt = ExecutionAttempt(
                one.key,
                one.state,
                one.slot.taskmanager_id,
                one.slot.slot_id,
                restored_from=one.restored_from,
                deployed_at_ms=parts.now_ms,
            )
            parts.graph.adopt(attempt)
            if attempt.state is AttemptState.FINISHED:
                parts.partitions.produced(attempt)
        return frozenset(displaced)

    def _adopt_slot(self, one: job_events.FoundAttempt, *, is_broken: bool) -> bool:
        """Whether the slot of an attempt is the job's: as that of its seat, or apart, as those of rivals are."""
        lease, number = self._parts.lease, self._parts.graph.attempt
        if lease.adopt(one.key.subtask, one.slot, one.endpoint, number):
            return True
        if is_broken or not self._parts.speculation.is_used:
            return False
        lease.take_apart(one.slot, number, one.endpoint)
        return True

    def _end_others(
        self, found: Iterable[job_events.FoundAttempt], newest: Newest
    ) -> list[PartEffect]:
        """Ends attempts that do not count, what they have kept, and slots that nothing that counts is in."""
        kept = set(self._parts.lease.slots)
        unused = tuple(slot for slot in _slots(found) if slot not in kept)
        effects: list[PartEffect] = [*free_stray(unused)]
        ended: dict[str, list[AttemptKey]] = {}
        left: dict[str, list[tuple[str, AttemptKey]]] = {}
        for one in found:
            if newest.get(one.key.subtask) is one or one.slot not in kept:
                continue
            if one.state in ON_TASKMANAGER:
                ended.setdefault(one.slot.taskmanager_id, []).append(one.key)
            elif one.state is AttemptState.FINISHED:
                left.setdefault(one.slot.taskmanager_id, []).extend(
                    (group.edge.id, one.key)
                    for group in self._parts.regions.written_by(one.key.subtask)
                )
        effects += [job_effects.CancelTasks(id, tuple(keys)) for id, keys in ended.items()]
        return effects + [
            job_effects.ReleasePartitions(id, tuple(own)) for id, own in left.items() if own
        ]

    def _tell_replaced(
        self,
        newest: Newest,
        outdated: frozenset[tuple[str, SubtaskId]],
        broken: frozenset[SubtaskId],
    ) -> list[PartEffect]:
        """Tells consumers whose rows they read from now on: the JobManager before has not, or not all of them.

        Of those that begin again they hear as these are deployed.
        """
        parts = self._parts
        replaced = frozenset(producer for _, producer in outdated) - broken
        return parts.sent(
            job_effects.ReplaceProducer(key, edge_id, channel)
            for key, edge_id, channel in parts.deployments.replaced_producers(replaced)
            if (edge_id, channel.producer_attempt.subtask) in outdated
            and key.subtask in newest.keys() - broken
            and (edge_id, channel.producer_attempt) not in newest[key.subtask].reads
        )

    # ------------------------------------------------------------ checkpoints and splits

    @property
    def _latest_id(self) -> int:
        """The newest completed checkpoint; 0 = none."""
        wiring = self._parts.wiring
        coordinator = wiring.coordinator if wiring is not None else None
        latest = coordinator.latest_completed if coordinator is not None else None
        return latest.checkpoint_id if latest is not None else 0

    def _is_cut(self, newest: Newest) -> bool:
        return any(one.savepoint_id > self._latest_id for one in newest.values())

    def _note_restored(self, newest: Newest, restored: RestoredCheckpoint | None) -> None:
        parts = self._parts
        parts.restored_checkpoint_id = max(
            (one.restored_from for one in newest.values()), default=0
        )
        if restored is not None:
            parts.graph.resume(restored.subtasks)
        parts.splits = SourceSplits(parts.plan, restored)
        parts.splits.retire(s for s, one in newest.items() if one.state is AttemptState.FINISHED)
        if parts.wiring is not None:
            # Of what is given out again from the first split on, tasks know what no checkpoint covers.
            for subtask in filter(parts.failover.is_rebuilt, newest):
                parts.failover.tie(subtask)
        if parts.wiring is not None:
            parts.wiring.restored(restored, ())
            for one in newest.values():
                if one.state is AttemptState.FINISHED:
                    parts.wiring.finished(one.key, one.last, parts.splits, parts.now_ms)

    def _tell_checkpoints(self) -> list[PartEffect]:
        """What is complete is committed, and what was under way is void."""
        parts = self._parts
        coordinator = parts.wiring.coordinator if parts.wiring is not None else None
        if coordinator is None:
            return []
        latest_id = self._latest_id
        void = c.NotifyAborted(coordinator.next_checkpoint_id - 1, (), latest_id + 1)
        told: dict[str, list[AttemptKey]] = {}
        waiting: dict[str, list[AttemptKey]] = {}
        for attempt in parts.graph.current():
            if attempt.state in ON_TASKMANAGER:
                told.setdefault(attempt.taskmanager_id, []).append(attempt.key)
                if attempt.restored_from < latest_id:
                    waiting.setdefault(attempt.taskmanager_id, []).append(attempt.key)
        effects: list[PartEffect] = []
        for id, keys in told.items():
            commands: list[c.CheckpointCommand] = []
            if id in waiting:
                commands.append(c.NotifyCompleted(latest_id, tuple(waiting[id])))
            if void.first_id <= void.checkpoint_id:
                commands.append(c.NotifyAborted(void.checkpoint_id, tuple(keys), void.first_id))
            if commands:
                effects.append(job_effects.SendCommands(id, tuple(commands)))
        return effects


def _slots(found: Iterable[job_events.FoundAttempt]) -> tuple[Slot, ...]:
    return tuple(dict.fromkeys(one.slot for one in found))
