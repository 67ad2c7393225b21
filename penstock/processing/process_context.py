"""What a process function is told about the row or timer it is called for, and its timers.

There is one context per running function; the runtime moves it from row to row (``StateScope``). What a
function asks for rarely, the key and the event time, is decoded once per batch, when it is first asked for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

import pyarrow as pa

from penstock.errors import Unrecoverable
from penstock.rows.decoded_values import decoded_keys
from penstock.state.base import KeyedState, StateScope
from penstock.storage.codec import StateError

MAX_WATERMARK = 2**63 - 1
"""``ctx.watermark`` at the end of the data: every event-time timer fires."""

MIN_WATERMARK = -(2**63)
"""``ctx.watermark`` before there is one."""

_TIME_LIMIT_MS = 2**62


class TimerChanges:
    """What a function asked of its timers of one domain, since the runtime took it last.

    Attributes:
        added: (slot, time in ms) -> index of a row with that key.
        deleted: the same for those that are to be removed.
        earliest_ms: nothing was added for a time before it.
    """

    __slots__ = ("added", "deleted", "earliest_ms")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.added: dict[tuple[int, int], int] = {}
        self.deleted: dict[tuple[int, int], int] = {}
        self.earliest_ms = MAX_WATERMARK

    def add(self, slot: int, time_ms: int, index: int) -> None:
        """A timer that is to be."""
        timer = (slot, time_ms)
        self.added[timer] = index
        if self.deleted:
            self.deleted.pop(timer, None)
        if time_ms < self.earliest_ms:
            self.earliest_ms = time_ms

    def delete(self, slot: int, time_ms: int, index: int) -> None:
        """A timer that is to be no more."""
        timer = (slot, time_ms)
        self.added.pop(timer, None)
        self.deleted[timer] = index


class Timers:
    """Timers of the current key; ``on_timer`` is called for each. A key has one timer per time and domain.

    Times are milliseconds since the epoch. An event-time timer fires when the watermark has reached its
    time; one for a time that the watermark has passed already fires with the next watermark. At the end of
    bounded data all event-time timers fire, and processing-time timers do not.

    A timer for a time more than 2**62 ms from the epoch is one for that limit: so ``MAX_WATERMARK`` is the end of the
    data, and ``ctx.watermark + 1`` the next watermark, also before the first.

    Attributes:
        without_event_time: name of the operator, where no input has event time; the runtime's.
        without_on_timer: the function, where it has no ``on_timer``; the runtime's.
    """

    __slots__ = (
        "_context",
        "event_changes",
        "processing_changes",
        "without_event_time",
        "without_on_timer",
    )

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self.without_event_time = ""
        self.without_on_timer = ""
        self.event_changes = TimerChanges()
        self.processing_changes = TimerChanges()

    def event_time(self, timestamp: int) -> None:
        """Asks for a call of ``on_timer`` when event time has reached ``timestamp`` (ms)."""
        context = self._context
        slot = context.slot
        if slot is None or type(timestamp) is not int or not context.has_timers:
            timestamp = self._checked(timestamp, "event_time")
        if self.without_event_time and timestamp != MAX_WATERMARK:
            raise Unrecoverable(
                f"operator {self.without_event_time!r}: ctx.timers.event_time({timestamp}) would wait for the end "
                "of the data, since no input has event time: call .with_event_time(...) in front of key_by, use "
                "ctx.timers.processing_time(), or say event_time(ps.MAX_WATERMARK) where the end is meant"
            )
        if self.without_on_timer:
            self._refuse("event_time", timestamp)
        self.event_changes.add(slot, _in_range(timestamp), context.index)

    def processing_time(self, timestamp: int) -> None:
        """Asks for a call of ``on_timer`` when the wall clock has reached ``timestamp`` (ms)."""
        timestamp = self._checked(timestamp, "processing_time")
        if self.without_on_timer:
            self._refuse("processing_time", timestamp)
        context = self._context
        self.processing_changes.add(context.slot, _in_range(timestamp), context.index)

    def delete_event_time(self, timestamp: int) -> None:
        """Takes back an event-time timer of the current key; none is no error."""
        timestamp = self._checked(timestamp, "delete_event_time")
        self.event_changes.delete(self._context.slot, _in_range(timestamp), self._context.index)

    def delete_processing_time(self, timestamp: int) -> None:
        """Takes back a processing-time timer of the current key; none is no error."""
        timestamp = self._checked(timestamp, "delete_processing_time")
        self.processing_changes.delete(
            self._context.slot, _in_range(timestamp), self._context.index
        )

    def _refuse(self, method: str, timestamp: int) -> NoReturn:
        raise Unrecoverable(
            f"ctx.timers.{method}({timestamp}) asks for a call of on_timer(), and {self.without_on_timer} has none: "
            "define on_timer(self, timestamp, ctx, out), or leave the timer out"
        )

    def _checked(self, timestamp: Any, method: str) -> int:
        context = self._context
        if context.slot is None or not context.has_timers:
            raise StateError(
                f"ctx.timers.{method}() needs a key, and there is none {context.absence or 'here'}: timers "
                "are there in process() and on_timer() of functions on a keyed stream"
            )
        if type(timestamp) is int:
            return timestamp
        try:
            return operator.index(timestamp)
        except TypeError:
            raise StateError(
                f"ctx.timers.{method}() takes milliseconds since the epoch as an integer, "
                f"got {timestamp!r} ({type(timestamp).__name__})"
            ) from None


def _in_range(time_ms: int) -> int:
    if -_TIME_LIMIT_MS <= time_ms <= _TIME_LIMIT_MS:
        return time_ms
    if MIN_WATERMARK <= time_ms <= MAX_WATERMARK:
        return _TIME_LIMIT_MS if time_ms > 0 else -_TIME_LIMIT_MS
    raise StateError(
        f"a timer at {time_ms} ms since the epoch is out of range: at the end of the data, where ctx.watermark is "
        "ps.MAX_WATERMARK, no later time comes"
    )


class ProcessContext(StateScope):
    """Given to every method of a process function that handles a row or a timer.

    Attributes:
        watermark: no row with an event time at or below it is expected any more, in ms;
            ``ps.MIN_WATERMARK`` before there is one, ``ps.MAX_WATERMARK`` at the end of the data.
        timers: of the current key.
        now_ms: the wall clock when the current slice of work began, in ms since the epoch.
        time_domain: of the timer in ``on_timer``: "event" or "processing"; None for rows.
        index: of the current row or timer in its bundle; the runtime's.
        has_timers: timers can be registered here; the runtime's.
        apply: visits keys, in ``process_broadcast`` only; the runtime's.
    """

    __slots__ = (
        "_key_arrays",
        "_key_names",
        "_keys",
        "_now",
        "_time_array",
        "_times",
        "apply",
        "has_timers",
        "index",
        "time_domain",
        "timers",
        "watermark",
    )

    def __init__(self, now: Callable[[], int]) -> None:
        super().__init__()
        self._now = now
        self.watermark = MIN_WATERMARK
        self.timers = Timers(self)
        self.time_domain: Literal["event", "processing"] | None = None
        self.has_timers = False
        self.apply: Callable[[KeyedState, Callable[[Any, Any], object]], None] | None = None
        self._key_arrays: Sequence[pa.Array] | None = None
        self._key_names: Sequence[str] = ()
        self._keys: Sequence[Any] | None = None
        self._time_array: pa.Array | None = None
        self._times: list[int] | None = None
        self.end()

    @property
    def timestamp(self) -> Any:
        """Event time of the row in ms, None where the stream carries none; in ``on_timer`` the timer's."""
        # Any: who uses event time has given the stream one, and computes with an int.
        times = self._times
        if times is None:
            if self._time_array is None:
                return None
            times = self._times = list(self._time_array.to_pylist())
        return times[self.index]

    @property
    def key(self) -> Any:
        """The current key: the value of the key column, a tuple where there are several.

        Raises:
            StateError: there is no key here.
            BadRecord: Python does not have its value, as of a timestamp with nanoseconds.
        """
        keys = self._keys
        if keys is None:
            if self._key_arrays is None:
                raise StateError(
                    f"ctx.key: there is no key {self.absence or 'here'}; keys are there in process() and "
                    "on_timer() of functions on a keyed stream"
                )
            keys = self._keys = decoded_keys(self._key_arrays, self._key_names)
        return keys[self.index]

    def apply_to_keyed_state(
        self, state: KeyedState, function: Callable[[Any, Any], object]
    ) -> None:
        """Calls ``function(key, state)`` for every key that has content in ``state``; it may change it.

        In ``process_broadcast`` of a ``KeyedBroadcastProcessFunction`` only. All keys of the subtask are
        visited at once: nothing else of the subtask runs meanwhile.
        """
        if self.apply is None:
            raise StateError(
                "ctx.apply_to_keyed_state() is there in process_broadcast() of a "
                "KeyedBroadcastProcessFunction only"
            )
        self.apply(state, function)

    def begin(
        self,
        key_arrays: Sequence[pa.Array] | None,
        times: pa.Array | None,
        key_names: Sequence[str] = (),
    ) -> None:
        """A bundle begins.

        Args:
            key_arrays: per key column the keys of its rows or timers, None = unkeyed.
            times: their times, None = the stream carries none.
            key_names: of the key columns.
        """
        self._key_arrays = key_arrays
        self._key_names = key_names
        self._keys = None
        self._time_array = times
        self._times = None
        self.has_timers = key_arrays is not None
        self.tick()

    def tick(self) -> None:
        """Looks at the clock."""
        self.now_ms = self._now()

    def end(self) -> None:
        """A bundle has ended: there is no key and no row."""
        self.slot = None
        self.index = 0
        self._key_arrays = None
        self._keys = None
        self._time_array = None
        self._times = None
        self.has_timers = False
