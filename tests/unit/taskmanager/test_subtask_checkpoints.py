"""A subtask and barriers: the snapshot lies exactly between two elements, and the way to the end waits for
what it has to wait for.

Method: a real subtask and chain between an input that the test fills and outputs whose room it decides on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from common.elements import (
    MAX_TIMESTAMP_MS,
    PAUSE,
    CheckpointBarrier,
    CheckpointCancelled,
    ControlElement,
    EndOfData,
    EndOfPartition,
    OperatorOutput,
    OriginEnded,
    Watermark,
)
from penstock.storage.checkpoint_properties import BehindBarrier, CheckpointProperties
from taskmanager.harness.manual_clock import ManualClock
from taskmanager.network.result_partition import ResultPartition
from taskmanager.operators.metrics import SubtaskCounters
from taskmanager.operators.operator import NOTHING, Operator
from taskmanager.snapshot.subtask_snapshot import Alignment
from taskmanager.task.inputs import EndedInput, Input
from taskmanager.task.operator_chain import SOURCE, OperatorChain
from taskmanager.task.subtask import Progress, Subtask, SubtaskPhase


def rows(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"x": pa.array(values, pa.int64())})


class FakeInput:
    """Hands out what the test has put in."""

    def __init__(self, *elements: OperatorOutput) -> None:
        self.elements = deque(elements)
        self.is_bounded = False
        self.has_ended = False
        self.triggered: deque[CheckpointBarrier] = deque()
        self.aborted: list[int] = []
        self.is_closed = False

    def poll(self) -> Iterable[OperatorOutput] | None:
        if self.triggered:
            return (self.triggered.popleft(),)
        return (self.elements.popleft(),) if self.elements else None

    @property
    def has_ended_data(self) -> bool:
        return self.is_bounded and not self.elements

    def trigger(self, barrier: CheckpointBarrier) -> None:
        self.triggered.append(barrier)

    def abort_checkpoint(self, checkpoint_id: int) -> None:
        self.aborted.append(checkpoint_id)

    def stop(self) -> None:
        self.elements.clear()
        self.has_ended = True

    def alignment(self) -> Alignment | None:
        return Alignment(5, 7)

    def on_timer(self, now_ms: int) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class FakePartition:
    """Notes what it gets; takes ``room`` batches."""

    is_complete = True

    def __init__(self) -> None:
        self.elements: list[Any] = []
        self.room = 10**9
        self.is_read = True
        self.flush_deadline_ns = None

    def is_available(self) -> bool:
        return self.room > 0

    def emit(self, batch: pa.RecordBatch) -> None:
        self.room -= 1
        self.elements += batch["x"].to_pylist()

    def emit_control(self, element: ControlElement) -> None:
        self.elements.append(element)

    def end_data(self) -> None:
        self.emit_control(EndOfData())

    def finish(self) -> None:
        self.elements.append(EndOfPartition())

    def is_drained(self) -> bool:
        return self.is_read

    def flush(self) -> None:
        pass

    def release(self) -> None:
        pass


class Spreads(Operator):
    """Emits a batch row by row, and pauses in between; a running count is its state."""

    def __init__(self) -> None:
        self.count = 0

    @override
    def process(self, batch: pa.RecordBatch) -> Iterator[OperatorOutput]:
        for value in batch["x"].to_pylist():
            self.count += 1
            yield rows(value)
            yield PAUSE

    @override
    def on_end_of_data(self) -> Iterator[OperatorOutput]:
        yield rows(-1)


class Commits(Operator):
    """A sink: what it got waits for a commit."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.prepared: dict[int, list[int]] = {}
        self.shown: list[int] = []
        self.void: list[int] = []
        self.is_taken = True
        self.takes_checkpoints = True

    @override
    def process(self, batch: pa.RecordBatch) -> Iterable[OperatorOutput]:
        self.got += batch["x"].to_pylist()
        return NOTHING

    @override
    def prepare_snapshot(self, checkpoint_id: int) -> None:
        self.prepared[checkpoint_id], self.got = self.got, []

    @override
    def on_checkpoint_completed(self, checkpoint_id: int) -> None:
        for prepared in [id for id in self.prepared if id <= checkpoint_id]:
            self.shown += self.prepared.pop(prepared)

    @override
    def on_checkpoint_aborted(self, checkpoint_id: int) -> None:
        self.void.append(checkpoint_id)

    @override
    def commit_output(self) -> None:
        self.shown += self.got
        self.got = []

    @property
    @override
    def needs_commit(self) -> bool:
        return bool(self.got or any(self.prepared.values()))

    @override
    def is_drained(self) -> bool:
        return self.is_taken


class Task:
    """A subtask whose chain spreads its rows and hands them to a sink and to an output."""

    def __init__(
        self, chain_input: Input, *, by_checkpoint: bool = True, sink: bool = True
    ) -> None:
        self.output = FakePartition()
        self.spreads, self.sink = Spreads(), Commits()
        operators: list[Operator] = [self.spreads, self.sink] if sink else [self.spreads]
        parents = [(SOURCE, ""), (0, "")][: len(operators)]
        chain = OperatorChain(operators, parents, [(0, "", cast("Any", self.output))])
        self.snapshots: list[tuple[int, Any]] = []
        self.subtask = Subtask(
            chain,
            operators,
            chain_input,
            [cast("ResultPartition", self.output)],
            SubtaskCounters(),
            ManualClock(),
            take_snapshot=self._take,
            commits_by_checkpoint=by_checkpoint,
        )

    def _take(self, barrier: CheckpointBarrier, alignment: Alignment | None) -> None:
        self.sink.prepare_snapshot(barrier.checkpoint_id)
        ended = self.subtask.has_ended_outputs
        self.snapshots.append(
            (barrier.checkpoint_id, (self.spreads.count, list(self.output.elements), ended))
        )

    def run(self) -> Progress:
        for _ in range(1000):
            progress = self.subtask.step()
            if progress is Progress.IDLE and self.subtask.holds_back:
                progress = self.subtask.flush()
            if progress is not Progress.MORE:
                return progress
        raise AssertionError("it runs on and on")


def barrier(checkpoint_id: int) -> CheckpointBarrier:
    return CheckpointBarrier(checkpoint_id, 0)


def test_a_snapshot_lies_between_two_elements() -> None:
    task = Task(FakeInput(rows(1, 2), barrier(1), rows(3), barrier(2)))
    assert task.run() is Progress.IDLE
    assert task.output.elements == [1, 2, barrier(1), 3, barrier(2)]
    assert task.snapshots == [
        (1, (2, [1, 2, barrier(1)], False)),
        (2, (3, [1, 2, barrier(1), 3, barrier(2)], False)),
    ]


@given(
    st.lists(st.integers(0, 3), max_size=12),
    st.lists(st.integers(0, 3), max_size=40),
)
def test_a_snapshot_holds_what_came_before_it(sizes: list[int], rooms: list[int]) -> None:
    """Whatever the outputs' room: 0 stands for a barrier, any other number for a batch of rows."""
    elements: list[OperatorOutput] = []
    expected, count, checkpoint_id = [], 0, 0
    for size in sizes:
        if size:
            elements.append(rows(*range(count, count + size)))
            count += size
        else:
            checkpoint_id += 1
            elements.append(barrier(checkpoint_id))
            expected.append((checkpoint_id, count))
    task = Task(FakeInput(*elements))
    task.output.room = 0
    for room in rooms:
        task.output.room = room
        task.run()
    task.output.room = 10**6
    task.run()
    assert [(id, taken[0]) for id, taken in task.snapshots] == expected
    for id, (_, emitted, _) in task.snapshots:
        assert emitted[-1] == barrier(id)
    assert [e for e in task.output.elements if isinstance(e, int)] == list(range(count))


def test_back_pressure_in_the_middle_of_a_barrier() -> None:
    """An operator emits rows ahead of the barrier and finds no room: nothing else happens meanwhile."""

    class HoldsBack(Spreads):
        @override
        def on_control(self, element: ControlElement) -> Iterator[OperatorOutput]:
            for value in (7, 8):
                self.count += 1
                yield rows(value)
            yield element

    source = FakeInput(barrier(1), rows(9))
    task = Task(source)
    task.spreads.__class__ = HoldsBack
    task.output.room = 1
    assert task.run() is Progress.BLOCKED
    assert task.output.elements == [7]
    assert task.snapshots == []
    task.subtask.register_timer(0, 0)
    assert task.subtask.next_call_ns(0, 0) is None
    assert task.run() is Progress.BLOCKED
    assert source.elements[0].num_rows == 1
    task.output.room = 2
    task.run()
    ((id, (count, emitted, _)),) = task.snapshots
    assert (id, count, emitted) == (1, 2, [7, 8, barrier(1)])
    assert task.output.elements == [7, 8, barrier(1), 9]


def test_a_checkpoint_given_up_while_its_barrier_is_held_up_takes_no_snapshot() -> None:
    class HoldsBack(Spreads):
        @override
        def on_control(self, element: ControlElement) -> Iterator[OperatorOutput]:
            for value in (7, 8):
                self.count += 1
                yield rows(value)
            yield element

    task = Task(FakeInput(barrier(1), barrier(2)))
    task.spreads.__class__ = HoldsBack
    task.output.room = 1
    assert task.run() is Progress.BLOCKED
    task.subtask.checkpoint_aborted(1)
    task.output.room = 9
    task.run()
    assert [id for id, _ in task.snapshots] == [2]
    assert task.output.elements == [7, 8, barrier(1), 7, 8, barrier(2)]


def test_what_may_be_complete_stays_with_the_operators() -> None:
    """A savepoint of an earlier JobManager: what a sink keeps for it is let go behind the next checkpoint only."""
    source = FakeInput(barrier(1), barrier(2))
    task = Task(source)
    task.run()
    task.subtask.checkpoint_aborted(1, is_known=False)
    task.subtask.checkpoint_aborted(2)
    assert (source.aborted, task.sink.void) == ([1, 2], [2])


def test_a_subtask_that_fails_before_its_barrier_takes_no_snapshot() -> None:
    source = FakeInput(barrier(1))
    task = Task(source)

    def fail(element: ControlElement) -> Iterable[OperatorOutput]:
        raise OSError("broken")

    task.sink.on_control = fail  # type: ignore[method-assign]
    with pytest.raises(Exception, match="broken"):
        task.run()
    assert task.snapshots == []
    assert task.subtask.close() == []
    assert source.is_closed


def test_the_end_of_the_data_waits_for_a_last_checkpoint() -> None:
    source = FakeInput(rows(1))
    source.is_bounded = True
    task = Task(source)
    assert task.run() is Progress.WAITING
    assert task.output.elements == [1, Watermark(MAX_TIMESTAMP_MS), -1, EndOfData()]
    task.subtask.commit_output()  # is for jobs without checkpoints
    source.has_ended = True
    assert task.run() is Progress.WAITING
    task.subtask.trigger(barrier(4))
    assert task.run() is Progress.WAITING
    assert task.output.elements[-2:] == [EndOfData(), barrier(4)]
    assert task.sink.shown == []
    task.subtask.checkpoint_completed(4)
    assert task.sink.shown == [1, -1]
    task.output.is_read = False
    assert task.run() is Progress.IDLE
    assert task.subtask.phase is SubtaskPhase.DRAINING
    assert task.output.elements[-1] == EndOfPartition()
    task.output.is_read = True
    assert task.run() is Progress.ENDED


def test_a_checkpoint_from_before_the_end_is_not_the_last_one() -> None:
    source = FakeInput(rows(1), barrier(1), rows(2))
    source.is_bounded = source.has_ended = True
    task = Task(source)
    assert task.run() is Progress.WAITING
    task.subtask.checkpoint_completed(1)
    assert task.sink.shown == [1]
    assert task.run() is Progress.WAITING
    task.subtask.trigger(barrier(2))
    task.run()
    task.subtask.checkpoint_aborted(2)
    assert source.aborted == [2]
    assert task.run() is Progress.WAITING
    task.subtask.trigger(barrier(3))
    task.run()
    task.subtask.checkpoint_completed(3)
    assert task.run() is Progress.ENDED
    assert task.sink.shown == [1, 2, -1]


def test_rows_on_their_way_are_waited_for_before_the_end_is_reported() -> None:
    source = FakeInput(rows(1))
    source.is_bounded = source.has_ended = True
    task = Task(source)
    task.sink.is_taken = False
    assert task.run() is Progress.IDLE
    task.sink.is_taken = True
    assert task.run() is Progress.WAITING


def test_a_consumer_waits_for_the_ends_of_its_producers() -> None:
    """Its own work is done; the producers wait for the last checkpoint, whose barrier must pass here."""
    source = FakeInput(rows(1), OriginEnded("a"))
    source.is_bounded = True
    task = Task(source, sink=False)
    assert task.run() is Progress.WAITING
    source.elements += [CheckpointCancelled(1), barrier(2)]
    assert task.run() is Progress.WAITING
    assert task.output.elements[-3:] == [EndOfData(), CheckpointCancelled(1), barrier(2)]
    assert [id for id, _ in task.snapshots] == [2]
    task.output.room = 0
    source.elements.append(barrier(3))
    assert task.run() is Progress.BLOCKED
    task.output.room = 1
    assert task.run() is Progress.WAITING
    source.has_ended = True
    assert task.run() is Progress.ENDED
    assert task.output.elements[-2:] == [barrier(3), EndOfPartition()]


def test_a_trigger_after_the_end_of_the_outputs() -> None:
    source = FakeInput()
    source.is_bounded = source.has_ended = True
    task = Task(source, sink=False)
    task.output.is_read = False
    task.run()
    assert task.subtask.phase is SubtaskPhase.DRAINING
    before = list(task.output.elements)
    task.subtask.trigger(barrier(9))
    task.run()
    assert task.output.elements == before
    ((id, (_, _, ended)),) = task.snapshots
    assert (id, ended) == (9, True)


def test_a_commit_without_checkpoints() -> None:
    source = FakeInput(rows(1))
    source.is_bounded = source.has_ended = True
    task = Task(source, by_checkpoint=False)
    task.subtask.commit_output()
    assert task.run() is Progress.WAITING
    assert task.sink.shown == []
    task.subtask.commit_output()
    assert task.sink.shown == [1, -1]
    assert task.run() is Progress.ENDED
    task.subtask.commit_output()
    assert task.sink.shown == [1, -1]


def test_a_subtask_restored_as_finished_ends_its_outputs() -> None:
    """It takes part in a checkpoint that comes before it has got so far, and in one that comes after."""
    source = EndedInput()
    output = FakePartition()
    output.is_read = False
    snapshots = []
    subtask = Subtask(
        OperatorChain([], [], [(SOURCE, "", cast("Any", output))]),
        [],
        source,
        [cast("ResultPartition", output)],
        SubtaskCounters(),
        ManualClock(),
        take_snapshot=lambda barrier, _: snapshots.append(barrier.checkpoint_id),
        commits_by_checkpoint=True,
    )
    subtask.trigger(barrier(1))
    while subtask.step() is Progress.MORE:
        pass
    subtask.trigger(barrier(2))
    assert snapshots == [1, 2]
    assert output.elements == [
        barrier(1),
        Watermark(MAX_TIMESTAMP_MS),
        EndOfData(),
        EndOfPartition(),
    ]
    output.is_read = True
    assert subtask.step() is Progress.ENDED


def stopping(checkpoint_id: int, behind: BehindBarrier = BehindBarrier.HOLD) -> CheckpointBarrier:
    return CheckpointBarrier(
        checkpoint_id, 0, properties=CheckpointProperties(target="/kept/s", behind=behind)
    )


def test_behind_the_barrier_of_a_stop_nothing_is_read_until_it_is_aborted() -> None:
    source = FakeInput(rows(1), stopping(3), rows(2))
    task = Task(source)
    assert task.run() is Progress.IDLE
    assert task.output.elements == [1, stopping(3)]
    task.subtask.register_timer(SOURCE, 0)
    assert task.subtask.next_call_ns(0, 0) is None
    assert not task.subtask.holds_back
    task.subtask.checkpoint_aborted(2)  # another one
    assert task.run() is Progress.IDLE
    assert len(source.elements) == 1
    task.subtask.checkpoint_aborted(3)
    assert task.run() is Progress.IDLE
    assert task.output.elements == [1, stopping(3), 2]
    assert task.sink.shown == []


def test_a_stop_that_is_complete_commits_and_ends_without_an_end_of_the_data() -> None:
    source = FakeInput(rows(1), stopping(3), rows(2))
    task = Task(source)
    task.run()
    task.subtask.checkpoint_completed(3)
    assert task.sink.shown == [1]
    assert task.run() is Progress.ENDED
    assert task.output.elements == [1, stopping(3), EndOfData(), EndOfPartition()]


def test_what_is_restored_from_a_stop_ends_at_once() -> None:
    source = FakeInput(rows(1))
    task = Task(source)
    task.subtask.stop()
    assert task.run() is Progress.ENDED
    assert task.output.elements == [EndOfData(), EndOfPartition()]


def test_a_drain_ends_the_data_before_its_barrier() -> None:
    drain = stopping(3, BehindBarrier.DRAIN)
    task = Task(FakeInput(rows(1), drain, rows(2)))
    assert task.run() is Progress.IDLE
    assert task.output.elements == [1, Watermark(MAX_TIMESTAMP_MS), -1, drain]
    assert [checkpoint_id for checkpoint_id, _ in task.snapshots] == [3]
    task.subtask.checkpoint_completed(3)
    assert task.sink.shown == [1, -1]
    assert task.run() is Progress.ENDED
    assert task.output.elements[-2:] == [EndOfData(), EndOfPartition()]
