"""Two subtasks and an exchange in one process on simulated time, over many seeds.

Aim: whatever the order of events, a windowed count over a hash exchange is exact, everything ends,
and a seed reproduces itself. Method: the real JobMaster, slots and exchange in ``SimulatedCluster``.
"""

import collections
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import penstock as ps
from jobmanager.messages.job_state import JobState
from penstock.config import Configuration
from tests.support.simulated_cluster import SimulatedCluster
from tests.support.simulated_directory import simulated_directory

ROWS = 600
KEYS = 7


def events(start, count):
    """Rows whose event times are out of order by up to 50 ms."""
    position = np.arange(start, start + count)
    return pa.record_batch(
        {
            "key": pa.array(position * 31 % KEYS),
            "ts": pa.array(position * 10 - position * 17 % 50 + 1000),
            "value": pa.array(position),
        }
    )


def windowed_count(parallelism, rate=None):
    env = ps.Environment(parallelism=parallelism)
    stream = env.generate(events, rows=ROWS, rate=rate, schema=events(0, 1).schema)
    (
        stream.with_event_time("ts", out_of_orderness="50ms")
        .key_by("key")
        .window(ps.tumbling("1s"))
        .aggregate(rows=ps.count(), total=ps.sum("value"))
        .collect()
    )
    return env.plan("simulated").graph


def expected():
    result = collections.defaultdict(lambda: [0, 0])
    for row in events(0, ROWS).to_pylist():
        cell = result[row["key"], row["ts"] // 1000 * 1000]
        cell[0] += 1
        cell[1] += row["value"]
    return {key: tuple(cell) for key, cell in result.items()}


def outcome(cluster):
    rows = [
        row for batches in cluster.rows.values() for batch in batches for row in batch.to_pylist()
    ]
    found = {
        (row["key"], int(row["window_start"].timestamp() * 1000)): (row["rows"], row["total"])
        for row in rows
    }
    assert len(found) == len(rows), "a window fired twice"
    return found


def run(graph, seed, **config):
    cluster = simulated(graph, seed, **config)
    assert cluster.state is JobState.FINISHED, cluster.failure
    return cluster


def simulated(graph, seed, **config):
    with simulated_directory() as directory:
        cluster = SimulatedCluster(
            graph, seed, Configuration.from_mapping(config), work_directory=Path(directory)
        )
        cluster.run()
        return cluster


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_events_gives_the_exact_result(seed):
    cluster = run(windowed_count(2), seed, **{"execution.batch-rows": 16})
    assert outcome(cluster) == expected()


@pytest.mark.parametrize("seed", range(5))
def test_a_paced_source_wakes_up_by_itself(seed):
    cluster = run(windowed_count(2, rate=1000), seed)
    assert outcome(cluster) == expected()
    assert cluster.loop.now_ms() >= 500


@pytest.mark.parametrize("rate", [None, 20_000, 1_000_000])
@pytest.mark.parametrize("interval", ["0ms", "20ms", "200ms"])
def test_no_watermark_overtakes_rows_that_are_held_for_company(rate, interval):
    """Batches here are large enough to be pre-aggregated, and the source goes idle between them."""

    def in_order(start, count):
        position = np.arange(start, start + count)
        return pa.record_batch({"key": pa.array(position % 3), "ts": pa.array(position)})

    env = ps.Environment(parallelism=2)
    stream = env.generate(in_order, rows=10_000, rate=rate, schema=in_order(0, 1).schema)
    windows = stream.with_event_time("ts").key_by("key").window(ps.tumbling("10ms"))
    windows.aggregate(rows=ps.count()).collect()
    cluster = run(env.plan("counts").graph, 5, **{"pipeline.auto-watermark-interval": interval})
    counted = [row["rows"] for bs in cluster.rows.values() for b in bs for row in b.to_pylist()]
    assert sum(counted) == 10_000


def test_wide_rows_are_collected_in_pieces():
    def wide(start, count):
        return pa.record_batch({"text": pa.array(["x" * 10_000] * count)})

    env = ps.Environment(parallelism=1)
    env.generate(wide, rows=2000, schema=wide(0, 1).schema).collect()
    cluster = run(env.plan("wide").graph, 3)
    batches = [batch for batches in cluster.rows.values() for batch in batches]
    assert sum(batch.num_rows for batch in batches) == 2000
    assert max(batch.nbytes for batch in batches) < 2 << 20


@pytest.mark.parametrize(
    ("message", "readable"), [("x" * (40 << 20), "left out"), ("caf\udce9.csv", "udce9")]
)
def test_any_message_of_a_failure_arrives_readable(message, readable):
    env = ps.Environment(parallelism=1)
    stream = env.generate(events, rows=ROWS, schema=events(0, 1).schema)

    def explode(row):
        raise ValueError(message)

    stream.map(explode, schema=stream.schema).discard()
    cluster = simulated(env.plan("fails").graph, 1)
    assert cluster.state is JobState.FAILED
    assert cluster.failure is not None
    assert readable in cluster.failure.message
    assert cluster.failure.ByteSize() < 100_000


def test_a_seed_reproduces_itself():
    first, second = (run(windowed_count(2), 42, **{"execution.batch-rows": 8}) for _ in range(2))
    assert first.loop.monotonic_ns() == second.loop.monotonic_ns()
    assert [b for bs in first.rows.values() for b in bs] == [
        b for bs in second.rows.values() for b in bs
    ]


def test_a_failing_function_fails_the_job_with_its_cause():
    env = ps.Environment(parallelism=2)
    stream = env.generate(events, rows=ROWS, schema=events(0, 1).schema)

    def explode(row):
        if row.value == 333:
            raise ValueError("three hundred and thirty-three")
        return row

    stream.key_by("key").map(explode, schema=stream.schema).discard()
    cluster = simulated(env.plan("fails").graph, 1)
    assert cluster.state is JobState.FAILED
    assert cluster.failure is not None
    assert "three hundred and thirty-three" in cluster.failure.message
    assert "333" in cluster.failure.row
