"""The twin of ``compiled_sessions``: all sessions of the key at every row, sorted, instead of a walk along a chain."""

from __future__ import annotations

from penstock.storage.key_types import BoolArray, Int64Array


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
    """See ``compiled_sessions.join_sessions``; never gives up."""
    head, start, end, key_of, earlier, later, changed_in, started_in = table
    of_row, absorbed, absorbing, dead_keys, dead_starts, counts = found

    def bury(session: int) -> None:
        if started_in[session] < version:
            dead_keys[counts[2]], dead_starts[counts[2]] = key_of[session], start[session]
            counts[2] += 1

    for row in order[first_row:].tolist():
        key, time = int(keys[row]), int(times[row])
        chain = []
        session = int(head[key])
        while session >= 0:
            chain.append(session)
            session = int(earlier[session])
        touched = [one for one in chain if start[one] <= time + gap and end[one] >= time]
        if not touched:
            kept = int(fresh[counts[0]])
            counts[0] += 1
            key_of[kept], start[kept], end[kept] = key, time, time + gap
            started_in[kept] = version
            chain.append(kept)
        else:
            *gone, kept = touched
            for other in gone:
                bury(other)
                absorbed[counts[1]], absorbing[counts[1]] = other, kept
                counts[1] += 1
                chain.remove(other)
            if time < start[kept]:
                bury(kept)
                start[kept], started_in[kept] = time, version
            end[kept] = max([time + gap, *(end[one] for one in touched)])
        fired[kept], changed_in[kept], of_row[row] = False, version, kept
        counts[3] = min(counts[3], end[kept])
        chain.sort(key=lambda one: -start[one])
        head[key] = chain[0]
        for after, now, before in zip([-1, *chain], chain, [*chain[1:], -1], strict=False):
            later[now], earlier[now] = after, before
    return len(order)
