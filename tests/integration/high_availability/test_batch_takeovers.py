"""Aim: batch jobs go on under the next leader wherever in their stages they are, and no stage is done twice.

Method: as in ``test_takeovers``. Two sources write to blocking exchanges and are held one after the other, who reads both
is held in the middle of them, and behind it rows are counted. The leader is killed in each of these states; attempts
tell who has begun again, and what comes out is compared with what plain Python makes of the input.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typing_extensions import override

import penstock as ps
from penstock.local.local_cluster import LocalCluster
from tests.support.elected_cluster import await_roles
from tests.support.jobs import DEADLINE_S, await_details
from tests.support.processes import wait_ended
from tests.support.watched_job import Subtask, placed

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]

BATCHES, BATCH_ROWS, KEYS, SPLITS = 6, 1_000, 7, 2
SCHEMA = pa.schema([("n", pa.int64()), ("key", pa.int64())])
CONFIG = {"execution.runtime-mode": "batch", "execution.checkpointing.interval": "none"}


class _HeldReader(ps.Reader):
    def __init__(self, first: int, gate: str) -> None:
        self._first, self._gate, self._read = first, gate, 0

    @override
    def read(self, max_rows: int) -> Any:
        if self._read == BATCHES:
            return ps.END
        if self._read == BATCHES // 2 and not Path(self._gate).exists():
            return None
        first = self._first + self._read * BATCH_ROWS
        self._read += 1
        n = range(first, first + BATCH_ROWS)
        return pa.RecordBatch.from_pydict({"n": n, "key": [i % KEYS for i in n]}, schema=SCHEMA)

    @override
    def next_read_at_ms(self) -> int | None:
        return 0

    @override
    def position(self) -> bytes:
        return b""


class HeldHalfway(ps.Source):
    """Numbered rows; the second half of each split waits until a file is there."""

    schema = SCHEMA

    def __init__(self, first: int, gate: Path) -> None:
        self._first, self._gate = first, str(gate)

    @override
    def discover(self, ctx: ps.SourceContext) -> list[ps.Split]:
        return [ps.Split(str(index), b"", size=1) for index in range(SPLITS)]

    @override
    def open(self, split: ps.Split, position: bytes | None) -> ps.Reader:
        return _HeldReader(self._first + int(split.id) * BATCHES * BATCH_ROWS, self._gate)


def held_in_rows(root: Path) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """Waits behind its first batch until a file is there, and says that it does."""
    gate, begun = str(root / "reads"), str(root / "begun")

    def hold(batch: pa.RecordBatch) -> pa.RecordBatch:
        Path(begun, str(os.getpid())).touch()
        while not Path(gate).exists():
            time.sleep(0.02)
        return batch

    return hold


ROWS = SPLITS * BATCHES * BATCH_ROWS
"""Of one source."""


def submitted(env: ps.Environment, root: Path) -> ps.JobHandle:
    (root / "begun").mkdir()
    left, right = (
        env.source(HeldHalfway(first, root / name))
        for name, first in [("left", 0), ("right", ROWS)]
    )
    read = left.union(right).key_by("key").map_batches(held_in_rows(root), schema=SCHEMA)
    counted = read.key_by("key").aggregate(rows=ps.count(), total=ps.sum("n"))
    counted.write_parquet(str(root / "out"))
    return env.submit("stages")


def kill_leader(cluster: LocalCluster) -> None:
    leader, _ = await_roles(cluster)
    os.kill(leader.pid, signal.SIGKILL)
    wait_ended(leader.pid)
    cluster.start(jobmanagers=2, taskmanagers=2)
    await_roles(cluster)


class Watched:
    """What the leader shows of a job."""

    def __init__(self, cluster: LocalCluster, handle: ps.JobHandle) -> None:
        self._cluster, self._handle = cluster, handle

    def subtasks(self) -> dict[Subtask, tuple[int, str]]:
        """Vertex and index -> number of the attempt, and its state."""
        with self._cluster.client() as client:
            job = client.job(self._handle.job_id)
        assert job.summary.restarts == 0
        return {key: (one.attempt, one.state) for key, one in placed(job).items()}

    def await_states(self, *states: str) -> dict[Subtask, tuple[int, str]]:
        """Waits until all subtasks of each vertex are in a state."""

        def are_so(_: Any, state: str) -> bool:
            found = self.subtasks()
            told = [
                {s for (v, _), (_, s) in found.items() if v == f"v{i}"} for i in range(len(states))
            ]
            return state == "RUNNING" and told == [{one} for one in states]

        await_details(self._handle, are_so)
        return self.subtasks()


def check(out: Path) -> None:
    expected = {
        key: (rows, sum(n for n in range(2 * ROWS) if n % KEYS == key))
        for key, rows in Counter(n % KEYS for n in range(2 * ROWS)).items()
    }
    found = pq.read_table(out).to_pylist()
    assert len(found) == KEYS, "each result is there once"
    assert {row["key"]: (row["rows"], row["total"]) for row in found} == expected


def test_no_stage_is_done_twice_whenever_a_leader_dies(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    with ps.Environment(cluster.address, parallelism=2, config=CONFIG) as env:
        handle = submitted(env, tmp_path)
        watched = Watched(cluster, handle)
        writing = watched.await_states("RUNNING", "RUNNING", "CREATED", "CREATED")
        kill_leader(cluster)
        after = watched.await_states("RUNNING", "RUNNING", "CREATED", "CREATED")
        assert {s: after[s] for s in after if s[0] in ("v0", "v1")} == {
            s: writing[s] for s in writing if s[0] in ("v0", "v1")
        }
        # One stage has written all of its rows, and nobody has begun to read them.
        (tmp_path / "left").touch()
        watched.await_states("FINISHED", "RUNNING", "CREATED", "CREATED")
        kill_leader(cluster)
        watched.await_states("FINISHED", "RUNNING", "CREATED", "CREATED")
        (tmp_path / "right").touch()
        reading = watched.await_states("FINISHED", "FINISHED", "RUNNING", "CREATED")
        await_details(handle, lambda _, __: any((tmp_path / "begun").iterdir()))
        kill_leader(cluster)
        reads = watched.await_states("FINISHED", "FINISHED", "RUNNING", "CREATED")
        assert {s: reads[s] for s in reads if s[0] != "v3"} == {
            s: reading[s] for s in reading if s[0] != "v3"
        }
        (tmp_path / "reads").touch()
        assert handle.wait(DEADLINE_S).status == "FINISHED"
        ended = watched.subtasks()
        numbers = {
            vertex: {n for (v, _), (n, _) in ended.items() if v == vertex}
            for vertex in ("v0", "v1", "v2")
        }
        assert numbers == {
            vertex: {n for (v, _), (n, _) in reading.items() if v == vertex} for vertex in numbers
        }
    check(tmp_path / "out")


def held_in_one(root: Path) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """Every process that has rows with ``n`` = 1 waits there until a file is there, and says that it does."""
    gate, held = str(root / "left"), root / "held"
    held.mkdir()
    signs = str(held)

    def hold(batch: pa.RecordBatch) -> pa.RecordBatch:
        if 1 in batch["n"].to_pylist():
            Path(signs, str(os.getpid())).touch()
            while not Path(gate).exists():
                time.sleep(0.02)
        return batch

    return hold


def test_rivals_end_with_their_leader_and_whoever_is_read_counts(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    speculative = {
        "execution.batch.speculative.enabled": True,
        "slow-task-detector.check-interval": "50ms",
        "slow-task-detector.execution-time.baseline-lower-bound": "200ms",
        "slow-task-detector.execution-time.baseline-ratio": 0.5,
    }
    (tmp_path / "begun").mkdir()
    with ps.Environment(cluster.address, parallelism=2, config=CONFIG | speculative) as env:
        numbers = env.from_rows([{"n": n, "key": n % KEYS} for n in range(ROWS)]).rebalance()
        held = numbers.map_batches(held_in_one(tmp_path), schema=SCHEMA).key_by("key")
        read = held.map_batches(held_in_rows(tmp_path), schema=SCHEMA)
        read.write_parquet(str(tmp_path / "out"))
        handle = env.submit("rivals")
        watched = Watched(cluster, handle)

        def await_held(count: int) -> None:
            await_details(handle, lambda _, __: len([*(tmp_path / "held").iterdir()]) >= count)

        await_held(2)
        slow = {s: one for s, one in watched.subtasks().items() if s[0] == "v1"}
        kill_leader(cluster)
        await_held(3)  # another rival, of the next leader
        assert {s: one for s, one in watched.subtasks().items() if s[0] == "v1"} == slow
        (tmp_path / "left").touch()
        await_details(handle, lambda _, __: any((tmp_path / "begun").iterdir()))
        counts = watched.await_states("FINISHED", "FINISHED", "RUNNING")
        kill_leader(cluster)
        assert watched.await_states("FINISHED", "FINISHED", "RUNNING") == counts
        (tmp_path / "reads").touch()
        assert handle.wait(DEADLINE_S).status == "FINISHED"
        assert handle.exceptions() == []
    assert sorted(pq.read_table(tmp_path / "out")["n"].to_pylist()) == list(range(ROWS))


def slowed(root: Path) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """Takes its time for each batch until a file is there."""
    gate = str(root / "reads")

    def slow(batch: pa.RecordBatch) -> pa.RecordBatch:
        time.sleep(0 if Path(gate).exists() else 0.1)
        return batch

    return slow


def test_collected_rows_are_all_there_and_what_had_sent_some_begins_again_without_a_failure(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    with ps.Environment(
        cluster.address, parallelism=2, config=CONFIG | {"execution.batch-rows": 20}
    ) as env:
        numbers = env.source(HeldHalfway(0, tmp_path / "left")).key_by("key")
        rows = numbers.map_batches(slowed(tmp_path), schema=SCHEMA).collect()
        handle = env.submit("collected")
        watched = Watched(cluster, handle)
        writing = watched.await_states("RUNNING", "CREATED")
        kill_leader(cluster)
        goes_on = watched.await_states("RUNNING", "CREATED")
        assert [goes_on["v0", i] for i in (0, 1)] == [writing["v0", i] for i in (0, 1)]
        with ThreadPoolExecutor(1) as threads:
            collected = threads.submit(rows.to_arrow)
            (tmp_path / "left").touch()
            sending = watched.await_states("FINISHED", "RUNNING")
            await_details(handle, lambda metrics, _: metrics["vertices"]["v1"]["records_out"] > 0)
            kill_leader(cluster)
            (tmp_path / "reads").touch()
            assert sorted(collected.result(DEADLINE_S)["n"].to_pylist()) == list(range(ROWS))
        assert handle.wait(DEADLINE_S).status == "FINISHED"
        ended = placed(handle.details())
        assert [ended["v0", i].attempt for i in (0, 1)] == [sending["v0", i][0] for i in (0, 1)]
        (entry,) = handle.exceptions()
        assert (entry.root_cause.error_class, entry.delay_ms) == ("CollectedRowsLost", 0)
        assert entry.restarted == ("v1/0..1",)
