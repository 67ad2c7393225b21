"""Aim: every sink holds exactly the rows, shows them only when a checkpoint covers
them or the job has ended well, and leaves nothing behind.

Method: what a job wrote is read back with pyarrow, json and DuckDB.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest
from typing_extensions import override

import penstock as ps
from penstock import col
from penstock.client.client import Client
from tests.integration.conftest import NewEnvironment
from tests.support.bids import cut, make_bids, to_table, write_table
from tests.support.committed_files import Table
from tests.support.jobs import DEADLINE_S, assert_same_rows, await_details, cancel, run
from tests.support.processes import wait_in_directory
from tests.support.row_server import LineServer

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]

BIDS = make_bids(2_000)
Row = dict[str, Any]

WRITERS: dict[str, Callable[..., ps.StreamSink]] = {
    "parquet": ps.Stream.write_parquet,
    "csv": ps.Stream.write_csv,
    "json": ps.Stream.write_json,
}


@pytest.fixture(scope="module")
def bids_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bids")
    for index, part in enumerate(cut(BIDS, 5)):
        write_table(to_table(part), directory / f"{index}.parquet")
    return directory


@pytest.fixture
def bids(env: ps.Environment, bids_dir: Path) -> ps.Stream:
    return env.read_parquet(str(bids_dir))


def everything_below(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def hidden_below(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.name.startswith((".", "_"))]


def read_back(form: str, directory: Path) -> list[Row]:
    """What a reader of datasets finds, hidden files left out."""
    assert hidden_below(directory) == []
    if form == "json":
        return [
            json.loads(line)
            for path in everything_below(directory)
            for line in path.read_text().splitlines()
        ]
    rows: list[Row] = pa.dataset.dataset(directory, format=form).to_table().to_pylist()
    return rows


def test_parquet_files(env: ps.Environment, bids: ps.Stream, tmp_path: Path) -> None:
    bids.write_parquet(str(tmp_path / "deep" / "out"))
    run(env)
    files = everything_below(tmp_path)
    assert len(files) == 2, "one per subtask"
    assert all(path.suffix == ".parquet" for path in files)
    for path in files:
        assert pa.parquet.read_schema(path).names == bids.schema.names
    assert_same_rows(read_back("parquet", tmp_path / "deep" / "out"), BIDS)


def test_csv_files(env: ps.Environment, bids: ps.Stream, tmp_path: Path) -> None:
    bids.drop("score").write_csv(str(tmp_path))
    run(env)
    for path in everything_below(tmp_path):
        header = path.read_text().splitlines()[0].replace('"', "")
        assert header == "n,auction,bidder,price,ts,at,open"
    wanted = [{k: v for k, v in row.items() if k not in ("score", "at")} for row in BIDS]
    found = duckdb.sql(
        f"SELECT n, auction, bidder, price, ts, open FROM read_csv('{tmp_path}/*.csv', "
        "nullstr='', allow_quoted_nulls=false)"
    )
    names = found.columns
    assert_same_rows([dict(zip(names, row, strict=True)) for row in found.fetchall()], wanted)


def test_json_files(env: ps.Environment, bids: ps.Stream, tmp_path: Path) -> None:
    nested = bids.with_columns(
        pair=ps.fn.make_struct(col("n"), col("open"), field_names=["a", "b"])
    )
    nested.drop("at", "score").write_json(str(tmp_path))
    run(env)
    expected = [
        {
            **{k: v for k, v in row.items() if k not in ("at", "score")},
            "pair": {"a": row["n"], "b": row["open"]},
        }
        for row in BIDS
    ]
    assert_same_rows(read_back("json", tmp_path), expected)


@pytest.mark.parametrize("form", WRITERS)
def test_what_was_written_can_be_read(
    env: ps.Environment, bids: ps.Stream, tmp_path: Path, form: str
) -> None:
    WRITERS[form](bids, str(tmp_path))
    run(env)
    reader = {"parquet": env.read_parquet, "csv": env.read_csv, "json": env.read_json}[form]
    again = reader(str(tmp_path), schema=bids.schema).collect()
    run(env)
    expected = BIDS
    if form in ("json", "csv"):  # JSON has no NaN; CSV as pyarrow reads it takes it for null
        expected = [
            {**row, "score": None if row["score"] != row["score"] else row["score"]} for row in BIDS
        ]
    if form == "csv":  # which has no difference between null and empty text
        expected = [{**row, "bidder": row["bidder"] or ""} for row in expected]
    assert_same_rows(again, expected)


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("columns", [["auction"], ["bidder", "open"]], ids=str)
def test_partitions_are_directories(
    env: ps.Environment, bids: ps.Stream, tmp_path: Path, form: str, columns: list[str]
) -> None:
    named = bids.select("n", "auction", "bidder", "open").with_columns(
        bidder=ps.when(col("bidder") == "", "a/b=c d").otherwise(col("bidder"))
    )
    WRITERS[form](named, str(tmp_path), partition_by=columns)
    run(env)
    assert hidden_below(tmp_path) == []
    rows = [
        {"n": r["n"], "auction": r["auction"], "bidder": r["bidder"], "open": r["open"]}
        for r in BIDS
    ]
    for row in rows:
        row["bidder"] = "a/b=c d" if row["bidder"] == "" else row["bidder"]
    values = {tuple(row[name] for name in columns) for row in rows}
    directories = {path.parent for path in everything_below(tmp_path)}
    assert len(directories) == len(values)
    kept = [name for name in named.schema.names if name not in columns]
    if form == "parquet":
        assert pa.parquet.read_schema(everything_below(tmp_path)[0]).names == kept
    partitioning = pa.dataset.partitioning(
        pa.schema([named.schema.field(name) for name in columns]), flavor="hive"
    )
    if form == "json":
        found = duckdb.sql(
            f"SELECT * FROM read_json('{tmp_path}/**/*.json', hive_partitioning=true, "
            "hive_types_autocast=true)"
        )
        names = found.columns
        again = [dict(zip(names, row, strict=True)) for row in found.fetchall()]
        for row in again:
            if row["bidder"] == "__HIVE_DEFAULT_PARTITION__":
                row["bidder"] = None
            row["open"] = {"true": True, "false": False}.get(row["open"], row["open"])
    else:
        again = (
            pa.dataset.dataset(tmp_path, format=form, partitioning=partitioning)
            .to_table()
            .to_pylist()
        )
    if form == "csv":  # no difference between null and empty text
        again = [{**row, "bidder": row["bidder"] or None} for row in again]
    assert_same_rows([{name: row[name] for name in named.schema.names} for row in again], rows)


@pytest.mark.parametrize("form", WRITERS)
def test_files_roll_at_a_size(new_env: NewEnvironment, tmp_path: Path, form: str) -> None:
    env = new_env(config={"execution.batch-rows": 50})
    rows = [{"n": n, "text": f"x{n * 7919 % 10_007:06}" * 20} for n in range(2_000)]
    WRITERS[form](env.from_rows(rows).rebalance(), str(tmp_path), roll="20kb")
    run(env)
    files = everything_below(tmp_path)
    assert len(files) > 6
    assert max(path.stat().st_size for path in files) < 60_000
    assert_same_rows(read_back(form, tmp_path), [*rows])


def test_a_job_adds_to_a_directory_and_leaves_others_alone(
    env: ps.Environment, bids: ps.Stream, tmp_path: Path
) -> None:
    for _ in range(2):
        env.from_rows([{"n": 1}, {"n": 2}]).write_parquet(str(tmp_path))
        env.from_rows([{"n": 3}]).write_parquet(str(tmp_path))
        run(env)
    counts = Counter(row["n"] for row in read_back("parquet", tmp_path))
    assert counts == {1: 2, 2: 2, 3: 2}


def test_no_rows_leave_no_files(env: ps.Environment, bids: ps.Stream, tmp_path: Path) -> None:
    bids.filter(col("n") < 0).write_parquet(str(tmp_path))
    run(env)
    assert everything_below(tmp_path) == []


def test_without_checkpoints_names_are_final_only_when_the_job_has_finished(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    env = new_env(config={"execution.checkpointing.interval": "none"})
    with LineServer() as server:
        lines = env.read_socket("127.0.0.1", server.port)
        lines.write_csv(str(tmp_path / "csv"))
        lines.write_json(str(tmp_path / "json"), partition_by=None, roll=1)
        handle = env.submit("commit")
        server.send("one", "two")
        await_details(handle, lambda metrics, _: metrics["totals"]["records_out"] == 4)
        written = everything_below(tmp_path)
        assert written
        assert all(path.name.startswith(".") for path in written)
        server.end()
        assert handle.wait(DEADLINE_S).status == "FINISHED"
    assert Counter(row["line"] for row in read_back("csv", tmp_path / "csv")) == {
        "one": 1,
        "two": 1,
    }
    assert len(read_back("json", tmp_path / "json")) == 2


def test_names_are_final_when_a_checkpoint_covers_the_rows(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    env = new_env(config={"execution.checkpointing.interval": "10 min"})
    with LineServer() as server:
        lines = env.read_socket("127.0.0.1", server.port)
        lines.write_json(str(tmp_path / "out"))
        handle = env.submit("commit")
        server.send("one", "two")
        await_details(handle, lambda metrics, _: metrics["totals"]["records_out"] == 2)
        assert all(path.name.startswith(".") for path in everything_below(tmp_path))
        handle.checkpoint(DEADLINE_S)
        committed = Table(str(tmp_path / "out"))

        def are_there() -> bool:
            committed.look()
            return len(committed) == 2  # of two subtasks, perhaps

        wait_in_directory(tmp_path / "out", are_there, "committed files")
        assert sorted(row["line"] for row in committed.rows()) == ["one", "two"]
        server.send("three")
        await_details(handle, lambda metrics, _: metrics["totals"]["records_out"] == 3)
        assert committed.look() == 0
        server.end()
        assert handle.wait(DEADLINE_S).status == "FINISHED"
    assert committed.look() == 1
    assert [path for path in everything_below(tmp_path) if path.name.startswith(".")] == []


def test_a_cancelled_job_leaves_what_checkpoints_have_committed(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    env = new_env(config={"execution.checkpointing.interval": "10 min"})
    out = tmp_path / "out"
    with LineServer() as server:
        lines = env.read_socket("127.0.0.1", server.port)
        lines.write_json(str(out))
        handle = env.submit("cancelled")
        server.send("one")
        await_details(handle, lambda metrics, _: metrics["totals"]["records_out"] == 1)
        handle.checkpoint(DEADLINE_S)
        committed = Table(str(out))
        wait_in_directory(out, committed.look, "committed files")
        server.send("two")
        await_details(handle, lambda metrics, _: metrics["totals"]["records_out"] == 2)
        cancel(handle)
    assert committed.look() == 0
    assert [row["line"] for row in committed.rows()] == ["one"]
    assert len(everything_below(out)) == 1


def test_a_cancelled_job_leaves_nothing(env: ps.Environment, tmp_path: Path) -> None:
    with LineServer() as server:
        lines = env.read_socket("127.0.0.1", server.port)
        lines.with_columns(p=col("line")).write_parquet(str(tmp_path / "out"), partition_by=["p"])
        handle = env.submit("cancelled")
        server.send("one", "two")
        await_details(handle, lambda metrics, _: metrics["totals"]["records_out"] == 2)
        cancel(handle)
    assert everything_below(tmp_path) == []


def fail_at_the_end(row: ps.Row) -> dict[str, int]:
    if row.n == 1_999:
        raise ValueError("the last row is bad")
    return {"n": row.n}


def test_a_failed_job_shows_nothing(env: ps.Environment, bids: ps.Stream, tmp_path: Path) -> None:
    bids.write_parquet(str(tmp_path / "good"))
    bids.map(fail_at_the_end, schema={"n": int}).write_parquet(str(tmp_path / "bad"), roll=1_000)
    with pytest.raises(ps.JobFailed, match="the last row is bad"):
        run(env)
    assert everything_below(tmp_path) == []


# ---------------------------------------------------------------- other sinks


def logged(client: Client, handle: ps.JobHandle) -> list[str]:
    """Lines of the task logs that are from print sinks, whatever their order between subtasks."""
    parts: dict[tuple[str, int], bytes] = {}
    for chunk in client.logs(handle.job_id):
        key = chunk.vertex, chunk.subtask_index
        parts[key] = parts.get(key, b"") + chunk.data
    return [
        line
        for data in parts.values()
        for line in data.decode().splitlines()
        if line.startswith("[")
    ]


def test_print_writes_to_the_log_of_the_task(
    env: ps.Environment, bids: ps.Stream, client: Client
) -> None:
    bids.filter(col("n") < 40).select("n", "bidder").print().name("shown")
    handle = env.submit("print")
    handle.wait(DEADLINE_S)
    lines = logged(client, handle)
    assert {line.partition("] ")[0] for line in lines} <= {"[shown (1/2)", "[shown (2/2)"}
    found = [json.loads(line.partition("] ")[2]) for line in lines]
    assert_same_rows(found, [{"n": row["n"], "bidder": row["bidder"]} for row in BIDS[:40]])


def test_discard_counts(env: ps.Environment, bids: ps.Stream) -> None:
    bids.filter(col("open")).discard()
    totals = run(env).metrics["totals"]
    assert totals["records_in"] == 2_000
    assert totals["records_out"] == sum(row["open"] for row in BIDS)


@pytest.mark.parametrize("limit", [1, 7, 5_000])
def test_collect_brings_back_at_most_the_limit(
    env: ps.Environment, bids: ps.Stream, limit: int
) -> None:
    rows = bids.select("n").collect(limit=limit)
    run(env)
    numbers = [row.n for row in rows]
    assert len(numbers) == len(set(numbers)) == min(limit, 2_000)
    assert set(numbers) <= set(range(2_000))


@pytest.mark.parametrize("interval", ["none", "200ms"])
def test_collect_with_a_limit_of_an_endless_stream_does_not_hold_the_job(
    new_env: NewEnvironment, interval: str
) -> None:
    env = new_env(config={"execution.checkpointing.interval": interval})
    rows = env.nexmark(columns=["price"]).collect(limit=100)
    handle = env.submit("limited")
    await_details(handle, lambda metrics, _: metrics["totals"]["records_in"] > 100_000)
    if interval != "none":
        assert len(rows) == 100  # there as soon as a checkpoint covers them: the job runs on
        assert handle.status() == "RUNNING"
    cancel(handle)
    assert len(rows) == 100  # what was taken stays readable, whatever becomes of the job


def test_rows_that_no_checkpoint_covers_are_not_handed_out(new_env: NewEnvironment) -> None:
    env = new_env(config={"execution.checkpointing.interval": "10 min"})
    rows = env.nexmark(columns=["price"]).collect(limit=100)
    handle = env.submit("uncovered")
    await_details(handle, lambda metrics, _: metrics["totals"]["records_in"] > 100_000)
    cancel(handle)
    with pytest.raises(ps.JobCanceled):
        len(rows)


def test_reading_collected_rows_runs_the_job(env: ps.Environment, bids: ps.Stream) -> None:
    rows = bids.select("n", "price").filter(col("n") < 10).collect()
    others = bids.filter(col("n") >= 1_995).select("n").collect()
    assert sorted(row["n"] for row in rows) == list(range(10))
    assert rows[0].price == BIDS[rows[0].n]["price"]
    assert len(rows) == 10
    assert rows.to_arrow().schema == pa.schema([("n", pa.int64()), ("price", pa.int64())])
    assert sorted(row.n for row in others) == list(range(1_995, 2_000))
    with pytest.raises(AttributeError, match="no column 'cost'"):
        _ = rows[0].cost


def test_collected_rows_are_back_pressured_until_they_are_taken(env: ps.Environment) -> None:
    rows = env.nexmark(200_000).collect()
    run(env)
    assert rows.to_arrow().num_rows == 184_000


class Recording(ps.Sink):
    """Writes what it is told into a file per subtask."""

    def __init__(self, directory: Path, lock: Any = None) -> None:
        self._directory = directory
        self._lock = lock

    @override
    def open(self, ctx: ps.SinkContext) -> None:
        self._path = self._directory / f"{ctx.operator_name}-{ctx.subtask_index}"
        self._unsafe: list[int] = []
        self._path.write_text(f"open {ctx.parallelism}\n")

    def _note(self, text: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{text}\n")

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        assert batch.num_rows > 0
        self._unsafe += batch["n"].to_pylist()

    @override
    def flush(self) -> None:
        self._note(" ".join(["flush", *map(str, self._unsafe)]))
        self._unsafe = []

    @override
    def close(self) -> None:
        self._note(f"close {len(self._unsafe)}")


def test_a_sink_of_the_users_own(env: ps.Environment, bids: ps.Stream, tmp_path: Path) -> None:
    bids.sink(Recording(tmp_path)).name("mine").parallelism(3)
    run(env)
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == ["mine-0", "mine-1", "mine-2"]
    numbers: list[int] = []
    for path in paths:
        first, *flushes, last = path.read_text().splitlines()
        assert (first, last) == ("open 3", "close 0")
        for line in flushes:
            word, *written = line.split(" ")
            assert word == "flush"
            numbers += map(int, written)
    assert sorted(numbers) == list(range(2_000))


def test_a_sink_that_cannot_travel_is_refused(bids: ps.Stream, env: ps.Environment) -> None:
    bids.sink(Recording(Path(), lock=threading.Lock()))
    with pytest.raises(ps.JobRejected, match="_lock"):
        env.submit("lock")


def test_many_sinks_in_one_job(env: ps.Environment, bids: ps.Stream, tmp_path: Path) -> None:
    collected = bids.select("n").collect()
    bids.write_parquet(str(tmp_path / "a"))
    bids.filter(col("open")).write_json(str(tmp_path / "b"), partition_by=["auction"])
    bids.key_by("auction").aggregate(n=ps.count()).write_csv(str(tmp_path / "c"))
    bids.sink(Recording(tmp_path)).name("mine")
    bids.discard()
    result = run(env)
    assert len(collected) == 2_000
    assert_same_rows(read_back("parquet", tmp_path / "a"), BIDS)
    assert len(read_back("json", tmp_path / "b")) == sum(row["open"] for row in BIDS)
    totals: dict[int, int] = {}
    for row in read_back("csv", tmp_path / "c"):
        totals[row["auction"]] = max(totals.get(row["auction"], 0), row["n"])
    assert totals == Counter(row["auction"] for row in BIDS)
    assert result.metrics["totals"]["records_in"] == 2_000


def test_a_job_cancelled_while_it_restarts_leaves_no_hidden_files(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    """Its attempts had ended before the cancellation: killed, so that they could remove nothing themselves."""
    marker = tmp_path / "die"

    def die_when_told(row: ps.Row) -> Row:
        if marker.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return {"n": "x" * 4_000}

    def started() -> bool:
        return any(path.suffix == ".inprogress" for path in hidden_below(out))

    out = tmp_path / "out"
    out.mkdir()
    env = new_env(
        config={
            "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
            "execution.checkpointing.interval": "1h",
            "restart-strategy.type": "fixed-delay",
            "restart-strategy.fixed-delay.delay": "1h",
        }
    )
    rows = env.generate(numbers_from, rate=1_000, schema=pa.schema([("n", pa.int64())]))
    rows.map(die_when_told, schema={"n": "string"}).write_json(str(out))
    handle = env.submit("cancelled")
    try:
        wait_in_directory(out, started, "the first file")
        marker.touch()
        await_details(handle, lambda _, state: state == "RESTARTING")
        (out / ".part-of-another-job-0-0-1.pending").touch()
        assert started()
    finally:
        cancel(handle)
    wait_in_directory(out, lambda: len(hidden_below(out)) == 1, "the hidden files to go")
    assert [path.name for path in out.iterdir()] == [".part-of-another-job-0-0-1.pending"]


def numbers_from(start: int, count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"n": range(start, start + count)})
