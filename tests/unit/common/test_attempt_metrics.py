"""Aim: a scrape stays quick and its labels bounded, whatever runs.

Method: the collector on made-up reports of 200 subtasks; its time on the processor beside what the client library takes to
write the same, the best of some runs by turns: less than 50 ms on a machine where that takes 125. The library also says what
is right.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from common.elements import MAX_TIMESTAMP_MS, MIN_TIMESTAMP_MS
from common.metrics import AttemptMetricsCollector, NamedMetrics
from common.metrics_text import text_of
from common.pb import internal_pb2
from penstock.pb import client_pb2
from taskmanager.state.state_sizes import OTHERS, STATES_MAX, DatabaseSizes, StateSizes, note_sizes

SUBTASKS = 200


def named(index: int, gauges: internal_pb2.SubtaskGauges, watermark_ms: int = 1) -> NamedMetrics:
    attempt = internal_pb2.AttemptId(job_id="a" * 32, vertex="v1", subtask_index=index, attempt=3)
    metrics = client_pb2.SubtaskMetrics(records_in=index, watermark_ms=watermark_ms)
    entry = internal_pb2.AttemptMetrics(attempt=attempt, metrics=metrics, gauges=gauges)
    return NamedMetrics("job", "generate -> map -> key_by", entry)


def shown(attempts: list[NamedMetrics], now_ms: int = 5_000) -> str:
    return text_of(AttemptMetricsCollector(lambda: attempts, lambda: now_ms).collect())


def written_by_library(collector: Collector) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry).decode()


def test_a_scrape_of_200_subtasks_takes_a_part_of_what_the_library_takes_to_write_it() -> None:
    gauges = internal_pb2.SubtaskGauges(states=[internal_pb2.StateSize(state="counts/seen")])
    attempts = [named(index, gauges) for index in range(SUBTASKS)]
    collector = AttemptMetricsCollector(lambda: attempts, lambda: 5_000)

    def own() -> str:
        return text_of(collector.collect())

    def of_library() -> str:
        return written_by_library(collector)

    took: dict[Callable[[], str], list[float]] = {own: [], of_library: []}
    for _ in range(7):
        for write, times in took.items():
            started_s = time.process_time()
            text = write()
            times.append(time.process_time() - started_s)
    assert own() == text
    assert text.count("penstock_subtask_records_in_total{") == SUBTASKS
    assert text.count("\n") < 30 * SUBTASKS
    assert min(took[own]) < 0.4 * min(took[of_library])


@pytest.mark.parametrize("label", ["", 'a "job"', "two\nlines", "C:\\new", "ünïcode ≠", "{a=1},"])
def test_what_is_shown_is_what_the_library_writes(label: str) -> None:
    gauges = internal_pb2.SubtaskGauges(states=[internal_pb2.StateSize(state=label)])
    gauges.database.cache_hits = 1 << 60
    ends = (MIN_TIMESTAMP_MS, MAX_TIMESTAMP_MS, -1, 123_456_789_012)
    attempts = [NamedMetrics(label, label, named(3, gauges, end).entry) for end in ends]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(AttemptMetricsCollector(lambda: attempts, lambda: 5_000))
    ProcessCollector(registry=registry)
    for number, value in enumerate((0.0, 1e-9, 1e22, -1e22, float("nan"), float("-inf"))):
        Gauge(f"some_{number}", f"Of a\nkind, and {label}.", registry=registry).set(value)
    families = list(registry.collect())
    replayed = SimpleNamespace(collect=lambda: families)  # the process does not stand still
    assert text_of(families) == generate_latest(replayed).decode()  # type: ignore[arg-type]


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
    text = shown([named(index, gauges, end) for index, end in enumerate(ends)])
    lags = {
        sample.labels["subtask_index"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "penstock_subtask_watermark_lag_seconds"
    }
    assert lags == {"0": 3.0}
