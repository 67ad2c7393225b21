"""Kept subpartitions against a plain list, by random histories.

Two subpartitions share a cache that is too small for them. Rows, watermarks, statuses and barriers are
emitted while the producer is not blocked; checkpoints complete or abort; readers attach at any row they
may, get credit, detach; writes and reads of files end in any order. Every reader must get exactly what
the list says, in order, without gaps.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.elements import (
    CheckpointBarrier,
    CheckpointCancelled,
    ControlElement,
    EndOfData,
    EndOfPartition,
    StreamStatus,
    Watermark,
)
from penstock.errors import PartitionUnavailable
from taskmanager.network.pipelined import PartitionLoad
from taskmanager.partitions.exchange_cache import ExchangeCache
from taskmanager.partitions.kept_subpartition import KeptSubpartition
from taskmanager.partitions.log_view import LogView
from taskmanager.partitions.retention import Retention
from tests.support.examples import examples
from tests.support.exchange_slots import numbers
from tests.support.kept_files import PendingFiles
from tests.support.subpartition_readers import RecordingReader

MEMORY_MAX = 200
BATCH_ROWS_MAX = 12
WHICH = st.integers(0, 1)


class Reading:
    """A reader, and what it has to get: (index in the model, element)."""

    def __init__(self, kept: Kept, view: LogView, first_row: int) -> None:
        self.kept = kept
        self.view = view
        self.reader = RecordingReader(0)
        self.first_row = first_row
        self.attached_length = len(kept.emitted)
        self.pending = {id for id in kept.barrier_rows if kept.subpartition.log.is_pending(id)}
        view.attach(self.reader)

    def check(self, *, is_complete: bool = False) -> None:
        """What has come is a beginning of what has to come, or all of it."""
        expected = self._expected()
        got = self._got()
        assert got == expected[: len(got)]
        if is_complete:
            assert len(got) == len(expected)

    def _expected(self) -> list[Any]:
        """Rows with the watermark and status that hold there; other control elements."""
        events: list[Any] = []
        watermark = status = None
        row = self.kept.base_row
        for index, element in enumerate(self.kept.emitted):
            if isinstance(element, pa.RecordBatch):
                for _ in range(element.num_rows):
                    if row >= self.first_row:
                        events.append((row, watermark, status))
                    row += 1
            elif isinstance(element, Watermark):
                watermark = element.timestamp_ms
            elif isinstance(element, StreamStatus):
                status = element.active
            elif row >= self.first_row:
                is_barrier = isinstance(element, CheckpointBarrier | CheckpointCancelled)
                if not is_barrier or index >= self.attached_length:
                    events.append(element)
        return events

    def _got(self) -> list[Any]:
        events: list[Any] = []
        watermark = status = None
        offsets = iter(self.reader.offsets)
        early = {
            element.checkpoint_id
            for element in self.kept.emitted[: self.attached_length]
            if isinstance(element, CheckpointBarrier)
        }
        for element in self.reader.got:
            if isinstance(element, pa.RecordBatch):
                offset = next(offsets)
                for number, value in enumerate(element.column(0).to_pylist()):
                    assert value == offset + number, "rows are where their offset says"
                    events.append((value, watermark, status))
            elif isinstance(element, Watermark):
                watermark = element.timestamp_ms
            elif isinstance(element, StreamStatus):
                status = element.active
            elif isinstance(element, CheckpointBarrier) and element.checkpoint_id in early:
                assert element.checkpoint_id in self.pending, "its checkpoint was over"
            else:
                events.append(element)
        return events


class Kept:
    """A subpartition, its model and its readers."""

    def __init__(
        self, retention: Retention, cache: ExchangeCache, base_row: int, per_file: int
    ) -> None:
        self.base_row = base_row
        self.files = PendingFiles(per_file)
        self.load = PartitionLoad()
        self.errors: list[Exception] = []
        self.is_woken = True
        self.emitted: list[Any] = []
        self.end_row = base_row
        self.completed_row = base_row
        self.barrier_rows: dict[int, int] = {}
        self.readings: list[Reading] = []
        self.cache = cache
        self.subpartition = KeptSubpartition(
            retention,
            (1, 1 << 20),  # every batch leaves the collector at once
            cache,
            self.files,
            self.load,
            first_row=base_row,
            on_sent=lambda size_bytes: None,
            on_unblocked=self.room_came,
            on_error=self.errors.append,
        )

    @property
    def has_backlog(self) -> bool:
        return self.subpartition.has_backlog

    def room_came(self) -> None:
        self.is_woken = True

    def is_available(self) -> bool:
        is_available = not self.load.waiting_batches and not self.cache.blocks(self)
        if is_available:
            assert self.is_woken, "it became available and was not told"
        else:
            self.is_woken = False
        return is_available

    def emit(self, batch: pa.RecordBatch) -> None:
        self.emitted.append(batch)
        self.end_row += batch.num_rows
        self.subpartition.add(batch, batch.nbytes)

    def emit_control(self, element: ControlElement) -> None:
        self.emitted.append(element)
        if isinstance(element, CheckpointBarrier):
            self.barrier_rows[element.checkpoint_id] = self.end_row
        self.subpartition.add_control(element)

    def attach(self, row: int) -> None:
        view = self.subpartition.view(row, [].append)
        self.readings.append(Reading(self, view, row))


class KeptSubpartitions(RuleBasedStateMachine):
    """Both subpartitions get the barriers of the same checkpoints."""

    retention = Retention.CACHING
    disk_max = 0

    @initialize(base_row=st.sampled_from([0, 0, 1000]), per_file=st.integers(1, 4))
    def start(self, base_row: int, per_file: int) -> None:
        self.cache = ExchangeCache(
            MEMORY_MAX, self.disk_max, can_spill=self.retention is Retention.CACHING
        )
        self.kept = [Kept(self.retention, self.cache, base_row, per_file) for _ in range(2)]
        self.clock = 0
        self.next_checkpoint = 1
        self.pending: list[int] = []
        self.is_ended = False

    @precondition(lambda self: not self.is_ended)
    @rule(which=WHICH, batches=st.lists(st.integers(1, BATCH_ROWS_MAX), min_size=1, max_size=5))
    def emit(self, which: int, batches: list[int]) -> None:
        kept = self.kept[which]
        for rows in batches:
            if kept.is_available():
                kept.emit(numbers(kept.end_row, rows))

    @precondition(lambda self: not self.is_ended)
    @rule(which=WHICH, step=st.integers(0, 3))
    def watermark(self, which: int, step: int) -> None:
        self.clock += step
        self.kept[which].emit_control(Watermark(self.clock))

    @precondition(lambda self: not self.is_ended)
    @rule(which=WHICH, active=st.booleans())
    def status(self, which: int, active: bool) -> None:
        self.kept[which].emit_control(StreamStatus(active))

    @precondition(lambda self: not self.is_ended)
    @rule(is_cancelled=st.booleans())
    def barrier(self, is_cancelled: bool) -> None:
        checkpoint_id, self.next_checkpoint = self.next_checkpoint, self.next_checkpoint + 1
        if not is_cancelled:
            self.pending.append(checkpoint_id)
        for kept in self.kept:
            kept.emit_control(
                CheckpointCancelled(checkpoint_id)
                if is_cancelled
                else CheckpointBarrier(checkpoint_id, 0)
            )

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        checkpoint_id = data.draw(st.sampled_from(self.pending))
        self.pending = [known for known in self.pending if known > checkpoint_id]
        for kept in self.kept:
            kept.completed_row = kept.barrier_rows[checkpoint_id]
            kept.subpartition.checkpoint_completed(checkpoint_id)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        checkpoint_id = data.draw(st.sampled_from(self.pending))
        self.pending.remove(checkpoint_id)
        for kept in self.kept:
            kept.subpartition.checkpoint_aborted(checkpoint_id)

    @rule(which=WHICH, data=st.data(), credit=st.integers(0, 5))
    def attach(self, which: int, data: st.DataObject, credit: int) -> None:
        kept = self.kept[which]
        row = data.draw(st.integers(kept.completed_row, kept.end_row))
        first_row = kept.subpartition.log.first_row
        if row < first_row:
            assert self.retention is Retention.CACHING_MEMORY or self.disk_max
            with pytest.raises(PartitionUnavailable, match="its producer must run again"):
                kept.attach(row)
            return
        kept.attach(row)
        kept.readings[-1].reader.credit = credit
        kept.readings[-1].view.serve()

    @rule(which=WHICH, data=st.data(), credit=st.integers(1, 20))
    def grant(self, which: int, data: st.DataObject, credit: int) -> None:
        if readings := self.kept[which].readings:
            reading = data.draw(st.sampled_from(readings))
            reading.reader.credit += credit
            reading.view.serve()

    @rule(which=WHICH, data=st.data())
    def detach(self, which: int, data: st.DataObject) -> None:
        if readings := self.kept[which].readings:
            reading = data.draw(st.sampled_from(readings))
            readings.remove(reading)
            reading.view.detach(is_complete=False)
            reading.check()

    @rule(which=WHICH, data=st.data())
    def finish_a_file(self, which: int, data: st.DataObject) -> None:
        if pending := self.kept[which].files.pending:
            pending.pop(data.draw(st.integers(0, len(pending) - 1)))()

    @precondition(lambda self: not self.is_ended)
    @rule()
    def end(self) -> None:
        self.is_ended = True
        for kept in self.kept:
            kept.emit_control(EndOfData())
            kept.emit_control(EndOfPartition())

    @invariant()
    def readers_have_what_they_should(self) -> None:
        for kept in getattr(self, "kept", []):
            assert not kept.errors
            for reading in kept.readings:
                reading.check()

    @invariant()
    def memory_is_bounded_and_counted(self) -> None:
        kept = getattr(self, "kept", [])
        if kept:
            memory_bytes = [one.subpartition.log.memory_bytes for one in kept]
            assert self.cache.memory_bytes == sum(memory_bytes)
            assert self.cache.memory_bytes < MEMORY_MAX + 2 * BATCH_ROWS_MAX * 8
            assert self.cache.disk_bytes == sum(one.files.size_bytes for one in kept)
            for one in kept:
                if self.retention is Retention.CACHING and not self.disk_max:
                    assert one.subpartition.log.first_row <= one.completed_row

    def teardown(self) -> None:
        for kept in getattr(self, "kept", []):
            for reading in kept.readings:
                reading.reader.credit = 10**9
                reading.view.serve()
            kept.files.run()
        for kept in getattr(self, "kept", []):
            kept.files.run()
            for reading in kept.readings:
                reading.check(is_complete=True)
        for kept in getattr(self, "kept", []):
            kept.files.run()
            if kept.readings:
                assert kept.is_available(), "everything has been read, and it waits"
            kept.subpartition.release()
        if hasattr(self, "cache"):
            for kept in self.kept:
                kept.files.run()
            assert self.cache.memory_bytes == 0
            assert self.cache.disk_bytes == 0


class InMemory(KeptSubpartitions):
    retention = Retention.CACHING_MEMORY


class OnASmallDisk(KeptSubpartitions):
    disk_max = 300


RUNS = examples(120, stateful_step_count=60)
TestKept = KeptSubpartitions.TestCase
TestKept.settings = RUNS
TestInMemory = InMemory.TestCase
TestInMemory.settings = RUNS
TestOnASmallDisk = OnASmallDisk.TestCase
TestOnASmallDisk.settings = RUNS
