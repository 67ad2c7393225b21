"""Aim: handles tell the truth: states, exact counters, cancellation, several jobs at once, freed slots."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import penstock as ps
from penstock import col
from penstock.client.client import Client
from tests.integration.conftest import SLOTS, TASKMANAGERS, NewEnvironment
from tests.support.bids import cut, make_bids, to_table, write_table
from tests.support.jobs import DEADLINE_S, await_details, cancel, run

pytestmark = [pytest.mark.integration, pytest.mark.sampled(2)]

BIDS = make_bids(2_000)


@pytest.fixture(scope="module")
def bids_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bids")
    for index, part in enumerate(cut(BIDS, 5)):
        write_table(to_table(part), directory / f"{index}.parquet")
    return directory


def endless(start: int, count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"n": range(start, start + count)})


def test_counters_are_exact(new_env: NewEnvironment, bids_dir: Path) -> None:
    env = new_env(config={"execution.pre-aggregation": "false"})
    bids = env.read_parquet(str(bids_dir)).name("read")
    cheap = bids.filter(col("n") < 500)
    doubled = cheap.rebalance().flat_map(lambda row: [row, row], schema=bids.schema).name("double")
    doubled.discard()
    doubled.key_by("auction").aggregate(n=ps.count()).name("per auction").discard()
    result = run(env)
    metrics = result.metrics
    assert result.status == "FINISHED"
    assert result.duration.total_seconds() > 0
    read, double, per_auction = (metrics["vertices"][f"v{i}"] for i in range(3))
    assert "read" in read["name"]
    assert (read["records_in"], read["records_out"]) == (2_000, 500)
    assert double["records_in"] == 500
    assert per_auction["records_in"] == 1_000
    assert metrics["totals"]["records_in"] == 2_000
    for vertex in (read, double, per_auction):
        assert vertex["parallelism"] == 2
        assert vertex["busy_ms"] >= 0
        assert vertex["bad_records"] == vertex["late_records"] == 0
    assert read["bytes_in"] == 0
    assert read["bytes_out"] == double["bytes_in"] > 500 * 8
    assert double["bytes_out"] == per_auction["bytes_in"] > 0


@pytest.mark.parametrize("parallelism", [1, 2, 4])
def test_records_in_and_out_of_each_vertex(
    new_env: NewEnvironment, bids_dir: Path, parallelism: int
) -> None:
    env = new_env(parallelism)
    stream = env.read_parquet(str(bids_dir)).with_event_time("ts", out_of_orderness="5s")
    windows = stream.key_by("auction").window(ps.tumbling("10s")).aggregate(n=ps.count())
    rows = windows.collect()
    result = run(env)
    source, window = (result.metrics["vertices"][f"v{i}"] for i in range(2))
    assert source["records_in"] == 2_000
    assert window["records_in"] == source["records_out"] <= 2_000
    assert window["records_out"] == len(rows) == result.metrics["totals"]["records_out"]
    assert sum(row.n for row in rows) == 2_000


def test_an_endless_job_runs_until_it_is_cancelled(env: ps.Environment) -> None:
    env.generate(endless).rebalance().discard()
    handle = env.submit("endless")
    metrics = await_details(
        handle, lambda metrics, state: state == "RUNNING" and metrics["totals"]["records_out"]
    )
    assert metrics["totals"]["records_in"] > 0
    assert handle.status() == "RUNNING"
    handle.cancel()
    with pytest.raises(ps.JobCanceled, match="endless"):
        handle.wait(DEADLINE_S)
    handle.cancel()  # harmless
    assert handle.status() == "CANCELED"


def test_a_job_is_cancelled_while_user_code_is_slow(
    new_env: NewEnvironment, tmp_path: Path
) -> None:
    env = new_env(config={"task.cancellation.timeout": "300ms"})

    def stuck(row: ps.Row) -> dict[str, int]:
        (tmp_path / "entered").touch()
        threading.Event().wait()
        return {"n": row.n}

    env.generate(endless).map(stuck, schema={"n": int}).discard()
    handle = env.submit("stuck")
    await_details(handle, lambda metrics, state: (tmp_path / "entered").exists())
    cancel(handle)


def test_waiting_has_a_deadline_of_the_callers(env: ps.Environment) -> None:
    env.generate(endless, rate=10).discard()
    handle = env.submit("patience")
    with pytest.raises(TimeoutError, match="still"):
        handle.wait(0.05)
    cancel(handle)


def test_jobs_run_at_the_same_time(new_env: NewEnvironment, client: Client) -> None:
    handles, results = [], []
    for size in (1_000, 2_000, 3_000, 4_000):
        env = new_env(parallelism=2)
        results.append(env.generate(endless, rows=size).rebalance().collect())
        handles.append(env.submit(f"job-{size}"))
    assert len({handle.job_id for handle in handles}) == 4
    for handle in handles:
        assert handle.wait(DEADLINE_S).status == "FINISHED"
    assert [len(rows) for rows in results] == [1_000, 2_000, 3_000, 4_000]
    names = [summary.name for summary in client.jobs()][-4:]
    assert names == ["job-1000", "job-2000", "job-3000", "job-4000"]


def test_a_job_waits_for_the_slots_of_another(new_env: NewEnvironment, client: Client) -> None:
    blocking = new_env(parallelism=TASKMANAGERS * SLOTS)
    blocking.generate(endless, rate=100).discard()
    first = blocking.submit("all slots")
    await_details(first, lambda _, state: state == "RUNNING")
    assert client.cluster().slots_free == 0
    env = new_env()
    rows = env.generate(endless, rows=10).collect()
    second = env.submit("waits")
    with pytest.raises(TimeoutError):
        second.wait(0.1)
    assert second.status() == "CREATED"
    cancel(first)
    assert second.wait(DEADLINE_S).status == "FINISHED"
    assert len(rows) == 10


ENDINGS: dict[str, Callable[[ps.Stream], object]] = {
    "finished": lambda stream: stream.filter(col("n") > 0).discard(),
    "failed": lambda stream: stream.with_columns(x=col("n") // 0).discard(),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_slots_are_free_again_when_a_job_has_ended(
    new_env: NewEnvironment, client: Client, ending: str
) -> None:
    for _ in range(3):  # each needs all slots: it runs only if the one before has given them back
        env = new_env(parallelism=TASKMANAGERS * SLOTS)
        ENDINGS[ending](env.generate(endless, rows=100))
        if ending == "finished":
            run(env)
        else:
            with pytest.raises(ps.JobFailed, match="zero"):
                run(env)


def test_connect_finds_jobs(env: ps.Environment, address: str) -> None:
    env.generate(endless, rows=10).discard()
    result = run(env, "findable")
    with ps.connect(address) as cluster:
        found = cluster.job(result.job_id[:12])
        assert found.job_id == result.job_id
        assert found.status() == "FINISHED"
        assert found.metrics()["totals"]["records_in"] == 10
        assert result.job_id in {handle.job_id for handle in cluster.jobs()}
        with pytest.raises(ps.JobNotFound):
            cluster.job("feedfeedfeed")


def test_an_environment_builds_one_job_after_another(env: ps.Environment) -> None:
    for size in (10, 20):
        rows = env.generate(endless, rows=size).collect()
        result = env.execute(f"size {size}")
        assert result.status == "FINISHED"
        assert len(rows) == size
    with pytest.raises(ps.JobRejected):
        env.submit("nothing")
