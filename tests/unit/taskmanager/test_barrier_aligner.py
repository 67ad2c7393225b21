"""Any interleaving of channels against a model: what was read when a checkpoint starts.

Channels are scripts of rows, barriers, cancellations and an end. A reader takes turns over the channels
that are not blocked, drawn by hypothesis. Exactly once: at a start, exactly the rows before the barrier
(or the end) have been read of each channel. At least once: at least those. Channels of blocking edges carry
rows and an end, and no barriers: they take no part.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from common.elements import CheckpointBarrier
from taskmanager.alignment.barrier_aligner import (
    AlignerEffect,
    BarrierAligner,
    BlockChannel,
    CancelCheckpoint,
    StartCheckpoint,
    UnblockChannels,
)

ROW, BARRIER, CANCEL = "row", "barrier", "cancel"


@dataclass
class Reader:
    """Reads scripts as a gate does."""

    scripts: list[list[tuple[str, int]]]
    is_exactly_once: bool
    silent: frozenset[int] = frozenset()
    read: list[int] = field(default_factory=list)
    blocked: set[int] = field(default_factory=set)
    started: dict[int, list[int]] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        speaking = set(range(len(self.scripts))) - self.silent
        self.aligner = BarrierAligner(speaking, is_exactly_once=self.is_exactly_once)
        self.read = [0] * len(self.scripts)
        self.positions = [0] * len(self.scripts)

    def open_channels(self) -> list[int]:
        return [
            channel
            for channel, script in enumerate(self.scripts)
            if channel not in self.blocked and self.positions[channel] <= len(script)
        ]

    def step(self, channel: int) -> None:
        script, position = self.scripts[channel], self.positions[channel]
        self.positions[channel] += 1
        if position == len(script):
            self.apply(self.aligner.channel_ended(channel))
            return
        kind, checkpoint_id = script[position]
        if kind == ROW:
            self.read[channel] += 1
        elif kind == BARRIER:
            barrier = CheckpointBarrier(checkpoint_id, 0)
            self.apply(self.aligner.barrier_arrived(channel, barrier, 0, 0))
        else:
            self.apply(self.aligner.cancelled(channel, checkpoint_id))

    def apply(self, effects: list[AlignerEffect]) -> None:
        for effect in effects:
            match effect:
                case BlockChannel(channel):
                    self.blocked.add(channel)
                case UnblockChannels():
                    self.blocked.clear()
                case StartCheckpoint(barrier):
                    assert barrier.checkpoint_id not in self.started
                    self.started[barrier.checkpoint_id] = list(self.read)
                case CancelCheckpoint(checkpoint_id):
                    self.cancelled.append(checkpoint_id)
        self.aligner.check()


def rows_before(script: list[tuple[str, int]], checkpoint_id: int) -> int:
    """Rows in front of the barrier, or all where it ends before."""
    count = 0
    for kind, own in script:
        if kind == BARRIER and own >= checkpoint_id:
            return count
        count += kind == ROW
    return count


@st.composite
def scripts(draw: st.DrawFn, *, may_cancel: bool) -> list[list[tuple[str, int]]]:
    checkpoints = draw(st.integers(0, 4))
    channels = draw(st.integers(1, 4))
    found = []
    for _ in range(channels):
        script: list[tuple[str, int]] = []
        last = draw(st.integers(0, checkpoints))  # the channel ends behind that barrier
        for checkpoint_id in range(1, last + 1):
            script += [(ROW, 0)] * draw(st.integers(0, 3))
            cancels = may_cancel and draw(st.integers(0, 5)) == 0
            script.append((CANCEL if cancels else BARRIER, checkpoint_id))
        script += [(ROW, 0)] * draw(st.integers(0, 3))
        found.append(script)
    return found


def run(reader: Reader, data: st.DataObject) -> None:
    while channels := reader.open_channels():
        reader.step(data.draw(st.sampled_from(channels)))
    assert not reader.blocked, "a channel is blocked for ever"
    assert not reader.aligner.is_aligning


@given(scripts(may_cancel=False), st.data())
def test_exactly_once_starts_every_checkpoint_with_exactly_the_rows_before_it(
    found: list[list[tuple[str, int]]], data: st.DataObject
) -> None:
    reader = Reader(found, is_exactly_once=True)
    run(reader, data)
    expected = {own for script in found for kind, own in script if kind == BARRIER}
    assert set(reader.started) == expected
    for checkpoint_id, read in reader.started.items():
        assert read == [rows_before(script, checkpoint_id) for script in found]
    assert reader.cancelled == []


@given(scripts(may_cancel=True), st.data())
def test_cancelled_checkpoints_never_start_and_block_nothing(
    found: list[list[tuple[str, int]]], data: st.DataObject
) -> None:
    reader = Reader(found, is_exactly_once=True)
    run(reader, data)
    cancelled = {own for script in found for kind, own in script if kind == CANCEL}
    for checkpoint_id, read in reader.started.items():
        assert checkpoint_id not in cancelled
        assert read == [rows_before(script, checkpoint_id) for script in found]
    assert len(set(reader.cancelled)) == len(reader.cancelled), "each is passed on once"
    assert list(reader.started) == sorted(reader.started)


@given(scripts(may_cancel=True), st.data())
def test_at_least_once_never_blocks_and_misses_no_row(
    found: list[list[tuple[str, int]]], data: st.DataObject
) -> None:
    reader = Reader(found, is_exactly_once=False)
    run(reader, data)
    for checkpoint_id, read in reader.started.items():
        for channel, script in enumerate(found):
            assert read[channel] >= rows_before(script, checkpoint_id)
    assert list(reader.started) == sorted(reader.started)


@given(scripts(may_cancel=False), st.data())
def test_channels_without_barriers_take_no_part(
    found: list[list[tuple[str, int]]], data: st.DataObject
) -> None:
    silent = [
        [(ROW, 0)] * data.draw(st.integers(0, 4)) for _ in range(data.draw(st.integers(1, 3)))
    ]
    first = len(found)
    reader = Reader(
        [*found, *silent], is_exactly_once=True, silent=frozenset(range(first, first + len(silent)))
    )
    while channels := reader.open_channels():
        reader.step(data.draw(st.sampled_from(channels)))
        assert not reader.blocked & reader.silent
    assert not reader.blocked
    expected = {own for script in found for kind, own in script if kind == BARRIER}
    assert set(reader.started) == expected
    for checkpoint_id, read in reader.started.items():
        assert read[:first] == [rows_before(script, checkpoint_id) for script in found]


def test_a_trigger_starts_at_once_where_no_channel_carries_barriers() -> None:
    aligner = BarrierAligner((), is_exactly_once=True)
    barrier = CheckpointBarrier(1, 0)
    assert aligner.triggered(barrier, 5, 7) == [StartCheckpoint(barrier, 5, 7)]
    assert aligner.channel_ended(0) == []
    assert aligner.triggered(barrier, 5, 7) == [], "once"
    assert not aligner.is_aligning


def test_a_newer_barrier_cancels_the_checkpoint_that_its_channel_has_skipped() -> None:
    aligner = BarrierAligner(range(2), is_exactly_once=True)
    aligner.barrier_arrived(0, CheckpointBarrier(1, 0), 0, 0)
    effects = aligner.barrier_arrived(1, CheckpointBarrier(2, 0), 0, 0)
    assert effects == [UnblockChannels(), CancelCheckpoint(1), BlockChannel(1)]


def test_an_abort_unblocks_and_late_barriers_of_it_are_ignored() -> None:
    aligner = BarrierAligner(range(2), is_exactly_once=True)
    aligner.barrier_arrived(0, CheckpointBarrier(1, 0), 0, 0)
    assert aligner.aborted(1) == [UnblockChannels()]
    assert aligner.barrier_arrived(1, CheckpointBarrier(1, 0), 0, 0) == []
    assert aligner.barrier_arrived(1, CheckpointBarrier(2, 0), 0, 0) == [BlockChannel(1)]


def test_a_trigger_without_producers_waits_for_the_ends_of_the_channels() -> None:
    aligner = BarrierAligner(range(2), is_exactly_once=True)
    barrier = CheckpointBarrier(1, 0)
    assert aligner.channel_ended(0) == []
    assert aligner.triggered(barrier, 5, 7) == []
    assert aligner.channel_ended(1) == [StartCheckpoint(barrier, 5, 7)]
    assert aligner.triggered(CheckpointBarrier(2, 0), 9, 9) == [
        StartCheckpoint(CheckpointBarrier(2, 0), 9, 9)
    ]


def test_the_cancellation_of_a_later_checkpoint_ends_the_alignment_of_an_earlier_one() -> None:
    aligner = BarrierAligner(range(2), is_exactly_once=True)
    assert aligner.barrier_arrived(0, CheckpointBarrier(1, 0), 0, 0) == [BlockChannel(0)]
    assert aligner.cancelled(1, 3) == [UnblockChannels(), CancelCheckpoint(1), CancelCheckpoint(3)]
    assert aligner.cancelled(0, 2) == [CancelCheckpoint(2)]
    assert aligner.cancelled(0, 3) == []
    assert not aligner.is_aligning
    assert aligner.barrier_arrived(0, CheckpointBarrier(4, 0), 0, 0) == [BlockChannel(0)]


def test_no_alignment_begins_for_what_a_channel_has_skipped() -> None:
    aligner = BarrierAligner(range(2), is_exactly_once=True)
    assert aligner.cancelled(1, 3) == [CancelCheckpoint(3)]
    assert aligner.barrier_arrived(0, CheckpointBarrier(2, 0), 0, 0) == []
    assert not aligner.is_aligning


def test_at_least_once_an_earlier_checkpoint_may_still_complete() -> None:
    aligner = BarrierAligner(range(2), is_exactly_once=False)
    barrier = CheckpointBarrier(1, 0)
    aligner.barrier_arrived(1, barrier, 0, 0)
    assert aligner.cancelled(1, 3) == [CancelCheckpoint(3)]
    assert aligner.barrier_arrived(0, barrier, 0, 0) == [StartCheckpoint(barrier, 0, 0)]


@st.composite
def with_skips(draw: st.DrawFn) -> list[list[tuple[str, int]]]:
    """Channels that leave checkpoints out, and say something of the last one at the latest."""
    last = draw(st.integers(1, 5))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        script = [(ROW, 0)] * draw(st.integers(0, 2))
        for checkpoint_id in range(1, last + 1):
            kinds = [BARRIER, CANCEL] if checkpoint_id == last else [BARRIER, CANCEL, ROW]
            script += [(draw(st.sampled_from(kinds)), checkpoint_id), (ROW, 0)]
        found.append(script)
    return found


@given(with_skips(), st.data())
def test_nothing_waits_for_a_channel_that_has_gone_past(
    found: list[list[tuple[str, int]]], data: st.DataObject
) -> None:
    reader = Reader(found, is_exactly_once=True)

    def readable() -> list[int]:
        return [c for c in reader.open_channels() if reader.positions[c] < len(found[c])]

    while channels := readable():
        reader.step(data.draw(st.sampled_from(channels)))
    assert all(
        position == len(script) for position, script in zip(reader.positions, found, strict=True)
    )
    assert not reader.aligner.is_aligning
    for checkpoint_id, read in reader.started.items():
        assert all((BARRIER, checkpoint_id) in script for script in found)
        assert read == [rows_before(script, checkpoint_id) for script in found]
    assert len(set(reader.cancelled)) == len(reader.cancelled), "each is passed on once"
