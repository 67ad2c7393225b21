"""The open sessions of all keys: intervals of time that grow together when they touch.

Sessions of one key are disjoint and do not touch. They are chained from the latest to the earliest, so
that a row looks only at those that begin behind it, and at one or two more.

What the sessions hold is part of the table, by number. In a snapshot a session is known by its key and
its start: a session whose start changes, or that becomes part of another, leaves a tombstone.

Invariants, per key: along the chain starts and ends fall; expired sessions are the end of the chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import pyarrow as pa
from typing_extensions import override

from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import BoolArray, Int64Array
from taskmanager.kernels.backend import kernels as process_kernels
from taskmanager.kernels.tombstones import Tombstones
from taskmanager.state.instances import InstanceState
from taskmanager.state.keyed_rows import MakeColumns
from taskmanager.state.keyed_table import KeyedTable
from taskmanager.state.slot_arrays import grown

_NEVER = np.int64(2**63 - 1)
_STEPS_PER_ROW: Final = 8
"""So many sessions on the way to its own may a row cost, on the average of a batch that is not sorted."""

_START = pa.field("start", pa.int64())
_END = pa.field("end", pa.int64())
_FIRED = pa.field("fired", pa.bool_())


@dataclass(frozen=True, slots=True)
class SessionUpdate:
    """What a batch did to the sessions.

    Attributes:
        of_row: int64[n], the session of each row.
        source: sessions with earlier rows that became part of others, and are no more.
        target: those others, one per source.
    """

    of_row: Int64Array
    source: Int64Array
    target: Int64Array


class SessionTable(KeyedTable):
    """Numbered sessions per key.

    Args:
        gap_ms: a session ends this long after its last row.
        contents: what the sessions hold, by number; part of this table.
    """

    kind = "sessions"
    number_field = _START
    by_slot = MappingProxyType(
        {
            "_start": 0,
            "_end": int(_NEVER),
            "_key": 0,
            "_earlier": -1,
            "_later": -1,
            "_fired": False,
            "_changed_in": 0,
            "_started_in": 0,
        }
    )
    _start: Int64Array
    _end: Int64Array
    _key: Int64Array
    _earlier: Int64Array
    _later: Int64Array
    _fired: BoolArray
    _started_in: Int64Array
    """Since when a session has its start: those of this version need no tombstone."""

    def __init__(
        self, key_types: Sequence[pa.DataType], gap_ms: int, contents: InstanceState
    ) -> None:
        self._gap_ms = gap_ms
        # Sessions that are no more, or have another start now, by key and start; their size in bytes.
        self._dead = Tombstones[list[pa.Array]]()
        super().__init__(key_types, contents)

    @override
    def _begin(self, contents: InstanceState) -> None:
        super()._begin(contents)
        self._head = np.full(64, -1, np.int64)
        self._count = 0
        # Lower bounds of the ends, so that most watermarks need no look at all sessions.
        self._first_end_to_fire = int(_NEVER)
        self._first_end_to_expire = int(_NEVER)

    def __len__(self) -> int:
        return self._count

    @override
    def memory_bytes(self) -> int:
        return super().memory_bytes() + self._head.nbytes + self._dead.size

    @override
    def _indices(self, keys: KeyBatch) -> Int64Array:
        indices, _ = self._keys.enter(keys)
        self._head = grown(self._head, self._keys.bound, -1)
        return indices

    def keys(self, sessions: Int64Array) -> list[pa.Array]:
        """The keys of sessions, per key column n values."""
        return self._keys.key_columns(self._key[sessions])

    def starts(self, sessions: Int64Array) -> Int64Array:
        """First milliseconds."""
        return self._start[sessions]

    def ends(self, sessions: Int64Array) -> Int64Array:
        """First milliseconds after."""
        return self._end[sessions]

    def intervals(self, key: int) -> list[tuple[int, int]]:
        """(start, end) of the sessions of one key, the latest first."""
        found = []
        session = int(self._head[key])
        while session >= 0:
            found.append((int(self._start[session]), int(self._end[session])))
            session = int(self._earlier[session])
        return found

    def add(self, keys: Int64Array, times: Int64Array) -> SessionUpdate:
        """Puts rows into sessions, new ones and grown ones.

        Args:
            keys: int64[n] of ``key_indices``.
            times: int64[n] milliseconds.
        """
        rows = len(keys)
        fresh = self.numbers.following(rows)
        self._reserve(int(fresh.max(initial=-1)) + 1)
        of_row, absorbed, absorbing = np.empty((3, rows), np.int64)
        dead_keys, dead_starts = np.empty((2, 2 * rows), np.int64)
        counts = np.array([0, 0, 0, _NEVER])
        found = of_row, absorbed, absorbing, dead_keys, dead_starts, counts
        table = (
            *(self._head, self._start, self._end, self._key, self._earlier, self._later),
            *(self._changed_in, self._started_in),
        )
        order = np.arange(rows)
        done, steps_max = 0, _STEPS_PER_ROW * rows
        while done < rows:
            if done:
                # Long chains, and rows that jump about in them: by time, they go along each chain once.
                rest = order[done:]
                order[done:] = rest[np.lexsort((times[rest], keys[rest]))]
                steps_max = int(_NEVER)
            done = process_kernels().join_sessions(
                *(order, keys, times, done, self._gap_ms, self._version, steps_max),
                *(table, self._fired, fresh, found),
            )
        used, merged, dead, soonest = counts.tolist()
        self._last_change = self._version
        self._count += len(self.numbers.allocate(used))
        self._bury(dead_keys[:dead], dead_starts[:dead])
        self._first_end_to_fire = min(self._first_end_to_fire, soonest)
        self._first_end_to_expire = min(self._first_end_to_expire, soonest)
        if not merged:
            return SessionUpdate(of_row, absorbed[:0], absorbing[:0])
        source, target = absorbed[:merged], _last_of(absorbed[:merged], absorbing[:merged])
        self._release(source)
        is_old = ~np.isin(source, fresh[:used])
        return SessionUpdate(_replaced(of_row, source, target), source[is_old], target[is_old])

    def _new_sessions(self, count: int) -> Int64Array:
        numbers = self.numbers.allocate(count)
        self._count += count
        self._reserve(self.numbers.bound)
        self._started_in[numbers] = self._version
        return numbers

    def due(self, watermark_ms: int) -> Int64Array:
        """Sessions that end at or before watermark + 1 and have not fired, by their end.

        Not always all of them: once these have fired, ask again until there are none.
        """
        if self._first_end_to_fire - 1 > watermark_ms:
            return np.empty(0, np.int64)
        bound = self.numbers.bound
        ends = self._end[:bound]
        waiting = ~self._fired[:bound] & (ends != _NEVER)
        is_due = waiting & (ends - 1 <= watermark_ms)
        left = ends[waiting & ~is_due]
        self._first_end_to_fire = int(left.min(initial=_NEVER))
        return self.by_end(np.flatnonzero(is_due))

    def by_end(self, sessions: Int64Array) -> Int64Array:
        """The sessions in the order in which they fire."""
        return sessions[np.lexsort((self._start[sessions], self._end[sessions]))]

    def mark_fired(self, sessions: Int64Array) -> None:
        """The sessions have fired and stay until they expire."""
        self._fired[sessions] = True
        self._touch(sessions)

    def expired(self, watermark_ms: int, lateness_ms: int) -> Int64Array:
        """Fired sessions that take no rows any more; not always all, as in ``due``."""
        last_end = watermark_ms - lateness_ms + 1
        if self._first_end_to_expire > last_end:
            return np.empty(0, np.int64)
        bound = self.numbers.bound
        ends = self._end[:bound]
        is_expired = self._fired[:bound] & (ends <= last_end)
        self._first_end_to_expire = int(ends[~is_expired].min(initial=_NEVER))
        return np.flatnonzero(is_expired)

    def remove(self, sessions: Int64Array) -> None:
        """Forgets sessions, and keys that have no other.

        Of a key's sessions the earliest ones are removed first.
        """
        if not len(sessions):
            return
        known = sessions[self._started_in[sessions] < self._version]
        self._bury(self._key[known], self._start[known])
        later = self._later[sessions]
        self._earlier[later[later >= 0]] = -1
        ended = self._key[sessions[later < 0]]
        self._head[ended] = -1
        self._release(sessions)
        self._keys.remove(ended)

    def forget_unused(self, keys: Int64Array) -> None:
        """Forgets those of the (different) keys that have no session: their rows were late."""
        self._keys.remove(keys[self._head[keys] < 0])

    def _release(self, sessions: Int64Array) -> None:
        self._end[sessions] = _NEVER
        self._fired[sessions] = False
        self.numbers.release(sessions)
        self._count -= len(sessions)

    def next_end(self) -> int | None:
        """A time at or before the end of the first session that is to fire, None = there is none."""
        return None if self._first_end_to_fire == _NEVER else self._first_end_to_fire

    def _bury(self, keys: Int64Array, starts: Int64Array) -> None:
        """Leaves tombstones for sessions that snapshots may know by their key and start."""
        if len(keys):
            dead = [*self._keys.key_columns(keys), pa.array(starts)]
            self._dead.bury(self._version, dead, sum(column.nbytes for column in dead))
            self._last_change = self._version

    @override
    def _fields(self) -> Sequence[pa.Field]:
        return [_END, _FIRED]

    @override
    def _rows(self) -> Int64Array:
        return np.flatnonzero(self._end[: self.numbers.bound] != _NEVER)

    @override
    def _identity(self, rows: Int64Array) -> list[pa.Array]:
        return [*self.keys(rows), pa.array(self._start[rows])]

    @override
    def _without_removed(
        self, rows: Int64Array, since_version: int
    ) -> tuple[Int64Array, list[pa.Array] | None]:
        dead = self._dead.after(since_version)
        return rows, [pa.concat_arrays(parts) for parts in zip(*dead, strict=True)] or None

    @override
    def _content(self, rows: Int64Array) -> MakeColumns:
        ends, fired = self._end[rows], self._fired[rows]
        states = self.contents.freeze(rows)

        def columns(chosen: Int64Array) -> list[pa.Array]:
            held = [state(chosen) for state in states]
            return [pa.array(ends[chosen]), pa.array(fired[chosen]), *held]

        return columns

    def forget(self, version: int) -> None:
        """Forgets the tombstones up to that version."""
        self._dead.forget(version)

    def _chain(self, sessions: Int64Array) -> None:
        """Links the sessions of keys that have no others, which come sorted by key and start."""
        keys = self._key[sessions]
        is_last = np.append(keys[1:] != keys[:-1], True)
        assert (self._head[keys[is_last]] < 0).all(), "a key was restored from two snapshots"
        self._head[keys[is_last]] = sessions[is_last]
        self._earlier[sessions] = self._later[sessions] = -1
        before, after = sessions[:-1][~is_last[:-1]], sessions[1:][~is_last[:-1]]
        self._earlier[after], self._later[before] = before, after

    def load(self, batches: Iterable[pa.RecordBatch], rows_max: int) -> None:
        """Adds restored sessions; all of a key come in one call."""
        loaded: list[Int64Array] = []
        for keys, (starts, ends, fired, *states) in self._restored_rows(batches):
            sessions = self._new_sessions(len(keys))
            self._started_in[sessions] = self._changed_in[sessions] = 0
            self._key[sessions] = keys
            self._start[sessions] = starts.to_numpy()
            self._end[sessions] = ends.to_numpy()
            self._fired[sessions] = fired.to_numpy(zero_copy_only=False)
            self.contents.restore(sessions, states)
            loaded.append(sessions)
        if not loaded:
            return
        sessions = np.concatenate(loaded)
        self._chain(sessions[np.lexsort((self._start[sessions], self._key[sessions]))])
        ends, fired = self._end[sessions], self._fired[sessions]
        first_to_fire = int(ends[~fired].min(initial=_NEVER))
        self._first_end_to_fire = min(self._first_end_to_fire, first_to_fire)
        self._first_end_to_expire = min(self._first_end_to_expire, int(ends.min()))


def _last_of(source: Int64Array, target: Int64Array) -> Int64Array:
    """What each has become part of in the end, where targets became part of others later."""
    last: dict[int, int] = {}
    for one, other in zip(reversed(source.tolist()), reversed(target.tolist()), strict=True):
        last[one] = last.get(other, other)
    return np.array([last[one] for one in source.tolist()])


def _replaced(values: Int64Array, source: Int64Array, target: Int64Array) -> Int64Array:
    """The values, with ``target[i]`` for each ``source[i]``."""
    order = np.argsort(source)
    places = np.minimum(np.searchsorted(source[order], values), len(source) - 1)
    return np.where(source[order][places] == values, target[order][places], values)
