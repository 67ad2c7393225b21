"""Aim: a source goes on exactly where it was told to, or the savepoint is refused.

Method: files that are named by one spelling are those that the source finds by another; what cannot be right is refused
by name. No cluster: what a source finds is what its discovery gives.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

import penstock as ps
from penstock.graph.adopted_paths import adopt_paths
from penstock.graph.fingerprint import fingerprint
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.state_tables.operator_tables import SPLITS_SCHEMA, splits_batch
from penstock.state_tables.savepoint_writer_store import graph_of
from penstock.state_tables.source_positions import split_snapshots
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


def test_a_spelling_whose_link_is_gone_is_not_gone_on_with(here: Path) -> None:
    """Another directory is there by the name that it comes down to without its dots."""
    (here / "deep").mkdir()
    (here / "deep" / "link").symlink_to(here / "in" / "below")
    spelt, job = f"{here}/deep/link/..", reading(here / "deep")
    savepoint = ps.write_savepoint(here / "new", {}, job=reading(spelt))
    assert started_from(savepoint, reading(spelt)).path == spelt
    (here / "deep" / "link").unlink()
    assert started_from(savepoint, job).path == str(here / "deep")
    (here / "deep").rmdir()  # as where the files are mounted elsewhere
    assert started_from(savepoint, job).path == spelt


def test_what_the_base_has_read_under_another_path_may_be_given_again(here: Path) -> None:
    history = ps.files_done("../in")
    base = ps.write_savepoint(here / "new", {}, job=reading("../in"), sources={"files": history})
    splits, moved = ps.open_state(base).read("files", "splits"), reading("../in/below")
    sources = {"files": splits}
    again = ps.write_savepoint(here / "again", {}, base=base, job=moved, sources=sources)
    assert done_in(again) == {*history}
    sources = {"files": {**history, str(here / "in" / "other.parquet"): ps.END}}
    with pytest.raises(ps.StateError, match=r"other.parquet' is not in .*/below, which the source"):
        ps.write_savepoint(here / "wrong", {}, base=base, job=moved, sources=sources)


def payload_of(path: str) -> bytes:
    return json.dumps({"path": path, "size_bytes": 1}).encode()


def test_an_open_file_goes_on_where_its_row_says(here: Path) -> None:
    name = str(here / "in" / "a.parquet")
    row = {"id": name, "payload": payload_of(name), "size": 1, "position": b"5"}
    written = ps.write_savepoint(here / "new", {}, job=reading("../in"), sources={"files": [row]})
    table = ps.open_state(written).read("files", "splits")
    assert table.select(list(row)).to_pylist() == [row]
    again = ps.write_savepoint(here / "again", {}, base=written, sources={"files": table})
    assert ps.open_state(again).read("files", "splits").equals(table)


NO_FILES: list[tuple[Any, str]] = [
    ({"../in/a.parquet": ps.END}, "is no whole path.*give what ps.files_done"),
    ({"a.parquet": ps.END}, "is no whole path.*give what ps.files_done"),
    ({"{0}/in": ps.END}, "is a directory: give its files"),
    ({"{0}/in/below/": ps.END}, "is a directory: give its files"),
    ({"{0}/live/a.parquet": ps.END}, "is not in {0}/in, which the source reads"),
    ({"{0}/inner/a.parquet": ps.END}, "is not in {0}/in, which the source reads"),
    ({"s3://bucket/in/a.parquet": ps.END}, "is not in {0}/in, which the source reads"),
    ({"{0}/in/a.parquet": None}, "is not done, and has no payload"),
    ({"{0}/in/a.parquet": b"5"}, "is not done, and has no payload"),
    ({"{0}/in/a.parquet": ps.END, "{0}/in/../in/a.parquet": ps.END}, "is there twice"),
    ([{"id": "{0}/in/a.parquet", "payload": b"partition 5"}], "has the payload of another split"),
    ([{"id": "{0}/in/a.parquet", "payload": payload_of("/b")}], "has the payload of another split"),
    ("{0}/in", "given as str: give .*ps.files_done"),
    (None, "given as NoneType: give .*leave the source out"),
    (5, "given as int: give .*ps.files_done"),
]  # fmt: skip


@pytest.mark.parametrize(("positions", "message"), NO_FILES, ids=[one for _, one in NO_FILES])
def test_what_is_no_file_of_the_source_is_refused(positions: Any, message: str, here: Path) -> None:
    if isinstance(positions, dict):
        positions = {name.format(here): position for name, position in positions.items()}
    if isinstance(positions, list):
        positions = [row | {"id": row["id"].format(here)} for row in positions]
    with pytest.raises(ps.StateError, match=f"source 'files'.*{message.format(here)}"):
        ps.write_savepoint(here / "new", {}, job=reading("../in"), sources={"files": positions})
    assert not list((here / "new").rglob("*"))


def test_a_file_that_is_not_there_is_told_of(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = [str(here / "in" / name) for name in ("a.parquet", "gone.parquet")]
    sources = {"files": dict.fromkeys(names, ps.END)}
    written = ps.write_savepoint(here / "new", {}, job=reading("../in"), sources=sources)
    assert done_in(written) == {*names}
    assert "1 of 2 files are not there" in caplog.text
    assert names[1] in caplog.text


def test_positions_of_subtasks_that_had_finished_are_refused(here: Path) -> None:
    base = ps.open_state(ps.write_savepoint(here / "base", {}, job=reading("../in")))
    for subtask in base.manifest.subtasks:
        subtask.finished = True
    with pytest.raises(ps.StateError, match="1 of its subtasks had finished in the base"):
        ps.write_savepoint(here / "new", {}, base=base, sources={"files": ps.files_done("../in")})
    with pytest.raises(ps.StateError, match=r"takes sources=\{uid: positions\}, got list"):
        ps.write_savepoint(here / "new", {}, base=base, sources=["files"])  # type: ignore[arg-type]


WRONG: list[tuple[Any, str]] = [
    (pa.table({"id": [5]}), "column 'id' is string, got int64: cast it"),
    (pa.table({"id": ["a"], "done": ["false"]}), "column 'done' is bool, got string: cast it"),
    (pa.table({"id": ["a"], "done": [0]}), "column 'done' is bool, got int64: cast it"),
    (pa.table({"id": ["a"], "position": ["5"]}), "column 'position' is binary, got string: cast it"),
    (pa.table({"id": ["a"], "size": [1.5]}), "column 'size' is int64, got double: cast it"),
    (pa.table({"id": ["a", None]}), "row 1: its id is null"),
    (pa.table({"id": ["a", ""]}), "row 1: its id is empty"),
    (pa.table({"id": ["a"], "done": [True], "position": [b"5"]}), "row 0: split 'a' is done and has a position"),
    (pa.table({"id": ["a", "a"]}), "split 'a' is there twice"),
    (pa.table({"id": ["a"], "size": [-1]}), "split 'a' has the size -1"),
    (pa.table({"id": ["a"], "min_event_time_ms": [2**63 - 1]}), "split 'a' has min_event_time_ms"),
    (pa.table({"name": pa.array([], "string")}), r"given with \['name'\]; columns of splits are"),
    (pa.table([["a"], ["b"]], ["id", "id"]), "'id' more than once"),
    ([{"id": 5}], "row 0: .*'id'"),
    ([{"id": "a", "done": "false"}], "row 0: .*'done'"),
    ([{"id": "a", "position": "5"}], "row 0: .*'position'"),
    ([{"position": b"5"}], r"given with \['position'\]; columns of splits are"),
    ({"": b"5"}, "its id is empty"),
    ({5: b"5"}, "5: b'5' is no split"),
    ({"a": "5"}, "'a': '5' is no split"),
    ({"\ud800": b"5"}, "is no split: its id is a text of UTF-8"),
    ({ps.Split("a", "payload"): b"5"}, "'a' is no split: .* its payload bytes"),  # type: ignore[arg-type]
    ({ps.Split("a", size=1 << 70): b"5"}, "'a' is no split: .*64 bits"),
]  # fmt: skip


@pytest.mark.parametrize(("positions", "message"), WRONG, ids=[one for _, one in WRONG])
def test_positions_that_cannot_be_right_are_refused(positions: Any, message: str) -> None:
    with pytest.raises(ps.StateError, match=f"^here.*{message}"):
        split_snapshots(positions, "here")


def test_no_positions_are_those_of_a_source_that_begins() -> None:
    for nothing in ({}, [], pa.table({"id": pa.array([], pa.string())})):
        assert split_snapshots(nothing, "here") == []


ROWS = st.lists(
    st.fixed_dictionaries(
        {"id": st.sampled_from(["a", "b", "c", "d", "e", "", None])},
        optional={
            "payload": st.none() | st.binary(max_size=2),
            "size": st.none() | st.integers(-1, 3),
            "min_event_time_ms": st.none() | st.integers(-(2**62), 2**62 + 1),
            "position": st.none() | st.binary(max_size=2),
            "done": st.none() | st.booleans(),
            "subtask": st.integers(0, 5),
        },
    ),
    max_size=5,
)


def taken(rows: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """What ``open_state`` would give of rows, as the documentation has it; None = they are refused."""
    names = [row["id"] for row in rows]
    if not all(names) or len({*names}) < len(names):
        return None
    found = []
    for row in rows:
        is_done, position, size = bool(row.get("done")), row.get("position"), row.get("size") or 0
        time_ms = row.get("min_event_time_ms")
        if (is_done and position) or size < 0 or (time_ms or 0) > 2**62:
            return None
        open_row = (row.get("payload") or b"", size, time_ms, position)
        values = (b"", 0, None, None) if is_done else open_row
        columns = ("payload", "size", "min_event_time_ms", "position")
        found.append({"id": row["id"], **dict(zip(columns, values, strict=True)), "done": is_done})
    return found


@given(ROWS, st.sampled_from(["rows", "table", "reader"]), st.integers(1, 3))
def test_rows_are_taken_as_they_are_or_refused(
    rows: list[dict[str, Any]], form: str, size: int
) -> None:
    names = dict.fromkeys(name for row in rows for name in row)
    schema = pa.schema([SPLITS_SCHEMA.field(name) for name in names or ["id"]])
    table = pa.Table.from_pylist(rows, schema=schema)
    reader = pa.RecordBatchReader.from_batches(schema, table.to_batches(max_chunksize=size))
    positions = {"rows": rows, "table": table, "reader": reader}[form]
    wanted = taken(rows)
    if wanted is None:
        with pytest.raises(ps.StateError):
            split_snapshots(positions, "here")
        return
    held = checkpoint_pb2.OperatorSnapshot(splits=split_snapshots(positions, "here"))
    assert splits_batch(held, 0).drop_columns("subtask").to_pylist() == wanted


def test_what_cannot_be_looked_at_is_not_there(here: Path) -> None:
    """As below a directory that may not be entered; a name that is too long stands for it, since root may enter all."""
    job = reading("../in")
    old, new = graph_of(job), graph_of(job)
    assert old is not None
    assert new is not None
    source_of(old).path = f"{here}/{'x' * 300}/../in"
    adopt_paths(new, checkpoint_pb2.CheckpointManifest(vertices=fingerprint(old)))
    assert source_of(new).path == f"{here}/in"


class Shards(ps.Source):
    """Two shards, which say in their payload where they are."""

    bounded = False
    fails = False

    @property
    @override
    def schema(self) -> pa.Schema:
        return pa.schema([("n", pa.int64())])

    @override
    def start(self, ctx: ps.SourceContext) -> None:
        self._names = ["shard-0", "shard-1"]

    @override
    def discover(self, ctx: ps.SourceContext) -> list[ps.Split]:
        if self.fails:
            raise ConnectionError("no such host")
        return [ps.Split(name, name[-1:].encode(), 7, 5) for name in self._names]

    @override
    def open(self, split: ps.Split, position: bytes | None) -> ps.Reader:
        raise NotImplementedError


class AwayShards(Shards):
    fails = True


def sharded(source: ps.Source) -> ps.Environment:
    env = ps.Environment(parallelism=1)
    env.source(source).uid("shards").discard()
    return env


def splits_of(savepoint: str) -> dict[str, tuple[Any, ...]]:
    rows = ps.open_state(savepoint).read("shards", "splits").to_pylist()
    names = ("payload", "size", "min_event_time_ms", "position", "done")
    return {row["id"]: tuple(row[name] for name in names) for row in rows}


@pytest.mark.parametrize("positions", [{"shard_0": b"5"}, {"shard-0": ps.END, "shard-2": ps.END}, [{"id": "Shard-1"}]])  # fmt: skip
def test_a_split_that_a_source_of_ones_own_has_not_is_refused(
    positions: Any, tmp_path: Path
) -> None:
    with pytest.raises(
        ps.StateError,
        match=r"source 'shards' has no split '(shard_0|shard-2|Shard-1)': it has 'shard-0', 'shard-1'",
    ):
        ps.write_savepoint(
            tmp_path / "new", {}, job=sharded(Shards()), sources={"shards": positions}
        )
    assert not list((tmp_path / "new").rglob("*"))


def test_splits_named_by_their_ids_are_what_the_source_says_of_them(tmp_path: Path) -> None:
    positions = {"shard-0": b"5", ps.Split("gone", b"g"): b"6"}
    first = ps.write_savepoint(
        tmp_path / "first", {}, job=sharded(Shards()), sources={"shards": positions}
    )
    wanted = {"shard-0": (b"0", 7, 5, b"5", False), "gone": (b"g", 0, None, b"6", False)}
    assert splits_of(first) == wanted
    # What the base has needs nobody to be asked, and what it has not is told of where nobody can be.
    again = ps.write_savepoint(
        tmp_path / "again", {}, base=first, sources={"shards": {"shard-0": b"9", "gone": ps.END}}
    )
    assert splits_of(again) == {"shard-0": (b"0", 7, 5, b"9", False), "gone": (b"", 0, None, None, True)}  # fmt: skip
    ended = ps.write_savepoint(
        tmp_path / "ended", {}, base=again, job=sharded(AwayShards()), sources={"shards": {"gone": ps.END}}
    )  # fmt: skip
    assert splits_of(ended) == {"gone": (b"", 0, None, None, True)}


def test_splits_that_nobody_can_say_anything_of_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sources = {"shards": {"shard_0": ps.END}}
    ps.write_savepoint(tmp_path / "new", {}, job=sharded(AwayShards()), sources=sources)
    assert "cannot be asked for its splits here: ConnectionError('no such host')" in caplog.text
    assert "nobody could say whether it has 'shard_0'" in caplog.text


def test_splits_of_a_source_of_ours_are_those_that_state_names(tmp_path: Path) -> None:
    env = ps.Environment(parallelism=1)
    env.from_rows([{"n": 1}]).uid("rows").discard()
    with pytest.raises(ps.StateError, match="source 'rows' has no split 'all': it has none"):
        ps.write_savepoint(tmp_path / "new", {}, job=env, sources={"rows": {"all": ps.END}})
