"""What a failure means for a job: whether it goes on, which of its subtasks begin again, and the record of it.

    failure -> restart strategy: whether, when -> failover strategy: which regions -> exceptions history

The strategy is not asked where a checkpoint could not be restored: another one is tried at once, and none
twice. When none is left, the start cannot be prepared, which no restart mends.

Source: Flink, ExecutionFailureHandler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.completed_checkpoint import CompletedCheckpoint
from jobmanager.checkpoint.restored_checkpoint import RestoredCheckpoint
from jobmanager.failover.adoption import adopted, pinned
from jobmanager.failover.exceptions_history import ExceptionsHistory
from jobmanager.failover.failover_strategy import FailoverView, kept_stages, tasks_to_restart
from jobmanager.failover.failure_cause import FailureCause
from jobmanager.failover.rebuilt_regions import rebuilt_regions, spared_regions
from jobmanager.failover.regions import KeptOutput, RegionGraph
from jobmanager.failover.restart_counts import KeptFailures
from jobmanager.failover.restart_strategy import RestartStrategy
from jobmanager.graph.execution_attempt import (
    AttemptKey,
    AttemptState,
    ExecutionAttempt,
    SubtaskId,
)
from jobmanager.graph.execution_graph import ExecutionGraph
from jobmanager.graph.job_plan import Exchange
from jobmanager.job.checkpoint_wiring import WiredEffect
from jobmanager.job.groups import GroupPhase, Groups
from jobmanager.job.job_causes import begun_again, inputs_gone, subtask_of
from jobmanager.job.job_options import JobOptions
from jobmanager.messages.job_effects import SendCommands
from jobmanager.messages.job_events import LocatedPartition
from jobmanager.partitions.partition_tracker import PartitionTracker

ALL = None
"""In the place of the failed subtasks: the failure concerns the whole job."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What follows from a failure.

    Attributes:
        delay_ms: until the restart; None = the job fails.
        subtasks: that begin again.
        cause: as the job shows it.
    """

    delay_ms: int | None
    subtasks: frozenset[SubtaskId]
    cause: FailureCause


class Failover:
    """Decides on the failures of one job.

    Args:
        partitions: what can be read again.
    """

    def __init__(
        self,
        options: JobOptions,
        regions: RegionGraph,
        graph: ExecutionGraph,
        partitions: PartitionTracker,
    ) -> None:
        kept = options.history.failures
        self.exceptions = ExceptionsHistory(options.exceptions_max, kept.entries)
        self.restarts_by_region: Counter[str] = Counter(kept.restarts_by_region)
        """Named after the first subtask of each; replaced as a whole, so that any thread may read it."""
        self._options = options
        self._regions = regions
        self._graph = graph
        self._partitions = partitions
        self._strategy = RestartStrategy(
            options.restart,
            jitter=options.jitter,
            is_recovered=options.is_recovered,
            counts=kept.counts,
        )
        self._free_restarts = kept.restarts_uncounted
        self._restarting = kept.restarting
        """Of the earlier JobManager, which has counted it."""
        self._caching_readers = frozenset(
            edge.target
            for edge in regions.plan.edges
            if edge.exchange in (Exchange.CACHING, Exchange.CACHING_MEMORY)
        )
        self._rebuilds = rebuilt_regions(regions)
        self._spared = frozenset[int]()
        self._finished_in_all = frozenset[SubtaskId]()
        """Of the checkpoints that ``over_in`` was asked about last."""
        self._over = frozenset[KeptOutput]()
        self._pre_aggregating = frozenset(
            vertex.id for vertex in regions.plan.vertices if vertex.pre_aggregates
        )
        self._tied: set[str] = set()
        """Sources that were read before, with splits of which nobody knows who has had which: what begins again of one
        begins again with all of its subtasks, which find the splits anew."""
        self._takeovers = 0
        self._moved = frozenset[SubtaskId]()
        """What was told to begin elsewhere, and has not failed since."""
        self.moves = 0
        """How often something was told to begin elsewhere."""
        self._is_cut = False
        """A savepoint has had pre-aggregation emit what it kept, and no checkpoint has been completed since."""

    @property
    def restarts(self) -> int:
        """Restarts that failures have led to; beginning again after another JobManager is one more."""
        return self._strategy.restarts + self._free_restarts + self._takeovers

    def go_on(self, *, is_cut: bool = False) -> None:
        """What another JobManager has deployed goes on: nothing has begun again.

        Args:
            is_cut: it has taken a savepoint, and no checkpoint has been completed since.
        """
        self._is_cut = is_cut

    def was_restarting(self, subtasks: frozenset[SubtaskId]) -> bool:
        """Whether an earlier JobManager has counted a restart of all of these that has not come to its end."""
        return bool(subtasks) and subtasks <= self._restarting

    def takes_up_restart(self, now_ms: int) -> bool:
        """Whether everything begins again as part of a restart that was under way, and the rest of its delay is to be
        waited for; else that it does is one restart more."""
        self._takeovers = int(not self._restarting)
        return bool(self._restarting) and self._strategy.rest_ms(now_ms) > 0

    def note_begun_again(self, reason: str, now_ms: int) -> None:
        """Nothing of what another JobManager has deployed goes on, which people are told beside failures; what was being
        restarted would have begun again under that one, too."""
        done = self._graph.in_state(AttemptState.FINISHED)
        begun = frozenset(self._graph.subtasks()) - done - self._restarting
        if begun:
            cause = replace(begun_again(reason), timestamp_ms=now_ms)
            self._note(cause, begun, 0, joined=False)

    def kept(self, groups: Groups) -> KeptFailures:
        """What the next JobManager is to know.

        Args:
            groups: of this one, under which the job has begun, or has gone on.
        """
        entries = self.exceptions.entries
        restarted = frozenset[SubtaskId]().union(*(entry.restarted for entry in entries))
        return KeptFailures(
            self._strategy.counts(),
            self._free_restarts + self._takeovers,
            dict(self.restarts_by_region),
            entries,
            groups.stopped | ((restarted | self._moved) - groups.subtasks(GroupPhase.RUNNING)),
        )

    def decide(
        self,
        cause: FailureCause,
        failed: Iterable[SubtaskId] | None,
        missing: Iterable[KeptOutput],
        now_ms: int,
        *,
        joins: bool,
        is_free: bool = False,
        resumes: bool = False,
        goes_back: bool = False,
        is_told: bool = True,
    ) -> Recovery:
        """Decides on a failure.

        Args:
            failed: whose attempts are over; ``ALL`` = everything is to begin again.
            missing: what could not be read.
            now_ms: the wall clock.
            joins: a restart has begun that it belongs to, unless no restart can mend it.
            is_free: it is restarted at once and not counted, unless no restart can mend it.
            resumes: an earlier JobManager has counted and noted it: what is left of its delay is waited for.
            goes_back: to a checkpoint that is older than what others have gone on from.
            is_told: people are told of it.
        """
        delay_ms: int | None
        if resumes:
            delay_ms = self._strategy.rest_ms(now_ms)
            return Recovery(delay_ms, self._restarted(failed, missing, goes_back), cause)
        if (joins or is_free) and self._strategy.may_mend(cause):
            delay_ms = 0
            self._free_restarts += not joins
            self._strategy.has_started = True
        else:
            delay_ms = self._strategy.failed(cause, subtask_of(cause), now_ms).delay_ms
        if delay_ms is None:
            cause = self._strategy.told(cause)
            self._note(cause, frozenset(), None, joined=False)
            return Recovery(None, frozenset(), cause)
        restarted = self._restarted(failed, missing, goes_back)
        if is_told:
            self._note(cause, restarted, delay_ms, joined=joins)
            self._moved -= restarted
        return Recovery(delay_ms, restarted, cause)

    def moved(
        self, subtasks: frozenset[SubtaskId], missing: Iterable[KeptOutput]
    ) -> frozenset[SubtaskId]:
        """What begins again where some subtasks leave their TaskManager, which is no failure and counts as none."""
        moved = self._restarted(subtasks, missing)
        self._moved |= moved
        self.moves += 1
        return moved

    def leaves(self, failed: Iterable[SubtaskId] | None) -> bool:
        """Whether these were told to begin elsewhere: what then ends has lost others that had ended first."""
        return failed is not ALL and self._moved.issuperset(failed)

    def join_end(self, cause: FailureCause) -> FailureCause:
        """A failure that comes while the job ends for another; returns the cause as the job shows it."""
        cause = self._strategy.told(cause)
        self._note(cause, frozenset(), None, joined=True)
        return cause

    def note_checkpoints(self, effect: WiredEffect) -> None:
        """What the coordinator wants done, of which a savepoint changes what producers would send again."""
        if isinstance(effect, c.ReportCompleted):
            self._is_cut = False
        elif isinstance(effect, SendCommands) and any(
            isinstance(told, c.TriggerTasks) and told.properties.target for told in effect.commands
        ):
            self._is_cut = True

    def _restarted(
        self,
        failed: Iterable[SubtaskId] | None,
        missing: Iterable[KeptOutput],
        goes_back: bool = False,
    ) -> frozenset[SubtaskId]:
        view = FailoverView(
            started=self._graph.started,
            finished=self._graph.in_state(AttemptState.FINISHED),
            is_available=self._partitions.is_available,
            not_repeated=self._not_repeated,
        )
        if failed is ALL:
            failed = view.started if goes_back else view.started - kept_stages(self._regions, view)
        failed, missing = frozenset(failed), frozenset(missing)
        strategy = self._options.failover_strategy
        while True:
            restarted = tasks_to_restart(strategy, self._regions, failed, missing, view)
            tied = {subtask.vertex for subtask in restarted} & self._tied
            all_of_tied = frozenset(s for s in view.started if s.vertex in tied)
            if all_of_tied <= restarted:
                return restarted
            failed |= all_of_tied

    def tie(self, subtask: SubtaskId) -> None:
        """A subtask has done its work under another JobManager, and nobody knows with which splits."""
        if self._regions.plan.vertex(subtask.vertex).source_uids:
            self._tied.add(subtask.vertex)

    def untied(self, restarted: Iterable[SubtaskId]) -> frozenset[str]:
        """Sources all of whose subtasks begin again now, and find their splits anew."""
        untied = frozenset(subtask.vertex for subtask in restarted) & self._tied
        self._tied -= untied
        return untied

    @property
    def _not_repeated(self) -> frozenset[str]:
        return self._pre_aggregating if self._is_cut else frozenset()

    def spares(self, reader: SubtaskId, begun: frozenset[SubtaskId]) -> bool:
        """Whether a subtask goes on where all these have begun again, whatever else could be read."""
        everything = frozenset(self._graph.subtasks())
        view = FailoverView(everything, frozenset(), lambda _: True, self._not_repeated)
        strategy = self._options.failover_strategy
        return reader not in tasks_to_restart(strategy, self._regions, begun, (), view)

    def _note(
        self,
        cause: FailureCause,
        restarted: frozenset[SubtaskId],
        delay_ms: int | None,
        *,
        joined: bool,
    ) -> None:
        self.exceptions.failed(
            cause,
            joined=joined,
            restarted=restarted,
            labels=self._options.labels.of(cause),
            restart_number=self.restarts,
            delay_ms=delay_ms,
        )

    def count_regions(self, subtasks: frozenset[SubtaskId]) -> None:
        """These subtasks begin again."""
        regions = {self._regions.region_of(subtask) for subtask in subtasks}
        begun = Counter(str(min(region.subtasks)) for region in regions)
        self.restarts_by_region = self.restarts_by_region + begun

    # ------------------------------------------------------------ what can begin

    def will_read_from_the_start(self, waiting: frozenset[SubtaskId]) -> bool:
        """Whether subtasks that wait for blocking partitions will also read caching edges.

        A checkpoint without them would have the producers of these drop, and after a restart never write again,
        rows that they are still to read.
        """
        return any(subtask.vertex in self._caching_readers for subtask in waiting)

    def startable(
        self, there: frozenset[SubtaskId], waiting: frozenset[SubtaskId]
    ) -> frozenset[SubtaskId]:
        """Those that wait and whose input is there.

        Args:
            there: subtasks whose attempts can be connected to.
        """
        ready = self._regions.startable(there, self._partitions.is_complete, waiting)
        return frozenset(subtask for region in ready for subtask in region.subtasks)

    def unreadable(
        self, restored: RestoredCheckpoint, subtasks: frozenset[SubtaskId]
    ) -> FailureCause | None:
        """Why subtasks cannot go on from a checkpoint; None = they can.

        Half-read blocking partitions are read on where they were left only where it is the same attempt's,
        or one that has made the same rows. A subtask restored as finished reads nothing any more, and what other
        jobs have left behind never changes.
        """
        own = {edge.id for edge in self._regions.plan.edges}
        for read in restored.reads:
            if read.edge_id not in own:
                continue
            edge = self._regions.exchange_of(read.edge_id)
            if (
                read.reader not in subtasks
                or read.reader in restored.finished
                or not read.rows
                or edge.exchange is not Exchange.BLOCKING
                or edge.is_reproducible
            ):
                continue
            producer = SubtaskId(edge.source, read.producer_index)
            if producer in subtasks or self._graph.current_of(producer).key.attempt != read.attempt:
                return inputs_gone(restored.checkpoint_id, read.reader, producer)
        return None

    def over_in(self, checkpoints: Iterable[CompletedCheckpoint]) -> frozenset[KeptOutput]:
        """The blocking partitions that nobody makes or reads who goes on from one of these."""
        known = [one.finished for one in checkpoints]
        if not (self._rebuilds and known):
            return frozenset()
        finished = frozenset.intersection(*known)
        if finished != self._finished_in_all:
            over = spared_regions(self._regions, finished)
            self._over = frozenset(
                partition
                for region in self._regions.regions
                if region.index in over
                for partition in self._regions.produced_by(region)
            )
            self._finished_in_all = finished
        return self._over

    def begin_from(self, restored: RestoredCheckpoint | None) -> None:
        """What begins from now on begins from this checkpoint."""
        finished = restored.finished if restored is not None else frozenset[SubtaskId]()
        self._spared = spared_regions(self._regions, finished)

    def begins_from_nothing(self, subtask: SubtaskId) -> bool:
        """Whether no checkpoint is of use to a subtask that begins: its whole region does all its work again."""
        has_finished = self._graph.current_of(subtask).state is AttemptState.FINISHED
        return self.is_rebuilt(subtask) and not has_finished

    def is_rebuilt(self, subtask: SubtaskId) -> bool:
        """Whether a subtask does all its work again wherever it begins again: what an earlier attempt of it has left
        in a checkpoint says nothing of a later one. Not where all who read of it had finished."""
        index = self._regions.region_of(subtask).index
        return index in self._rebuilds and index not in self._spared

    # ------------------------------------------------------------ what was done under another JobManager

    def pinned(self, restored: RestoredCheckpoint) -> tuple[tuple[str, AttemptKey], ...]:
        """Partitions of attempts that need not be run again if these are still there."""
        return tuple(
            (edge_id, AttemptKey(producer.vertex, producer.subtask_index, number))
            for edge_id, producer, number in sorted(
                (partition.edge_id, partition.producer, number)
                for partition, number in pinned(self._regions, restored)
            )
        )

    def adopt(self, restored: RestoredCheckpoint, located: Iterable[LocatedPartition]) -> None:
        """Counts as finished what was done before, before anything has begun."""
        holders = {
            (KeptOutput(one.edge_id, one.producer.subtask), one.producer.attempt): (
                one.taskmanager_id
            )
            for one in located
        }
        done = adopted(self._regions, restored, holders.keys())
        for subtask, number in done.items():
            held = {
                partition: holder
                for (partition, attempt), holder in holders.items()
                if partition.producer == subtask and attempt == number
            }
            holder = next(iter(held.values()), "")
            key = AttemptKey(subtask.vertex, subtask.subtask_index, number)
            attempt = ExecutionAttempt(key, AttemptState.FINISHED, holder)
            self._graph.adopt(attempt)
            self._partitions.adopt(attempt, held)
            self.tie(subtask)
