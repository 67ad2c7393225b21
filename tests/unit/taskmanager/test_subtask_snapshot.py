"""The snapshot of a subtask: what is done when, what is acknowledged, and what becomes of failures.

Method: operators and backends that note what is asked of them, writers on a store in memory, and an I/O
thread that runs when the test says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from typing_extensions import override

from common.elements import CheckpointBarrier
from common.pb import internal_pb2
from penstock.errors import (
    CheckpointAborted,
    InvariantViolation,
    StoreCorrupt,
    StoreTransient,
    TaskFailure,
)
from penstock.pb import checkpoint_pb2
from penstock.storage.blobs import Blob, SnapshotWriter
from penstock.storage.checkpoint_properties import (
    BehindBarrier,
    CheckpointKind,
    CheckpointProperties,
    SavepointFormat,
)
from penstock.storage.local_store import LocalStore
from penstock.storage.memory_store import MemoryStore
from penstock.storage.snapshot_files import (
    PackedSnapshotWriter,
    StoreSnapshotReader,
    parse_snapshot_file_name,
)
from taskmanager.harness.manual_clock import ManualClock
from taskmanager.operators.metrics import SubtaskCounters
from taskmanager.operators.operator import Operator
from taskmanager.snapshot.snapshot_files_store import SnapshotFiles
from taskmanager.snapshot.subtask_snapshot import (
    Alignment,
    ChannelPositions,
    SnapshotPart,
    SubtaskSnapshotter,
)
from taskmanager.state.backend import KeyedStateBackend
from taskmanager.state.operator_state import OperatorStateStore

INLINE_MAX = 100
LARGE_LIST = 1025


class FakeBackend:
    """Its snapshots have one blob."""

    def __init__(self, story: list[str], content: bytes = b"state") -> None:
        self.story = story
        self.content = content
        self.error: BaseException | None = None

    def snapshot(
        self, checkpoint_id: int, *, is_full: bool = False, in_runs: bool = False
    ) -> FakeSnapshot:
        self.story.append("backend.snapshot" + " full" * is_full + " in runs" * in_runs)
        if self.error is not None:
            raise self.error
        return FakeSnapshot(self.story, self.content)


class FakeSnapshot:
    def __init__(self, story: list[str], content: bytes) -> None:
        self.story = story
        self.content = content

    def blobs(self) -> Iterable[Blob]:
        self.story.append("blobs")
        yield Blob("run", lambda: (self.content,))

    def describe(
        self, handles: Mapping[str, checkpoint_pb2.StateHandle]
    ) -> checkpoint_pb2.KeyedStateSnapshot:
        self.story.append("describe")
        files = [
            checkpoint_pb2.StateFile(name=name, handle=handle) for name, handle in handles.items()
        ]
        return checkpoint_pb2.KeyedStateSnapshot(backend="fake", files=files)

    def discard(self) -> None:
        self.story.append("discard")


class Prepares(Operator):
    """Has a list, and work for the I/O thread."""

    def __init__(self, story: list[str], state: OperatorStateStore, item: bytes) -> None:
        self.story = story
        self.state = state
        self.item = item
        self.error: BaseException | None = None

    @override
    def prepare_snapshot(self, checkpoint_id: int) -> None:
        self.story.append(f"prepare {checkpoint_id}")
        self.state.list("items").items = [self.item]

    @override
    def finish_snapshot(self, checkpoint_id: int) -> Callable[[], None]:
        def work() -> None:
            self.story.append("work")
            if self.error is not None:
                raise self.error

        return work


class Listener:
    """Notes what became of snapshots."""

    def __init__(self) -> None:
        self.acknowledged: list[tuple[int, checkpoint_pb2.SubtaskSnapshot]] = []
        self.barriers: list[CheckpointBarrier] = []
        self.declined: list[tuple[int, str]] = []
        self.failures: list[BaseException] = []

    def acknowledge(
        self, barrier: CheckpointBarrier, snapshot: checkpoint_pb2.SubtaskSnapshot
    ) -> None:
        self.barriers.append(barrier)
        self.acknowledged.append((barrier.checkpoint_id, snapshot))

    def decline(self, barrier: CheckpointBarrier, reason: str) -> None:
        self.declined.append((barrier.checkpoint_id, reason))

    def fail_later(self, error: BaseException) -> None:
        self.failures.append(error)


class FailingWriter:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def write(self, blobs: Iterable[Blob]) -> Mapping[str, checkpoint_pb2.StateHandle]:
        raise self.error


class Subtask:
    """A source, an operator with a list and an operator with keyed state."""

    def __init__(
        self,
        *,
        item: bytes = b"item",
        content: bytes = b"state",
        new_writer: Callable[[int, str], SnapshotWriter] | None = None,
        is_incremental: bool = True,
    ) -> None:
        self.story: list[str] = []
        self.store = MemoryStore(1 << 20)
        self.backend = FakeBackend(self.story, content)
        self.state = OperatorStateStore()
        self.operator = Prepares(self.story, self.state, item)
        self.clock = ManualClock(1_000)
        self.counters = SubtaskCounters()
        self.listener = Listener()
        self.io: list[Callable[[], None]] = []
        split = checkpoint_pb2.SplitSnapshot(id="a", position=b"7")
        parts = [
            SnapshotPart("source", None, OperatorStateStore(), None, lambda _: [split]),
            SnapshotPart("sink", self.operator, self.state, None),
            SnapshotPart(
                "keyed",
                Operator(),
                OperatorStateStore(),
                cast("KeyedStateBackend", self.backend),
            ),
        ]
        self.snapshotter = SubtaskSnapshotter(
            "v1",
            3,
            parts,
            new_writer=new_writer or self._writer,
            submit=self.io.append,
            listener=self.listener,
            clock=self.clock,
            counters=self.counters,
            inline_max_bytes=INLINE_MAX,
            is_incremental=is_incremental,
        )

    def _writer(self, checkpoint_id: int, target: str) -> SnapshotWriter:
        self.story += [f"into {target}"] * bool(target)
        return PackedSnapshotWriter(self.store, f"{checkpoint_id}-v1-3-0-abc", INLINE_MAX)

    def take(self, checkpoint_id: int = 1, *, finished: bool = False) -> None:
        barrier = CheckpointBarrier(checkpoint_id, 400)
        self.snapshotter.take(barrier, Alignment(700, 55), finished=finished)

    def run(self) -> checkpoint_pb2.SubtaskSnapshot:
        """The I/O thread does all its work; the snapshot that is acknowledged at its end."""
        while self.io:
            self.io.pop(0)()
        assert not self.listener.declined
        assert not self.listener.failures
        return self.listener.acknowledged[-1][1]


def test_what_is_acknowledged() -> None:
    subtask = Subtask()
    subtask.take(7, finished=True)
    assert subtask.listener.acknowledged == []
    found = subtask.run()
    ((checkpoint_id, _),) = subtask.listener.acknowledged
    assert checkpoint_id == 7
    assert (found.vertex, found.subtask_index, found.finished) == ("v1", 3, True)
    source, sink, keyed = found.operators
    assert [operator.operator_uid for operator in found.operators] == ["source", "sink", "keyed"]
    assert [(split.id, split.position) for split in source.splits] == [("a", b"7")]
    assert [(held.name, list(held.items)) for held in sink.lists] == [("items", [b"item"])]
    assert [(f.name, f.handle.inline) for f in keyed.keyed.files] == [("run", b"state")]
    assert not source.HasField("keyed")
    assert not sink.HasField("keyed")
    metrics = found.metrics
    assert (metrics.start_delay_ms, metrics.alignment_ms, metrics.aligned_bytes) == (300, 300, 55)
    assert metrics.state_bytes == len(b"item") + len(b"state")
    assert subtask.counters.checkpoint_alignment_ms == 300
    assert subtask.counters.checkpoint_start_delay_ms == 300
    assert subtask.counters.checkpoint_aligned_bytes == 55
    assert subtask.counters.to_proto().checkpoint_aligned_bytes == 55
    assert subtask.counters.gauges().checkpoint_uploaded_bytes == len(b"state")
    assert subtask.counters.state_bytes == metrics.state_bytes


def test_positions_are_those_at_the_barrier() -> None:
    subtask = Subtask()
    read = checkpoint_pb2.ChannelPosition(edge_id="e0", index=1, rows=70, checksum=5)
    written = checkpoint_pb2.ChannelPosition(edge_id="e1", index=2, rows=30)
    positions = ChannelPositions([read], [written])
    subtask.snapshotter.take(CheckpointBarrier(1, 0), None, finished=False, positions=positions)
    found = subtask.run()
    assert (list(found.inputs), list(found.outputs)) == ([read], [written])


def test_what_is_done_at_once_and_what_later() -> None:
    subtask = Subtask()
    subtask.take()
    assert subtask.story == ["prepare 1", "backend.snapshot"]
    subtask.state.list("items").items.append(b"later")
    found = subtask.run()
    assert subtask.story[2:] == ["work", "blobs", "describe"]
    assert list(found.operators[1].lists[0].items) == [b"item"]


def test_a_source_has_nothing_to_align() -> None:
    subtask = Subtask()
    subtask.snapshotter.take(CheckpointBarrier(1, 400), None, finished=False)
    metrics = subtask.run().metrics
    assert (metrics.start_delay_ms, metrics.alignment_ms, metrics.aligned_bytes) == (600, 0, 0)
    subtask.clock.time_ms = 100  # the clock of the JobManager is ahead
    subtask.snapshotter.take(CheckpointBarrier(2, 400), None, finished=False)
    assert subtask.run().metrics.start_delay_ms == 0


def test_large_lists_go_to_the_file() -> None:
    item = bytes(LARGE_LIST)
    subtask = Subtask(item=item, content=b"x" * 500)
    subtask.take()
    found = subtask.run()
    (held,) = found.operators[1].lists
    assert (list(held.items), held.name) == ([], "items")
    assert held.handle.path == "shared/1-v1-3-0-abc"
    reader = StoreSnapshotReader(subtask.store)
    content = checkpoint_pb2.OperatorStateItems.FromString(reader.read(held.handle))
    assert list(content.items) == [item]
    (file,) = found.operators[2].keyed.files
    assert reader.read(file.handle) == b"x" * 500
    assert file.handle.path == held.handle.path
    assert found.metrics.uploaded_bytes == held.handle.size_bytes + 500
    assert found.metrics.state_bytes == held.handle.size_bytes + 500


def test_lists_that_the_jobmanager_may_read_stay_inline_whatever_the_threshold() -> None:
    subtask = Subtask(item=bytes(1024), content=b"x" * 500)
    subtask.take()
    (held,) = subtask.run().operators[1].lists
    assert (list(held.items), held.HasField("handle")) == ([bytes(1024)], False)


def test_large_lists_come_back(tmp_path: Path) -> None:
    item = bytes(LARGE_LIST)
    attempt = internal_pb2.AttemptId(vertex="v1", subtask_index=3, attempt=2)
    files = SnapshotFiles(LocalStore(tmp_path), attempt, INLINE_MAX)
    subtask = Subtask(item=item, new_writer=files.writer)
    subtask.take(9)
    found = subtask.run()
    (path,) = (p for p in tmp_path.rglob("*") if p.is_file() and p.name.startswith("9-"))
    name = parse_snapshot_file_name(path.name)
    assert name is not None
    assert (name.checkpoint_id, name.vertex, name.subtask_index, name.attempt) == (9, "v1", 3, 2)
    restored = internal_pb2.RestoredOperator(lists=found.operators[1].lists)
    (held,) = files.restored_lists(restored)
    assert list(held.items) == [item]
    assert not held.HasField("handle")
    path.write_bytes(b"!" * path.stat().st_size)
    with pytest.raises(StoreCorrupt):
        files.restored_lists(restored)


def test_without_a_directory_all_is_inline_up_to_a_bound() -> None:
    attempt = internal_pb2.AttemptId(vertex="v1")
    files = SnapshotFiles(None, attempt, INLINE_MAX, 1000)
    subtask = Subtask(item=bytes(400), content=b"x" * 300, new_writer=files.writer)
    subtask.take()
    found = subtask.run()
    assert found.operators[1].lists[0].handle.path == ""
    subtask.backend.content = b"x" * 2000
    subtask.take(2)
    subtask.io.pop()()
    ((checkpoint_id, reason),) = subtask.listener.declined
    assert checkpoint_id == 2
    assert "1000 bytes" in reason
    assert "execution.checkpointing.jobmanager.max-size" in reason


def test_a_backend_with_too_much_to_write_declines_at_once() -> None:
    subtask = Subtask()
    subtask.backend.error = CheckpointAborted(1, "2 snapshots are still being written")
    subtask.take()
    assert subtask.listener.declined == [(1, "2 snapshots are still being written")]
    assert subtask.io == []


@pytest.mark.parametrize("error", [StoreTransient("no answer"), OSError("no space")])
def test_what_the_store_cannot_take_declines(error: Exception) -> None:
    subtask = Subtask(new_writer=lambda *_: FailingWriter(error))
    subtask.take(4)
    subtask.io.pop()()
    assert subtask.listener.declined == [(4, str(error))]
    assert not subtask.listener.failures
    assert not subtask.listener.acknowledged
    assert subtask.story[-1] == "discard"


@pytest.mark.parametrize("where", ["work", "writer", "sync"])
def test_an_error_of_our_own_ends_the_attempt(where: str) -> None:
    error: Any = InvariantViolation("our bug")
    subtask = Subtask(new_writer=(lambda *_: FailingWriter(error)) if where == "writer" else None)
    if where == "sync":
        subtask.backend.error = error
        with pytest.raises(InvariantViolation):
            subtask.take()
        assert subtask.io == []
        return
    if where == "work":
        subtask.operator.error = error
    subtask.take()
    subtask.io.pop()()
    assert subtask.listener.failures == [error]
    assert not subtask.listener.declined
    assert not subtask.listener.acknowledged
    assert subtask.story[-1] == "discard"


def test_output_that_cannot_be_made_safe_ends_the_attempt() -> None:
    """The rows are gone from the operator: only an earlier checkpoint still has them."""
    subtask = Subtask()
    subtask.operator.error = TaskFailure("the disk is full")
    subtask.take()
    subtask.io.pop()()
    assert subtask.listener.failures == [subtask.operator.error]
    assert not subtask.listener.declined
    assert not subtask.listener.acknowledged
    assert "blobs" not in subtask.story


def test_snapshots_may_be_finished_in_another_order() -> None:
    subtask = Subtask()
    subtask.take(1)
    subtask.operator.item = b"second"
    subtask.take(2)
    for work in reversed(subtask.io):
        work()
    found = {id: list(s.operators[1].lists[0].items) for id, s in subtask.listener.acknowledged}
    assert found == {1: [b"item"], 2: [b"second"]}


@pytest.mark.parametrize(
    ("properties", "is_incremental", "said"),
    [
        (CheckpointProperties(behind=BehindBarrier.END), True, ""),
        (CheckpointProperties(is_full=True), False, ""),
        (CheckpointProperties(is_full=True), True, "execution.checkpointing.incremental"),
        (CheckpointProperties(CheckpointKind.SAVEPOINT, "/kept/s"), True, ""),
        (CheckpointProperties(CheckpointKind.SAVEPOINT, "/kept/s", is_full=True), True, ""),
        (CheckpointProperties(CheckpointKind.SAVEPOINT), True, "do not take"),
        (
            CheckpointProperties(
                CheckpointKind.SAVEPOINT, "/kept/s", format=SavepointFormat.CANONICAL
            ),
            True,
            "",
        ),
        (CheckpointProperties(target="/kept/s"), True, ""),
        (CheckpointProperties(target="/kept/s", behind=BehindBarrier.END), True, "do not take"),
        (CheckpointProperties(target="/kept/s", behind=BehindBarrier.MOVE), True, "do not take"),
        (
            CheckpointProperties(target="/kept/s", format=SavepointFormat.CANONICAL),
            True,
            "do not take",
        ),
        (CheckpointProperties(behind=BehindBarrier.HOLD), True, "do not take"),
        (CheckpointProperties(behind=BehindBarrier.DRAIN), True, "do not take"),
    ],
)
def test_what_cannot_be_taken_as_it_is_wanted_is_declined_and_not_taken_otherwise(
    properties: CheckpointProperties, is_incremental: bool, said: str
) -> None:
    subtask = Subtask(is_incremental=is_incremental)
    barrier = CheckpointBarrier(3, 400, leader_epoch=5, properties=properties)
    subtask.snapshotter.take(barrier, None, finished=False)
    if said:
        ((checkpoint_id, reason),) = subtask.listener.declined
        assert (checkpoint_id, said in reason) == (3, True)
        assert not subtask.io
    else:
        subtask.run()
        assert subtask.listener.barriers == [barrier]
        is_full = properties.is_full and "backend.snapshot full" in subtask.story
        assert is_full == properties.is_full
        is_canonical = properties.format is SavepointFormat.CANONICAL
        assert ("backend.snapshot in runs" in subtask.story) == is_canonical
        into = [told for told in subtask.story if told.startswith("into")]
        assert into == [f"into {properties.target}"] * properties.is_savepoint
