"""Aim: what becomes of each state when a job is started from another one's is said before anything starts.

Method: stored operators and a graph, made by hand; each case changes one thing.
"""

from __future__ import annotations

import pyarrow as pa
import pytest

from penstock.errors import JobRejected
from penstock.graph.output_in_doubt import OutputDecision
from penstock.graph.restore_check import Fate, adopt_key_groups, check_restore
from penstock.graph.state_meaning import declaration
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.storage.codec import codec_of
from penstock.storage.prepared_output import COMMITTABLES

FORWARD = graph_pb2.PARTITIONING_FORWARD
HASH = graph_pb2.PARTITIONING_HASH


def stored_job(max_parallelism: int = 128) -> checkpoint_pb2.CheckpointManifest:
    """A source and, behind an exchange, an operator with keyed state."""
    manifest = checkpoint_pb2.CheckpointManifest(checkpoint_id=4)
    for vertex, uid in (("v0", "source"), ("v1", "counts")):
        manifest.vertices.add(
            id=vertex, name=vertex, parallelism=1, max_parallelism=max_parallelism
        ).operators.add(uid=uid, name=f"the {uid}")
    source = manifest.subtasks.add(vertex="v0").operators.add(operator_uid="source")
    source.splits.add(id="a", size=3)
    keyed = manifest.subtasks.add(vertex="v1").operators.add(operator_uid="counts").keyed
    keyed.max_parallelism = max_parallelism
    keyed.tables.add(name="seen", kind="value")
    keyed.segments.add(table=0)
    return manifest


def graph_of(
    *uids: str, partitioning: graph_pb2.Partitioning.ValueType = HASH
) -> graph_pb2.JobGraph:
    graph = graph_pb2.JobGraph(name="job")
    for number, uid in enumerate(uids):
        vertex = graph.vertices.add(id=f"v{number}", parallelism=2, max_parallelism=256)
        vertex.operators.add(uid=uid, name=uid)
    for number in range(1, len(uids)):
        graph.edges.add(
            source_vertex=f"v{number - 1}", target_vertex=f"v{number}", partitioning=partitioning
        )
    return graph


def fates(
    graph: graph_pb2.JobGraph,
    manifest: checkpoint_pb2.CheckpointManifest,
    *,
    ignores_unclaimed: bool = False,
) -> dict[tuple[str, str], Fate]:
    check = check_restore(graph, manifest, ignores_unclaimed=ignores_unclaimed)
    return {(one.uid, one.state): one.fate for one in check.fates}


def test_splits_of_a_source_of_another_kind_are_refused() -> None:
    manifest, graph = stored_job(256), graph_of("source", "counts")
    source = graph.vertices[0].operators[0].source
    source.generator.SetInParent()
    [[stored], _] = (vertex.operators for vertex in manifest.vertices)
    stored.declared.CopyFrom(declaration(graph.vertices[0].operators[0]))
    assert not check_restore(graph, manifest, ignores_unclaimed=False).refusals
    source.files.path = "in"
    [refusal] = check_restore(graph, manifest, ignores_unclaimed=False).refusals
    assert "state 'splits' of operator 'the source'" in refusal
    assert "kind 'generator', and it is one of kind 'files' now" in refusal
    stored.ClearField("declared")  # as versions wrote it that did not note the kind
    assert not check_restore(graph, manifest, ignores_unclaimed=False).refusals


def test_files_that_were_found_in_another_format_are_refused_until_they_are_read() -> None:
    manifest, graph = stored_job(256), graph_of("source", "counts")
    files = graph.vertices[0].operators[0].source.files
    files.format = "parquet"
    manifest.vertices[0].operators[0].declared.CopyFrom(declaration(graph.vertices[0].operators[0]))
    assert not check_restore(graph, manifest, ignores_unclaimed=False).refusals
    files.format = "csv"
    [refusal] = check_restore(graph, manifest, ignores_unclaimed=True).refusals
    assert "files to read that were found as parquet, and it reads csv now" in refusal
    manifest.subtasks[0].operators[0].splits[0].done = True
    assert not check_restore(graph, manifest, ignores_unclaimed=False).refusals


def test_a_source_of_files_that_reads_otherwise_is_told_of() -> None:
    manifest, graph = stored_job(256), graph_of("source", "counts")
    operator = graph.vertices[0].operators[0]
    files = operator.source.files
    files.format, files.path = "csv", "/old"
    stored = manifest.vertices[0].operators[0].declared
    stored.CopyFrom(declaration(operator))

    def told() -> str:
        check = check_restore(graph, manifest, ignores_unclaimed=False)
        assert not check.refusals
        return "; ".join(one.reason for one in check.changed if one.state == "splits")

    assert not told()
    files.path = "/new"
    assert told().endswith("; what it has found in '/old' is read to its end as well")
    files.text.delimiter, files.text.no_header, files.text.has_nulls = ";", True, True
    assert told().endswith("found is read with another delimiter, header, nulls")
    manifest.subtasks[0].operators[0].splits[0].done = True
    assert told().endswith(
        "'/new' now, from the start but for files that it has read under the same path"
    )
    files.path = "/old"
    assert not told(), "nothing is left that was found with the other options"
    stored.source.files.path, files.path = "", "/new"  # as versions wrote it that did not note it
    assert not told()


def prepared(kind: str = "files") -> tuple[checkpoint_pb2.CheckpointManifest, graph_pb2.JobGraph]:
    """A job that has prepared output, and the same job."""
    manifest, graph = stored_job(256), graph_of("source", "counts", "out")
    sink = graph.vertices[2].operators[0]
    getattr(sink.sink, kind).SetInParent()
    if kind == "files":
        sink.sink.files.format, sink.sink.files.directory = "parquet", "/one"
    stored = manifest.vertices[1].operators.add(uid="out", name="out", kind="sink")
    stored.declared.CopyFrom(declaration(sink))
    held = manifest.subtasks[1].operators.add(operator_uid="out")
    held.lists.add(name=COMMITTABLES, items=[b"a file"])
    return manifest, graph


@pytest.mark.parametrize(
    ("format", "directory", "reason"),
    [
        ("parquet", "/one", ""),
        ("csv", "/one", "what is prepared becomes parquet in /one, what comes csv in /one"),
        ("csv", "/two", "what is prepared becomes parquet in /one, what comes csv in /two"),
    ],
)
def test_prepared_files_get_their_names_whatever_is_written_now(
    format: str, directory: str, reason: str
) -> None:
    manifest, graph = prepared()
    files = graph.vertices[2].operators[0].sink.files
    files.format, files.directory = format, directory
    check = check_restore(graph, manifest, ignores_unclaimed=False)
    [fate] = [one for one in check.fates if one.uid == "out"]
    assert (fate.fate, fate.reason) == (Fate.MAPS, reason)


def test_output_that_a_sink_of_another_kind_has_prepared_is_refused_unless_it_is_left() -> None:
    manifest, graph = prepared()
    sink = graph.vertices[2].operators[0].sink
    sink.files.directory = "s3://bucket/out"
    [refusal] = check_restore(graph, manifest, ignores_unclaimed=True).refusals
    assert "prepared by a sink of kind 'files', and it is one of kind 'files on S3' now" in refusal
    sink.custom.SetInParent()
    [refusal] = check_restore(graph, manifest, ignores_unclaimed=True).refusals
    assert "and it is one of kind 'custom' now" in refusal
    left = check_restore(graph, manifest, ignores_unclaimed=False, output=OutputDecision(False))
    assert not left.refusals
    assert "out" not in {one.uid for one in left.fates}
    graph.vertices[2].operators[0].uid = "other"
    assert check_restore(graph, manifest, ignores_unclaimed=False).refusals
    left = check_restore(graph, manifest, ignores_unclaimed=False, output=OutputDecision(False))
    assert not left.refusals, "what is committed is no state that would be lost with its sink"
    manifest.vertices[1].operators[1].kind = "process"  # with a list of that name
    assert check_restore(
        graph, manifest, ignores_unclaimed=False, output=OutputDecision(False)
    ).refusals


def test_state_maps_by_uid_wherever_the_operator_is() -> None:
    graph, manifest = graph_of("new", "counts", "source"), stored_job()
    adopt_key_groups(graph, manifest)
    assert fates(graph, manifest) == {
        ("source", "splits"): Fate.MAPS,
        ("counts", "seen"): Fate.MAPS,
    }


def test_state_without_operator_is_refused_or_left_out() -> None:
    graph, manifest = graph_of("source"), stored_job()
    adopt_key_groups(graph, manifest)
    assert fates(graph, manifest)["counts", ""] is Fate.REFUSED
    check = check_restore(graph, manifest, ignores_unclaimed=False)
    with pytest.raises(
        JobRejected, match=r"'the counts' \(uid 'counts'\).*seen.*--allow-non-restored"
    ):
        check.raise_refusal("job", "/somewhere")
    left = check_restore(graph, manifest, ignores_unclaimed=True)
    left.raise_refusal("job", "/somewhere")
    assert [one.uid for one in left.dropped] == ["counts"]


def test_operators_without_state_may_go() -> None:
    manifest = stored_job()
    del manifest.subtasks[1].operators[0].keyed.segments[:]
    assert ("counts", "") not in fates(graph_of("source"), manifest)


def test_rows_that_were_collected_and_an_empty_bundle_are_no_state() -> None:
    manifest = stored_job()
    operators = manifest.vertices[1].operators
    operators.add(uid="collect", name="collect", kind="sink")
    operators.add(uid="before", name="pre-aggregate", kind="window_aggregate")
    held = manifest.subtasks[1].operators
    held.add(operator_uid="collect").lists.add(name="collect", items=[b"1", b"2"])
    before = held.add(operator_uid="before")
    before.lists.add(name="bundle")
    before.lists.add(name="gauge", items=[b"1"])
    graph = graph_of("source", "counts")
    assert {uid for uid, _ in fates(graph, manifest)} == {"source", "counts"}
    before.lists[0].items.append(b"rows")
    assert fates(graph, manifest)["before", ""] is Fate.REFUSED


@pytest.mark.parametrize("spec", ["window_aggregate", "running_aggregate"])
def test_a_phase_that_the_planner_has_made_is_nothing_that_anybody_could_name(spec: str) -> None:
    graph, manifest = graph_of("source", "made", "counts"), stored_job()
    adopt_key_groups(graph, manifest)
    made = graph.vertices[1].operators[0]
    made.uid_is_generated = True
    getattr(made, spec).phase = graph_pb2.AGGREGATION_PHASE_PARTIAL
    assert {uid for uid, _ in fates(graph, manifest)} == {"source", "counts"}
    stored = manifest.vertices[1].operators.add(uid="made", name="phase", kind=spec)
    stored.uid_is_generated = True
    before = manifest.subtasks[1].operators.add(operator_uid="made")
    before.lists.add(name="bundle", items=[b"rows"])
    check = check_restore(graph, manifest, ignores_unclaimed=False)
    assert ("made", "bundle") in {(one.uid, one.state) for one in check.fates}
    assert not [one for one in check.fates if one.is_uid_generated]
    getattr(made, spec).phase = graph_pb2.AGGREGATION_PHASE_COMPLETE
    check = check_restore(graph, manifest, ignores_unclaimed=False)
    assert [one.uid for one in check.fates if one.is_uid_generated] == ["made"]


def test_the_stored_number_of_key_groups_is_taken_over_with_all_that_lies_by_it() -> None:
    graph = graph_of("counts", "kept", partitioning=FORWARD)
    adopt_key_groups(graph, stored_job(32))
    assert [vertex.max_parallelism for vertex in graph.vertices] == [32, 32]


def test_a_number_that_was_asked_for_stays_and_another_one_is_refused() -> None:
    graph, manifest = graph_of("source", "counts"), stored_job(32)
    graph.vertices[1].max_parallelism_is_explicit = True
    adopt_key_groups(graph, manifest)
    assert graph.vertices[1].max_parallelism == 256
    assert fates(graph, manifest)["counts", "seen"] is Fate.REFUSED


def test_more_subtasks_than_key_groups_are_refused() -> None:
    graph, manifest = graph_of("source", "counts"), stored_job(1)
    adopt_key_groups(graph, manifest)
    [refusal] = check_restore(graph, manifest, ignores_unclaimed=False).refusals
    assert "max-parallelism 1, and the job has parallelism 2" in refusal


def test_rows_of_a_blocking_exchange_have_gone_with_their_job() -> None:
    manifest = stored_job()
    manifest.edges.add(id="e0", source_vertex="v0", target_vertex="v1", blocking=True)
    graph = graph_of("source", "counts")
    adopt_key_groups(graph, manifest)
    [problem] = check_restore(graph, manifest, ignores_unclaimed=False).problems
    assert "blocking exchange e0 (v0 -> v1)" in problem
    manifest.subtasks[1].finished = True
    assert not check_restore(graph, manifest, ignores_unclaimed=False).problems


def test_what_was_persisted_and_half_read_is_not_read_again() -> None:
    manifest, graph = stored_job(), graph_of("source", "counts")
    adopt_key_groups(graph, manifest)
    manifest.subtasks[0].operators[0].ClearField("splits")
    persisted = graph_pb2.PersistedSource(name="clean", job_id="earlier")

    def problems() -> tuple[str, ...]:
        return check_restore(graph, manifest, ignores_unclaimed=False).problems

    graph.vertices[0].operators[0].source.persisted.CopyFrom(persisted)
    assert problems(), "a savepoint does not say where it stood"
    split = manifest.subtasks[0].operators[0].splits.add(id="a")
    assert not problems(), "another source had the uid"
    manifest.subtasks[0].operators[0].splits.remove(split)
    graph.vertices[0].operators[0].ClearField("source")
    read = manifest.subtasks[0].inputs.add(edge_id="source", index=0, rows=7)
    assert not problems(), "another source has the uid now"
    graph.vertices[0].operators[0].source.persisted.CopyFrom(persisted)
    [problem] = problems()
    assert "uid 'source') was reading what is persisted as 'clean'" in problem
    read.rows = 0
    assert not problems(), "it had not begun"
    manifest.subtasks.add(vertex="v0", subtask_index=1, finished=True)
    assert problems(), "one subtask has read its share, the other has not"
    manifest.subtasks[0].finished = True
    assert not problems(), "all of it is read"


@pytest.mark.parametrize(
    ("key_codec", "codec", "stored", "fate"),
    [
        ("", "int64", "int64", Fate.MAPS),
        ("", "int64", "int32", Fate.MIGRATES),
        ("", "int32", "int64", Fate.REFUSED),
        ("int64", "int64", "int64 -> int32", Fate.MIGRATES),
        ("int64", "int64", "string -> int64", Fate.REFUSED),
        ("int64", "int64", "int64", Fate.REFUSED),
        ("", "int64", "int64 -> int64", Fate.REFUSED),
    ],
)
def test_states_without_a_key_are_looked_at_before_anything_starts(
    key_codec: str, codec: str, stored: str, fate: Fate
) -> None:
    graph, manifest = graph_of("source", "counts"), stored_job()
    adopt_key_groups(graph, manifest)
    names = {name: codec_of(getattr(pa, name)()).name for name in ("int32", "int64", "string")}
    for name, of_codec in names.items():
        stored, codec = stored.replace(name, of_codec), codec.replace(name, of_codec)
        key_codec = key_codec.replace(name, of_codec)
    declared = (
        graph.vertices[1]
        .operators[0]
        .process.states.add(name="kept", kind="operator list", codec=codec, key_codec=key_codec)
    )
    assert declared.name
    held = manifest.subtasks[1].operators[0].lists.add(name="kept", codec=stored)
    held.items.append(b"1")
    assert fates(graph, manifest)["counts", "kept"] is fate
    told = " ".join(check_restore(graph, manifest, ignores_unclaimed=False).refusals)
    assert ("declare it as it was, or give it another name" in told) is (fate is Fate.REFUSED)


def test_a_list_that_is_declared_no_more_is_left_out_and_told() -> None:
    graph, manifest = graph_of("source", "counts"), stored_job(256)
    graph.vertices[1].operators[0].process.SetInParent()
    lists = manifest.subtasks[1].operators[0].lists
    lists.add(name="kept", codec="msgpack/1", items=[b"1"])
    lists.add(name="watermark", codec="msgpack/1", items=[b"1"])  # the operator's own
    stored = manifest.vertices[1].operators[0].declared.process
    stored.states.add(name="kept", kind="operator list", codec="msgpack/1")
    check = check_restore(graph, manifest, ignores_unclaimed=False)
    assert [one.state for one in check.dropped] == ["seen", "kept"]


def test_what_holds_for_all_states_of_an_operator_is_said_once() -> None:
    graph, manifest = graph_of("source", "counts"), stored_job(max_parallelism=64)
    manifest.subtasks[1].operators[0].keyed.tables.add(name="last", kind="value")
    (refusal,) = check_restore(graph, manifest, ignores_unclaimed=False).refusals
    assert refusal.startswith("state 'seen', 'last' of operator 'the counts'")


def test_states_in_a_database_are_named_as_they_are_declared() -> None:
    manifest = stored_job(256)
    keyed = manifest.subtasks[1].operators[0].keyed
    keyed.backend, keyed.tables[0].name = "rocksdb", "key_space/seen"
    same, other = graph_of("source", "counts"), graph_of("source", "other")
    [refusal] = check_restore(same, manifest, ignores_unclaimed=False, backend="hashmap").refusals
    assert refusal.startswith("state 'seen' of operator 'the counts'")
    [refusal] = check_restore(other, manifest, ignores_unclaimed=False).refusals
    assert "it has state (seen), and the job has no such operator" in refusal
