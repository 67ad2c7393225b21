"""What the JobManager needs to know of a job graph: its shape, not its content.

The graph itself stays protobuf and travels to the TaskManagers unread; the machines work on this
plan, which ``jobmanager/rpc/graph_convert.py`` derives from it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Partitioning(enum.Enum):
    """How the rows of an edge are spread over the consumers."""

    FORWARD = "forward"
    HASH = "hash"
    REBALANCE = "rebalance"
    RESCALE = "rescale"
    BROADCAST = "broadcast"


class Exchange(enum.Enum):
    """What becomes of the rows of an edge: Flink's result partition types.

    PIPELINED rows are gone when they are read. BLOCKING ones are complete before they are read, and CACHING
    ones kept since the latest completed checkpoint while they are: both can be read again, and end a
    region. CACHING_MEMORY keeps what fits into memory.
    """

    PIPELINED = "pipelined"
    BLOCKING = "blocking"
    CACHING = "caching"
    CACHING_MEMORY = "caching-memory"


@dataclass(frozen=True, slots=True)
class VertexPlan:
    """One vertex.

    Attributes:
        slot_group: subtasks of vertices of one group share slots.
        source_uids: uids of the source operators in it; splits are assigned per uid.
        colocation_group: subtasks of equal index in one group are restarted together; "" = none.
        commits_output: checkpoints, where there are any, make visible what it writes.
        allows_rivals: two attempts of a subtask may run at the same time.
        pre_aggregates: what it sends depends on where savepoints were taken.
    """

    id: str
    parallelism: int
    slot_group: str = "default"
    source_uids: tuple[str, ...] = ()
    colocation_group: str = ""
    commits_output: bool = False
    allows_rivals: bool = False
    pre_aggregates: bool = False


@dataclass(frozen=True, slots=True)
class EdgePlan:
    """One edge; ``source`` and ``target`` are vertex ids.

    Attributes:
        target: "" = nobody in the job reads it: it is blocking, and outlives the job.
        is_deterministic: the producer sends the same rows again after a restart, in any order, as long as
            it gets the same rows over the kept edges that it and its region read.
        is_reproducible: ... and in the same order, as long as those come in the same order too.
        load_first: the target reads it to its end before it reads any other.
    """

    id: str
    source: str
    target: str
    partitioning: Partitioning
    exchange: Exchange = Exchange.PIPELINED
    is_deterministic: bool = False
    is_reproducible: bool = False
    load_first: bool = False

    @property
    def is_persisted(self) -> bool:
        """True where its partitions outlive the job."""
        return not self.target

    @property
    def may_be_shared(self) -> bool:
        """True where what is complete may lie on shared storage: it is read afterwards only."""
        return self.exchange is Exchange.BLOCKING


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The shape of a job; vertices in topological order.

    Attributes:
        is_batch: it runs in batch mode.
    """

    vertices: tuple[VertexPlan, ...]
    edges: tuple[EdgePlan, ...] = ()
    is_batch: bool = False

    @property
    def loading(self) -> frozenset[str]:
        """The vertices that read an input to its end before they read any other."""
        return frozenset(edge.target for edge in self.edges if edge.load_first)

    def vertex(self, vertex_id: str) -> VertexPlan:
        """The vertex of this id."""
        return next(vertex for vertex in self.vertices if vertex.id == vertex_id)

    def has_edge(self, edge_id: str, target: str) -> bool:
        """Whether an edge of this id leads to a vertex."""
        return any(edge.id == edge_id and edge.target == target for edge in self.edges)


def plan_problem(plan: JobPlan) -> str | None:
    """What makes the plan impossible to run, in the user's words; None = nothing.

    Checks what deployment relies on; what operators rely on is checked by ``penstock.graph.job_graph.validate``.
    """
    if not plan.vertices:
        return "the job has no operators: add a source and a sink"
    ids = [vertex.id for vertex in plan.vertices]
    if len(set(ids)) != len(ids):
        return f"vertex ids are not unique: {', '.join(ids)}"
    for vertex in plan.vertices:
        if vertex.parallelism < 1:
            return f"vertex {vertex.id}: parallelism {vertex.parallelism} must be at least 1"
    edge_ids = [edge.id for edge in plan.edges]
    if len(set(edge_ids)) != len(edge_ids):
        return f"edge ids are not unique: {', '.join(edge_ids)}"
    place = {vertex_id: index for index, vertex_id in enumerate(ids)}
    for edge in plan.edges:
        for end in (edge.source,) if edge.is_persisted else (edge.source, edge.target):
            if end not in place:
                return f"edge {edge.id} names the unknown vertex {end!r}"
        if edge.is_persisted:
            continue
        if place[edge.source] >= place[edge.target]:
            return (
                f"edge {edge.id} leads from {edge.source} back to {edge.target}: the graph must be "
                "free of cycles and its vertices in topological order"
            )
        source, target = plan.vertex(edge.source), plan.vertex(edge.target)
        if edge.partitioning is Partitioning.FORWARD and source.parallelism != target.parallelism:
            return (
                f"edge {edge.id} is forward, but {source.id} has parallelism {source.parallelism} "
                f"and {target.id} {target.parallelism}: make them equal or rebalance"
            )
    return None
