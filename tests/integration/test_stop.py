"""Aim: a job that is stopped ends behind its savepoint's barrier: what it has written is what the savepoint covers, once; what
keeps it from being stopped leaves it running, with every row once. Method: numbers counted per source subtask into files, on
real daemons; the savepoint's position of the sources says how many rows there must be."""

from __future__ import annotations

import contextlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import penstock as ps
from penstock.cli.main import main
from penstock.client.job import JobHandle
from penstock.errors import StreamError
from penstock.pb import checkpoint_pb2
from penstock.storage.local_store import LocalStore
from penstock.storage.manifest import decode_manifest
from tests.integration.conftest import NewEnvironment
from tests.support.jobs import DEADLINE_S, await_details

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]


def numbers(start: int, count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"n": range(start, start + count)})


def timed(start: int, count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {"n": range(start, start + count), "ts": range(start, start + count)}
    )


def submit(
    new_env: NewEnvironment, out: Path, from_savepoint: str = "", **config: object
) -> JobHandle:
    env = new_env(config={"execution.checkpointing.interval": "1h", **config})
    stream = env.generate(numbers, rate=20_000).uid("numbers").parallelism(1)
    stream.rebalance().map(lambda row: row, schema=pa.schema([("n", pa.int64())])).write_parquet(
        str(out)
    )
    handle = env.submit("stopped", from_savepoint=from_savepoint or None)
    await_details(handle, lambda metrics, _: metrics["totals"]["records_in"] > 2_000)
    return handle


def rows_of(out: Path) -> list[int]:
    files = [file for file in out.rglob("*.parquet") if not file.name.startswith(".")]
    return sorted(n for file in files for n in pq.read_table(file)["n"].to_pylist())


def more_rows_than(known: int, out: Path) -> int:
    """Waits for rows: a sink commits when it has heard that the checkpoint is complete."""
    deadline = time.monotonic() + DEADLINE_S
    while (count := len(rows_of(out))) <= known:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return count


def manifest_of(path: str) -> checkpoint_pb2.CheckpointManifest:
    return decode_manifest(LocalStore(Path(path)).get("manifest"))


def test_fewer_subtasks_read_all_that_a_source_without_end_has(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    out, savepoint, reached = tmp_path / "out", None, 0
    for parallelism in (3, 1):
        env = new_env(parallelism, {"execution.checkpointing.interval": "100ms"})
        env.generate(numbers, rate=20_000).uid("numbers").write_parquet(str(out)).uid("files")
        handle = env.submit("narrower", from_savepoint=savepoint)
        deadline = time.monotonic() + DEADLINE_S
        while not set(range(reached + 1_000)) <= set(rows_of(out)):
            assert time.monotonic() < deadline, "there are numbers that nobody reads"
            time.sleep(0.05)
        savepoint = handle.stop(str(tmp_path / "kept"))
        reached = max(rows_of(out))
    assert len(rows_of(out)) == len(set(rows_of(out)))


def test_what_is_written_is_what_the_savepoint_covers(
    new_env: NewEnvironment, address: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    handle = submit(new_env, out)
    handle.checkpoint(DEADLINE_S)
    before = more_rows_than(0, out)
    command = ["stop", handle.job_id, "--savepoint-dir", str(tmp_path / "kept"), "--json"]
    result = CliRunner().invoke(main, [*command, "--jobmanager", address])
    assert result.exit_code == 0, result.output
    told: dict[str, Any] = json.loads(result.output)
    assert set(told) == {"job_id", "operation_id", "path"}
    assert handle.status() == "FINISHED"
    rows = rows_of(out)
    assert len(rows) > before
    assert rows == list(range(len(rows)))
    assert {file.name[0] for file in out.iterdir()} == {"p"}  # nothing hidden is left
    assert (Path(told["path"]) / "committed").exists()
    manifest = manifest_of(told["path"])
    assert manifest.properties.kind == checkpoint_pb2.CHECKPOINT_KIND_SAVEPOINT
    assert manifest.properties.behind == checkpoint_pb2.BEHIND_BARRIER_HOLD
    asked = told["operation_id"]
    assert handle.operation(asked).status == "COMPLETED"
    again = [*command, "--operation-id", asked, "--jobmanager", address]
    repeated = CliRunner().invoke(main, again)  # as who has not heard the first answer
    assert (repeated.exit_code, repeated.stdout) == (0, result.stdout), repeated.output
    with pytest.raises(ps.JobRejected, match=rf"operation {asked} .* is a stop .*\(hold, native\)"):
        handle.stop(tmp_path / "kept", drain=True, operation_id=asked)
    with pytest.raises(ps.JobRejected, match="has ended"):
        handle.stop(tmp_path / "kept", operation_id="another")
    assert handle.metrics()["totals"]["records_in"] >= len(rows)


def test_of_two_stops_one_is_told_that_the_job_does_not_run_on(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    handle = submit(new_env, tmp_path / "out")
    with ThreadPoolExecutor(2) as threads:
        stops = [
            threads.submit(handle.stop, tmp_path / "kept", operation_id=id) for id in ("a", "b")
        ]
        [error] = [error for stop in stops if (error := stop.exception()) is not None]
    assert "runs on" not in str(error), "it is stopped, or has ended"
    assert handle.wait(DEADLINE_S).status == "FINISHED"
    assert len(list((tmp_path / "kept").iterdir())) == 1


def counting_windows(new_env: NewEnvironment, out: Path) -> ps.Environment:
    env = new_env(config={"execution.checkpointing.interval": "1h"})
    stream = env.generate(timed, rate=10_000).parallelism(1).with_event_time("ts")
    keyed = stream.with_columns(k=ps.col("n") % ps.lit(7)).key_by("k")
    keyed.window(ps.tumbling("1h")).aggregate(n=ps.count()).write_parquet(str(out))
    return env


def test_windows_fire_only_with_drain_and_whoever_goes_on_is_told(
    new_env: NewEnvironment, address: str, tmp_path: Path
) -> None:
    for drain in (False, True):
        out = tmp_path / f"out-{drain}"
        handle = counting_windows(new_env, out).submit(f"drain {drain}")
        await_details(handle, lambda metrics, _: metrics["totals"]["records_in"] > 2_000)
        path = handle.stop(tmp_path / "kept", drain=drain, timeout=DEADLINE_S)
        assert handle.status() == "FINISHED"
        counted = sum(rows_of(out))
        assert bool(counted) == drain
        expected = (
            checkpoint_pb2.BEHIND_BARRIER_DRAIN if drain else checkpoint_pb2.BEHIND_BARRIER_HOLD
        )
        assert manifest_of(path).properties.behind == expected
        if drain:
            assert counted == handle.metrics()["vertices"]["v0"]["records_in"]
        again = counting_windows(new_env, out).submit("again", from_savepoint=path)
        await_details(again, lambda _, state: state == "RUNNING")
        command = ["info", again.job_id, "--jobmanager", address]
        told = CliRunner().invoke(main, command).output
        assert ("event time had ended before it was taken (stop --drain)" in told) == drain
        again.cancel()


def test_an_idle_job_stops_at_once(new_env: NewEnvironment, tmp_path: Path) -> None:
    """Long before its source would look for files again."""
    (tmp_path / "in").mkdir()
    env = new_env(config={"execution.checkpointing.interval": "1h"})
    schema = pa.schema([("n", pa.int64())])
    stream = env.read_json(str(tmp_path / "in"), schema=schema, watch="1h")
    stream.key_by("n").aggregate(rows=ps.count()).write_parquet(str(tmp_path / "out"))
    handle = env.submit("idle")
    await_details(handle, lambda _, state: state == "RUNNING")
    handle.stop(tmp_path / "kept", timeout=DEADLINE_S)
    assert handle.wait(DEADLINE_S).status == "FINISHED"


@pytest.mark.parametrize("drain", [False, True])
def test_a_stop_that_fails_leaves_the_numbers_going_on(
    new_env: NewEnvironment, tmp_path: Path, drain: bool
) -> None:
    out = tmp_path / "out"
    handle = submit(new_env, out)
    handle.checkpoint(DEADLINE_S)
    # Its directory can be made, and the manifest in it cannot be written.
    kept = tmp_path / "kept"
    blocked = kept / f"savepoint-{handle.job_id[:8]}-mine"
    (blocked / "state").mkdir(parents=True)
    (blocked / ".manifest.lock").mkdir()
    with pytest.raises(StreamError, match="not stopped, and runs on"):
        handle.stop(kept, drain, timeout=DEADLINE_S, operation_id="mine")
    assert handle.operation("mine").status == "FAILED"
    assert not (blocked / "manifest").exists()
    while True:
        await_details(handle, lambda _, state: state == "RUNNING")
        with contextlib.suppress(StreamError):  # its tasks begin again behind a drain
            handle.checkpoint(DEADLINE_S)
            break
    handle.stop(tmp_path / "other", timeout=DEADLINE_S)
    rows = rows_of(out)
    assert rows == list(range(len(rows)))


def test_a_savepoint_returns_when_its_output_is_committed(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    handle = submit(new_env, out)
    path = Path(handle.savepoint(tmp_path / "kept", timeout=DEADLINE_S))
    assert (path / "committed").exists()
    kinds = [one.status for one in handle.checkpoints()]
    assert kinds == ["COMPLETED"]  # the one that follows
    more_rows_than(0, out)
    handle.cancel()
    with pytest.raises(ps.JobCanceled):
        handle.wait(DEADLINE_S)
    rows = rows_of(out)
    assert rows == list(range(len(rows)))
    assert not [file.name for file in out.iterdir() if file.name.startswith(".")]


def test_what_was_stopped_goes_on_where_it_stood(new_env: NewEnvironment, tmp_path: Path) -> None:
    out, path = tmp_path / "out", ""
    for _ in range(3):
        handle = submit(new_env, out, from_savepoint=path)
        path = handle.stop(tmp_path / "kept", timeout=DEADLINE_S)
    rows = rows_of(out)
    assert rows == list(range(len(rows)))


def test_what_was_stopped_reads_no_file_again(new_env: NewEnvironment, tmp_path: Path) -> None:
    """Of what a checkpoint before the stop knew as read nobody has names any more."""
    data, out, path = tmp_path / "data", tmp_path / "out", ""
    data.mkdir()
    for step in range(3):
        for part in range(2):
            lines = [json.dumps({"n": (2 * step + part) * 10 + n}) for n in range(10)]
            made = tmp_path / "made.json"
            made.write_text("\n".join(lines))
            made.rename(data / f"{step}-{part}.json")
        env = new_env(config={"execution.checkpointing.interval": "1h"})
        stream = env.read_json(data, schema={"n": "int64"}, watch="20ms").uid("files")
        stream.write_parquet(str(out))
        handle = env.submit("watching", from_savepoint=path or None)
        await_details(handle, lambda metrics, _: metrics["totals"]["records_in"] >= 20)
        handle.checkpoint(DEADLINE_S)
        path = handle.stop(tmp_path / "kept", timeout=DEADLINE_S)
        assert rows_of(out) == list(range(20 * (step + 1)))


def test_a_fork_and_its_original_publish_what_is_behind_the_savepoint_once_each(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    handle = submit(new_env, tmp_path / "out")
    path = handle.savepoint(tmp_path / "kept", timeout=DEADLINE_S)
    fork = submit(new_env, tmp_path / "fork", from_savepoint=path)
    for one in (handle, fork):
        one.stop(tmp_path / "kept", timeout=DEADLINE_S)
    original, forked = rows_of(tmp_path / "out"), rows_of(tmp_path / "fork")
    assert original == list(range(len(original)))
    assert forked[0] > 0
    assert forked == list(range(forked[0], forked[0] + len(forked)))
