"""Aim: a source goes on exactly where it was told to, or the savepoint is refused.

Method: files that are named by one spelling are those that the source finds by another; what cannot be right is refused
by name. No cluster: what a source finds is what its discovery gives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.graph.adopted_paths import adopt_paths
from penstock.graph.fingerprint import fingerprint
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.state_tables.savepoint_writer_store import graph_of
from penstock.storage.restore_point import open_restore_point
from taskmanager.connectors.file_source import FileSource
from tests.support.source_harness import SourceHarness


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``in`` with two files, its link ``link``, and the working directory ``live`` beside them."""
    (tmp_path / "in" / "below").mkdir(parents=True)
    (tmp_path / "live").mkdir()
    for name in ("in/a.parquet", "in/below/b.parquet"):
        pq.write_table(pa.table({"n": [1]}), tmp_path / name)
    (tmp_path / "link").symlink_to("in")
    monkeypatch.chdir(tmp_path / "live")
    return tmp_path


def reading(path: Any) -> ps.Environment:
    env = ps.Environment(parallelism=1)
    env.read_parquet(path).uid("files").discard()
    return env


def source_of(graph: graph_pb2.JobGraph | None) -> graph_pb2.FileSource:
    assert graph is not None
    return next(
        one.source.files
        for vertex in graph.vertices
        for one in vertex.operators
        if one.uid == "files"
    )


def found_by(files: graph_pb2.FileSource) -> set[str]:
    return {one.id for one in FileSource(files).discover(SourceHarness().context())}


def done_in(savepoint: str) -> set[str]:
    tasks = open_restore_point(savepoint).manifest.subtasks
    return {one.id for task in tasks for held in task.operators for one in held.splits if one.done}


def started_from(savepoint: str, job: ps.Environment) -> graph_pb2.FileSource:
    graph = graph_of(job)
    assert graph is not None
    adopt_paths(graph, open_restore_point(savepoint).manifest)
    return source_of(graph)


SPELT = [
    "{0}/in",
    "../in",
    "..//in/",
    "./../in/.",
    "/{0}/live/../in",
    "file://{0}/in",
    "../in/**/*.parquet",
]


@pytest.mark.parametrize(("named", "read"), list(zip(SPELT, [*SPELT[3:], *SPELT[:3]], strict=True)))
def test_the_same_files_are_the_same_however_they_are_spelt(
    named: str, read: str, here: Path
) -> None:
    job, history = reading(read.format(here)), ps.files_done(named.format(here))
    assert {*history} == {str(here / name) for name in ("in/a.parquet", "in/below/b.parquet")}
    savepoint = ps.write_savepoint(here / "new", {}, job=job, sources={"files": history})
    assert found_by(started_from(savepoint, job)) == done_in(savepoint) == {*history}


def test_links_stay_as_they_are_spelt(here: Path) -> None:
    assert {*ps.files_done("../link")} == {
        str(here / "link" / name) for name in ("a.parquet", "below/b.parquet")
    }
    (here / "deep").mkdir()
    (here / "deep" / "link").symlink_to(here / "in" / "below")
    above = str(here / "deep" / "link" / "..")
    assert {*ps.files_done(above)} == {f"{above}/a.parquet", f"{above}/below/b.parquet"}
    assert source_of(graph_of(reading(above))).path == above


def test_a_path_that_names_nothing_to_read_is_an_error_of_state(here: Path) -> None:
    for wrong in ("gs://bucket/in", "s3:/bucket", "", 5, "../inn"):
        with pytest.raises(ps.StateError, match="files_done: "):
            ps.files_done(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("says_path", [True, False])
def test_state_that_spells_its_files_with_dots_is_gone_on_with(here: Path, says_path: bool) -> None:
    """As older versions have stored it: some do not say which path the source had."""
    spelt = f"{here}/live/../in"
    job = reading("../in")
    old = graph_of(job)
    assert old is not None
    source_of(old).path = spelt
    manifest = checkpoint_pb2.CheckpointManifest(vertices=fingerprint(old))
    if not says_path:
        for vertex in manifest.vertices:
            for one in vertex.operators:
                one.ClearField("declared")
    new = graph_of(job)
    assert new is not None
    adopt_paths(new, manifest)
    assert source_of(new).path == spelt
    assert found_by(source_of(new)) == {f"{spelt}/a.parquet", f"{spelt}/below/b.parquet"}

    # What is given of it goes on by the same names; and files named otherwise get them.
    for ids in (found_by(source_of(new)), {*ps.files_done("../in")}):
        target = here / f"new-{len(list(here.iterdir()))}"
        sources = {"files": dict.fromkeys(ids, ps.END)}
        written = ps.write_savepoint(target, {}, job=job, sources=sources)
        assert found_by(started_from(written, job)) == done_in(written)
        again = ps.write_savepoint(
            f"{target}-again", {}, base=written, sources={"files": ps.files_done("../in")}
        )
        assert found_by(started_from(again, job)) == done_in(again)
