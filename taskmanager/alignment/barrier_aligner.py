"""When the barriers of a checkpoint have come on every channel, and what waits until then (pure).

Exactly once: a channel is blocked from its barrier on until all others have delivered theirs or have
ended, so that no row behind a barrier is processed before the snapshot. At least once: nothing is
blocked, and several checkpoints may be on their way at once.

Invariants (``check``):
- a checkpoint starts at most once, and only when each channel that carries barriers has delivered its
  own or has ended;
- checkpoints start in the order of their ids; what is overtaken is cancelled;
- channels are blocked only while a checkpoint is being aligned, and only those that have delivered;
- exactly once: nothing waits for a channel that has gone past what it waits for, by a barrier or by a cancellation.

Source: Carbone et al., State Management in Apache Flink, Algorithm 1; Flink's
SingleCheckpointBarrierHandler and CheckpointBarrierTracker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from common.elements import CheckpointBarrier
from penstock.errors import require_invariant

_ABORTED_MAX = 128


@dataclass(frozen=True, slots=True)
class BlockChannel:
    """Read no more of a channel for now."""

    channel: int


@dataclass(frozen=True, slots=True)
class UnblockChannels:
    """Go on reading every blocked channel."""


@dataclass(frozen=True, slots=True)
class StartCheckpoint:
    """Everything before the barrier has been processed: pass it on and take the snapshot.

    Attributes:
        first_at_ms: wall-clock time of the first barrier.
        first_bytes: input bytes processed when it came.
    """

    barrier: CheckpointBarrier
    first_at_ms: int
    first_bytes: int


@dataclass(frozen=True, slots=True)
class CancelCheckpoint:
    """The checkpoint will not be taken here: those behind need not wait for it."""

    checkpoint_id: int


AlignerEffect = BlockChannel | UnblockChannels | StartCheckpoint | CancelCheckpoint


@dataclass(slots=True)
class _Alignment:
    barrier: CheckpointBarrier
    first_at_ms: int
    first_bytes: int
    arrived: set[int] = field(default_factory=set)


class BarrierAligner:
    """Aligns the barriers of one input gate.

    Args:
        channels: those that carry barriers; the others (blocking ones) take no part, and where there are
            no such channels a checkpoint starts when it is triggered.
        is_exactly_once: block channels.
        first_id: barriers of checkpoints before this one are ignored.

    Example: two channels; the first one that has delivered its barrier waits for the other.
        >>> aligner = BarrierAligner([0, 1], is_exactly_once=True)
        >>> barrier = CheckpointBarrier(1, 0)
        >>> aligner.barrier_arrived(0, barrier, now_ms=5, bytes_in=0)
        [BlockChannel(channel=0)]
        >>> for effect in aligner.barrier_arrived(1, barrier, now_ms=9, bytes_in=64):
        ...     print(type(effect).__name__)
        StartCheckpoint
        UnblockChannels
    """

    def __init__(
        self, channels: Iterable[int], *, is_exactly_once: bool, first_id: int = 0
    ) -> None:
        self._channels = frozenset(channels)
        self._is_exactly_once = is_exactly_once
        self._ended: set[int] = set()
        self._pending: dict[int, _Alignment] = {}
        self._blocked: set[int] = set()
        self._aborted: set[int] = set()
        self._last_id = max(0, first_id - 1)
        self._passed = dict.fromkeys(self._channels, 0)
        """Per channel the latest checkpoint it has said anything of, exactly once only."""

    @property
    def is_aligning(self) -> bool:
        """True while some barriers of a checkpoint have come and others have not."""
        return bool(self._pending)

    def barrier_arrived(
        self, channel: int, barrier: CheckpointBarrier, now_ms: int, bytes_in: int
    ) -> list[AlignerEffect]:
        """A channel has delivered a barrier."""
        effects = self._pass(channel, barrier.checkpoint_id)
        effects += self._begin(barrier, now_ms, bytes_in)
        alignment = self._pending.get(barrier.checkpoint_id)
        if alignment is None:
            return effects
        alignment.arrived.add(channel)
        effects += self._complete(alignment) or self._block(channel)
        self.check_step()
        return effects

    def triggered(
        self, barrier: CheckpointBarrier, now_ms: int, bytes_in: int
    ) -> list[AlignerEffect]:
        """The coordinator starts a checkpoint here, since no producer is left to send its barrier.

        It is taken once the ends of all channels that carry barriers have been read.
        """
        effects = self._begin(barrier, now_ms, bytes_in)
        alignment = self._pending.get(barrier.checkpoint_id)
        return effects + (self._complete(alignment) if alignment is not None else [])

    def channel_ended(self, channel: int) -> list[AlignerEffect]:
        """Nothing follows on a channel."""
        if channel not in self._channels:
            return []
        self._ended.add(channel)
        self._blocked.discard(channel)
        effects: list[AlignerEffect] = []
        for checkpoint_id in sorted(self._pending):
            alignment = self._pending.get(checkpoint_id)
            if alignment is not None:
                effects += self._complete(alignment)
        return effects

    def cancelled(self, channel: int, checkpoint_id: int) -> list[AlignerEffect]:
        """A channel says that the barrier of a checkpoint will not come."""
        effects = self._pass(channel, checkpoint_id)
        if checkpoint_id <= self._last_id or checkpoint_id in self._aborted:
            return effects
        self._note_aborted(checkpoint_id)
        return [*effects, *self._drop(checkpoint_id), CancelCheckpoint(checkpoint_id)]

    def aborted(self, checkpoint_id: int) -> list[AlignerEffect]:
        """The coordinator has given a checkpoint up, and tells everybody."""
        if checkpoint_id <= self._last_id:
            return []
        self._note_aborted(checkpoint_id)
        return self._drop(checkpoint_id)

    def _begin(self, barrier: CheckpointBarrier, now_ms: int, bytes_in: int) -> list[AlignerEffect]:
        checkpoint_id = barrier.checkpoint_id
        if (
            checkpoint_id <= self._last_id
            or checkpoint_id in self._aborted
            or checkpoint_id in self._pending
            or any(passed > checkpoint_id for passed in self._passed.values())
        ):
            return []
        effects: list[AlignerEffect] = []
        if self._is_exactly_once and self._pending:
            effects += self._cancel(next(iter(self._pending)))
        self._pending[checkpoint_id] = _Alignment(barrier, now_ms, bytes_in)
        return effects

    def _pass(self, channel: int, checkpoint_id: int) -> list[AlignerEffect]:
        """A channel goes past the earlier checkpoints: one that it has skipped can not complete any more.

        At least once, a producer may give a later checkpoint up and still deliver the barrier of an earlier one.
        """
        if not self._is_exactly_once or channel not in self._channels:
            return []
        self._passed[channel] = max(self._passed[channel], checkpoint_id)
        skipped = [id for id in self._pending if id < checkpoint_id]
        return [effect for id in skipped for effect in self._cancel(id)]

    def _complete(self, alignment: _Alignment) -> list[AlignerEffect]:
        if len(alignment.arrived | self._ended) < len(self._channels):
            return []
        started = alignment.barrier.checkpoint_id
        effects: list[AlignerEffect] = []
        for overtaken in sorted(id for id in self._pending if id < started):
            effects += self._cancel(overtaken)
        self._last_id = started
        self._aborted = {id for id in self._aborted if id > started}
        effects.append(
            StartCheckpoint(alignment.barrier, alignment.first_at_ms, alignment.first_bytes)
        )
        return effects + self._drop(started)

    def _cancel(self, checkpoint_id: int) -> list[AlignerEffect]:
        self._last_id = max(self._last_id, checkpoint_id)
        return [*self._drop(checkpoint_id), CancelCheckpoint(checkpoint_id)]

    def _drop(self, checkpoint_id: int) -> list[AlignerEffect]:
        if self._pending.pop(checkpoint_id, None) is None or not self._blocked:
            return []
        self._blocked.clear()
        return [UnblockChannels()]

    def _block(self, channel: int) -> list[AlignerEffect]:
        if not self._is_exactly_once:
            return []
        self._blocked.add(channel)
        return [BlockChannel(channel)]

    def _note_aborted(self, checkpoint_id: int) -> None:
        self._aborted.add(checkpoint_id)
        if len(self._aborted) > _ABORTED_MAX:
            self._aborted.discard(min(self._aborted))

    def check_step(self) -> None:
        """The part of ``check`` that costs the same whatever is aligned: run at each barrier.

        Raises:
            InvariantViolation: one does not hold.
        """
        if self._is_exactly_once:
            require_invariant(len(self._pending) <= 1, "one checkpoint is aligned at a time")
            require_invariant(
                bool(self._pending) or not self._blocked, "only an alignment blocks channels"
            )
        else:
            require_invariant(not self._blocked, "at least once blocks no channel")

    def check(self) -> None:
        """Asserts the invariants named at the head of the file, as far as the state shows them."""
        for checkpoint_id, alignment in self._pending.items():
            assert checkpoint_id > self._last_id, "what is pending is younger than what has started"
            assert (alignment.arrived | self._ended) < self._channels
        self.check_step()
        if self._is_exactly_once:
            arrived = {c for a in self._pending.values() for c in a.arrived}
            assert self._blocked <= arrived, "only channels that have delivered are blocked"
            assert all(
                self._passed[channel] <= id
                for id, alignment in self._pending.items()
                for channel in self._channels - alignment.arrived
            ), "what a channel has skipped is not waited for"
