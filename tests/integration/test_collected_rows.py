"""Aim: rows that a job brings back can be read as they come, and an endless job ends when it has given enough.

Method: endless and bounded jobs on a cluster; a script with an embedded one whose functions print.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import penstock as ps
from penstock.client import arrived_rows, collected
from penstock.client.client import Client
from penstock.local.local_cluster import LocalCluster
from penstock.pb import client_pb2
from tests.support.examples import RUNS_ALL
from tests.support.processes import DEADLINE_S, Site, site

pytestmark = [pytest.mark.integration, pytest.mark.sampled(2)]

FAST = {"execution.checkpointing.interval": "200ms", "restart-strategy.type": "none"}


def numbers(start: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(range(start, start + count), pa.int64())})


@pytest.fixture
def env(cluster: LocalCluster) -> Iterator[ps.Environment]:
    with ps.Environment(cluster.address, parallelism=2, config=FAST) as env:
        yield env


def endless(env: ps.Environment) -> ps.Stream:
    return env.generate(numbers, rate=20_000).map(lambda row: {"n": row.n}, schema={"n": "int64"})


def last_state(client: Client, ended: bool = True) -> str:
    job = max(client.jobs(), key=lambda one: one.submitted_at_ms)
    details = client.job(job.job_id)
    if ended:
        for details in client.watch(job.job_id, 0):  # noqa: B007 - the last one counts
            pass
    return client_pb2.JobState.Name(details.summary.state).removeprefix("JOB_STATE_")


def test_a_rejected_job_does_no_harm_to_the_next(env: ps.Environment) -> None:
    import threading

    lock = threading.Lock()
    bad = env.from_rows([{"n": 1}]).map(lambda row: lock and row, schema={"n": "int64"}).collect()
    for _ in range(2):
        with pytest.raises(ps.JobRejected, match="cannot be pickled"):
            bad.to_pylist()
    good = env.from_rows([{"n": 2}]).collect()
    assert good.to_pylist() == [{"n": 2}]
    more = env.from_rows([{"n": 3}]).map(lambda row: lock and row, schema={"n": "int64"}).collect()
    with pytest.raises(ps.JobRejected, match="cannot be pickled"):
        env.execute("bad")
    with pytest.raises(ps.JobRejected, match="cannot be pickled"):
        more.to_pylist()
    assert env.from_rows([{"n": 4}]).collect().to_pylist() == [{"n": 4}]


def test_an_endless_job_ends_with_its_limit(env: ps.Environment, client: Client) -> None:
    assert len(endless(env).collect(limit=7).to_pylist()) == 7
    assert last_state(client, ended=False) == "CANCELED"
    rows, others = endless(env).collect(limit=5), endless(env).collect(limit=6)
    assert env.execute("limited").status == "CANCELED"
    assert (len(rows), len(others)) == (5, 6)
    assert len([*endless(env).collect(limit=3)]) == 3
    assert last_state(client) == "CANCELED"


def test_a_bounded_job_with_a_limit_finishes(env: ps.Environment) -> None:
    rows = env.from_rows([{"n": n} for n in range(9)]).collect(limit=4)
    assert env.execute("bounded").status == "FINISHED"
    assert len(rows) == 4


def test_a_value_that_python_cannot_hold_is_named_with_the_remedy(env: ps.Environment) -> None:
    far = pa.table({"n": [1, 2], "t": pa.array([0, 2**53], pa.timestamp("ms"))})
    rows = env.from_arrow(far).collect()
    with pytest.raises(ps.StreamError, match=r"column 't' has a value .*\.to_arrow\(\)"):
        rows.to_pylist()
    assert rows.to_arrow().equals(far)
    with pytest.raises(ps.StreamError, match="column 't' has a value"):
        list(env.from_arrow(far).collect())


def test_rows_come_as_they_are_made(env: ps.Environment, client: Client) -> None:
    for seen, row in enumerate(endless(env).collect()):
        assert set(row) == {"n"}
        if seen == 20_000:
            break
    assert last_state(client) == "CANCELED", "whoever leaves the loop ends the job"

    # Of a job that somebody else has submitted nothing is ended.
    rows = endless(env).collect()
    handle = env.submit("endless")
    for _ in zip(range(3), rows, strict=False):
        pass
    with pytest.raises(ps.JobRejected, match="as they come"):
        rows.to_pylist()
    assert handle.status() == "RUNNING"
    handle.cancel()
    with pytest.raises(ps.JobCanceled):
        handle.wait(DEADLINE_S)


def test_a_loop_is_as_good_as_a_list(env: ps.Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"n": range(30_000)})
    rows = env.from_arrow(table).collect()
    looped = sorted(row.n for row in rows)
    assert looped == sorted(row.n for row in rows) == list(range(30_000)), "few are kept"
    assert len(rows) == 30_000

    monkeypatch.setattr(collected, "MEMORY_BYTES_MAX", 1000)
    many = env.from_arrow(table).collect()
    assert sum(1 for _ in many) == 30_000
    with pytest.raises(ps.JobRejected, match="as they come"):
        len(many)

    bad = env.from_rows([{"n": 0}]).map(lambda row: {"n": 1 // row.n}, schema={"n": "int64"})
    with pytest.raises(ps.JobFailed, match="ZeroDivisionError"):
        for _ in bad.collect():
            pass


def test_a_loop_over_the_rows_of_a_job_with_other_sinks(
    env: ps.Environment, tmp_path: Path
) -> None:
    stream = env.from_rows([{"n": n} for n in range(9)])
    stream.write_json(str(tmp_path / "out"))
    for _ in stream.collect(limit=2):
        break
    files = (tmp_path / "out").rglob("*.json")
    assert sum(len(path.read_text().splitlines()) for path in files) == 9
    first, second = stream.collect(limit=2), stream.collect()
    assert (sum(1 for _ in first), len(second)) == (2, 9)


def test_a_loop_over_a_limit_of_a_submitted_job_has_rows_as_they_come(
    env: ps.Environment,
) -> None:
    rows = endless(env).collect(limit=10_000_000)
    handle = env.submit("endless")
    assert len(list(zip(range(100), rows, strict=False))) == 100, "long before they are all there"
    handle.cancel()
    few = endless(env).collect(limit=300)
    handle = env.submit("endless")
    assert sum(1 for _ in few) == sum(1 for _ in few) == 300
    assert handle.status() == "RUNNING", "who has submitted it ends it"
    handle.cancel()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_rows_of_two_collects_in_either_order(
    env: ps.Environment, order: tuple[int, int]
) -> None:
    wide = env.from_arrow(pa.table({"n": range(3000)})).map_batches(
        lambda batch: batch.append_column("text", pa.array(["x" * 10_000] * batch.num_rows)),
        schema={"n": "int64", "text": "string"},
    )
    both = wide.collect(), wide.select("n").collect()
    for index in order:
        assert sorted(row.n for row in both[index]) == list(range(3000))


def test_loops_side_by_side_over_an_endless_stream(
    env: ps.Environment, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrived_rows, "MEMORY_BYTES_MAX", 10_000)
    stream = endless(env)
    first, second = stream.collect(), stream.collect()
    seen = sum(
        len(a) + len(b) for a, b in itertools.islice(zip(first, second, strict=False), 50_000)
    )
    assert seen == 100_000
    assert last_state(client) == "CANCELED"


def test_rows_of_an_endless_job_with_other_sinks_come_as_they_are_made(
    env: ps.Environment, client: Client, tmp_path: Path
) -> None:
    stream = endless(env)
    stream.write_json(str(tmp_path / "out"))
    assert sum(1 for _ in stream.collect(limit=5)) == 5
    assert last_state(client) == "CANCELED"
    stream.write_json(str(tmp_path / "more"))
    for _ in stream.collect():
        break
    assert last_state(client) == "CANCELED"


MEMORY = """
import sys
import pyarrow as pa
import penstock as ps

def rss_mb():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) >> 10

def wide(start, count):
    return pa.record_batch({"n": pa.array(range(start, start + count)), "text": ["x" * 10_000] * count})

with ps.Environment(sys.argv[1], parallelism=2) as env:
    stream = env.generate(wide, rows=60_000)
    both = [stream.collect() for _ in range(2)]
    before, most = rss_mb(), 0
    for rows in both:
        for seen, row in enumerate(rows, 1):
            if not seen % 500:
                most = max(most, rss_mb() - before)
        assert seen == 60_000, seen
    print("grown by", most)
"""


@pytest.mark.skipif(not RUNS_ALL, reason="it takes long: make test-all runs it")
def test_a_loop_needs_bounded_memory(cluster: LocalCluster, place: Site) -> None:
    script = place.directory / "memory.py"
    script.write_text(MEMORY)
    # What is freed goes back to the system at once: else what the allocator keeps is what one sees.
    gives_back = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    ended = place.start_python(str(script), cluster.address, environment=gives_back).wait()
    assert ended.status == 0, ended.stderr
    assert int(ended.stdout.split()[-1]) < 300, "of two times 600 MB, of which 64 MB each are kept"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as place:
        yield place
        place.assert_nothing_left()


def test_what_functions_print_is_seen_where_the_script_runs(place: Site) -> None:
    script = place.directory / "job.py"
    script.write_text(
        textwrap.dedent("""
        import penstock as ps
        def shout(row):
            print("in pieces", row.n, end="")
            print(":", "ä" * 3)
            return {"n": row.n}
        env = ps.Environment(parallelism=2)
        env.from_rows([{"n": n} for n in range(20)]).rebalance().map(shout, schema={"n": "int64"}).print()
        env.execute("prints")
        """)
    )
    ended = place.start_python(str(script)).wait()
    assert ended.status == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert sorted(line for line in lines if line.startswith("in")) == sorted(
        f"in pieces {n}: äää" for n in range(20)
    )
    assert len([line for line in lines if line.startswith("[")]) == 20, (
        "the print sink's, once each"
    )
    assert len(lines) == 40
