"""Aim: a job is started from the checkpoint that another one has left, and goes on exactly there.

Method: rows are counted per key and each count is written to files by two jobs, one after the other, into one
directory: over both, each number comes once. Every case waits for what it needs, with a deadline.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import penstock as ps
from penstock.cli.main import main
from penstock.client.client import Client
from penstock.client.job import JobHandle
from penstock.storage.fsck import check_store
from tests.integration.conftest import NewEnvironment
from tests.support.jobs import DEADLINE_S, await_details, cancel, started_from
from tests.support.processes import DaemonCluster, Deadline, site, wait_ended, wait_gone

pytestmark = [pytest.mark.integration, pytest.mark.sampled(4)]

KEYS, ROWS = 7, 4_000
RATE = 500
"""Rows per second of a job that runs to its end."""
SLOW = 100
"""Of one that is cancelled long before its end, however slow the machine."""


def config(tmp_path: Path, **more: object) -> dict[str, object]:
    return {
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "execution.checkpointing.interval": "100ms",
        "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
        **more,
    }


def numbers(start: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(range(start, start + count), pa.int64())})


class Count(ps.KeyedProcessFunction):
    """Numbers the rows of each key."""

    seen = ps.ValueState("seen", pa.int64(), default=0)

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        self.seen.update(self.seen.value() + 1)
        out.emit(key=ctx.key, count=self.seen.value())


def build(
    env: ps.Environment,
    output: Path,
    rate: float | None = None,
    function: ps.KeyedProcessFunction | None = None,
) -> None:
    rows = env.generate(numbers, rows=ROWS, rate=rate, schema={"n": "int64"}).uid("numbers")
    keyed = rows.select(key=ps.col("n") % KEYS, n=ps.col("n")).uid("select").key_by("key")
    schema = {"key": "int64", "count": "int64"}
    counts = keyed.process(function or Count(), schema=schema).uid("counts")
    counts.write_parquet(output).uid("files")


def written(output: Path) -> list[dict[str, Any]]:
    files = [path for path in output.glob("*.parquet") if not path.name.startswith((".", "_"))]
    return [row for path in files for row in pq.read_table(path).to_pylist()]


def assert_complete(output: Path) -> None:
    """Each row of the source has made one update of its key's count; a count that starts anew would show twice."""
    found = Counter((row["key"], row["count"]) for row in written(output))
    wanted = Counter((n % KEYS, n // KEYS + 1) for n in range(ROWS))
    assert found == wanted


def run_until_checkpoint(
    new_env: NewEnvironment,
    tmp_path: Path,
    parallelism: int = 2,
    function: ps.KeyedProcessFunction | None = None,
    **more: object,
) -> str:
    """Cancels a job behind its third checkpoint; returns where its checkpoints are."""
    env = new_env(parallelism, config(tmp_path, **more))
    build(env, tmp_path / "out", SLOW, function)
    handle = env.submit("first")
    await_details(
        handle,
        lambda _metrics, state: state == "RUNNING" and handle.details().last_checkpoint_id > 2,
    )
    cancel(handle)
    return str(tmp_path / "checkpoints" / handle.job_id)


@pytest.mark.parametrize("parallelism", [2, 1, 3])
@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_goes_on_where_a_cancelled_job_has_stopped(
    new_env: NewEnvironment, tmp_path: Path, backend: str, parallelism: int
) -> None:
    more = {"state.backend.type": backend}
    path = run_until_checkpoint(new_env, tmp_path, **more)
    env = new_env(parallelism, config(tmp_path, **more))
    build(env, tmp_path / "out")
    handle = env.submit("second", from_savepoint=path)
    assert handle.wait(DEADLINE_S).status == "FINISHED"
    assert_complete(tmp_path / "out")
    started = handle.details().started_from
    assert re.fullmatch(rf"{re.escape(path)}/chk-\d+", started.path)
    assert started.independent_since_checkpoint_id > started.checkpoint_id
    assert Path(started.path).exists()


def test_needs_nothing_of_the_original_once_it_has_a_checkpoint(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    path = run_until_checkpoint(new_env, tmp_path)
    env = new_env(2, config(tmp_path))
    build(env, tmp_path / "out", SLOW)
    handle = env.submit("second", from_savepoint=path)
    await_details(
        handle, lambda _m, _s: handle.details().started_from.independent_since_checkpoint_id
    )
    shutil.rmtree(path)
    cancel(handle)
    env = new_env(1, config(tmp_path))
    build(env, tmp_path / "out")
    again = str(tmp_path / "checkpoints" / handle.job_id)
    assert env.submit("third", from_savepoint=again).wait(DEADLINE_S).status == "FINISHED"
    assert_complete(tmp_path / "out")


def test_cancelled_and_failed_jobs_are_listed_with_what_they_can_be_started_from(
    new_env: NewEnvironment, client: Client, address: str, tmp_path: Path
) -> None:
    path = run_until_checkpoint(new_env, tmp_path)
    listed = {job.job_id: job.restorable_from for job in client.jobs()}
    assert listed[Path(path).name].startswith(f"{path}/chk-")
    never = {"restart-strategy.type": "none", "execution.checkpointing.interval": "1h"}
    env = new_env(1, config(tmp_path) | never)
    fails = tmp_path / "fails"
    failing = env.generate(numbers, rate=RATE, schema={"n": "int64"})
    failing.map(lambda row: 1 // (not fails.exists()), schema={"n": "int64"}).discard()
    handle = env.submit("failing")
    await_details(handle, lambda _m, state: state == "RUNNING")
    handle.checkpoint(DEADLINE_S)
    fails.touch()
    with pytest.raises(ps.JobFailed) as failed:
        handle.wait(DEADLINE_S)
    last = str(failed.value).splitlines()[-1]
    restorable_from = handle.details().summary.restorable_from
    assert last.endswith(f"env.submit('failing', from_savepoint='{restorable_from}')")
    assert Path(restorable_from).is_dir()

    def told(*command: str) -> str:
        result = CliRunner().invoke(main, [*command, "--jobmanager", address])
        assert result.exit_code == 0, result.output
        return result.output

    # Whoever removes them takes the job off that list, whether the JobManager was asked or not.
    told("dispose", path)
    listed = {job.job_id: job.restorable_from for job in client.jobs()}
    assert (listed[Path(path).name], listed[handle.job_id]) == ("", restorable_from)
    shutil.rmtree(Path(restorable_from).parent)
    assert handle.job_id in told("list")
    assert handle.job_id not in told("list", "--restorable")


def test_without_retention_nothing_is_left_of_a_cancelled_job(
    new_env: NewEnvironment, client: Client, tmp_path: Path
) -> None:
    key = "execution.checkpointing.externalized-checkpoint-retention"
    path = run_until_checkpoint(new_env, tmp_path, **{key: "DELETE_ON_CANCELLATION"})
    [job] = [job for job in client.jobs() if job.job_id == Path(path).name]
    assert not job.restorable_from


def test_a_checkpoint_of_a_job_that_still_runs_is_refused(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    env = new_env(1, config(tmp_path))
    build(env, tmp_path / "out", 100)
    handle = env.submit("first")
    await_details(handle, lambda _m, _s: handle.details().last_checkpoint_id)
    build(env, tmp_path / "out")
    with pytest.raises(ps.JobRejected, match=f"job {handle.job_id} still runs on this cluster"):
        env.submit("second", from_savepoint=tmp_path / "checkpoints" / handle.job_id)


def test_state_that_has_no_operator_is_refused_by_name_or_left_out(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    path = run_until_checkpoint(new_env, tmp_path)
    more = {"execution.state-recovery.ignore-unclaimed-state": True}

    def build_other(env: ps.Environment) -> None:
        rows = env.generate(numbers, rows=ROWS, schema={"n": "int64"}).uid("numbers")
        rows.write_parquet(tmp_path / "other").uid("files")

    env = new_env(2, config(tmp_path))
    build_other(env)
    with pytest.raises(ps.JobRejected, match=r"'counts'.*--allow-non-restored-state"):
        env.submit("second", from_savepoint=path)
    env = new_env(2, config(tmp_path, **more))
    build_other(env)
    handle = env.submit("second", from_savepoint=path)
    assert handle.wait(DEADLINE_S).status == "FINISHED"
    assert [one.operator_uid for one in handle.details().started_from.dropped_states] == ["counts"]


def test_key_groups_are_taken_over_unless_others_are_asked_for(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    path = run_until_checkpoint(new_env, tmp_path, **{"pipeline.max-parallelism": 16})
    env = new_env(3, config(tmp_path))
    build(env, tmp_path / "out")
    other = new_env(2, config(tmp_path, **{"pipeline.max-parallelism": 24}))
    build(other, tmp_path / "out")
    with pytest.raises(ps.JobRejected, match="stored with max-parallelism 16, and the job says 24"):
        other.submit("refused", from_savepoint=path)
    handle = env.submit("second", from_savepoint=path)
    assert handle.wait(DEADLINE_S).status == "FINISHED"
    assert_complete(tmp_path / "out")
    assert {vertex.max_parallelism for vertex in handle.details().vertices} == {16}


def test_a_claimed_checkpoint_belongs_to_the_job_and_goes_with_it(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    path = run_until_checkpoint(new_env, tmp_path)
    env = new_env(1, config(tmp_path))
    build(env, tmp_path / "out", SLOW)
    handle = env.submit("second", from_savepoint=path, claim=True)
    claimed = started_from(handle).checkpoint_id
    left = {job.job_id: job.restorable_from for job in handle._client.jobs()}
    assert not left[Path(path).name], "nobody else can start from there"
    await_details(handle, lambda _m, _s: handle.details().last_checkpoint_id > claimed)
    assert check_store(str(Path(path).parent)).is_healthy
    build(env, tmp_path / "other")
    with pytest.raises(ps.JobRejected, match=f"job {handle.job_id} still runs"):
        env.submit("third", from_savepoint=path, claim=True)
    saved = handle.stop(tmp_path / "savepoints", timeout=DEADLINE_S)
    assert handle.wait(DEADLINE_S).status == "FINISHED"
    assert handle.details().started_from.claimed
    wait_gone(Path(path), Deadline(f"the end of {path}"))
    env = new_env(3, config(tmp_path))
    build(env, tmp_path / "out")
    assert env.submit("third", from_savepoint=saved).wait(DEADLINE_S).status == "FINISHED"
    assert_complete(tmp_path / "out")


@pytest.mark.parametrize("claim", [False, True])
def test_goes_on_from_a_savepoint_that_was_moved(
    new_env: NewEnvironment, tmp_path: Path, claim: bool
) -> None:
    key = "execution.checkpointing.externalized-checkpoint-retention"
    env = new_env(2, config(tmp_path, **{key: "DELETE_ON_CANCELLATION"}))
    build(env, tmp_path / "out", SLOW)
    handle = env.submit("first")
    await_details(handle, lambda _m, state: state == "RUNNING")
    taken = Path(handle.savepoint(str(tmp_path / "savepoints")))
    moved = taken.rename(tmp_path / "moved")
    cancel(handle)
    shutil.rmtree(tmp_path / "out")
    env = new_env(3, config(tmp_path) | {"execution.state-recovery.in-doubt": "leave"})
    build(env, tmp_path / "out")
    handle = env.submit("second", from_savepoint=moved, claim=claim)
    assert handle.wait(DEADLINE_S).status == "FINISHED"
    counts: dict[int, list[int]] = {}
    for row in written(tmp_path / "out"):
        counts.setdefault(row["key"], []).append(row["count"])
    for key, own in counts.items():
        last = (ROWS - 1 - key) // KEYS + 1
        assert sorted(own) == list(range(min(own), last + 1))
    if claim:
        wait_gone(moved, Deadline(f"the end of {moved}"))
    else:
        assert (moved / "manifest").exists()


def test_a_plan_says_what_becomes_of_each_state(
    new_env: NewEnvironment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_until_checkpoint(new_env, tmp_path)
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        from pathlib import Path
        import penstock as ps
        from tests.integration.test_start_again import build, numbers

        env = ps.Environment()
        if "other" in sys.argv:
            rows = env.generate(numbers, rows=10, schema={{"n": "int64"}}).uid("numbers")
            rows.write_parquet("{tmp_path}/out").uid("files")
        else:
            build(env, Path("{tmp_path}/out"))
        env.execute("job")
        """)
    )

    def plan(*options: str) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(("plan", str(script), "--json", "--from-savepoint", path, *options))
        return int(ended.value.code or 0), json.loads(capsys.readouterr().out)["restore"]

    status, found = plan()
    assert (status, found["refused"]) == (0, False)
    fates = {(one["operator_uid"], one["state"]): one["fate"] for one in found["states"]}
    assert fates["counts", "seen"] == "maps"
    status, found = plan("--", "other")
    assert (status, found["refused"]) == (1, True)
    status, found = plan("--allow-non-restored-state", "--", "other")
    assert status == 0
    assert {one["operator_uid"]: one["fate"] for one in found["states"]}["counts"] == "dropped"


STORED = pa.struct([("seen", pa.int32()), ("gone", pa.string())])
DECLARED = pa.struct(
    [ps.field("count", pa.int64(), alias="seen"), ps.field("base", pa.int64(), default=1_000)]
)


class CountBefore(ps.KeyedProcessFunction):
    """Numbers the rows of each key, in three kinds of state."""

    value = ps.ValueState("value", STORED)
    entries = ps.MapState("entries", pa.string(), STORED)
    items = ps.ListState("items", pa.int32())

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        seen = (self.value.value() or {"seen": 0})["seen"] + 1
        stored = {"seen": seen, "gone": "x"}
        self.value.update(stored)
        self.entries.put("last", stored)
        self.items.update([seen])
        out.emit(key=ctx.key, count=seen)


class CountAfter(ps.KeyedProcessFunction):
    """The same, when the job has been changed: each state must say the same."""

    value = ps.ValueState("value", DECLARED)
    entries = ps.MapState("entries", pa.string(), DECLARED)
    items = ps.ListState("items", pa.int64(), ttl=ps.Ttl("1h"))

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        before = self.value.value()
        if before is not None:
            assert before["base"] == 1_000
            assert self.entries.get("last") == before
            assert list(self.items.get()) == [before["count"]]
        stored = {"count": (before or {"count": 0})["count"] + 1, "base": 1_000}
        self.value.update(stored)
        self.entries.put("last", stored)
        self.items.update([stored["count"]])
        out.emit(key=ctx.key, count=stored["count"])


class CountOtherwise(CountAfter):
    """What is stored cannot become this."""

    items = ps.ListState("items", pa.string())


@pytest.mark.parametrize("parallelism", [2, 3])
@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_state_of_an_upgraded_job_migrates(
    new_env: NewEnvironment, tmp_path: Path, backend: str, parallelism: int
) -> None:
    more = {"state.backend.type": backend}
    path = run_until_checkpoint(new_env, tmp_path, function=CountBefore(), **more)
    env = new_env(parallelism, config(tmp_path, **more))
    build(env, tmp_path / "out", function=CountOtherwise())
    with pytest.raises(
        ps.JobRejected, match=r"'items'.*stored as int32, and are declared as string"
    ):
        env.submit("refused", from_savepoint=path)
    env = new_env(parallelism, config(tmp_path, **more))
    build(env, tmp_path / "out", SLOW, function=CountAfter())
    handle = env.submit("second", from_savepoint=path)
    await_details(
        handle, lambda _m, _s: handle.details().started_from.independent_since_checkpoint_id
    )
    cancel(handle)
    env = new_env(1, config(tmp_path, **more))
    build(env, tmp_path / "out", function=CountAfter())
    again = str(tmp_path / "checkpoints" / handle.job_id)
    assert env.submit("third", from_savepoint=again).wait(DEADLINE_S).status == "FINISHED"
    assert_complete(tmp_path / "out")


class FailOnce(Count):
    """Fails once, when a file is not there yet."""

    def __init__(self, marker: str) -> None:
        self.marker = Path(marker)

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        if row.n > ROWS // 2 and not self.marker.exists():
            self.marker.touch()
            raise OSError("once")
        super().process(row, ctx, out)


@pytest.mark.parametrize("parallelism", [2, 3])
def test_a_failure_before_the_first_own_checkpoint_starts_from_the_original_again(
    new_env: NewEnvironment, tmp_path: Path, parallelism: int
) -> None:
    path = run_until_checkpoint(new_env, tmp_path)
    restarts = {
        "execution.checkpointing.interval": "1h",
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.delay": "0s",
        "restart-strategy.fixed-delay.attempts": 10,
    }
    env = new_env(parallelism, config(tmp_path) | restarts)
    build(env, tmp_path / "out", function=FailOnce(str(tmp_path / "failed")))
    handle = env.submit("second", from_savepoint=path)
    assert handle.wait(DEADLINE_S).status == "FINISHED"
    assert (tmp_path / "failed").exists()
    assert handle.details().summary.restarts >= 1
    assert_complete(tmp_path / "out")


def test_a_successor_of_the_jobmanager_goes_on_from_the_original(tmp_path: Path) -> None:
    with site(tmp_path / "site") as place:
        cluster = DaemonCluster(place)
        cluster.start(taskmanagers=1, slots=2)
        with ps.Environment(cluster.jobmanager, parallelism=2, config=config(tmp_path)) as env:
            build(env, tmp_path / "out", SLOW)
            first = env.submit("first")
            await_details(first, lambda _m, _s: first.details().last_checkpoint_id > 2)
            cancel(first)
            never = {"execution.checkpointing.interval": "1h"}
        with ps.Environment(
            cluster.jobmanager, parallelism=1, config=config(tmp_path) | never
        ) as env:
            build(env, tmp_path / "out", RATE)
            path = tmp_path / "checkpoints" / first.job_id
            second = env.submit("second", from_savepoint=path)
            await_details(second, lambda metrics, _s: metrics["totals"]["records_in"] > 500)
            jobmanager = cluster.pid("jobmanager")
            os.kill(jobmanager, signal.SIGKILL)
            wait_ended(jobmanager)
            cluster.start(taskmanagers=1, slots=2)
            with Client(cluster.jobmanager) as client:
                assert JobHandle(client, second.job_id).wait(DEADLINE_S).status == "FINISHED"
        assert_complete(tmp_path / "out")
        cluster.stop()
