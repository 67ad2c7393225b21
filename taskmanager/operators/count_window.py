"""Count windows: every n rows of a key, in order of arrival. What is incomplete stays unsaid.

Where nobody reads ``window_index``, a key between two windows leaves nothing behind. With a TTL, a key that
has had no row for so long begins anew: its next row finds nothing of before, and in the background what has
expired is removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from typing_extensions import override

from common.elements import OperatorOutput
from penstock.pb import graph_pb2
from penstock.rows.schema import EVENT_TIME, schema_from_bytes
from penstock.storage.key_types import Int64Array
from taskmanager.operators.key_columns import KeyColumns
from taskmanager.operators.operator import NOTHING, Operator, OperatorContext
from taskmanager.operators.window_contents import FiredInstances, InstanceContents
from taskmanager.state.backend import KeyedStateBackend
from taskmanager.state.count_table import CountTable

_COUNTS = "counts"
_SWEEPS_PER_TTL = 4
_SWEEP_STEP_MS = 100
"""Between two steps of one sweep, and two sweeps at least."""


class CountWindowOperator(Operator):
    """Cuts each key's rows into windows of n, and emits those that are complete."""

    def __init__(
        self,
        spec: graph_pb2.Operator,
        window: graph_pb2.WindowSpec,
        keys: list[str],
        contents: InstanceContents[Any],
    ) -> None:
        schema = schema_from_bytes(spec.input_schema)
        self._rows_per_window: int = window.count
        self._ttl_ms: int = window.ttl_ms
        self._is_numbered = not window.without_index
        self._keys = KeyColumns(keys, schema)
        self._has_event_time = EVENT_TIME in schema.names
        self._contents = contents

    @override
    def restore(self, context: OperatorContext) -> None:
        self._counts_in(context.state)

    @override
    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._contents.open(context, lambda: self._counts.contents)
        if self._ttl_ms:
            self._sweep_later(is_done=True)

    @property
    def _counts(self) -> CountTable:
        return self._counts_in(self.context.state)

    def _counts_in(self, state: KeyedStateBackend) -> CountTable:
        table = state.count_table(_COUNTS, self._keys.types, self._contents.new_state, self._ttl_ms)
        if not self._is_numbered:
            table.drop_empty_keys()
        return table

    @override
    def prepare_snapshot(self, checkpoint_id: int) -> None:
        self._contents.prepare_snapshot()

    @override
    def close(self) -> None:
        self._contents.close()

    @override
    def on_pause_over(self) -> Iterable[OperatorOutput]:
        if self._ttl_ms:
            expired, is_done = self._counts.sweep(self.context.clock.now_ms())
            self._expire(expired)
            self._counts.leave(expired)
            self._sweep_later(is_done=is_done)
        return NOTHING

    def _sweep_later(self, *, is_done: bool) -> None:
        pause_ms = max(_SWEEP_STEP_MS, self._ttl_ms // _SWEEPS_PER_TTL if is_done else 0)
        self.context.call_after(pause_ms)

    def _expire(self, keys: Int64Array) -> None:
        if len(keys):
            instances = self._counts.instance[keys]
            self._forget(instances[instances >= 0])
            self._counts.reset(keys)

    @override
    def process(self, batch: pa.RecordBatch) -> Iterator[OperatorOutput]:
        size = self._rows_per_window
        table = self._counts
        keys = table.key_indices(self._keys.encode(batch))
        order = np.argsort(keys, kind="stable")
        sorted_keys = keys[order]
        key_starts = np.flatnonzero(np.diff(sorted_keys, prepend=-1))
        key_counts = np.diff(np.append(key_starts, len(order)))
        batch_keys = sorted_keys[key_starts]
        if self._ttl_ms:
            now_ms = self.context.clock.now_ms()
            self._expire(table.expired(now_ms, batch_keys))
            table.touched_ms[batch_keys] = now_ms

        # Place of each row counted from the start of its key's open window.
        place = np.arange(len(order)) - np.repeat(key_starts - table.filled[batch_keys], key_counts)
        window = place // size
        is_first = np.ones(len(order), np.bool_)
        is_first[1:] = (np.diff(sorted_keys) != 0) | (np.diff(window) != 0)
        firsts = np.flatnonzero(is_first)
        lasts = np.append(firsts[1:], len(order)) - 1
        part_keys, part_windows = sorted_keys[firsts], window[firsts]

        instances = table.instance[part_keys]
        is_new = (part_windows > 0) | (instances < 0)
        instances[is_new] = table.numbers.allocate(int(is_new.sum()))
        of_row = np.empty(len(order), np.int64)
        of_row[order] = np.repeat(instances, np.diff(np.append(firsts, len(order))))
        self._contents.add(of_row, batch)

        is_complete = (place[lasts] + 1) % size == 0
        indices = table.window_index[part_keys] + part_windows
        filled = table.filled[batch_keys] + key_counts
        table.window_index[batch_keys] += filled // size
        table.filled[batch_keys] = filled % size
        table.instance[part_keys] = -1
        table.instance[part_keys[~is_complete]] = instances[~is_complete]
        table.changed(batch_keys)

        last_rows = order[lasts[is_complete]]
        by_arrival = np.argsort(last_rows)
        complete = np.flatnonzero(is_complete)[by_arrival]
        if len(complete):
            event_times = None
            if self._has_event_time:
                event_times = batch.column(EVENT_TIME).to_numpy()[last_rows[by_arrival]]
            fired = FiredInstances(
                instances[complete],
                table.keys(part_keys[complete]),
                indices[complete],
                None,
                event_times,
            )
            table.leave(batch_keys)
            yield from self._emit(fired)

    def _emit(self, fired: FiredInstances) -> Iterator[OperatorOutput]:
        done = 0
        for now_done, output in self._contents.emit(fired):
            self._forget(fired.instances[done:now_done])
            done = now_done
            yield output
        self._forget(fired.instances[done:])

    def _forget(self, instances: Int64Array) -> None:
        if len(instances):
            self._contents.clear(instances)
            self._counts.numbers.release(instances)
