"""Whether the rows of an exchange would come again after a restart of their producer, and if not, why.

An exchange is *deterministic* when each of its subpartitions gets the same rows again, whatever their
order, and *reproducible* when it gets them in the same order: only then can a consumer go on where it is.
The producer restarts with its region, so what it reads over pipelined exchanges is made again; what it
reads over kept ones is given: the same rows, in the same order per channel, whatever made them.

Order is lost where a subtask reads several channels, and in operators that give out results when
watermarks arrive. How rows are cut into batches is never the same; so whatever depends on it (the partial
phase of a running aggregation, dealing rows out in turn) is not even deterministic. The partial phase of windows
can go by the rows themselves instead of by watermarks, where these follow from the rows it reads: event time begins
in its chain, and every row from there on comes to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.graph.exchanges import keeps_rows
from penstock.graph.operator_checks import is_partial, late_tag, window_of
from penstock.pb import graph_pb2

_ROUND_ROBIN = (graph_pb2.PARTITIONING_REBALANCE, graph_pb2.PARTITIONING_RESCALE)
_WITH_TIMERS = (
    graph_pb2.PROCESS_KIND_KEYED,
    graph_pb2.PROCESS_KIND_KEYED_BROADCAST,
    graph_pb2.PROCESS_KIND_KEYED_CO,
)
_ROW_BY_ROW = (graph_pb2.ROW_FUNCTION_KIND_MAP, graph_pb2.ROW_FUNCTION_KIND_KEY)


@dataclass(frozen=True, slots=True)
class Repeatability:
    """What is known of rows that are made again.

    Attributes:
        difference: why they may be others, "" = they are the same.
        cut: why they may be grouped otherwise, although the operator behind makes the same of them;
            "" = they are not.
        reordering: why they may come in another order, "" = in the same.
        out_of_orderness_ms: every watermark among them is below the largest event time of the rows before it minus
            this; None = that is not known.
        unbounded: why it is not.
    """

    difference: str = ""
    cut: str = ""
    reordering: str = ""
    out_of_orderness_ms: int | None = None
    unbounded: str = "event time begins in front of another exchange"

    @property
    def is_deterministic(self) -> bool:
        """The same rows come again, in any order."""
        return not self.difference and not self.cut

    @property
    def is_reproducible(self) -> bool:
        """The same rows come again in the same order."""
        return self.is_deterministic and not self.reordering

    @property
    def why_not_reproducible(self) -> str:
        """In the user's words; "" = it is."""
        return self.difference or self.cut or self.reordering


@dataclass(frozen=True, slots=True)
class VertexInput:
    """One edge that a vertex reads.

    Attributes:
        rows: what ``on_edge`` says of it.
        is_kept: its rows can be read again.
        channels: at most how many of its channels one subtask reads.
    """

    rows: Repeatability
    is_kept: bool
    channels: int


def into_vertex(head_name: str, inputs: Sequence[VertexInput]) -> Repeatability:
    """What comes in at the head of a vertex.

    Args:
        head_name: of the first operator.
        inputs: its edges; none for sources.
    """
    made_again = [given.rows for given in inputs if not given.is_kept]
    difference = next((rows.difference for rows in made_again if rows.difference), "")
    cut = next((rows.cut for rows in made_again if rows.cut), "")
    if sum(given.channels for given in inputs) > 1:
        reordering = f"the subtasks of {head_name!r} have several input channels"
    else:
        reordering = next((rows.reordering for rows in made_again), "")
    return Repeatability(difference, cut, reordering)


def after_operator(
    operator: graph_pb2.Operator, given: Repeatability, tag: str = ""
) -> Repeatability:
    """What an operator makes of its input.

    Args:
        tag: which of its outputs, "" = the main one.
    """
    if is_partial(operator):
        return replace(given, cut=_own_cut(operator, given) or given.cut)
    bound_ms, unbounded = _watermarks(operator, given)
    return Repeatability(
        difference=given.difference or _own_difference(operator, tag),
        reordering=given.reordering or _own_reordering(operator),
        out_of_orderness_ms=bound_ms,
        unbounded=unbounded,
    )


def on_edge(
    rows: Repeatability,
    partitioning: graph_pb2.Partitioning.ValueType,
    producers: int,
    consumers: int,
) -> Repeatability:
    """What the subpartitions of an edge get of what its producer makes.

    Args:
        rows: of the output that feeds the edge.
        producers: parallelism of the producer.
        consumers: parallelism of the consumer.
    """
    if partitioning not in _ROUND_ROBIN or rows.difference:
        return rows
    is_spread = consumers > (producers if partitioning == graph_pb2.PARTITIONING_RESCALE else 1)
    if not is_spread:
        return rows
    return replace(
        rows, difference="how rows are dealt out in turn depends on how they are cut into batches"
    )


def channels_read(
    partitioning: graph_pb2.Partitioning.ValueType, producers: int, consumers: int
) -> int:
    """At most how many channels of an edge one of its consumers reads."""
    if partitioning == graph_pb2.PARTITIONING_FORWARD:
        return 1
    if partitioning == graph_pb2.PARTITIONING_RESCALE:
        return -(-producers // consumers)
    return producers


def repeatability_of_edges(graph: graph_pb2.JobGraph) -> dict[str, Repeatability]:
    """Edge id -> what is known of its rows.

    Args:
        graph: a valid one; vertices in topological order.
    """
    found: dict[str, Repeatability] = {}
    parallelism = {vertex.id: vertex.parallelism for vertex in graph.vertices}
    for vertex in graph.vertices:
        incoming = [edge for edge in graph.edges if edge.target_vertex == vertex.id]
        inputs = [
            VertexInput(
                found[edge.id],
                keeps_rows(edge.partition_type),
                channels_read(
                    edge.partitioning, parallelism[edge.source_vertex], vertex.parallelism
                ),
            )
            for edge in incoming
        ]
        given = [into_vertex(vertex.operators[0].name, inputs)]
        for operator in vertex.operators[1:]:
            index, tag = operator.input.operator_index, operator.input.side_tag
            given.append(after_operator(vertex.operators[index], given[index], tag))
        for edge in graph.edges:
            if edge.source_vertex == vertex.id:
                index = edge.source_output.operator_index
                producer = vertex.operators[index]
                rows = after_operator(producer, given[index], edge.source_output.side_tag)
                consumers = parallelism[edge.target_vertex]
                found[edge.id] = on_edge(rows, edge.partitioning, vertex.parallelism, consumers)
    return found


def _own_difference(operator: graph_pb2.Operator, tag: str) -> str:
    name = repr(operator.name)
    if tag and tag == late_tag(operator):
        return f"which rows are late for {name} depends on when watermarks arrive"
    if operator.deterministic:
        return ""
    match operator.WhichOneof("spec"):
        case "source" if operator.source.WhichOneof("kind") == "socket":
            return f"what {name} reads from a socket cannot be read again"
        case "source" if operator.source.WhichOneof("kind") == "custom":
            return _undeclared(name, operator.source.custom)
        case "source" if operator.source.WhichOneof("kind") == "spark":
            return _undeclared(name, operator.source.spark.function)
        case "spark":
            return _undeclared(name, operator.spark.function)
        case "row_function":
            return _undeclared(name, operator.row_function.function)
        case "batch_function":
            return _undeclared(name, operator.batch_function.function)
        case "process":
            return _undeclared(name, operator.process.function)
        case "running_aggregate":
            return f"{name} gives out its values once per key and batch"
        case "window_aggregate" | "window_function" | "join":
            return _window_difference(operator, name)
        case _:
            return f"{name} was declared .deterministic(False)"


def _own_cut(partial: graph_pb2.Operator, given: Repeatability) -> str:
    what = f"the pre-aggregation for {partial.name!r} depends on"
    if partial.WhichOneof("spec") == "running_aggregate":
        return f"{what} how rows are cut into batches"
    if not partial.window_aggregate.HasField("out_of_orderness_ms"):
        return f"{what} when watermarks arrive" + (given.unbounded and f": {given.unbounded}")
    return given.reordering and f"{what} the order of rows: {given.reordering}"


def _watermarks(operator: graph_pb2.Operator, given: Repeatability) -> tuple[int | None, str]:
    """``out_of_orderness_ms`` and ``unbounded`` behind an operator."""
    name = repr(operator.name)
    if operator.WhichOneof("spec") == "event_time":
        if operator.event_time.in_any_order:
            return None, f"{name} takes rows in any order, as all do in batch mode"
        if operator.event_time.idle_timeout_ms:
            return None, f"{name} has an idle timeout"
        return operator.event_time.out_of_orderness_ms, ""
    if given.out_of_orderness_ms is not None and not _keeps_every_row(operator):
        return None, f"{name} may leave out rows behind with_event_time"
    return given.out_of_orderness_ms, given.unbounded


def _keeps_every_row(operator: graph_pb2.Operator) -> bool:
    """Whether each row becomes one row of the same event time."""
    if operator.on_error.action != graph_pb2.ERROR_ACTION_FAIL:
        return False
    kind = operator.WhichOneof("spec")
    if kind == "row_function":
        return operator.row_function.kind in _ROW_BY_ROW
    return kind in ("project", "pass")


def _undeclared(name: str, function: graph_pb2.Function) -> str:
    return (
        f"{name} runs Python code ({function.display_name}) that was not declared "
        ".deterministic(True)"
    )


def _window_difference(operator: graph_pb2.Operator, name: str) -> str:
    window = window_of(operator)
    if window is not None and window.kind == graph_pb2.WINDOW_KIND_COUNT:
        return f"which rows {name} counts together depends on their order, unless it was declared .deterministic(True)"
    if window is not None and window.time == graph_pb2.TIME_DOMAIN_PROCESSING:
        return f"the windows of {name} depend on the machine's clock"
    return (
        f"which rows are late for {name} depends on when watermarks arrive, unless it was declared "
        ".deterministic(True)"
    )


def _own_reordering(operator: graph_pb2.Operator) -> str:
    name = repr(operator.name)
    match operator.WhichOneof("spec"):
        case "window_aggregate" | "window_function" | "running_aggregate" | "join":
            return f"the results of {name} have no fixed order"
        case "process" if operator.process.kind in _WITH_TIMERS:
            return f"the timers of {name} fire when watermarks arrive"
        case "spark":
            return f"Spark gives the rows of {name} out in no fixed order"
        case "source" if operator.source.WhichOneof("kind") == "spark":
            return f"Spark gives the rows of {name} out in no fixed order"
        case "source" if operator.source.HasField("custom") and not operator.source.bounded:
            return f"the subtasks of {name} may read several splits in turn"
        case "source" if operator.source.persisted.partition_count > 1:
            return f"the subtasks of {name} may read several partitions"
        case _:
            return ""
