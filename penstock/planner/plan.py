"""Plans a whole job: nodes to vertices, functions to pickles, the script's modules to artifacts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.client.artifacts import LocalArtifact
from penstock.client.code_shipping import collect_code
from penstock.config import Configuration
from penstock.config.spark_keys import CASE_SENSITIVE, PINNED, pinned_problem
from penstock.errors import JobRejected
from penstock.functions.user_code import cloudpickle_version, python_version, shipping
from penstock.graph.job_graph import validate
from penstock.graph.logical import (
    ApplyWindowFunction,
    Join,
    Node,
    Process,
    ReadSource,
    RunningAggregate,
    SparkStage,
    WindowAggregate,
    input_schema,
    is_spark,
    reachable,
)
from penstock.graph.persisted import persist_sinks
from penstock.pb import graph_pb2
from penstock.planner.history import check_spark_history
from penstock.planner.planner import Planner
from penstock.rows.spark_types import same_but_for_case
from penstock.state.declarations import declared_states

_WITHOUT_OWN_STATE = (graph_pb2.PROCESS_KIND_PLAIN, graph_pb2.PROCESS_KIND_CO)


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job, ready to be submitted.

    Attributes:
        artifacts: what has to be uploaded with it.
        warnings: what the user should know, one sentence each.
    """

    graph: graph_pb2.JobGraph
    artifacts: tuple[LocalArtifact, ...]
    warnings: tuple[str, ...]


def plan_job(
    name: str,
    sinks: Sequence[Node],
    config: Configuration,
    *,
    py_files: Sequence[Path] = (),
    requirements: Sequence[str] = (),
) -> PlannedJob:
    """Plans and validates a job.

    Args:
        name: what the job is called.
        sinks: the ends of its streams.
        py_files: more code to ship.
        requirements: PEP 508 requirements on the TaskManagers.

    Raises:
        JobRejected: the job cannot run; the message names the operator.
    """
    if not sinks:
        raise JobRejected(
            "the job has no sink, so it would do nothing: end a stream with .write_parquet(...), "
            ".print(), .collect(), .discard() or .sink(...)"
        )
    nodes = reachable(list(sinks))
    _check_runtime_mode(nodes, config)
    _check_spark(nodes, config)
    config = _pinned(nodes, config)
    _check_case(nodes, config)
    warnings = _check_uids(nodes, config)
    code = collect_code(py_files)
    with shipping(code.roots):
        graph = Planner(nodes, config).plan()
    artifacts = {artifact.id: artifact for artifact in code.artifacts}
    for node in nodes:
        if isinstance(node.operation, ReadSource):
            artifacts.update({artifact.id: artifact for artifact in node.operation.artifacts})
    graph.name = name
    graph.config.update(config.of_job())
    _leave_checkpoints_out(graph, config)
    graph.artifacts.extend(artifact.to_proto() for artifact in artifacts.values())
    graph.python_version = python_version()
    graph.cloudpickle_version = cloudpickle_version()
    graph.requirements.extend(requirements)
    validate(graph)
    return PlannedJob(graph, tuple(artifacts.values()), warnings)


def _leave_checkpoints_out(graph: graph_pb2.JobGraph, config: Configuration) -> None:
    """What is persisted is made in one go: such a job takes no checkpoints, unless it was told to."""
    if not persist_sinks(graph):
        return
    if config.execution_checkpointing_interval_ms:
        raise JobRejected(
            "what the job persists is made in one go, so it cannot go on from a checkpoint: leave "
            "execution.checkpointing.interval out, or set it to none"
        )
    graph.config["execution.checkpointing.interval"] = "none"


def _check_runtime_mode(nodes: Sequence[Node], config: Configuration) -> None:
    if config.runtime_mode != "batch":
        return
    endless = [
        repr(node.name)
        for node in nodes
        if isinstance(node.operation, ReadSource) and not node.operation.spec.bounded
    ]
    if endless:
        raise JobRejected(
            f"the job runs in batch mode, where every source has an end, but {', '.join(endless)} "
            "reads without end: give the source an end (a number of rows, no watch=), or call "
            "env.set_runtime_mode('streaming')"
        )


def _check_spark(nodes: Sequence[Node], config: Configuration) -> None:
    """What runs on Spark is done as a whole or not at all: in batch mode, without checkpoints, or before these begin."""
    first = next((node for node in nodes if is_spark(node.operation)), None)
    if first is None:
        return
    name = repr(first.name)
    if config.runtime_mode != "batch":
        check_spark_history(nodes)
        return
    if config.checkpoint_interval_ms is not None:
        raise JobRejected(
            f"operator {name} runs on Spark, so the job cannot go on from a checkpoint: leave "
            "execution.checkpointing.interval out, or set it to none"
        )


def _check_case(nodes: Sequence[Node], config: Configuration) -> None:
    """Columns that differ by case only are two where Spark is told so."""
    if config.spark_keys.get(CASE_SENSITIVE, "").lower() == "true":
        return
    for node in filter(lambda node: is_spark(node.operation), nodes):
        given = [(f"input {i + 1}", input_schema(each)) for i, each in enumerate(node.inputs)]
        for where, schema in (*given, ("schema=", node.schema)):
            pair = same_but_for_case(schema)
            if pair is not None:
                raise JobRejected(
                    f"operator {node.name!r}: {where}: the columns {pair[0]!r} and {pair[1]!r} are one to Spark: rename "
                    f"one, or set {CASE_SENSITIVE} to true: env = ps.Environment(config={{'{CASE_SENSITIVE}': True}})"
                )


def _pinned(nodes: Sequence[Node], config: Configuration) -> Configuration:
    """The configuration with what parts that were compiled for Spark need of its session."""
    compiled = [n for n in nodes if isinstance(n.operation, SparkStage) and n.operation.is_compiled]
    if not compiled:
        return config
    problem = pinned_problem(config.spark_keys)
    if problem:
        raise JobRejected(
            f"operator {compiled[0].name!r} is compiled for Spark, with results that are those of Penstock: {problem}; "
            "leave the key out"
        )
    return config.merged(PINNED)


def _check_uids(nodes: Sequence[Node], config: Configuration) -> tuple[str, ...]:
    without = [node.name for node in nodes if _has_state(node) and not node.properties.uid]
    if not without:
        return ()
    names = ", ".join(repr(name) for name in without)
    if not config.pipeline_auto_generate_uids:
        raise JobRejected(
            f"these operators have state and no uid: {names}; give each one by .uid('...'), since "
            "pipeline.auto-generate-uids is false"
        )
    warning = (
        f"the uids of {names} are derived from the place in the graph: give these operators one by "
        ".uid('...'), so that their state is found again when the job has changed"
    )
    return (warning,)


def _has_state(node: Node) -> bool:
    operation = node.operation
    if isinstance(operation, Process):
        return operation.kind not in _WITHOUT_OWN_STATE or bool(declared_states(operation.function))
    return isinstance(operation, (WindowAggregate, ApplyWindowFunction, RunningAggregate, Join))
