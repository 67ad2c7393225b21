"""Watermark merging against a model that looks at all channels after every event."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from common.elements import MAX_TIMESTAMP_MS, MIN_TIMESTAMP_MS, StreamStatus, Watermark
from taskmanager.alignment.watermark_merger import WatermarkMerger


class Model:
    """The definition, channel by channel."""

    def __init__(self, count: int) -> None:
        self.channels = [
            {"wm": MIN_TIMESTAMP_MS, "idle": False, "ended": False} for _ in range(count)
        ]
        self.merged = MIN_TIMESTAMP_MS
        self.was_active = True

    def active(self) -> bool:
        open_channels = [c for c in self.channels if not c["ended"]]
        return not open_channels or any(not c["idle"] for c in open_channels)

    def update(self) -> None:
        values = [
            MAX_TIMESTAMP_MS if c["ended"] else c["wm"]
            for c in self.channels
            if c["ended"] or not c["idle"]
        ]
        if self.active():
            self.merged = max(self.merged, min(values))
        elif self.was_active:
            self.merged = max(self.merged, *(c["wm"] for c in self.channels if not c["ended"]))
        self.was_active = self.active()


EVENTS = st.one_of(
    st.tuples(st.just("wm"), st.integers(0, 3), st.integers(-5, 50)),
    st.tuples(st.just("idle"), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("end"), st.integers(0, 3), st.none()),
    st.tuples(st.just("end of time"), st.integers(0, 3), st.none()),
)


@given(st.integers(1, 4), st.lists(EVENTS, max_size=60))
def test_merger_agrees_with_the_model(count: int, events: list[Any]) -> None:
    merger, model = WatermarkMerger(count), Model(count)
    seen_watermark, seen_active = MIN_TIMESTAMP_MS, True
    for kind, channel, value in events:
        channel %= count
        state = model.channels[channel]
        if kind == "wm":
            state["wm"] = max(state["wm"], value)
            changes = merger.on_watermark(channel, value)
        elif kind == "idle":
            state["idle"] = value
            changes = merger.on_status(channel, active=not value)
        else:
            state["ended"] = True
            if kind == "end":
                changes = merger.on_end(channel)
            else:
                changes = merger.on_watermark(channel, MAX_TIMESTAMP_MS)
        model.update()
        for change in changes:
            if isinstance(change, Watermark):
                assert change.timestamp_ms > seen_watermark
                assert seen_active
                seen_watermark = change.timestamp_ms
            else:
                assert isinstance(change, StreamStatus)
                assert change.active != seen_active
                seen_active = change.active
        assert seen_watermark == merger.watermark_ms == model.merged
        assert seen_active == merger.is_active == model.active()


def test_an_idle_channel_does_not_hold_the_watermark_back() -> None:
    merger = WatermarkMerger(2)
    assert merger.on_watermark(0, 10) == []
    assert merger.on_status(1, active=False) == [Watermark(10)]
    assert merger.on_status(0, active=False) == [StreamStatus(active=False)]
    assert merger.on_watermark(1, 5) == []
    assert merger.on_status(1, active=True) == [StreamStatus(active=True)]
    assert merger.on_watermark(1, 12) == [Watermark(12)]


def test_the_order_in_which_channels_fall_silent_does_not_matter() -> None:
    for first, second in ((0, 1), (1, 0)):
        merger = WatermarkMerger(2)
        merger.on_watermark(0, 10)
        merger.on_watermark(1, 5)
        changes = merger.on_status(first, active=False) + merger.on_status(second, active=False)
        assert merger.watermark_ms == 10
        assert changes[-1] == StreamStatus(active=False)


def test_the_end_of_one_channel_makes_no_row_of_an_idle_one_late() -> None:
    """A file has been read while a live source is silent: what that brings later is not late."""
    merger = WatermarkMerger(2)
    assert merger.on_watermark(0, 7) == []
    assert merger.on_status(1, active=False) == [Watermark(7)]
    assert merger.on_watermark(0, MAX_TIMESTAMP_MS) == [StreamStatus(active=False)]
    assert merger.on_end(0) == []
    assert merger.on_status(1, active=True) == [StreamStatus(active=True)]
    assert merger.on_watermark(1, 12) == [Watermark(12)]
    assert merger.on_watermark(1, MAX_TIMESTAMP_MS) == [Watermark(MAX_TIMESTAMP_MS)]


def test_the_end_of_all_channels_is_the_end_of_time() -> None:
    merger = WatermarkMerger(2)
    merger.on_watermark(0, 7)
    assert merger.on_end(1) == [Watermark(7)]
    assert merger.on_end(0) == [Watermark(MAX_TIMESTAMP_MS)]
