"""Which subtasks are restarted after a failure.

The rules, applied until nothing is added:

1. The regions of the failed subtasks are restarted.
2. A region to restart reads its kept partitions again: where one is not available, or a consumer has blamed
   it, the region of its producer is restarted as well (backtracking).
3. What a restarted region sends again may differ from what it has sent before, so the regions that read it are
   restarted as well, finished ones too, unless the edge says otherwise:

   - a caching edge that is reproducible: consumers read on from the new attempt where they are;
   - a blocking edge that is deterministic: consumers that have finished have read the same, and those that
     have not can read the old partition to its end, if all of it that comes from restarted producers is still
     there.

   A region stays if every edge over which it reads from restarted regions protects it.

A failure of the whole job is one of all its regions but ``kept_stages``.

A region of which nothing has been started is left alone, and so nothing is passed on by it. Each rule only ever
adds regions, so the result is the least set that they allow, whatever the order.

The flags of an edge hold as long as its producer's region reads the same again over its own kept edges: where
that is made anew as well, over an edge that promises less, the region's own promises are void. A restarted producer's partitions on caching edges are gone with its process's log whether
they were available or not; nobody waits for them, since their consumers are either protected, and need the new
ones, or restarted, and read the new ones.

Source: FLIP-1 phase 2 and Flink's RestartPipelinedRegionFailoverStrategy, which restarts all consumers; as a fixpoint
with a visited set, since the proposal's recursion does not end on a diamond.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jobmanager.failover.channel_groups import ChannelGroup
from jobmanager.failover.regions import KeptOutput, Region, RegionGraph
from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.graph.job_plan import Exchange, JobPlan

_SHOWN_MAX = 4


class FailoverStrategyName(enum.Enum):
    """How much a failure restarts, as the configuration names it."""

    FULL = "full"
    REGION = "region"
    INDIVIDUAL = "individual"


@dataclass(frozen=True, slots=True)
class FailoverView:
    """What the decision depends on, as it is when the failure is handled.

    Attributes:
        started: subtasks with an attempt that was deployed, whether it runs, has finished or has failed.
        finished: those whose current attempt has finished.
        is_available: whether the data of the producer's current attempt can (still) be read by a consumer that
            begins where its checkpoint says, or at the start without one.
        not_repeated: vertices of which a restarted subtask does not send the same again, whatever their edges promise.
    """

    started: frozenset[SubtaskId]
    finished: frozenset[SubtaskId]
    is_available: Callable[[KeptOutput], bool]
    not_repeated: frozenset[str] = frozenset()


def strategy_problem(name: FailoverStrategyName, regions: RegionGraph) -> str | None:
    """Why a job cannot be run with this strategy, in the user's words; None = it can.

    ``individual`` restarts a failed subtask alone: it is refused where another one shares its region.
    """
    if name is not FailoverStrategyName.INDIVIDUAL:
        return None
    shared = [region for region in regions.regions if len(region.subtasks) > 1]
    if not shared:
        return None
    together = ", ".join(str(subtask) for subtask in sorted(shared[0].subtasks)[:_SHOWN_MAX])
    if len(shared[0].subtasks) > _SHOWN_MAX:
        together += ", ..."
    return (
        f"failover strategy 'individual' restarts a failed subtask alone, but {len(shared)} of the job's "
        f"{len(regions.regions)} regions hold several, which can only be restarted together (such as "
        f"{together}), because of {_what_joins(regions.plan)}: use 'region', or exchanges that keep their "
        "rows (blocking, caching) and no colocation"
    )


def _what_joins(plan: JobPlan) -> str:
    reasons = [
        f"the pipelined edge {edge.id} from {edge.source} to {edge.target}"
        for edge in plan.edges
        if edge.exchange is Exchange.PIPELINED
    ]
    members: dict[str, list[str]] = {}
    for vertex in plan.vertices:
        if vertex.colocation_group:
            members.setdefault(vertex.colocation_group, []).append(vertex.id)
    reasons += [
        f"the colocation group {group!r} of {', '.join(vertices)}"
        for group, vertices in members.items()
        if len(vertices) > 1
    ]
    return ", ".join(reasons)


def tasks_to_restart(
    name: FailoverStrategyName,
    regions: RegionGraph,
    failed: Iterable[SubtaskId],
    missing: Iterable[KeptOutput],
    view: FailoverView,
) -> frozenset[SubtaskId]:
    """The subtasks whose current attempts are to end and to be replaced.

    Args:
        name: ``INDIVIDUAL`` needs a job without ``strategy_problem``; it then decides as ``REGION``.
        failed: subtasks whose attempts have failed.
        missing: partitions that failed consumers could not read.
        view: the rest of what is known.

    Returns:
        Subtasks that have been started, and with each one all of its region that have been.

    Example: the reader of a lost blocking partition fails; who has written it comes again as well.
        >>> from jobmanager.graph.job_plan import EdgePlan, Partitioning, VertexPlan
        >>> vertices = (VertexPlan("write", parallelism=2), VertexPlan("read", parallelism=1))
        >>> edge = EdgePlan("e", "write", "read", Partitioning.REBALANCE, Exchange.BLOCKING)
        >>> writers, reader = [SubtaskId("write", 0), SubtaskId("write", 1)], SubtaskId("read", 0)
        >>> everyone = frozenset([*writers, reader])
        >>> view = FailoverView(everyone, frozenset(writers), is_available=lambda partition: True)
        >>> lost = KeptOutput("e", writers[1])
        >>> regions = RegionGraph(JobPlan(vertices, (edge,)))
        >>> again = tasks_to_restart(FailoverStrategyName.REGION, regions, [reader], [lost], view)
        >>> sorted(map(str, again))
        ['read/0', 'write/1']
    """
    if name is FailoverStrategyName.FULL:
        return view.started
    restart = _Backtracking(regions, frozenset(missing), view).closure(failed)
    return frozenset(
        subtask for region in restart for subtask in region.subtasks if subtask in view.started
    )


def kept_stages(regions: RegionGraph, view: FailoverView) -> frozenset[SubtaskId]:
    """Subtasks that a failure of the whole job is none of: all their work is done, and others read it from blocking
    exchanges, of which no checkpoint holds what they have made.
    """
    return frozenset(
        subtask
        for region in regions.regions
        if region.subtasks <= view.finished
        and {g.edge.exchange for s in region.subtasks for g in regions.written_by(s)}
        == {Exchange.BLOCKING}
        for subtask in region.subtasks
    )


class _Changed(enum.Enum):
    """What a restarted region may get otherwise than before, and so give out otherwise."""

    ROWS = "other rows"
    ORDER = "rows in another order"


class _Backtracking:
    """The closure under the rules.

    Works on groups of channels: all consumers of a group read the same producers, so each group is asked at most
    once for its unavailable producers, restarts its consumers at most once, and changes what they read once.
    What an edge promises holds as long as its producer's region reads the same again.
    """

    def __init__(
        self, regions: RegionGraph, missing: frozenset[KeptOutput], view: FailoverView
    ) -> None:
        self._regions = regions
        self._missing = missing
        self._view = view
        self._started = {regions.region_of(subtask).index for subtask in view.started}
        self._finished = {
            region.index for region in regions.regions if region.subtasks <= view.finished
        }
        self._restart: dict[int, Region] = {}
        self._pending: list[Region] = []
        self._read_again: set[ChannelGroup] = set()
        self._passed_on: set[tuple[ChannelGroup, bool]] = set()
        self._changed_by: dict[tuple[ChannelGroup, _Changed], list[int]] = {}
        """The first two regions that write in a group and may do so otherwise than before: no more are
        needed to know, for each region, whether another one does."""
        self._reads_changed: set[tuple[int, _Changed]] = set()

    def closure(self, failed: Iterable[SubtaskId]) -> list[Region]:
        for subtask in sorted(failed):
            self._add(self._regions.region_of(subtask))
        while self._pending:
            region = self._pending.pop()
            subtasks = self._regions.subtasks_of(region)
            for group in [group for s in subtasks for group in self._regions.read_by(s)]:
                self._backtrack(group)
                for change in _Changed:
                    if self._is_changed_for(region, group, change):
                        self._reads_changed.add((region.index, change))
            for subtask in subtasks:
                for group in self._regions.written_by(subtask):
                    self._change(group, region)
                    self._pass_on(group, subtask, region)
        return list(self._restart.values())

    def _change(self, group: ChannelGroup, producer: Region) -> None:
        """Notes what the consumers that are restarted read otherwise, now that this producer is."""
        promised = {
            _Changed.ROWS: group.edge.is_deterministic and self._is_repeated(group),
            _Changed.ORDER: group.edge.is_reproducible and self._is_repeated(group),
        }
        for change, is_promised in promised.items():
            is_kept = is_promised and (producer.index, change) not in self._reads_changed
            changed_by = self._changed_by.setdefault((group, change), [])
            if is_kept or producer.index in changed_by or len(changed_by) > 1:
                continue
            changed_by.append(producer.index)
            for consumer in group.consumers:
                region = self._regions.region_of(consumer)
                is_new = (region.index, change) not in self._reads_changed
                if (
                    is_new
                    and region.index in self._restart
                    and self._is_changed_for(region, group, change)
                ):
                    self._reads_changed.add((region.index, change))
                    self._pending.append(region)

    def _is_changed_for(self, reader: Region, group: ChannelGroup, change: _Changed) -> bool:
        """Whether another region that writes in the group may do so otherwise than before."""
        return any(index != reader.index for index in self._changed_by.get((group, change), ()))

    def _add(self, region: Region) -> None:
        if region.index in self._started and region.index not in self._restart:
            self._restart[region.index] = region
            self._pending.append(region)

    def _backtrack(self, group: ChannelGroup) -> None:
        if group in self._read_again:
            return
        self._read_again.add(group)
        for producer in group.producers:
            if not self._can_be_read(group, producer):
                self._add(self._regions.region_of(producer))

    def _pass_on(self, group: ChannelGroup, producer: SubtaskId, made_by: Region) -> None:
        edge = group.edge
        spares_finished = (
            edge.exchange is Exchange.BLOCKING
            and edge.is_deterministic
            and self._is_repeated(group)
            and (made_by.index, _Changed.ROWS) not in self._reads_changed
        )
        if (group, spares_finished) in self._passed_on:
            return
        if self._is_protected(group, producer, made_by):
            return
        self._passed_on.add((group, spares_finished))
        for consumer in group.consumers:
            region = self._regions.region_of(consumer)
            if not (spares_finished and region.index in self._finished):
                self._add(region)

    def _is_protected(self, group: ChannelGroup, producer: SubtaskId, made_by: Region) -> bool:
        """Whether all consumers can stay, as far as this restarted producer is concerned."""
        edge = group.edge
        if not self._is_repeated(group):
            return False
        if edge.exchange is Exchange.BLOCKING:
            same_rows = (made_by.index, _Changed.ROWS) not in self._reads_changed
            return edge.is_deterministic and same_rows and self._can_be_read(group, producer)
        return edge.is_reproducible and (made_by.index, _Changed.ORDER) not in self._reads_changed

    def _is_repeated(self, group: ChannelGroup) -> bool:
        return group.edge.source not in self._view.not_repeated

    def _can_be_read(self, group: ChannelGroup, producer: SubtaskId) -> bool:
        partition = KeptOutput(group.edge.id, producer)
        return partition not in self._missing and self._view.is_available(partition)
