"""The open sessions of all keys: intervals of time that grow together when they touch.

Sessions of one key are disjoint and do not touch. They are chained from the latest to the earliest, so
that a batch looks only at those that are not over before its first row of that key. Everything is done
for a whole batch at once, with a number of array operations that does not depend on its rows.

What the sessions hold is part of the table, by number. In a snapshot a session is known by its key and
its start: a session whose start changes, or that becomes part of another, leaves a tombstone.

Invariants, per key: along the chain starts and ends fall; expired sessions are the end of the chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pyarrow as pa
from typing_extensions import override

from penstock.storage.key_encoding import KeyBatch
from penstock.storage.key_types import BoolArray, Int64Array
from taskmanager.kernels.tombstones import Tombstones
from taskmanager.state.instances import InstanceState
from taskmanager.state.keyed_rows import MakeColumns
from taskmanager.state.keyed_table import KeyedTable
from taskmanager.state.slot_arrays import grown
from taskmanager.state.snapshot_table import RestoredPart

_NEVER = np.int64(2**63 - 1)

_START = pa.field("start", pa.int64())
_END = pa.field("end", pa.int64())
_FIRED = pa.field("fired", pa.bool_())


@dataclass(frozen=True, slots=True)
class SessionUpdate:
    """What a batch did to the sessions.

    Attributes:
        of_row: int64[n], the session of each row.
        source: sessions that became part of others, and are no more.
        target: those others, one per source.
        touched: sessions that have got rows, different ones.
    """

    of_row: Int64Array
    source: Int64Array
    target: Int64Array
    touched: Int64Array


class SessionTable(KeyedTable):
    """Numbered sessions per key.

    Args:
        key_types: types of the key columns.
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
        order = np.lexsort((times, keys))
        sorted_keys, sorted_times = keys[order], times[order]
        is_first = np.ones(len(order), np.bool_)
        is_first[1:] = (np.diff(sorted_keys) != 0) | (np.diff(sorted_times) > self._gap_ms)
        firsts = np.flatnonzero(is_first)
        lasts = np.append(firsts[1:], len(order)) - 1
        new_keys, new_starts = sorted_keys[firsts], sorted_times[firsts]
        new_ends = sorted_times[lasts] + self._gap_ms

        met, rest_of, key_list = self._met(new_keys, new_starts)
        all_keys = np.concatenate((new_keys, self._key[met]))
        starts = np.concatenate((new_starts, self._start[met]))
        ends = np.concatenate((new_ends, self._end[met]))
        numbers = np.concatenate((np.full(len(firsts), -1, np.int64), met))

        component, by_start, is_head = _components(all_keys, starts, ends)
        heads = np.flatnonzero(is_head)
        component_keys = all_keys[by_start[heads]]
        component_starts = starts[by_start[heads]]
        component_ends = np.full(len(heads), -_NEVER, np.int64)
        np.maximum.at(component_ends, component, ends)

        session = self._sessions_of(component, numbers, len(heads))
        is_source = (numbers >= 0) & (session[component] != numbers)
        source, target = numbers[is_source], session[component[is_source]]

        touched = np.unique(component[: len(firsts)])
        touched_sessions = session[touched]
        is_moved = self._start[touched_sessions] != component_starts[touched]
        self._bury(np.append(source, touched_sessions[is_moved]))
        self._started_in[touched_sessions[is_moved]] = self._version
        self._touch(touched_sessions)
        self._key[session] = component_keys
        self._start[session] = component_starts
        self._end[session] = component_ends
        self._fired[touched_sessions] = False
        self._chain(session, component_keys, key_list, rest_of)
        self._release(source)
        earliest = int(component_ends[touched].min())
        self._first_end_to_fire = min(self._first_end_to_fire, earliest)
        self._first_end_to_expire = min(self._first_end_to_expire, earliest)

        of_row = np.empty(len(order), np.int64)
        of_row[order] = session[component[np.cumsum(is_first) - 1]]
        return SessionUpdate(of_row, source, target, touched_sessions)

    def _met(
        self, new_keys: Int64Array, new_starts: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The sessions that new ones may touch: those that do not end before a key's first row.

        Returns:
            These sessions; per key of the batch the latest session that is over before; the keys.
        """
        is_first = np.ones(len(new_keys), np.bool_)
        is_first[1:] = np.diff(new_keys) != 0
        keys, earliest = new_keys[is_first], new_starts[is_first]
        rest_of = self._head[keys]
        met: list[Int64Array] = []
        looking = np.flatnonzero(rest_of >= 0)
        while len(looking):
            current = rest_of[looking]
            near = self._end[current] >= earliest[looking]
            looking, current = looking[near], current[near]
            met.append(current)
            rest_of[looking] = self._earlier[current]
            looking = looking[rest_of[looking] >= 0]
        return np.concatenate(met) if met else np.empty(0, np.int64), rest_of, keys

    def _sessions_of(self, component: Int64Array, numbers: Int64Array, count: int) -> Int64Array:
        """The session of each component: one that it contains, else a new one."""
        session = np.full(count, -1, np.int64)
        known = numbers >= 0
        session[component[known]] = numbers[known]
        new = np.flatnonzero(session < 0)
        session[new] = self._new_sessions(len(new))
        return session

    def _new_sessions(self, count: int) -> Int64Array:
        numbers = self.numbers.allocate(count)
        self._count += count
        self._reserve(self.numbers.bound)
        self._started_in[numbers] = self._version
        return numbers

    def _chain(
        self,
        session: Int64Array,
        component_keys: Int64Array,
        keys: Int64Array,
        rest_of: Int64Array,
    ) -> None:
        """Links the sessions, which come sorted by key and start, in front of each key's rest."""
        is_first = np.ones(len(session), np.bool_)
        is_first[1:] = np.diff(component_keys) != 0
        is_last = np.append(is_first[1:], True)
        earlier = np.empty(len(session), np.int64)
        earlier[1:] = session[:-1]
        earlier[is_first] = rest_of
        later = np.empty(len(session), np.int64)
        later[:-1] = session[1:]
        later[is_last] = -1
        self._earlier[session] = earlier
        self._later[session] = later
        has_rest = rest_of >= 0
        self._later[rest_of[has_rest]] = session[is_first][has_rest]
        self._head[keys] = session[is_last]

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
        self._bury(sessions)
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

    def _bury(self, sessions: Int64Array) -> None:
        """Leaves tombstones for sessions that snapshots may know by their start."""
        known = sessions[self._started_in[sessions] < self._version]
        if len(known):
            dead = self._identity(known)
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

    def load(self, batches: Iterable[pa.RecordBatch], part: RestoredPart) -> None:
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
        keys = self._key[sessions]
        order = np.lexsort((self._start[sessions], keys))
        different = np.unique(keys)
        assert (self._head[different] < 0).all(), "a key was restored from two snapshots"
        self._chain(sessions[order], keys[order], different, self._head[different])
        ends, fired = self._end[sessions], self._fired[sessions]
        first_to_fire = int(ends[~fired].min(initial=_NEVER))
        self._first_end_to_fire = min(self._first_end_to_fire, first_to_fire)
        self._first_end_to_expire = min(self._first_end_to_expire, int(ends.min()))


def _components(
    keys: Int64Array, starts: Int64Array, ends: Int64Array
) -> tuple[Int64Array, Int64Array, BoolArray]:
    """Groups intervals of one key that touch each other, directly or through others.

    Returns:
        Per interval the number of its group; the intervals' order by key and start, in which groups
        are numbered; and per interval of that order whether it is the first of its group.
    """
    by_start = np.lexsort((starts, keys))
    by_end = np.lexsort((ends, keys))
    # The rank of (key, end): its running maximum stays within a key, as ranks rise from key to key.
    rank = np.empty(len(keys), np.int64)
    rank[by_end] = np.arange(len(keys))
    furthest = ends[by_end[np.maximum.accumulate(rank[by_start])]]
    is_head = np.ones(len(keys), np.bool_)
    is_head[1:] = (np.diff(keys[by_start]) != 0) | (starts[by_start][1:] > furthest[:-1])
    component = np.empty(len(keys), np.int64)
    component[by_start] = np.cumsum(is_head) - 1
    return component, by_start, is_head
