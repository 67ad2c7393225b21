"""The split assigners of a job's sources, over its attempts.

After a restore the splits that the checkpoint mentions belong to the subtasks they were restored to; the
others are discovered and assigned anew. Where subtask 0 of a source, which discovers, had finished,
nothing is left to discover, and the others are told so. A subtask that is restarted alone is told again
what it had been assigned and its checkpoint does not name, in the same order, so that it reads what it
read before, and nobody else does.

Of splits that a completed checkpoint knows as done a digest is kept, and nobody is told of them again. Subtasks that
do all their work again whatever checkpoints hold read all splits again, so theirs stay what they are; and rivals
are told of everything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from common.done_splits import NOTHING_DONE, DoneSplits
from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.restored_checkpoint import RestoredCheckpoint
from jobmanager.failover.rebuilt_regions import rebuilt_vertices
from jobmanager.failover.regions import RegionGraph
from jobmanager.graph.execution_attempt import AttemptKey, SubtaskId
from jobmanager.graph.execution_graph import ExecutionGraph
from jobmanager.graph.job_plan import JobPlan, VertexPlan
from jobmanager.messages import job_effects, job_events
from jobmanager.scheduler.split_assigner import SplitAssigner
from penstock.connectors.source import Split


class SourceSplits:
    """(vertex, operator uid) -> who reads which split, in one attempt.

    Example: what is discovered is dealt out to the attempts that run.
        >>> from jobmanager.graph.job_plan import VertexPlan
        >>> from penstock.connectors.source import Split
        >>> plan = JobPlan((VertexPlan("read", parallelism=2, source_uids=("files",)),))
        >>> splits = tuple(Split(id, size=size) for id, size in [("a", 9), ("b", 5), ("c", 3)])
        >>> found = job_events.SplitsReported(AttemptKey("read", 0, 0), "files", splits, final=True)
        >>> for told in SourceSplits(plan).assign(found, ExecutionGraph(plan)):
        ...     print(told.key, [split.id for split in told.splits])
        read/0 (attempt 0) ['a']
        read/1 (attempt 0) ['b', 'c']
    """

    def __init__(self, plan: JobPlan, restored: RestoredCheckpoint | None = None) -> None:
        self._plan = plan
        self._finished = restored.finished if restored is not None else frozenset[SubtaskId]()
        self._restarted: dict[SubtaskId, frozenset[tuple[str, str]]] = {}
        """Begun again, not told so far: (uid, id) of the splits that their checkpoint names."""
        rebuilt = rebuilt_vertices(RegionGraph(plan))
        self._of_checkpoints = frozenset(v.id for v in plan.vertices if v.id not in rebuilt)
        """Vertices whose subtasks go on from checkpoints."""
        done = self._done_in(restored)
        self._assigners = {
            (vertex.id, uid): self._new(vertex, done.get((vertex.id, uid), NOTHING_DONE))
            for vertex in plan.vertices
            for uid in vertex.source_uids
        }
        for subtask in sorted(self._finished):
            for uid in plan.vertex(subtask.vertex).source_uids:
                self._assigners[subtask.vertex, uid].retire(subtask.subtask_index)
        for split in restored.splits if restored is not None else ():
            assigner = self._assigners.get((split.vertex, split.operator_uid))
            if assigner is not None and not (split.done and split.vertex in self._of_checkpoints):
                load = 0 if split.done else split.size
                assigner.seed(split.split_id, split.subtask_index, load)

    def _new(self, vertex: VertexPlan, done: DoneSplits) -> SplitAssigner:
        keeps_done = self._plan.is_batch and vertex.allows_rivals
        return SplitAssigner(vertex.parallelism, done, keeps_done=keeps_done)

    def forget(self, vertices: Collection[str]) -> None:
        """All subtasks of these begin again from nothing, and find anew what there is to read."""
        for vertex in self._plan.vertices:
            if vertex.id in vertices:
                for uid in vertex.source_uids:
                    self._assigners[vertex.id, uid] = self._new(vertex, NOTHING_DONE)
        self._finished = frozenset(s for s in self._finished if s.vertex not in vertices)

    def _done_in(self, restored: RestoredCheckpoint | None) -> dict[tuple[str, str], DoneSplits]:
        """What a checkpoint knows as done, by the set or, as in checkpoints of older versions, by name."""
        if restored is None:
            return {}
        done = {
            (one.vertex, one.operator_uid): one.done
            for one in restored.done
            if one.vertex in self._of_checkpoints
        }
        names: dict[tuple[str, str], list[str]] = {}
        for split in restored.splits:
            if split.done and split.vertex in self._of_checkpoints:
                names.setdefault((split.vertex, split.operator_uid), []).append(split.split_id)
        return done | {key: done.get(key, NOTHING_DONE).with_ids(ids) for key, ids in names.items()}

    def assigner(self, vertex: str, operator_uid: str) -> SplitAssigner | None:
        """Of one source; None = there is no such source."""
        return self._assigners.get((vertex, operator_uid))

    def assign(
        self, event: job_events.SplitsReported, graph: ExecutionGraph
    ) -> list[job_effects.AddSplits]:
        """What readers are told of a discovery; those that were restored as finished hear nothing."""
        vertex = event.key.vertex
        return [
            job_effects.AddSplits(
                graph.current_of(SubtaskId(vertex, assignment.subtask_index)).key,
                event.operator_uid,
                assignment.splits,
                assignment.final,
            )
            for assignment in self._assigners[vertex, event.operator_uid].assign(
                event.splits, event.final
            )
            if SubtaskId(vertex, assignment.subtask_index) not in self._finished
        ]

    def adopt(
        self,
        found: Iterable[job_events.SplitsReported],
        given: Iterable[tuple[SubtaskId, job_events.GivenSplits]],
        graph: ExecutionGraph,
    ) -> list[job_effects.AddSplits]:
        """Attempts of an earlier JobManager go on with the splits that it has given them; what it had not given yet
        is given now, and all hear how far the discovery is.

        Args:
            found: what has been discovered.
            given: to whom what was given.
        """
        begun: dict[tuple[str, str], tuple[dict[str, Split], bool]] = {}
        for subtask, one in given:
            if (assigner := self.assigner(subtask.vertex, one.operator_uid)) is not None:
                assigner.note_given(subtask.subtask_index, one.splits)
                begun.setdefault((subtask.vertex, one.operator_uid), ({}, False))
        for report in found:
            place = report.key.vertex, report.operator_uid
            if place in self._assigners:
                splits, final = begun.get(place, ({}, False))
                splits |= {split.id: split for split in report.splits}
                begun[place] = splits, final or report.final
        return [
            told
            for (vertex, uid), (splits, final) in begun.items()
            for told in self.assign(
                job_events.SplitsReported(
                    AttemptKey(vertex, 0, graph.attempt), uid, tuple(splits.values()), final
                ),
                graph,
            )
        ]

    def retire(self, subtasks: Iterable[SubtaskId]) -> None:
        """These have finished, and read nothing any more of what is still to be given."""
        for subtask in subtasks:
            for uid in self._plan.vertex(subtask.vertex).source_uids:
                self._assigners[subtask.vertex, uid].retire(subtask.subtask_index)

    @property
    def done(self) -> tuple[c.SourceDone, ...]:
        """What the newest complete checkpoint knows as done, of sources that go on from it."""
        return tuple(
            c.SourceDone(vertex, uid, assigner.done)
            for (vertex, uid), assigner in self._assigners.items()
            if vertex in self._of_checkpoints
        )

    def completed(self, done: Iterable[c.SourceDone]) -> None:
        """A checkpoint is complete."""
        for one in done:
            assigner = self._assigners.get((one.vertex, one.operator_uid))
            if assigner is not None:
                assigner.complete(one.done, one.ids)

    def restart(self, subtasks: Iterable[SubtaskId], restored: RestoredCheckpoint | None) -> None:
        """Some subtasks begin again while others go on.

        Args:
            subtasks: that begin again, of sources or not.
            restored: what they start from.
        """
        subtasks = frozenset(subtasks)
        finished = restored.finished if restored is not None else frozenset[SubtaskId]()
        self._finished = (self._finished - subtasks) | (finished & subtasks)
        self._restarted |= dict.fromkeys(subtasks, frozenset[tuple[str, str]]())
        for split in restored.splits if restored is not None else ():
            owner = SubtaskId(split.vertex, split.subtask_index)
            if owner in subtasks:
                self._restarted[owner] |= {(split.operator_uid, split.split_id)}
        for key, done in self._done_in(restored).items():
            # It may have been completed without anybody having heard of it yet.
            if key in self._assigners:
                self._assigners[key].adopt(done)

    def told_again(
        self, deployed: Iterable[SubtaskId], graph: ExecutionGraph
    ) -> Iterator[job_effects.AddSplits]:
        """What subtasks that begin must hear, since others began before: all that their checkpoint does not
        name, or that nothing comes."""
        self._close_discovered()
        for subtask in sorted(deployed):
            known = self._restarted.pop(subtask, frozenset())
            if subtask in self._finished:
                continue
            for uid in self._plan.vertex(subtask.vertex).source_uids:
                assigner = self._assigners[subtask.vertex, uid]
                splits = tuple(
                    split
                    for split in assigner.left_to(subtask.subtask_index)
                    if (uid, split.id) not in known
                )
                if assigner.has_started:
                    key = graph.current_of(subtask).key
                    yield job_effects.AddSplits(key, uid, splits, assigner.is_final)

    def is_discovered(self, vertex: str) -> bool:
        """Whether nothing more will be assigned to subtasks of a vertex; true for one without sources."""
        uids = self._plan.vertex(vertex).source_uids
        return all(self._assigners[vertex, uid].is_final for uid in uids)

    def told_to_rival(self, rival: AttemptKey) -> list[job_effects.AddSplits]:
        """What a rival must hear of a source that is discovered: all that the subtask reads."""
        return [
            job_effects.AddSplits(
                rival, uid, tuple(assigner.assigned_to(rival.subtask_index)), final=True
            )
            for uid in self._plan.vertex(rival.vertex).source_uids
            for assigner in (self._assigners[rival.vertex, uid],)
        ]

    def done_by(self, subtask: SubtaskId) -> list[tuple[str, tuple[str, ...]]]:
        """What a subtask that has finished has read: (operator uid, ids of its splits that may not be known as
        done)."""
        done = []
        for uid in self._plan.vertex(subtask.vertex).source_uids:
            ids = self._assigners[subtask.vertex, uid].owned_by(subtask.subtask_index)
            done.append((uid, tuple(ids)))
        return done

    def _close_discovered(self) -> None:
        """Closes sources that nobody discovers any more."""
        for vertex in self._plan.vertices:
            if SubtaskId(vertex.id, 0) in self._finished:
                for uid in vertex.source_uids:
                    self._assigners[vertex.id, uid].assign((), final=True)
