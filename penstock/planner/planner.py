"""From logical nodes to the job graph: parallelism, exchanges, chains, narrowing, pre-aggregation.

Operators are placed in order of their making, inputs first. An operator joins the chain it reads from
where rows need neither move nor be kept (one input, forward, equal parallelism and slot group); else it starts a vertex
with an edge from each input. In front of an exchange rows are narrowed to what is needed behind it,
and aggregated per batch where the aggregates allow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from penstock.config import Configuration
from penstock.errors import JobRejected
from penstock.graph.determinism import is_deterministic
from penstock.graph.exchanges import BLOCKING, CACHING, CACHING_MEMORY, PIPELINED
from penstock.graph.logical import (
    AssignEventTime,
    Node,
    NodeInput,
    Process,
    Properties,
    ReadSource,
    RunningAggregate,
    SparkStage,
    Union,
    WindowAggregate,
    WriteSink,
    input_schema,
    is_spark,
)
from penstock.graph.operator_checks import NARROWING, is_spark_operator
from penstock.graph.window_schemas import can_pre_aggregate
from penstock.pb import graph_pb2
from penstock.planner.draft import (
    FORWARD,
    Draft,
    DraftInput,
    DraftOperator,
    DraftOutput,
    schema_of_input,
)
from penstock.planner.exchange_choice import (
    AS_USUAL,
    OF_SPARK,
    exchange_beside_spark,
    exchange_type,
    given_by_spark,
    read_by_spark,
    wanted_exchange,
)
from penstock.planner.history import Histories, set_down
from penstock.planner.in_place import FilesInPlace
from penstock.planner.needs import Need, find_needs, need_of, pruned
from penstock.planner.specs import operator_proto, select_spec, specify, with_event_time
from penstock.planner.uids import assign_uids, derived_uid
from penstock.planner.update_keys import UpdateKeys
from penstock.planner.ways import Read, Way
from penstock.rows.schema import EVENT_TIME

DEFAULT_SLOT_GROUP = "default"
SPARK_SLOT_GROUP = "spark"
"""What a job does on Spark shares a slot, and so a session."""

_HASH = graph_pb2.PARTITIONING_HASH
_REBALANCE = graph_pb2.PARTITIONING_REBALANCE
_WITH_BROADCAST = (
    graph_pb2.PROCESS_KIND_BROADCAST,
    graph_pb2.PROCESS_KIND_KEYED_BROADCAST,
)
_READ_WHILE_KEPT = (CACHING, CACHING_MEMORY)


class Planner:
    """Plans one job.

    Args:
        nodes: the job's nodes, inputs first (``logical.reachable``).
    """

    def __init__(self, nodes: Sequence[Node], config: Configuration) -> None:
        self._nodes = nodes
        self._config = config
        self._needs = find_needs(nodes)
        self._uids = assign_uids(nodes)
        self._is_batch = config.runtime_mode == "batch"
        self._histories = Histories(nodes, is_batch=self._is_batch)
        self._update_keys = UpdateKeys(nodes)
        self._see_through = _unions_to_see_through(nodes, self._histories)
        self._in_place = FilesInPlace(
            nodes, has_chains=config.pipeline_operator_chaining and self._is_batch
        )
        self._draft = Draft(
            chaining=config.pipeline_operator_chaining,
            default_max_parallelism=config.pipeline_max_parallelism,
        )
        self._operators: dict[int, DraftOperator] = {}
        self._narrowed: dict[tuple[int, str, tuple[str, ...]], DraftOutput] = {}
        self._partials: dict[str, DraftOutput] = {}
        self._set_down: dict[tuple[int, str], DraftOutput] = {}

    def plan(self) -> graph_pb2.JobGraph:
        """Vertices and edges.

        Raises:
            JobRejected: a function cannot be pickled, or properties contradict each other.
        """
        for node in self._nodes:
            if node.index not in self._see_through and not self._in_place.is_left_out(node):
                self._operators[node.index] = self._place(node)
        return self._draft.to_proto(is_batch=self._is_batch)

    # ------------------------------------------------------------ placing

    def _place(self, node: Node) -> DraftOperator:
        is_union = isinstance(node.operation, Union)
        reads = [
            Read(output, way, i, 0 if is_union else i)
            for i, source in enumerate(node.inputs)
            if not self._in_place.reads(node, i)
            for output, way in self._outputs(source, self._way(node, source))
        ]
        parallelism = self._parallelism(node, reads)
        group = SPARK_SLOT_GROUP if self._in_place.writes(node) else _slot_group(node, reads)
        most = node.properties.max_parallelism or _key_groups_of_placed(reads, parallelism)
        together = node.properties.colocation_group
        inputs = [self._draft_input(node, read, parallelism, most) for read in reads]
        chained = self._draft.can_chain(inputs, parallelism, group, most, together)
        if not chained:
            stay = [
                given.source.operator.vertex
                for read, given in zip(reads, inputs, strict=True)
                if read.routing.is_placed and given.partitioning == FORWARD
            ]
            most = self._draft.with_equal_key_groups(stay, most) if stay else most
        inputs = [
            self._prepare(node, read, given, _routed_by(inputs, given), chained=chained)
            for read, given in zip(reads, inputs, strict=True)
        ]
        given = schema_of_input(inputs, 0) or pa.schema([])
        proto = operator_proto(
            node,
            self._uids[node.index],
            deterministic=is_deterministic(node, whole_job=self._config.pipeline_deterministic),
        )
        output = specify(proto, node, given, self._needs[node.index, ""])
        if inputs:
            of_stream = input_schema(node.inputs[0]).names
            proto.unread_columns.extend(name for name in of_stream if name not in given.names)
            proto.stream_columns.extend(of_stream if proto.unread_columns else ())
        inputs = self._complete(node, proto, inputs)
        inputs = [self._pre_aggregated(node, proto, each) for each in inputs]
        if chained:
            self._in_place.give_output(node, proto, inputs[0].source.operator.proto)
            operator = self._draft.append(
                proto,
                inputs[0].source,
                output,
                max_parallelism=most,
                colocation_group=together,
            )
        else:
            operator = self._draft.start_vertex(
                proto,
                inputs,
                output,
                parallelism=parallelism,
                slot_group=group,
                max_parallelism=most,
                colocation_group=together,
            )
        if node.properties.max_parallelism is not None:
            operator.vertex.is_max_explicit = True
        return operator

    def _complete(
        self, node: Node, proto: graph_pb2.Operator, inputs: list[DraftInput]
    ) -> list[DraftInput]:
        """Says of an operator what follows from where its rows come from; returns how it reads them."""
        if isinstance(node.operation, SparkStage):
            return self._given_to_spark(node, proto, inputs)
        if isinstance(node.operation, AssignEventTime):
            self._histories.check_order(node)
            is_unordered = self._is_batch or self._histories.comes_from_spark(node.inputs[0])
            proto.event_time.in_any_order = is_unordered
        return inputs

    def _way(self, node: Node, source: NodeInput, behind: Way | None = None) -> Way:
        """How an operator, or a union on the way to it, reads one of its inputs.

        Args:
            behind: what counts behind the union.
        """
        wanted = wanted_exchange(node, source)
        is_first = self._histories.is_first(node, source)
        keys = self._update_keys.of(source)
        if behind is None:
            return Way(source, wanted, is_first=is_first, keys_of_updates=keys)
        is_rows = behind.source.is_rows
        return Way(
            replace(source, is_rows=source.is_rows or is_rows),
            wanted if behind.exchange is None else behind.exchange,
            behind.routing,
            behind.is_first or is_first,
            () if is_rows else keys or behind.keys_of_updates,
        )

    def _outputs(self, source: NodeInput, way: Way) -> list[tuple[DraftOutput, Way]]:
        """What an input comes to when unions without a vertex are seen through."""
        way = way if way.routing.is_asked else replace(way, routing=source.routing)
        if source.node.index in self._see_through:
            return [
                output
                for each in source.node.inputs
                for output in self._outputs(each, self._way(source.node, each, way))
            ]
        output = DraftOutput(self._operators[source.node.index], source.tag)
        is_of_spark = is_spark(source.node.operation)
        goes_first = way.is_first or (way.routing.load_first and is_of_spark and not self._is_batch)
        if goes_first and (is_of_spark or way.exchange == BLOCKING):
            return [(self._behind_exchange(source, output, way), self._released(way))]
        return [(output, way)]

    def _behind_exchange(self, source: NodeInput, output: DraftOutput, way: Way) -> DraftOutput:
        """Where the rows of a blocking exchange are that is read first."""
        key = (source.node.index, source.tag)
        if key not in self._set_down:
            is_said = way.exchange is not None
            self._set_down[key] = set_down(self._draft, output, self._config, is_said=is_said)
        return self._set_down[key]

    @staticmethod
    def _released(way: Way) -> Way:
        """How rows go on behind such an exchange."""
        return replace(way, exchange=None, routing=replace(way.routing, is_placed=False))

    def _parallelism(self, node: Node, reads: Sequence[Read]) -> int:
        wanted = node.properties.parallelism
        if is_spark(node.operation):
            if wanted not in (None, 1):
                raise JobRejected(
                    f"operator {node.name!r}: what runs on Spark is one task of Penstock, so its parallelism is "
                    f"1, not {wanted}: Spark splits the work itself (cores=, or its cluster)"
                )
            return 1
        if self._in_place.writes(node):
            return 1
        if _sees_all_rows(node):
            if wanted not in (None, 1):
                raise JobRejected(
                    f"operator {node.name!r}: without key_by, one subtask sees all rows, so its "
                    f"parallelism is 1, not {wanted}"
                )
            return 1
        if wanted is not None:
            return wanted
        if isinstance(node.operation, ReadSource) and node.operation.is_single:
            return 1
        if node.is_inserted and len(reads) == 1 and not reads[0].routing.is_asked:
            return reads[0].output.operator.vertex.parallelism
        return self._config.parallelism_default

    # ------------------------------------------------------------ in front of an operator

    def _draft_input(
        self, node: Node, read: Read, parallelism: int, max_parallelism: int | None
    ) -> DraftInput:
        partitioning, keys = read.routing.partitioning, read.routing.keys
        vertex = read.output.operator.vertex
        same = vertex.parallelism == parallelism
        if partitioning is None:
            kept = () if same or parallelism == 1 else read.way.keys_of_updates
            keys = kept if set(kept) <= set(read.output.schema.names) else ()
            if not (same or parallelism == 1 or kept):
                self._update_keys.check_order(node.name, read.way.source)
            partitioning = FORWARD if same else _HASH if keys else _REBALANCE
        elif read.routing.is_placed and same and vertex.max_parallelism in (None, max_parallelism):
            # A key's subtask follows from the number of key-groups.
            partitioning, keys = FORWARD, ()
        partition_type = exchange_type(partitioning, read.way.exchange, self._config)
        spill_format = AS_USUAL
        is_of_spark = is_spark_operator(read.output.operator.proto)
        if self._in_place.writes(node):
            partition_type = PIPELINED
        elif is_spark(node.operation) or is_of_spark:
            partition_type = exchange_beside_spark(node.name, read.way.exchange)
            if is_of_spark:
                spill_format = given_by_spark(read.output.schema, partitioning)
        return DraftInput(
            read.output,
            partitioning,
            keys,
            read.target_input,
            partition_type,
            is_said=read.way.exchange is not None,
            load_first=self._loads_first(node, read),
            spill_format=spill_format,
        )

    def _loads_first(self, node: Node, read: Read) -> bool:
        """Whether an input is read whole before the other ones."""
        if read.way.is_first:
            return True
        wanted, operation = read.routing.load_first, node.operation
        is_side = isinstance(operation, Process) and operation.kind in _WITH_BROADCAST
        if not is_side or read.target_input != 1:
            if wanted:
                raise JobRejected(
                    f"operator {node.name!r}: .broadcast(load_first=True) goes with .connect(...), where there is "
                    "another stream that waits: stream.connect(airports.broadcast(load_first=True)).process(...)"
                )
            return False
        return self._is_batch if wanted is None else wanted

    def _prepare(
        self, node: Node, read: Read, given: DraftInput, keys: frozenset[str], *, chained: bool
    ) -> DraftInput:
        """Leaves out columns that the operator does not need, where they would cost something.

        Args:
            keys: what the rows of this input of the operator are routed by, wherever they come from:
                they all have the same columns.
        """
        need = need_of(node, read.position, self._needs) | Need(keys)
        source = node.inputs[read.position]
        schema = with_event_time(pruned(input_schema(source), need), need.event_time)
        actual = given.source.schema
        is_disturbed = isinstance(node.operation, AssignEventTime) and EVENT_TIME in actual.names
        if schema.names == actual.names or (chained and not is_disturbed):
            return given
        if given.spill_format == OF_SPARK and source.node.index not in self._see_through:
            return given  # nothing is written, so there is nothing to be saved
        return replace(given, source=self._narrow(given.source, schema), spill_format=AS_USUAL)

    def _given_to_spark(
        self, node: Node, proto: graph_pb2.Operator, inputs: Sequence[DraftInput]
    ) -> list[DraftInput]:
        """What a stage reads, in files that Spark reads where there are such."""
        schemas = {each.target_input: each.source.schema for each in inputs}
        self._in_place.give_inputs(node, proto.spark, schemas)
        return [
            replace(each, spill_format=read_by_spark(each.source.schema, each.spill_format))
            for each in inputs
        ]

    def _narrow(self, output: DraftOutput, schema: pa.Schema) -> DraftOutput:
        key = (id(output.operator), output.tag, tuple(schema.names))
        if key not in self._narrowed:
            uid = derived_uid("narrow", output.operator.proto.uid, output.tag, *schema.names)
            proto = graph_pb2.Operator(
                uid=uid, uid_is_generated=True, name=NARROWING, deterministic=True
            )
            select_spec(proto, schema)
            self._narrowed[key] = DraftOutput(self._draft.append(proto, output, schema), "")
        return self._narrowed[key]

    def _pre_aggregated(
        self, node: Node, proto: graph_pb2.Operator, given: DraftInput
    ) -> DraftInput:
        """Puts the partial phase of an aggregation in front of its exchange."""
        operation = node.operation
        if not isinstance(operation, (WindowAggregate, RunningAggregate)):
            return given
        window = operation.window if isinstance(operation, WindowAggregate) else None
        bound_ms = None if window is None else _bound_to_repeat(given)
        if (
            self._config.pre_aggregation == "never"
            or (bound_ms is None and self._is_better_without(given))
            or given.partitioning != _HASH
            or not can_pre_aggregate(
                dict(operation.aggregates), given.source.schema, operation.keys, window
            )
        ):
            return given
        tag = [given.source.tag] if given.source.tag else []
        uid = derived_uid("pre_aggregate", proto.uid, given.source.operator.proto.uid, *tag)
        if uid in self._partials:  # a union has one of its inputs twice
            return replace(given, source=self._partials[uid])
        # It has the aggregation's name: what fails here is the user's aggregate.
        partial = graph_pb2.Operator(uid=uid, uid_is_generated=True, name=node.name)
        if window is None:
            proto.running_aggregate.phase = graph_pb2.AGGREGATION_PHASE_FINAL
            partial.running_aggregate.CopyFrom(proto.running_aggregate)
            partial.running_aggregate.phase = graph_pb2.AGGREGATION_PHASE_PARTIAL
        else:
            proto.window_aggregate.phase = graph_pb2.AGGREGATION_PHASE_FINAL
            partial.window_aggregate.CopyFrom(proto.window_aggregate)
            partial.window_aggregate.phase = graph_pb2.AGGREGATION_PHASE_PARTIAL
            if bound_ms is not None:
                partial.window_aggregate.out_of_orderness_ms = bound_ms
                partial.deterministic = True
        operator = self._draft.append(partial, given.source, given.source.schema)
        self._partials[uid] = DraftOutput(operator, "")
        return replace(given, source=self._partials[uid])

    def _is_better_without(self, given: DraftInput) -> bool:
        """Whether consumers can go on when their producer restarts, unless it pre-aggregates."""
        return self._config.pre_aggregation == "auto" and _lets_consumers_go_on(given)


def _lets_consumers_go_on(given: DraftInput) -> bool:
    kept = given.partition_type in _READ_WHILE_KEPT
    return kept and given.source.repeatability.is_reproducible


def _bound_to_repeat(given: DraftInput) -> int | None:
    """By what the partial phase of windows repeats itself, so that consumers can go on; None = nothing.

    Elsewhere it follows the watermarks, which are often behind what rows say: splits that were not read yet
    hold them back.
    """
    return given.source.repeatability.out_of_orderness_ms if _lets_consumers_go_on(given) else None


def _routed_by(inputs: Sequence[DraftInput], given: DraftInput) -> frozenset[str]:
    """The columns that rows of the same input of an operator are routed by."""
    same = (each for each in inputs if each.target_input == given.target_input)
    return frozenset(key for each in same for key in each.keys)


def _key_groups_of_placed(reads: Sequence[Read], parallelism: int) -> int | None:
    """Max-parallelism of the operator where its rows can stay where they lie by key; None = any."""
    placed = (read.output.operator.vertex for read in reads if read.routing.is_placed)
    return next(
        (v.max_parallelism for v in placed if v.max_parallelism and v.parallelism == parallelism),
        None,
    )


def _slot_group(node: Node, reads: Sequence[Read]) -> str:
    """The operator's own slot group, else the one all its inputs share; what Spark does is for itself."""
    if node.properties.slot_group:
        return node.properties.slot_group
    if is_spark(node.operation):
        return SPARK_SLOT_GROUP
    operators = [read.output.operator for read in reads]
    groups = {one.vertex.slot_group for one in operators if not is_spark_operator(one.proto)}
    return groups.pop() if len(groups) == 1 else DEFAULT_SLOT_GROUP


def _sees_all_rows(node: Node) -> bool:
    operation = node.operation
    if isinstance(operation, (ReadSource, WriteSink, Process)):
        return False
    return getattr(operation, "keys", None) == ()


def _unions_to_see_through(nodes: Sequence[Node], histories: Histories) -> frozenset[int]:
    """Unions that need no operator: nothing is set on them and their rows are routed only once."""
    readers: dict[int, list[Node]] = {}
    for node in nodes:
        for source in node.inputs:
            readers.setdefault(source.node.index, []).append(node)
    return frozenset(
        node.index
        for node in nodes
        if isinstance(node.operation, Union)
        and replace(node.properties, exchange=None) == Properties()
        and len(readers[node.index]) == 1
        and not histories.needs_operator(node, readers[node.index][0])
    )
