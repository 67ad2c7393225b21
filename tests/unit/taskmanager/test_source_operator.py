"""Aim: who waits for a source that hangs finds it named in its log, once, and nobody ends who has not told what it found.

Method: an operator with a source that answers when it is told to.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from structlog.testing import capture_logs
from typing_extensions import override

import penstock as ps
from common.pb import internal_pb2
from penstock.config import Configuration
from penstock.pb import graph_pb2
from penstock.rows.schema import schema_to_bytes
from taskmanager.harness.manual_clock import ManualClock
from taskmanager.operators import source as source_module
from taskmanager.operators.silences import SILENT_MS
from taskmanager.operators.source import SourceOperator

SCHEMA = pa.schema([("a", pa.int64())])


class SlowReader(ps.Reader):
    """Rows are on their way until ``batch`` is there."""

    batch: pa.RecordBatch | None = None
    has_come = False

    @override
    def read(self, max_rows: int) -> pa.RecordBatch | None:
        found, self.batch = self.batch, None
        return found

    @override
    def position(self) -> bytes:
        return b""

    @override
    def is_reading(self) -> bool:
        return not self.has_come


class SlowSource(ps.Source):
    schema = SCHEMA
    bounded = False
    interval_ms: int | None = 1_000

    def __init__(self) -> None:
        self.reader = SlowReader()

    @override
    def discover(self, ctx: ps.SourceContext) -> list[ps.Split]:
        return [ps.Split("one", b"")]

    @override
    def discovery_interval_ms(self) -> int | None:
        return self.interval_ms

    @override
    def open(self, split: ps.Split, position: bytes | None) -> ps.Reader:
        return self.reader


class Site:
    """An open source whose background calls wait to be made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source = SlowSource()
        self.clock = ManualClock(0)
        self.calls: list[Any] = []
        self.reported: list[Any] = []
        monkeypatch.setattr(source_module, "build_source", lambda *_: self.source)
        origins = SimpleNamespace(add=lambda *_: None, start=lambda *_: None, all_known=False)
        origins.rest_is_from = lambda *_: None
        self.woken = False
        self.context = SimpleNamespace(
            job_id="job",
            operator_name="slow",
            subtask_index=0,
            parallelism=1,
            origins=origins,
            clock=self.clock,
            config=Configuration.from_mapping({}),
            counters=SimpleNamespace(records_in=0, bad_records=0),
            artifact_paths={},
            takes_checkpoints=True,
            wake=self.wake,
            submit=None,
            submit_apart=None,
            post=None,
            call_after=lambda _ms: None,
            run_in_background=lambda call, done: self.calls.append((call, done)),
        )
        spec = graph_pb2.Operator(name="slow", output_schema=schema_to_bytes(SCHEMA))
        self.operator = SourceOperator(spec, "")
        self.operator.open(cast("Any", self.context), self.reported.append)

    def wake(self) -> None:
        self.woken = True

    def make_call(self) -> None:
        call, done = self.calls.pop()
        done(call())

    def told_after(self, milliseconds: int) -> list[str]:
        self.clock.time_ms += milliseconds
        with capture_logs() as logs:
            self.operator.on_pause_over()
        return [entry["what"] for entry in logs if entry["event"] == "source.silent"]


def test_a_listing_that_does_not_come_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(monkeypatch)
    assert site.told_after(SILENT_MS - 1) == []
    assert site.told_after(1) == ["its listing"]
    assert site.told_after(10 * SILENT_MS) == []
    site.make_call()
    assert site.told_after(1_000) == []
    assert len(site.calls) == 1
    assert site.told_after(SILENT_MS) == ["its listing"]


def test_rows_that_do_not_come_are_told_of_and_those_that_wait_for_room_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = Site(monkeypatch)
    site.make_call()
    (found,) = site.reported
    site.operator.add_splits(internal_pb2.AddSplits(splits=found.splits))
    assert site.operator.poll() is None
    site.source.reader.has_come = True
    assert site.told_after(SILENT_MS) == []
    site.make_call()
    site.source.reader.has_come = False
    site.source.reader.batch = pa.RecordBatch.from_pydict({"a": [1]})
    assert site.operator.poll() is not None
    assert site.operator.poll() is None
    assert "one" in site.told_after(SILENT_MS)


def test_who_discovers_does_not_end_before_all_that_it_finds_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next JobManager knows what was reported, and no more, though this one has told that nothing else comes."""
    site = Site(monkeypatch)
    site.operator.add_splits(internal_pb2.AddSplits(final=True))
    site.context.origins.all_known = True
    assert not site.operator.is_finished
    site.make_call()
    assert not site.operator.is_finished
    site.source.interval_ms = None
    assert site.told_after(1_000) == []
    assert not site.operator.is_finished
    site.woken = False
    site.make_call()
    assert site.operator.is_finished
    assert site.woken
