"""Aim: a scrape stays quick and its labels bounded, whatever runs.

Method: the collector on made-up reports of 200 subtasks; its time on the processor beside what writing as many samples takes
the client library, the best of some runs by turns: together less than 50 ms on a machine where that takes 40.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from typing_extensions import override

from common.elements import MAX_TIMESTAMP_MS, MIN_TIMESTAMP_MS
from common.metrics import AttemptMetricsCollector, NamedMetrics
from common.pb import internal_pb2
from penstock.pb import client_pb2
from taskmanager.state.state_sizes import OTHERS, STATES_MAX, DatabaseSizes, StateSizes, note_sizes

SUBTASKS = 200


def named(index: int, gauges: internal_pb2.SubtaskGauges, watermark_ms: int = 1) -> NamedMetrics:
    attempt = internal_pb2.AttemptId(job_id="a" * 32, vertex="v1", subtask_index=index, attempt=3)
    metrics = client_pb2.SubtaskMetrics(records_in=index, watermark_ms=watermark_ms)
    entry = internal_pb2.AttemptMetrics(attempt=attempt, metrics=metrics, gauges=gauges)
    return NamedMetrics("job", "generate -> map -> key_by", entry)


def shown(attempts: list[NamedMetrics], now_ms: int = 5_000) -> bytes:
    return written(AttemptMetricsCollector(lambda: attempts, lambda: now_ms))


def written(collector: Collector) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)


class Collected(Collector):
    """Gives what another has collected."""

    def __init__(self, collector: Collector) -> None:
        self._families = list(collector.collect())

    @override
    def collect(self) -> list[Metric]:
        return self._families


def test_a_scrape_of_200_subtasks_takes_little_more_than_writing_it() -> None:
    gauges = internal_pb2.SubtaskGauges(states=[internal_pb2.StateSize(state="counts/seen")])
    attempts = [named(index, gauges) for index in range(SUBTASKS)]
    collector = AttemptMetricsCollector(lambda: attempts, lambda: 5_000)
    collected = Collected(collector)
    times: dict[Collector, list[float]] = {collector: [], collected: []}
    for _ in range(7):
        for one, took in times.items():
            started_s = time.process_time()
            text = written(one)
            took.append(time.process_time() - started_s)
            assert text.count(b"penstock_subtask_records_in_total{") == SUBTASKS
    assert text.count(b"\n") < 30 * SUBTASKS
    assert min(times[collector]) < 1.75 * min(times[collected])


def test_of_many_states_only_the_largest_have_a_label() -> None:
    gauges = internal_pb2.SubtaskGauges()
    sizes = {f"s{number}": number for number in range(1_000)}
    database = DatabaseSizes(1, 2, 3, 4, 5, 6)
    note_sizes(gauges, [StateSizes("u", sizes), *[StateSizes("d", {"": 5}, database)] * 2])
    assert len(gauges.states) == STATES_MAX
    assert sum(state.memory_bytes for state in gauges.states) == sum(range(1_000)) + 10
    assert gauges.states[0].state == "u/s999"
    assert gauges.states[-1].state == OTHERS
    assert (gauges.database.level0_files, gauges.database.cache_misses) == (4, 12)


def test_the_lag_of_a_watermark_is_shown_while_there_is_one_that_moves() -> None:
    gauges = internal_pb2.SubtaskGauges()
    ends = (2_000, MIN_TIMESTAMP_MS, MAX_TIMESTAMP_MS)
    text = shown([named(index, gauges, end) for index, end in enumerate(ends)]).decode()
    lags = {
        sample.labels["subtask_index"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "penstock_subtask_watermark_lag_seconds"
    }
    assert lags == {"0": 3.0}
