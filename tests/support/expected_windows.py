"""What windows over finished data must come to, row by row in plain Python.

Nothing is late here: lateness is for ``window_oracle``. Written from the API's words alone.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.support.jobs import canonical

Row = dict[str, Any]
Aggregates = dict[str, Callable[[list[Row]], Any]]
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def groups(rows: Iterable[Row], keys: Sequence[str]) -> list[tuple[Row, list[Row]]]:
    """(key columns, rows in order of arrival) per key; NaN is one key, null another."""
    found: dict[Any, tuple[Row, list[Row]]] = {}
    for row in rows:
        key = {name: row[name] for name in keys}
        found.setdefault(canonical(key), (key, []))[1].append(row)
    return list(found.values())


def sliced(
    rows: Iterable[Row],
    keys: Sequence[str],
    aggregates: Aggregates,
    *,
    time: Callable[[Row], int],
    size_ms: int,
    slide_ms: int | None = None,
    offset_ms: int = 0,
) -> list[Row]:
    """Tumbling (no slide) and sliding windows."""
    slide_ms = slide_ms or size_ms
    results = []
    for key, members in groups(rows, keys):
        windows: dict[int, list[Row]] = {}
        for row in members:
            start = time(row) - (time(row) - offset_ms) % slide_ms
            while start + size_ms > time(row):
                windows.setdefault(start, []).append(row)
                start -= slide_ms
        results += [
            {**key, **_bounds(start, start + size_ms), **_values(aggregates, inside)}
            for start, inside in windows.items()
        ]
    return results


def sessions(
    rows: Iterable[Row],
    keys: Sequence[str],
    aggregates: Aggregates,
    *,
    time: Callable[[Row], int],
    gap_ms: int,
) -> list[Row]:
    """Session windows: rows at most ``gap_ms`` apart."""
    results = []
    for key, members in groups(rows, keys):
        in_order = sorted(members, key=time)
        runs: list[list[Row]] = []
        for row in in_order:
            if runs and time(row) - time(runs[-1][-1]) <= gap_ms:
                runs[-1].append(row)
            else:
                runs.append([row])
        arrival = {id(row): i for i, row in enumerate(members)}
        results += [
            {
                **key,
                **_bounds(time(run[0]), time(run[-1]) + gap_ms),
                **_values(aggregates, sorted(run, key=lambda row: arrival[id(row)])),
            }
            for run in runs
        ]
    return results


def counted(
    rows: Iterable[Row], keys: Sequence[str], aggregates: Aggregates, *, size: int
) -> list[Row]:
    """Count windows; what is incomplete is not there."""
    return [
        {
            **key,
            "window_index": index,
            **_values(aggregates, members[index * size : (index + 1) * size]),
        }
        for key, members in groups(rows, keys)
        for index in range(len(members) // size)
    ]


def whole(rows: Iterable[Row], keys: Sequence[str], aggregates: Aggregates) -> list[Row]:
    """One result per key over all rows."""
    return [{**key, **_values(aggregates, members)} for key, members in groups(rows, keys)]


def _bounds(start_ms: int, end_ms: int) -> Row:
    return {
        "window_start": EPOCH + dt.timedelta(milliseconds=start_ms),
        "window_end": EPOCH + dt.timedelta(milliseconds=end_ms),
    }


def _values(aggregates: Aggregates, rows: list[Row]) -> Row:
    return {name: function(rows) for name, function in aggregates.items()}
