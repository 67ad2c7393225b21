"""Drives one operator without a task: push batches and watermarks, move the clock, look at what came.

``OperatorHarness(operator)`` opens it with a context of its own; each ``push``, ``watermark``,
``advance_clock`` and ``end`` runs the operator to the end of the call and keeps what it emitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa

from common.elements import (
    MAX_TIMESTAMP_MS,
    OperatorOutput,
    Pause,
    SideOutput,
    Watermark,
)
from penstock.config import Configuration
from penstock.schema import EVENT_TIME
from taskmanager.operators.operator import Operator, OperatorContext
from taskmanager.state.hashmap.store import HashMapStateBackend
from taskmanager.task.metrics import SubtaskCounters


class ManualClock:
    """A clock that stands still until it is moved."""

    def __init__(self, now_ms: int = 0) -> None:
        self.time_ms = now_ms

    def now_ms(self) -> int:
        """The time that was set."""
        return self.time_ms

    def monotonic_ns(self) -> int:
        """The same in nanoseconds."""
        return self.time_ms * 1_000_000


class OperatorHarness:
    """One open operator and everything it has emitted.

    Attributes:
        batches: the main output.
        sides: side outputs by tag.
        controls: watermarks and other control elements, in order.
        emitted: everything in order, pauses left out.
        timers: wall-clock times the operator asked for and did not get yet.
    """

    def __init__(
        self,
        operator: Operator,
        *,
        now_ms: int = 0,
        config: Configuration | None = None,
        name: str = "operator",
    ) -> None:
        self.operator = operator
        self.clock = ManualClock(now_ms)
        self.timers: list[int] = []
        self.counters = SubtaskCounters()
        self.state = HashMapStateBackend(0, 1, 128)
        self.emitted: list[OperatorOutput] = []
        self.context = OperatorContext(
            job_id="job",
            job_name="job",
            vertex_id="v0",
            operator_uid="uid",
            operator_name=name,
            subtask_index=0,
            parallelism=1,
            max_parallelism=128,
            attempt=0,
            config=config or Configuration.from_mapping({}),
            clock=self.clock,
            counters=self.counters,
            state=self.state,
            register_timer=self.timers.append,
            wake=lambda: None,
            run_in_background=lambda call, done: done(call()),
            send_results=lambda _collect_id, _chunk: None,
            origins=cast("Any", SimpleNamespace(open=(), current="")),
        )
        operator.open(self.context)

    @property
    def batches(self) -> list[pa.RecordBatch]:
        """What came out of the main output."""
        return [element for element in self.emitted if isinstance(element, pa.RecordBatch)]

    @property
    def controls(self) -> list[Any]:
        """The control elements that came out, in order."""
        return [e for e in self.emitted if not isinstance(e, (pa.RecordBatch, SideOutput))]

    def side(self, tag: str) -> list[dict[str, Any]]:
        """The rows of a side output."""
        found = [e for e in self.emitted if isinstance(e, SideOutput) and e.tag == tag]
        return [row for element in found for row in element.batch.to_pylist()]

    def rows(self, *, event_time: bool = False) -> list[dict[str, Any]]:
        """The rows of the main output so far; without the event-time column unless asked for."""
        rows = [row for batch in self.batches for row in batch.to_pylist()]
        if not event_time:
            for row in rows:
                row.pop(EVENT_TIME, None)
        return rows

    def take_rows(self, *, event_time: bool = False) -> list[dict[str, Any]]:
        """The same, and forgets everything that was emitted."""
        rows = self.rows(event_time=event_time)
        self.emitted.clear()
        return rows

    def push(self, batch: pa.RecordBatch) -> None:
        """Hands the operator a batch."""
        if batch.num_rows:
            self._run(self.operator.process(batch))

    def watermark(self, timestamp_ms: int) -> None:
        """Hands the operator a watermark."""
        self._run(self.operator.on_watermark(Watermark(timestamp_ms)))

    def idle(self) -> None:
        """Tells the operator that nothing more is coming for now."""
        self._run(self.operator.on_idle())

    def advance_clock(self, now_ms: int) -> None:
        """Moves the clock, and calls the operator at every time it asked for on the way."""
        while self.timers and min(self.timers) <= now_ms:
            at_ms = min(self.timers)
            self.timers[:] = [timer for timer in self.timers if timer > at_ms]
            self.clock.time_ms = max(self.clock.time_ms, at_ms)
            self._run(self.operator.on_timer(self.clock.time_ms))
        self.clock.time_ms = now_ms

    def end(self) -> None:
        """The end of the data: the last watermark, then the call for what is left."""
        self.watermark(MAX_TIMESTAMP_MS)
        self._run(self.operator.on_end_of_data())

    def close(self) -> None:
        """Closes the operator."""
        self.operator.close()

    def _run(self, outputs: Iterable[OperatorOutput]) -> None:
        for output in outputs:
            if not isinstance(output, Pause):
                self.emitted.append(output)
