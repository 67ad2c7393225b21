"""What lies in windows, as their timing sees it: something that takes rows and is emitted.

``sliced_window`` and the session and count operators decide *when*; implementations of these two
classes (aggregates, or the rows for a function) decide *what*.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar, cast

import numpy as np
import pyarrow as pa

from common.elements import TIME_LIMIT_MS, OperatorOutput
from penstock.graph.window_schemas import WINDOW_TIME_TYPE
from penstock.storage.key_types import Int64Array
from taskmanager.operators.operator import OperatorContext
from taskmanager.state.backend import KeyedStateBackend
from taskmanager.state.instances import InstanceState

Rows = slice | Int64Array
P = TypeVar("P")


def result_time(end: int) -> int:
    """Event time of what a window that ends there gives out: its last, within the limits of event times."""
    return max(-TIME_LIMIT_MS, min(end - 1, TIME_LIMIT_MS))


def result_times(ends: Int64Array) -> Int64Array:
    """The same of several windows: int64[n]."""
    return np.clip(ends - 1, -TIME_LIMIT_MS, TIME_LIMIT_MS)


class SliceContents(ABC, Generic[P]):
    """Contents of tumbling and sliding windows, kept by slice.

    ``P`` is what a batch becomes before it is taken apart by slice.

    Attributes:
        has_one_input: batches are all alike, so that several may be prepared as one, and later.
    """

    has_one_input: ClassVar[bool] = True

    only_unfired: Callable[[pa.RecordBatch, int], pa.RecordBatch] | None = None
    """Takes rows with the key columns, and the end of a window; leaves out keys for which it had fired before a
    restore. None = there are none."""

    def unfired(self, rows: pa.RecordBatch, end: int) -> pa.RecordBatch:
        """The rows of keys for which the window that ends there has not fired yet."""
        return rows if self.only_unfired is None else self.only_unfired(rows, end)

    @abstractmethod
    def restore(self, state: KeyedStateBackend) -> None:
        """Brings all slices into memory, before ``open``; any thread."""

    def open(self, context: OperatorContext) -> None:
        """Called once before anything else."""
        self.context = context

    def close(self) -> None:
        """Called once at the end, whatever the end."""

    @abstractmethod
    def slices(self) -> list[int]:
        """Starts of the slices that have rows, restored ones included."""

    @abstractmethod
    def prepare_snapshot(self) -> None:
        """Puts what is kept outside of the backend into the operator's lists."""

    @abstractmethod
    def prepare(self, batch: pa.RecordBatch) -> P:
        """Reads keys and inputs of a batch (rows or partial rows)."""

    @abstractmethod
    def add(self, start: int, prepared: P, rows: Rows | None) -> None:
        """Adds rows (None = all) to the slice that starts at ``start``."""

    @abstractmethod
    def emit(self, start: int, end: int, slices: Sequence[int]) -> Iterator[OperatorOutput]:
        """Emits the window ``start .. end - 1``, batch by batch.

        Args:
            slices: starts of its slices that have rows; they stay as they are meanwhile.
        """

    @abstractmethod
    def emit_updated(
        self, start: int, end: int, slices: Sequence[int], updated: Sequence[tuple[P, Rows | None]]
    ) -> Iterator[OperatorOutput]:
        """Emits a window that has fired before again, for the keys of the updated rows."""

    @abstractmethod
    def drop(self, start: int) -> None:
        """Forgets a slice."""


@dataclass(frozen=True, slots=True)
class FiredInstances:
    """Sessions or count windows that fire.

    Attributes:
        keys: per key column the key of each.
        starts: int64[n] first millisecond; window index for count windows.
        ends: int64[n] first millisecond after; None for count windows.
        event_times: int64[n] event times of the results, None where the stream carries none.
    """

    instances: Int64Array
    keys: list[pa.Array]
    starts: Int64Array
    ends: Int64Array | None
    event_times: Int64Array | None

    def __len__(self) -> int:
        return len(self.instances)

    def slice(self, start: int, stop: int) -> FiredInstances:
        """Windows ``start .. stop - 1``."""
        rows = slice(start, stop)
        return FiredInstances(
            self.instances[rows],
            [array.slice(start, stop - start) for array in self.keys],
            self.starts[rows],
            None if self.ends is None else self.ends[rows],
            None if self.event_times is None else self.event_times[rows],
        )

    def window_columns(self) -> list[pa.Array]:
        """``window_start`` and ``window_end``, or ``window_index``."""
        if self.ends is None:
            return [pa.array(self.starts)]
        return [times(self.starts), times(self.ends)]


S = TypeVar("S", bound=InstanceState)


class InstanceContents(ABC, Generic[S]):
    """Contents of windows that belong to one key each: sessions and count windows, by number.

    ``S`` is the state of the windows, which is part of the table that numbers them.
    """

    def open(self, context: OperatorContext, state: Callable[[], InstanceState]) -> None:
        """Called once before anything else.

        Args:
            state: asks the backend for what ``new_state`` has made; asked again in every call.
        """
        self.context = context
        self._ask = state

    @property
    def _state(self) -> S:
        """The state of the windows, for this call only."""
        return cast("S", self._ask())

    @abstractmethod
    def new_state(self) -> InstanceState:
        """The state of a table without windows."""

    @abstractmethod
    def prepare_snapshot(self) -> None:
        """Puts what is kept outside of the backend into the operator's lists."""

    def close(self) -> None:
        """Called once at the end, whatever the end."""

    @abstractmethod
    def add(self, instances: Int64Array, batch: pa.RecordBatch) -> None:
        """Adds the batch's rows, each to its instance."""

    @abstractmethod
    def merge(self, source: Int64Array, target: Int64Array) -> None:
        """Adds instance ``source[i]`` to ``target[i]`` and empties the sources."""

    @abstractmethod
    def emit(self, fired: FiredInstances) -> Iterator[tuple[int, OperatorOutput]]:
        """The results of windows, each with how many of the windows are done by then.

        The state of those that are done may be cleared before the next result is asked for.
        """

    @abstractmethod
    def clear(self, instances: Int64Array) -> None:
        """Empties the instances."""


def times(values: Int64Array) -> pa.Array:
    """int64[n] milliseconds as a column of window bounds."""
    return pa.array(values).view(WINDOW_TIME_TYPE)


def constant_time(value: int, length: int) -> pa.Array:
    """``length`` times the same window bound."""
    return times(np.full(length, value))
