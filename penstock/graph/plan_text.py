"""A job graph as people and programs read it: ``penstock plan``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from penstock.config import Configuration
from penstock.expressions import Expr
from penstock.graph.exchanges import exchange_name
from penstock.graph.operator_checks import (
    grouping_keys,
    is_partial,
    keeps_every_key,
    shown_name,
    window_of,
)
from penstock.graph.repeatability import Repeatability, repeatability_of_edges
from penstock.graph.speculation import why_not_speculative
from penstock.pb import graph_pb2
from penstock.rows.schema import schema_from_bytes

_WINDOWS = {
    graph_pb2.WINDOW_KIND_TUMBLING: "tumbling",
    graph_pb2.WINDOW_KIND_SLIDING: "sliding",
    graph_pb2.WINDOW_KIND_SESSION: "session",
    graph_pb2.WINDOW_KIND_COUNT: "count_window",
}
KEEPS_EVERY_KEY = (
    "keeps the number of its windows (window_index) for every key there has ever been; where keys come and go, bound "
    "it with ps.count_window(n, ttl=ps.Ttl('7d')), or do not read window_index"
)
_ROW_FUNCTIONS = {
    graph_pb2.ROW_FUNCTION_KIND_MAP: "map",
    graph_pb2.ROW_FUNCTION_KIND_FLAT_MAP: "flat_map",
    graph_pb2.ROW_FUNCTION_KIND_FILTER: "filter",
    graph_pb2.ROW_FUNCTION_KIND_KEY: "key",
}


def explain(graph: graph_pb2.JobGraph) -> str:
    """The plan for people: one block per vertex, with what comes in and what each operator does."""
    return "\n".join(_lines(plan_dict(graph)))


def plan_dict(graph: graph_pb2.JobGraph) -> dict[str, Any]:
    """The plan for programs; its fields are stable, and equal graphs give equal plans."""
    known = repeatability_of_edges(graph)
    is_speculative = Configuration.from_mapping(dict(graph.config)).is_speculative
    obstacles = why_not_speculative(graph) if is_speculative else {}
    return {
        "name": graph.name,
        "vertices": [_vertex(vertex, obstacles.get(vertex.id)) for vertex in graph.vertices],
        "edges": [_edge(edge, known[edge.id]) for edge in graph.edges],
        "artifacts": [
            {"id": a.id, "name": a.name, "size_bytes": a.size_bytes, "kind": a.kind}
            for a in graph.artifacts
        ],
        "config": dict(sorted(graph.config.items())),
        "requirements": list(graph.requirements),
        "python_version": graph.python_version,
        "cloudpickle_version": graph.cloudpickle_version,
    }


def what_grows(graph: graph_pb2.JobGraph) -> list[str]:
    """Of a job that may run for ever: what of its state nothing bounds, a line per operator."""
    operators = [operator for vertex in graph.vertices for operator in vertex.operators]
    if all(one.source.bounded for one in operators if one.HasField("source")):
        return []
    return [f"{shown_name(one)}: {KEEPS_EVERY_KEY}" for one in operators if keeps_every_key(one)]


def _vertex(vertex: graph_pb2.Vertex, why_not_speculative: str | None) -> dict[str, Any]:
    return {
        "id": vertex.id,
        "name": vertex.name,
        "parallelism": vertex.parallelism,
        "max_parallelism": vertex.max_parallelism,
        "slot_group": vertex.slot_group,
        "colocation_group": vertex.colocation_group,
        "why_not_speculative": why_not_speculative,
        "operators": [_operator(operator, i) for i, operator in enumerate(vertex.operators)],
    }


def _operator(operator: graph_pb2.Operator, index: int) -> dict[str, Any]:
    action = graph_pb2.ErrorAction.Name(operator.on_error.action)
    return {
        "uid": operator.uid,
        "uid_is_generated": operator.uid_is_generated,
        "name": shown_name(operator),
        "kind": operator.WhichOneof("spec"),
        "detail": operator_detail(operator),
        "note": _note(operator),
        "reads": {"operator": operator.input.operator_index, "side_output": operator.input.side_tag}
        if index
        else None,
        "columns": _columns(operator.output_schema),
        "deterministic": operator.deterministic,
        "on_error": operator.on_error.tag or action.removeprefix("ERROR_ACTION_").lower(),
    }


def _note(operator: graph_pb2.Operator) -> str:
    """What the user should look at, "" = nothing."""
    if operator.WhichOneof("spec") == "running_aggregate" and not is_partial(operator):
        return "gives out updates: the new values of each key that a batch touched"
    if keeps_every_key(operator):
        return KEEPS_EVERY_KEY
    if window_of(operator) is None or grouping_keys(operator):
        return ""
    return "one window for all rows, in one subtask; for one per key, call key_by before it"


def _edge(edge: graph_pb2.Edge, known: Repeatability) -> dict[str, Any]:
    return {
        "id": edge.id,
        "source": edge.source_vertex,
        "source_operator": edge.source_output.operator_index,
        "side_output": edge.source_output.side_tag,
        "target": edge.target_vertex,
        "target_input": edge.target_input,
        "partitioning": _partitioning(edge),
        "keys": list(edge.key_columns),
        "type": exchange_name(edge.partition_type),
        "files_of_spark": edge.spill_format == graph_pb2.SPILL_FORMAT_OF_SPARK,
        "load_first": edge.load_first,
        "waits": edge.waits,
        "follows": edge.follows,
        "deterministic": edge.deterministic,
        "reproducible": edge.reproducible,
        "why_not_reproducible": known.why_not_reproducible,
        "columns": _columns(edge.schema),
    }


def _partitioning(edge: graph_pb2.Edge) -> str:
    return graph_pb2.Partitioning.Name(edge.partitioning).removeprefix("PARTITIONING_").lower()


def _columns(schema: bytes) -> list[dict[str, str]]:
    return [{"name": f.name, "type": str(f.type)} for f in schema_from_bytes(schema)]


def operator_detail(operator: graph_pb2.Operator) -> str:
    """What an operator does, in one line."""
    match operator.WhichOneof("spec"):
        case "source":
            return _source_detail(operator.source)
        case "project":
            return ", ".join(_named(column) for column in operator.project.columns)
        case "filter":
            return _text(operator.filter.predicate)
        case "row_function":
            rows = operator.row_function
            return f"{_ROW_FUNCTIONS[rows.kind]}({rows.function.display_name})"
        case "batch_function":
            return operator.batch_function.function.display_name
        case "spark":
            return _spark_detail(operator.spark)
        case "event_time":
            return _event_time_detail(operator.event_time)
        case "window_aggregate":
            spec = operator.window_aggregate
            window, grouped = window_text(spec.window), _grouped(spec.keys, spec.aggregates)
            return f"{_phase(spec.phase)}{window}{grouped}"
        case "running_aggregate":
            running = operator.running_aggregate
            return f"{_phase(running.phase)}running{_grouped(running.keys, running.aggregates)}"
        case "window_function":
            function = operator.window_function
            keys = f" by {', '.join(function.keys)}" if function.keys else ""
            return f"{window_text(function.window)}{keys}: {function.function.display_name}"
        case "process":
            return _process_detail(operator.process)
        case "join":
            return _join_detail(operator.join)
        case "sink":
            return _sink_detail(operator.sink)
        case _:
            return ""


def window_text(window: graph_pb2.WindowSpec) -> str:
    """A window in one line.

    >>> kind = graph_pb2.WINDOW_KIND_TUMBLING
    >>> window_text(graph_pb2.WindowSpec(kind=kind, size_ms=86_400_000, slide_ms=86_400_000, offset_ms=-3_600_000))
    'tumbling(86400000 ms, offset -3600000 ms)'
    """
    name = _WINDOWS[window.kind]
    if window.kind == graph_pb2.WINDOW_KIND_COUNT:
        ttl = f", {window.ttl_ms} ms to live" if window.ttl_ms else ""
        return f"{name}({window.count}){ttl}"
    if window.kind == graph_pb2.WINDOW_KIND_SESSION:
        length = f"{window.gap_ms} ms"
    elif window.kind == graph_pb2.WINDOW_KIND_SLIDING:
        length = f"{window.size_ms} ms, {window.slide_ms} ms"
    else:
        length = f"{window.size_ms} ms"
    if window.offset_ms:
        length += f", offset {window.offset_ms} ms"
    time = " in processing time" if window.time == graph_pb2.TIME_DOMAIN_PROCESSING else ""
    late = f", {window.allowed_lateness_ms} ms late" if window.allowed_lateness_ms else ""
    tag = f", later to {window.late_tag!r}" if window.late_tag else ""
    return f"{name}({length}){time}{late}{tag}"


def _source_detail(source: graph_pb2.SourceSpec) -> str:
    match source.WhichOneof("kind"):
        case "files":
            return f"{source.files.format} {source.files.path}"
        case "arrow":
            return f"table {source.arrow.artifact[:12]}"
        case "generator":
            rows = "endless" if source.generator.rows < 0 else f"{source.generator.rows} rows"
            return f"{source.generator.function.display_name}, {rows}"
        case "nexmark":
            nexmark = source.nexmark
            events = "endless" if nexmark.events < 0 else f"{nexmark.events} events"
            return f"nexmark {nexmark.kind or 'all kinds'}, {events}, seed {nexmark.seed}"
        case "socket":
            return f"{source.socket.host}:{source.socket.port}"
        case "persisted":
            return f"{source.persisted.name} of job {source.persisted.job_id}"
        case "spark":
            return _spark_detail(source.spark)
        case _:
            return source.custom.display_name


def _event_time_detail(time: graph_pb2.EventTimeSpec) -> str:
    if time.in_any_order:
        return f"{time.column}, in any order"
    idle = f", idle after {time.idle_timeout_ms} ms" if time.idle_timeout_ms else ""
    return f"{time.column}, out of order by {time.out_of_orderness_ms} ms{idle}"


def _spark_detail(spec: graph_pb2.SparkSpec) -> str:
    reads = [f"reads {files.source.path}" for files in spec.files]
    writes = [f"writes {spec.output_directory}"] if spec.output_directory else []
    return ", ".join([spec.function.display_name, *reads, *writes])


def _process_detail(process: graph_pb2.ProcessSpec) -> str:
    kind = graph_pb2.ProcessKind.Name(process.kind).removeprefix("PROCESS_KIND_").lower()
    keys = f" by {', '.join(process.keys)}" if process.keys else ""
    others = f" and {', '.join(process.second_keys)}" if process.second_keys else ""
    form = ", compiled" if process.HasField("compiled") else ""
    return f"{kind.replace('_', ' ')}{keys}{others}: {process.function.display_name}{form}"


def _join_detail(join: graph_pb2.JoinSpec) -> str:
    how = graph_pb2.JoinKind.Name(join.how).removeprefix("JOIN_KIND_").lower()
    if join.is_interval:
        where = f"right within {join.lower_ms} ms to {join.upper_ms} ms of left"
    else:
        where = window_text(join.window)
    return f"{how} by {', '.join(join.keys)}, {where}"


def _sink_detail(sink: graph_pb2.SinkSpec) -> str:
    match sink.WhichOneof("kind"):
        case "files":
            parts = f" by {', '.join(sink.files.partition_by)}" if sink.files.partition_by else ""
            return f"{sink.files.format} {sink.files.directory}{parts}"
        case "collect":
            return f"first {sink.collect.limit} rows" if sink.collect.limit else "all rows"
        case "custom":
            return sink.custom.display_name
        case "persist":
            return f"as {sink.persist.name}"
        case kind:
            return kind or ""


def _grouped(keys: Sequence[str], aggregates: Iterable[graph_pb2.Aggregate]) -> str:
    by = f" by {', '.join(keys)}" if keys else ""
    results = ", ".join(f"{a.name}={_aggregate(a)}" for a in aggregates)
    return f"{by}: {results}"


def _aggregate(aggregate: graph_pb2.Aggregate) -> str:
    function = aggregate.custom.display_name or aggregate.function
    return f"{function}({aggregate.column})"


def _phase(phase: graph_pb2.AggregationPhase.ValueType) -> str:
    return {
        graph_pb2.AGGREGATION_PHASE_PARTIAL: "partial ",
        graph_pb2.AGGREGATION_PHASE_FINAL: "final ",
    }.get(phase, "")


def _named(column: graph_pb2.NamedExpression) -> str:
    text = _text(column.expression)
    return text if text == column.name else f"{column.name}={text}"


def _text(expression: graph_pb2.Expression) -> str:
    return str(Expr.from_proto(expression))


def _lines(plan: dict[str, Any]) -> Iterator[str]:
    yield f"job {plan['name']}"
    for vertex in plan["vertices"]:
        yield ""
        together = vertex["colocation_group"]
        colocated = f", colocated as {together}" if together else ""
        yield (
            f"{vertex['id']}  {vertex['name']}  [parallelism {vertex['parallelism']} of "
            f"{vertex['max_parallelism']}, slot group {vertex['slot_group']}{colocated}]"
        )
        if vertex["why_not_speculative"] is not None:
            why = vertex["why_not_speculative"]
            yield f"    a slow subtask {f'has no second attempt: {why}' if why else 'may have a second attempt'}"
        incoming = [edge for edge in plan["edges"] if edge["target"] == vertex["id"]]
        has_two_inputs = any(edge["target_input"] for edge in incoming)
        for edge in incoming:
            which = f"input {edge['target_input'] + 1}: " if has_two_inputs else ""
            yield f"    <- {which}{_edge_line(edge)}"
            if edge["type"] != "pipelined":
                yield f"       {_restart_line(edge)}"
        for index, operator in enumerate(vertex["operators"]):
            yield f"    {index}: {_operator_line(operator)}"
            if operator["note"]:
                yield f"       note: {operator['note']}"


def _edge_line(edge: dict[str, Any]) -> str:
    side = f" side output {edge['side_output']!r}" if edge["side_output"] else ""
    keys = f" by {', '.join(edge['keys'])}" if edge["keys"] else ""
    columns = ", ".join(column["name"] for column in edge["columns"])
    order = ", files that Spark writes" if edge["files_of_spark"] else ""
    order += ", read whole first" if edge["load_first"] else ""
    awaited = "its history" if edge["follows"] else "the other input"
    order += f", waits until {awaited} is read whole" if edge["waits"] else ""
    return (
        f"{edge['source']}/{edge['source_operator']}{side}  {edge['partitioning']}{keys}, "
        f"{edge['type']}{order}  ({columns})"
    )


def _restart_line(edge: dict[str, Any]) -> str:
    """What becomes of the consumers of a kept exchange when its producer is restarted."""
    restart = f"a restart of {edge['source']}"
    target, why = edge["target"], edge["why_not_reproducible"]
    if edge["type"] == "blocking" and edge["deterministic"]:
        return f"{restart} spares what has finished of {target}: the same rows come again"
    if edge["reproducible"]:
        return f"{restart} leaves {target} running: the same rows come again in the same order"
    if edge["deterministic"]:
        return f"{restart} restarts {target}: the same rows may come in another order: {why}"
    return f"{restart} restarts {target}: {why}"


def _operator_line(operator: dict[str, Any]) -> str:
    columns = ", ".join(column["name"] for column in operator["columns"])
    result = f"  -> {columns}" if columns else ""
    reads = operator["reads"]
    source = ""
    if reads is not None and (reads["side_output"]):
        source = f" (from {reads['operator']}, side output {reads['side_output']!r})"
    given = "" if operator["uid_is_generated"] else f" [uid {operator['uid']}]"
    return f"{operator['name']}{given}{source}: {operator['detail']}{result}"
