"""Which engine does a part of a job: ``Stream.engine``, and ``engine=`` of a whole job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.errors import JobRejected
from penstock.expressions import col
from penstock.graph.logical import (
    ANY_ROUTING,
    Node,
    NodeInput,
    Project,
    Routing,
    SparkStage,
    endless_input,
    input_schema,
)
from penstock.naming import nearest_hint
from penstock.pb import graph_pb2
from penstock.planner.in_place import is_read_in_place
from penstock.pushdown.part_compiler import PENSTOCK, SPARK, PartInput, compile_part, is_begin
from penstock.rows.spark_types import (
    NotCarriedError,
    carried_schema,
    check_for_spark,
    check_from_spark,
)
from penstock.streams.job_builder import JobBuilder
from penstock.streams.updates import check_no_updates

if TYPE_CHECKING:
    from penstock.streams.stream import Stream

_ENGINES = (PENSTOCK, SPARK)
_SHOWN = 4


class StreamEngines:
    """The call of a stream that says which engine does what is in front of it."""

    _builder: JobBuilder
    _source: NodeInput

    if TYPE_CHECKING:

        def _last_operator(self, call: str) -> Node: ...

    def engine(self, name: str) -> Stream:
        """Says which engine does the operators in front of this call; for bounded streams in batch mode.

        Args:
            name: "spark": all operators between here and the sources, or the last ``engine("penstock")``, are
                compiled into one Spark stage; they are those of docs/spark.md, and everything else is refused.
                The output has no event time, and its rows come in no fixed order. "penstock" (the
                default): what was called so far is not for Spark; a later ``engine("spark")`` begins here.
        """
        from penstock.streams.stream import Stream

        check_engine("engine", name)
        node = self._last_operator("engine")
        if name == PENSTOCK:
            node.properties.engine = PENSTOCK
            return Stream(self._builder, self._source)
        if is_begin(node):
            raise JobRejected(
                f"engine('spark'): there is nothing between {node.name!r} and this call that Spark could do: call it "
                "behind the operators that are meant"
            )
        return Stream(self._builder, spark_part(self._builder, self._source))


def check_engine(call: str, name: object) -> None:
    """Checks that there is such an engine.

    Raises:
        JobRejected: there is none.
    """
    if name not in _ENGINES:
        hint = nearest_hint(name, _ENGINES) if isinstance(name, str) else ""
        raise JobRejected(f"{call}: {name!r} is no engine{hint}; there are 'penstock' and 'spark'")


def spark_part(builder: JobBuilder, target: NodeInput) -> NodeInput:
    """The output of a Spark stage that does what an output of ours would have given.

    Raises:
        JobRejected: something in front of it does not compile, or cannot go to Spark.
    """
    part, inputs = compile_part(target)
    for given in inputs:
        name = given.source.node.name
        check_no_updates("engine('spark')", given.source)
        endless = endless_input(given.source)
        if endless:
            raise JobRejected(
                f"engine('spark'): {endless!r} reads without end, and Spark takes whole inputs: give the source an end "
                "(a number of rows, no watch=), or leave the part to Penstock"
            )
        check_for_spark(f"engine('spark'): the rows of {name!r}", given.columns)
    schema = input_schema(target)
    check_from_spark("engine('spark')", schema)
    node = builder.add(
        SparkStage(part, timeout_ms=0, cores=0, is_compiled=True),
        tuple(_read(builder, given) for given in inputs),
        label=_label(part.operators),
        schema=schema,
        has_event_time=False,
    )
    return NodeInput(node)


def _label(operators: Sequence[str]) -> str:
    """What the stage is called: after what it does, in short."""
    shown = operators if len(operators) <= _SHOWN else (*operators[: _SHOWN - 1], "...")
    return f"spark({', '.join(shown)})" if shown else SPARK


def _read(builder: JobBuilder, given: PartInput) -> NodeInput:
    """An input with the columns that the part needs; of files that Spark reads itself, it leaves out the others itself."""
    source = replace(given.source, routing=ANY_ROUTING)
    schema = input_schema(source)
    if given.columns.names == schema.names or (
        not source.tag and is_read_in_place(source.node) and _is_carried(schema)
    ):
        return source
    kept = builder.add(
        Project(tuple((name, col(name)) for name in given.columns.names)),
        (source,),
        label="select",
        schema=pa.schema([schema.field(name) for name in given.columns.names]),
        has_event_time=False,
        is_inserted=True,
    )
    return NodeInput(kept)


def _is_carried(schema: pa.Schema) -> bool:
    """Whether Spark can have all of the columns."""
    try:
        carried_schema(schema)
    except NotCarriedError:
        return False
    return True


def sinks_on_spark(builder: JobBuilder, sinks: Sequence[Node]) -> list[Node]:
    """The ends of a job, with everything between them and the sources compiled for Spark.

    Raises:
        JobRejected: something does not compile.
    """
    made: dict[tuple[int, str], NodeInput] = {}
    moved = []
    for sink in sinks:
        (source,) = sink.inputs
        place = (source.node.index, source.tag)
        if is_begin(source.node):
            moved.append(sink)
            continue
        if place not in made:
            made[place] = spark_part(builder, replace(source, routing=ANY_ROUTING))
        moved.append(builder.reading(sink, replace(made[place], routing=_kept(source.routing))))
    return moved


def _kept(routing: Routing) -> Routing:
    """How rows go to a sink: what says which of its subtasks gets a row is asked of ours behind Spark as well."""
    is_kept = routing.is_asked and routing.partitioning in (
        graph_pb2.PARTITIONING_HASH,
        graph_pb2.PARTITIONING_BROADCAST,
    )
    return routing if is_kept else ANY_ROUTING
