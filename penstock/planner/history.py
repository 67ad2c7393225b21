"""History, then live: which inputs of a union are read whole before the others, in streaming mode.

An input is *history* where all its rows come out of blocking exchanges, or out of Spark: they are complete before the
first of them is read. In a union with a stream that is none, what reads the union reads history first
(``planner.loading`` makes the others wait), so no checkpoint has to hold how far that was.

A blocking exchange leads into an operator of its own, which passes rows on (``set_down``). Once history has been read that
has finished: checkpoints say so, and nothing that is restored from one asks for the rows of the exchange again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.config import Configuration
from penstock.errors import JobRejected
from penstock.graph.exchanges import BLOCKING
from penstock.graph.logical import Node, NodeInput, SparkStage, Union, is_spark
from penstock.graph.operator_checks import is_spark_operator
from penstock.pb import graph_pb2
from penstock.planner.draft import FORWARD, Draft, DraftInput, DraftOutput
from penstock.planner.exchange_choice import AS_USUAL, given_by_spark
from penstock.planner.uids import derived_uid

HISTORY = "history"
"""Name of the operator behind a blocking exchange that is read first."""


class Histories:
    """What is history in a job.

    Args:
        nodes: the job's, inputs first.
        is_batch: it runs in batch mode, where nothing is read before anything else.
    """

    def __init__(self, nodes: Sequence[Node], *, is_batch: bool) -> None:
        self._whole: dict[int, bool] = {}
        self._has_first: dict[int, bool] = {}
        for node in nodes:
            self._whole[node.index] = bool(node.inputs) and all(map(self._is_history, node.inputs))
            is_open = isinstance(node.operation, Union) and node.properties.exchange is None
            self._has_first[node.index] = (is_open and not is_batch) and (
                len({self._is_history(given) for given in node.inputs}) > 1
                or any(self._has_first[given.node.index] for given in node.inputs)
            )

    def is_first(self, node: Node, given: NodeInput) -> bool:
        """Whether a union has an input read before others that it has."""
        others = not all(map(self._is_history, node.inputs))
        return self._has_first[node.index] and others and self._is_history(given)

    def needs_operator(self, union: Node, reader: Node) -> bool:
        """Whether the reader of a union cannot do its work: another input of it would have to wait as well."""
        is_alone = len(reader.inputs) == 1 and not isinstance(reader.operation, SparkStage)
        return self._has_first[union.index] and not (
            is_alone or isinstance(reader.operation, Union)
        )

    def comes_from_spark(self, given: NodeInput) -> bool:
        """Whether rows are in no order, since Spark has made them, and nothing has given them one."""
        return is_spark(given.node.operation) or (
            not isinstance(given.node.operation, Union)
            and len(given.node.inputs) == 1
            and self._whole[given.node.index]
            and self.comes_from_spark(given.node.inputs[0])
        )

    def check_order(self, node: Node) -> None:
        """Checks an operator that gives rows their event time.

        Raises:
            JobRejected: some of them come from Spark, in no order, and the others do not: the former would be late.
        """
        given = node.inputs[0]
        while len(given.node.inputs) == 1 and not self._whole[given.node.index]:
            given = given.node.inputs[0]
        if self._has_first[given.node.index] and any(map(self.comes_from_spark, _leaves(given))):
            raise JobRejected(
                f"operator {node.name!r}: it gives event time to the rows of a union of which some come from Spark, in no "
                "order, so that most of these would be late: call .with_event_time(...) on each of the streams, "
                "in front of .union(...)"
            )

    def _is_history(self, given: NodeInput) -> bool:
        node = given.node
        is_kept = not given.tag and node.properties.exchange == BLOCKING
        return is_kept or is_spark(node.operation) or self._whole[node.index]


def check_spark_history(nodes: Sequence[Node]) -> None:
    """Checks that what a job in streaming mode does on Spark is over before the first checkpoint.

    Raises:
        JobRejected: nothing waits for what an operator makes, or it is compiled as one of a batch job.
    """
    awaited = _read_first(nodes)
    for node in nodes:
        if not is_spark(node.operation):
            continue
        where = f"operator {node.name!r} runs on Spark, which takes whole inputs and gives whole results"
        if isinstance(node.operation, SparkStage) and node.operation.is_compiled:
            raise JobRejected(
                f"{where}; operators are compiled for it in batch mode only, since no row is late there: call "
                "env.set_runtime_mode('batch'), or make it a function: .spark(fn, schema=...)"
            )
        if node.index not in awaited:
            raise JobRejected(
                f"{where}: in streaming mode something has to wait for these, which is then read first: .union(...) "
                "with a stream that goes on from there, or stream.connect(table.broadcast(load_first=True)). A job "
                "that has neither runs with env.set_runtime_mode('batch')"
            )


def _read_first(nodes: Sequence[Node]) -> frozenset[int]:
    """The nodes that lead to something which reads them first, by index."""
    histories = Histories(nodes, is_batch=False)
    leading: set[int] = set()
    for node in reversed(nodes):
        for given in node.inputs:
            is_first = histories.is_first(node, given) or bool(given.routing.load_first)
            if is_first or node.index in leading:
                leading.add(given.node.index)
    return frozenset(leading)


def _leaves(given: NodeInput) -> Iterator[NodeInput]:
    """What unions come to, those among them seen through."""
    if not isinstance(given.node.operation, Union):
        yield given
        return
    for each in given.node.inputs:
        yield from _leaves(each)


def set_down(
    draft: Draft, output: DraftOutput, config: Configuration, *, is_said: bool
) -> DraftOutput:
    """The rows of a blocking exchange as an operator of its own passes them on.

    Args:
        draft: takes the operator.
        output: what the exchange keeps.
        is_said: the user has chosen its type.
    """
    vertex, proto = output.operator.vertex, output.operator.proto
    is_of_spark = is_spark_operator(proto)
    parallelism = config.parallelism_default if is_of_spark else vertex.parallelism
    same = parallelism == vertex.parallelism
    partitioning = FORWARD if same else graph_pb2.PARTITIONING_REBALANCE
    given = DraftInput(
        output,
        partitioning,
        partition_type=BLOCKING,
        is_said=is_said,
        spill_format=given_by_spark(output.schema, partitioning) if is_of_spark else AS_USUAL,
    )
    passing = graph_pb2.Operator(
        uid=derived_uid(HISTORY, proto.uid, output.tag),
        uid_is_generated=True,
        name=HISTORY,
        deterministic=True,
    )
    getattr(passing, "pass").SetInParent()  # a keyword in Python
    operator = draft.start_vertex(
        passing,
        [given],
        output.schema,
        parallelism=parallelism,
        slot_group="default" if is_of_spark else vertex.slot_group,
        max_parallelism=None,
        colocation_group="",
    )
    return replace(output, operator=operator, tag="")
