"""Two subtasks and an exchange in one process on simulated time, over many seeds.

Aim: whatever the order of events, a windowed count over a hash exchange is exact, everything ends,
and a seed reproduces itself. Method: the real JobMaster, slots and exchange in ``SimulatedCluster``.
"""

import collections

import numpy as np
import pyarrow as pa
import pytest

import penstock as ps
from jobmanager.dispatcher.job_state import JobState
from penstock.config import Configuration
from tests.support.simulated_cluster import SimulatedCluster

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
    cluster = SimulatedCluster(graph, seed, Configuration.from_mapping(config))
    cluster.run()
    assert cluster.state is JobState.FINISHED, cluster.failure
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
    cluster = SimulatedCluster(env.plan("fails").graph, 1)
    cluster.run()
    assert cluster.state is JobState.FAILED
    assert cluster.failure is not None
    assert "three hundred and thirty-three" in cluster.failure.message
    assert "333" in cluster.failure.row
