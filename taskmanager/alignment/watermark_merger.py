"""Merges the watermarks and the idleness of input channels into those of the subtask (pure).

The merged watermark is the minimum over the channels that are neither idle nor ended (an ended
channel counts as having reached the end of time), and never goes back: a channel that becomes active
again with an older watermark holds the merged one where it is until it has caught up.

When every channel that has not ended is idle, none of them holds another back: the watermark advances
to the largest that one of them has said, behind which comes the status idle. So it does not matter in
which order they fell silent, and what a burst of rows has completed is not kept until the next one.
A channel that has come to the end of time has ended: the end is merged when all have come to it, since a row of an
idle channel would be late behind it.

Source: Flink's StatusWatermarkValve. It lets the end of time pass where the channels that have not ended are
idle, and leaves a channel that is active again out until it has caught up: both can make rows late that are
not late here.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.elements import MAX_TIMESTAMP_MS, MIN_TIMESTAMP_MS, StreamStatus, Watermark

Merged = Watermark | StreamStatus


class WatermarkMerger:
    """State of all channels of one input gate.

    Each method returns what changes for the subtask, in the order in which it must be delivered:
    a status "active" before the watermark, a status "idle" behind it.

    Example: the smallest of three channels counts, but not one that is idle.
        >>> merger = WatermarkMerger(3)
        >>> [merger.on_watermark(channel, ms) for channel, ms in enumerate([5, 3])]
        [[], []]
        >>> merger.on_status(2, active=False)
        [Watermark(timestamp_ms=3)]
        >>> merger.on_end(1)
        [Watermark(timestamp_ms=5)]
    """

    def __init__(self, channel_count: int) -> None:
        self._watermarks = [MIN_TIMESTAMP_MS] * channel_count
        self._is_idle = [False] * channel_count
        self._has_ended = [False] * channel_count
        self._merged_ms = MIN_TIMESTAMP_MS
        self._merged_active = True

    @property
    def watermark_ms(self) -> int:
        """The merged watermark."""
        return self._merged_ms

    @property
    def is_active(self) -> bool:
        """False while every channel that has not ended is idle."""
        return self._merged_active

    def on_watermark(self, channel: int, timestamp_ms: int) -> list[Merged]:
        """A channel's watermark; one that goes back is ignored."""
        if timestamp_ms >= MAX_TIMESTAMP_MS:
            return self.on_end(channel)
        known = self._watermarks[channel]
        if timestamp_ms <= known:
            return []
        self._watermarks[channel] = timestamp_ms
        # Only the channel at the minimum can move it: the rest need no look at all channels.
        if self._is_idle[channel] or self._has_ended[channel] or known > self._merged_ms:
            return []
        return self._changes()

    def on_status(self, channel: int, *, active: bool) -> list[Merged]:
        """A channel becomes idle or active."""
        if self._has_ended[channel] or self._is_idle[channel] == (not active):
            return []
        self._is_idle[channel] = not active
        return self._changes()

    def on_end(self, channel: int) -> list[Merged]:
        """A channel has ended its data."""
        if self._has_ended[channel]:
            return []
        self._has_ended[channel] = True
        return self._changes()

    def reach(self, channels: Iterable[int]) -> list[Merged]:
        """No row of these is to come, and others go on from there: the largest watermark of theirs counts.

        Example: a history of two channels has come to an end.
            >>> merger = WatermarkMerger(2)
            >>> [merger.on_watermark(channel, ms) for channel, ms in enumerate([5, 3])]
            [[], [Watermark(timestamp_ms=3)]]
            >>> merger.reach([0, 1])
            [Watermark(timestamp_ms=5)]
        """
        reached_ms = max(self._watermarks[channel] for channel in channels)
        if reached_ms <= self._merged_ms:
            return []
        self._merged_ms = reached_ms
        return [Watermark(reached_ms)]

    def _changes(self) -> list[Merged]:
        active_ms = [
            watermark
            for watermark, is_idle, has_ended in zip(
                self._watermarks, self._is_idle, self._has_ended, strict=True
            )
            if not is_idle and not has_ended
        ]
        if active_ms:
            merged_ms, is_active = min(active_ms), True
        elif all(self._has_ended):
            merged_ms, is_active = MAX_TIMESTAMP_MS, True
        else:
            is_active = False
            merged_ms = self._largest_of_idle() if self._merged_active else self._merged_ms
        changes: list[Merged] = []
        if is_active != self._merged_active and is_active:
            changes.append(StreamStatus(active=True))
        if merged_ms > self._merged_ms:
            self._merged_ms = merged_ms
            changes.append(Watermark(merged_ms))
        if is_active != self._merged_active and not is_active:
            changes.append(StreamStatus(active=False))
        self._merged_active = is_active
        return changes

    def _largest_of_idle(self) -> int:
        """What the channels come to when all that have not ended have just become idle."""
        pairs = zip(self._watermarks, self._has_ended, strict=True)
        return max(watermark for watermark, has_ended in pairs if not has_ended)
