"""Aim: what ``penstock plan --from-savepoint`` says of a start is what the JobManager does then.

Method: generated: a job that has left a savepoint, another one that is to start from it, what is said of the start, and
what lies beside the savepoint. Both decisions are asked, and compare: refusals word by word, and what is left out.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from jobmanager.dispatcher.job_start_runner import prepare_start
from penstock.cli.planned_restore import planned_restore
from penstock.config import Configuration
from penstock.errors import JobRejected
from penstock.graph.fingerprint import fingerprint
from penstock.graph.output_in_doubt import IN_DOUBT_KEY, decided_output, fate_of_output
from penstock.graph.state_meaning import EVENT_TIMERS
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.storage.local_store import LocalStore
from penstock.storage.manifest import encode_manifest
from penstock.storage.prepared_output import COMMITTABLES, PreparedOutput
from penstock.storage.savepoint import COMMITTED_PATH, MANIFEST_PATH, TAKEN_BACK_PATH
from tests.unit.penstock.test_state_meaning import CHANGES, Answered, Seen, planned, with_function

CASES = 100
PAIRS = [(before, after) for before, after, _ in CHANGES.values()]
PAIRS += 5 * [(with_function(Answered()), with_function(Seen()))]


@cache
def graphs() -> list[tuple[graph_pb2.JobGraph, graph_pb2.JobGraph]]:
    """The pairs as they are planned; not when the module is imported, which every process of the tests does."""
    return [(planned(before), planned(after)) for before, after in PAIRS]


def connected(draw: random.Random, planned: graph_pb2.JobGraph) -> graph_pb2.JobGraph:
    """A job with one of several sources and sinks."""
    graph = graph_pb2.JobGraph()
    graph.CopyFrom(planned)
    for vertex in graph.vertices:
        for operator in vertex.operators:
            if operator.WhichOneof("spec") == "source":
                files = operator.source.files
                files.format = draw.choice(["csv", "csv", "csv", "json"])
                files.path = draw.choice(["/in", "/in", "/elsewhere"])
                files.text.delimiter = draw.choice(["", "", ";"])
            if operator.WhichOneof("spec") == "sink":
                operator.uid = draw.choice(["sink", "sink", "sink", "other sink"])
                if draw.random() < 0.7:
                    operator.sink.files.directory = draw.choice(["/out", "/out", "s3://b/out"])
                    operator.sink.files.format = draw.choice(["csv", "parquet"])
    return graph


def saved(draw: random.Random, graph: graph_pb2.JobGraph, path: Path) -> None:
    """A savepoint of a job, in which each operator may have something."""
    manifest = checkpoint_pb2.CheckpointManifest(job_id="0" * 32, vertices=fingerprint(graph))
    manifest.properties.kind = checkpoint_pb2.CHECKPOINT_KIND_SAVEPOINT
    backend = draw.choice([*5 * ["hashmap"], "rocksdb"])
    for vertex in graph.vertices:
        task = manifest.subtasks.add(vertex=vertex.id)
        for operator in vertex.operators:
            held = task.operators.add(operator_uid=operator.uid)
            spec = operator.WhichOneof("spec")
            if spec == "sink" and draw.random() < 0.7:
                held.lists.add(name=COMMITTABLES, items=[b"a file"])
            if spec == "source" and draw.random() < 0.7:
                held.splits.add(id="a", done=draw.random() < 0.3)
            if operator.uid == "stateful":
                is_function = spec == "process"
                held.keyed.max_parallelism, held.keyed.backend = vertex.max_parallelism, backend
                held.keyed.tables.add(
                    name=EVENT_TIMERS if is_function else "rows",
                    kind="timers" if is_function else "group",
                )
                held.keyed.segments.add(table=0, row_count=1)
    store = LocalStore(path)
    store.put(MANIFEST_PATH, [encode_manifest(manifest)])
    beside = draw.choice([None, None, None, COMMITTED_PATH, TAKEN_BACK_PATH])
    if beside is not None:
        store.put(beside, [b"x"])


@pytest.mark.parametrize("ignores", [False, True])
def test_a_plan_says_what_a_start_does(tmp_path: Path, ignores: bool) -> None:
    draw, seen = random.Random(int(ignores)), Counter[str]()
    for case in range(CASES):
        path = tmp_path / str(case)
        pair = draw.choice(graphs())
        before, graph = (connected(draw, one) for one in (pair[0], draw.choice(pair)))
        saved(draw, before, path)
        graph.config["execution.state-recovery.path"] = str(path)
        graph.config["execution.state-recovery.ignore-unclaimed-state"] = str(ignores)
        graph.config["state.backend.type"] = "hashmap"
        if (said := draw.choice([None, "commit", "commit", "leave"])) is not None:
            graph.config[IN_DOUBT_KEY] = said
        asked = graph_pb2.JobGraph()
        asked.CopyFrom(graph)
        plan = planned_restore(asked)
        assert plan is not None
        nobody_runs = (lambda _: False, lambda _: True)
        start, refusal = None, ""
        try:
            start = prepare_start("1" * 32, graph, Configuration.from_mapping({}), *nobody_runs)
        except JobRejected as error:
            refusal = str(error)
        reasons = "; ".join(plan.check.refusals)
        assert refusal == (reasons and f"job '' cannot be started from {path}: {reasons}"), case
        assert start is None or start.check == plan.check, case
        if start is not None:
            assert fate_of_output(start.point, decided_output(start.graph)) is plan.output, case
            seen[plan.output] += 1
        seen.update(word for word in WORDS if word in refusal)
        seen["started"] += start is not None
        seen["left out"] += start is not None and bool(start.check.dropped)
        seen.update(word for word in CHANGES if start and word in str(start.check.changed))
    met = {word for word, count in seen.items() if count}
    assert met >= {PreparedOutput.NONE, PreparedOutput.TAKEN_BACK}, seen
    assert met >= {"started", *WORDS[2:], *CHANGES, *(["left out"] if ignores else WORDS)}, seen


WORDS = (
    "the function has none now",
    "has no such operator",
    "nobody knows whether the output",
    "has gone back behind it",
    "by a sink of kind",
    "found as",
    "by the backend",
    "types of keys never change",
)
"""Of the reasons that are met."""
CHANGES = ("reads '/elsewhere' now", "read with another delimiter")
