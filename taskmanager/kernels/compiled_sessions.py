"""The compiled loop over the rows of a batch that go into sessions.

A row touches one session or two, or opens one. Of two the earlier one stays. An absorbed session is
no longer in the chain, and is what rows before may have in ``of_row``.

What ``join_sessions`` is given: ``order`` (int64[n]) says which row comes when, those from ``first_row`` on; ``keys``
(int64[n]) are indices into ``head``; ``fresh`` (int64[n]) numbers for new sessions; ``fired`` is a flag by session. It gives
up when ``steps_max`` sessions were passed on the way to others.

``table``: head (by key its latest session, -1 = none); by session start, end, key, earlier, later, the versions in which
it changed and has got its start.

``found`` is filled: of_row (int64[n], the session of each row); absorbed (int64[n]) sessions that became part of others,
and absorbing, these, which may be absorbed later; dead_keys and dead_starts (int64[2 n]) that sessions had before this
version, and have no longer; and counts (int64[4]), moved on: used numbers of ``fresh``, absorbed sessions, the dead; the
smallest end of sessions that have got rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from penstock.storage.key_types import BoolArray, Int64Array
from taskmanager.kernels.jit import BOOLS, INT64, INT64S, INT64S_IN, inlined, kernel


@inlined
def _latest(now: Any, until: Any, start: Any, earlier: Any, later: Any) -> Any:
    """From a session along its chain, either way: the latest that starts by then, the one behind it, the steps."""
    steps = 0
    after = np.int64(-1)
    while now >= 0 and start[now] > until:
        after, now = now, earlier[now]
        steps += 1
    if now >= 0:
        after = later[now]
        while after >= 0 and start[after] <= until:
            now, after = after, later[after]
            steps += 1
    return now, after, steps


@inlined
def _put_before(session: Any, after: Any, key: Any, head: Any, earlier: Any, later: Any) -> Any:
    """Links a session and the one behind it; -1 = it is the key's latest."""
    later[session] = after
    if after >= 0:
        earlier[after] = session
    else:
        head[key] = session


@inlined
def _bury(
    key: Any, known_start: Any, is_known: Any, dead_keys: Any, dead_starts: Any, dead: Any
) -> Any:
    """Notes what snapshots may know a session by, and will not any more; how many are noted."""
    if is_known:
        dead_keys[dead], dead_starts[dead] = key, known_start
        dead += 1
    return dead


@kernel(
    INT64(
        *(INT64S_IN, INT64S_IN, INT64S_IN, INT64, INT64, INT64, INT64),
        *(types.UniTuple(INT64S, 8), BOOLS, INT64S, types.UniTuple(INT64S, 6)),
    )
)
def join_sessions(
    order: Int64Array,
    keys: Int64Array,
    times: Int64Array,
    first_row: int,
    gap: int,
    version: int,
    steps_max: int,
    table: tuple[Int64Array, ...],
    fired: BoolArray,
    fresh: Int64Array,
    found: tuple[Int64Array, ...],
) -> int:
    """Puts rows into the sessions of their keys (``SessionTable``), one after the other; how many of ``order`` are done."""
    head, start, end, key_of, earlier, later, changed_in, started_in = table
    of_row, absorbed, absorbing, dead_keys, dead_starts, counts = found
    used, merged, dead, soonest = counts[0], counts[1], counts[2], counts[3]
    steps = 0
    last_key, near = np.int64(-1), np.int64(-1)
    done = first_row
    while done < len(order) and steps <= steps_max:
        row = order[done]
        key, time = keys[row], times[row]
        until = time + gap
        begin = near if key == last_key else head[key]
        now, after, taken = _latest(begin, until, start, earlier, later)
        steps += taken
        if now >= 0 and end[now] >= time:
            until = max(until, end[now])
            before = earlier[now]
            if before >= 0 and end[before] >= time:
                # The row closes the gap between two: the earlier one takes the other in.
                is_known = started_in[now] < version
                dead = _bury(key, start[now], is_known, dead_keys, dead_starts, dead)
                absorbed[merged], absorbing[merged] = now, before
                merged += 1
                _put_before(before, after, key, head, earlier, later)
                now = before
            if time < start[now]:
                is_known = started_in[now] < version
                dead = _bury(key, start[now], is_known, dead_keys, dead_starts, dead)
                start[now], started_in[now] = time, version
        else:
            new = fresh[used]
            used += 1
            key_of[new], start[new], started_in[new] = key, time, version
            earlier[new] = now
            if now >= 0:
                later[now] = new
            _put_before(new, after, key, head, earlier, later)
            now = new
        end[now], fired[now], changed_in[now] = until, False, version
        soonest = min(soonest, until)
        of_row[row] = now
        last_key, near = key, now
        done += 1
    counts[0], counts[1], counts[2], counts[3] = used, merged, dead, soonest
    return done
