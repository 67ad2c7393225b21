"""What becomes of the attempts that an earlier JobManager has deployed (pure).

TaskManagers tell what they run; from that, and from the checkpoint that HEAD names, the job is put together as its
JobManager knew it: attempts, slots, splits. What is missing, was being ended, or reads the rows of an attempt that is
no more, has failed, and is restarted as after any failure; where their JobManager had counted that restart already, the
rest of its delay is waited for, and it counts once. Of two attempts of a subtask the newer counts. Checkpoints
that were under way are void, the newest completed one is told of once more, and the next is taken at once.

Invariants: whoever goes on reads from those who go on; each slot that was found is the job's or is freed; splits are
neither lost nor given twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.restored_checkpoint import RestoredCheckpoint
from jobmanager.graph.deployment import producers_of
from jobmanager.graph.execution_attempt import (
    ON_TASKMANAGER,
    AttemptKey,
    AttemptState,
    ExecutionAttempt,
    SubtaskId,
)
from jobmanager.graph.job_plan import Exchange, JobPlan
from jobmanager.graph.slot import Slot
from jobmanager.job.failover import ALL
from jobmanager.job.groups import Group, GroupEvent
from jobmanager.job.job_causes import not_taken_over
from jobmanager.job.job_parts import Failed, JobParts, PartEffect
from jobmanager.job.slot_lease import free_stray
from jobmanager.job.source_splits import SourceSplits
from jobmanager.messages import job_effects, job_events

_GOES_ON = (
    AttemptState.DEPLOYING,
    AttemptState.INITIALIZING,
    AttemptState.RUNNING,
    AttemptState.FINISHED,
)

Newest = dict[SubtaskId, job_events.FoundAttempt]


def can_go_on(plan: JobPlan) -> bool:
    """Whether attempts of a job can go on under another JobManager: where exchanges keep no rows, since who holds
    which of them was known to the JobManager only, and where no subtask may have two attempts."""
    is_pipelined = all(
        edge.exchange is Exchange.PIPELINED and not edge.is_persisted for edge in plan.edges
    )
    return is_pipelined and not any(
        vertex.allows_rivals and plan.is_batch for vertex in plan.vertices
    )


def newest_of(found: Iterable[job_events.FoundAttempt], plan: JobPlan, below: int) -> Newest:
    """The attempt that counts of each subtask.

    Args:
        plan: what it does not have counts for nothing.
        below: numbers that were never given out count for nothing either.

    Example: of two attempts of a subtask the newer counts.
        >>> from jobmanager.graph.deployment import Endpoint
        >>> from jobmanager.graph.job_plan import VertexPlan
        >>> plan, slot = JobPlan((VertexPlan("v1", parallelism=1),)), Slot("s", "tm-1", "i")
        >>> found = [
        ...     job_events.FoundAttempt(AttemptKey("v1", 0, number), slot, Endpoint("s"), 1, state)
        ...     for number, state in [(4, AttemptState.RUNNING), (2, AttemptState.RUNNING)]
        ... ]
        >>> [one.key.attempt for one in newest_of(found, plan, below=16).values()]
        [4]
    """
    parallelism = {vertex.id: vertex.parallelism for vertex in plan.vertices}
    newest: Newest = {}
    for one in sorted(found, key=lambda one: one.key.attempt):
        is_known = 0 <= one.key.subtask_index < parallelism.get(one.key.vertex, 0)
        if is_known and 0 <= one.key.attempt < below and one.state is not AttemptState.CREATED:
            newest[one.key.subtask] = one
    return newest


def misreading(
    newest: Newest, plan: JobPlan, done: Collection[SubtaskId] = ()
) -> frozenset[SubtaskId]:
    """Subtasks that read, or wait for, rows of another attempt than the one that counts.

    Args:
        done: what has nothing to send any more, whichever attempt of it did so.
    """
    wrong: set[SubtaskId] = set()
    for edge in plan.edges:
        producers = plan.vertex(edge.source).parallelism
        consumers = plan.vertex(edge.target).parallelism
        for index in range(consumers):
            reader = newest.get(SubtaskId(edge.target, index))
            if reader is None or reader.state is AttemptState.FINISHED:
                continue
            for producer, _ in producers_of(edge.partitioning, producers, consumers, index):
                source = SubtaskId(edge.source, producer)
                read = newest.get(source)
                if source in done:
                    continue
                if read is None or (edge.id, read.key) not in reader.reads:
                    wrong.add(reader.key.subtask)
    return frozenset(wrong)


class Takeover:
    """Takes one job over.

    Args:
        parts: of the job, of which nothing has begun.
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
        able = {s for s, one in newest.items() if one.state in _GOES_ON and one.is_complete}
        if event.reason or not able:
            return [*free_stray(_slots(event.found))]
        # What a checkpoint knows as finished need not be anywhere.
        finished = restored.finished if restored is not None else frozenset[SubtaskId]()
        done = finished - newest.keys()
        broken = (parts.groups.all - able - done) | misreading(newest, plan, done)
        broken |= self._adopt_attempts(newest, broken, done)
        parts.failover.go_on()
        parts.groups.move(group, GroupEvent.FOUND)
        self._note_restored(newest, restored)
        effects = self._end_others(event.found, newest)
        effects += self._tell_checkpoints()
        effects += parts.sent(
            parts.splits.adopt(
                (report for one in newest.values() for report in one.found),
                ((subtask, given) for subtask, one in newest.items() for given in one.given),
                parts.graph,
            )
        )
        parts.is_taken_over = True
        if broken:
            failures = [one.failure for one in newest.values() if one.failure is not None]
            gone = sorted(parts.groups.all - newest.keys() - done)
            cause = failures[0] if failures else not_taken_over(gone, sorted(broken))
            failed = ALL if broken == parts.groups.all else broken
            is_free = parts.options.begins_again and not (failures or gone)
            resumes = parts.failover.was_restarting(broken)
            effects.append(Failed(cause, failed, is_free=is_free, resumes=resumes))
        return effects

    # ------------------------------------------------------------ attempts and slots

    def _adopt_attempts(
        self, newest: Newest, broken: Collection[SubtaskId], done: Collection[SubtaskId]
    ) -> frozenset[SubtaskId]:
        """Takes in what there is; returns those whose seat another attempt's slot has."""
        parts, displaced = self._parts, set[SubtaskId]()
        # Who goes on has its slot first.
        for subtask in sorted(parts.groups.all, key=lambda s: (s in broken, s)):
            one = newest.get(subtask)
            if subtask in done:
                key = AttemptKey(subtask.vertex, subtask.subtask_index, 0)
                parts.graph.adopt(ExecutionAttempt(key, AttemptState.FINISHED))
                continue
            if one is None or not parts.lease.adopt(
                subtask, one.slot, one.endpoint, parts.graph.attempt
            ):
                displaced |= {subtask}
                parts.graph.current_of(subtask).become(AttemptState.FAILED)
                continue
            parts.graph.adopt(
                ExecutionAttempt(
                    one.key,
                    one.state,
                    one.slot.taskmanager_id,
                    one.slot.slot_id,
                    restored_from=one.restored_from,
                    deployed_at_ms=parts.now_ms,
                )
            )
        return frozenset(displaced)

    def _end_others(
        self, found: Iterable[job_events.FoundAttempt], newest: Newest
    ) -> list[PartEffect]:
        """Ends attempts that do not count, and slots that nothing that counts is in."""
        kept = set(self._parts.lease.slots)
        unused = tuple(slot for slot in _slots(found) if slot not in kept)
        effects: list[PartEffect] = [*free_stray(unused)]
        ended: dict[str, list[AttemptKey]] = {}
        for one in found:
            is_newest = newest.get(one.key.subtask) is one
            if not is_newest and one.slot in kept and one.state in ON_TASKMANAGER:
                ended.setdefault(one.slot.taskmanager_id, []).append(one.key)
        return effects + [job_effects.CancelTasks(id, tuple(keys)) for id, keys in ended.items()]

    # ------------------------------------------------------------ checkpoints and splits

    def _note_restored(self, newest: Newest, restored: RestoredCheckpoint | None) -> None:
        parts = self._parts
        parts.restored_checkpoint_id = max(one.restored_from for one in newest.values())
        if restored is not None:
            parts.graph.resume(restored.subtasks)
        parts.splits = SourceSplits(parts.plan, restored)
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
        latest = coordinator.latest_completed
        latest_id = latest.checkpoint_id if latest is not None else 0
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
