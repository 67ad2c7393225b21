"""Draws what happened in a simulation: one column per process, time downwards.

Each host has a column for its daemon, and one for each slot process that lives beside others; a process that comes
after another one's end goes on in its column. Where the width does not suffice for all, the slots of a host share a
column, and at last the slots and their daemon do. A column of several processes names in brackets who speaks
whenever that changes.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

WIDTH = 120
_TIME_WIDTH = 10
_COLUMN_WIDTH_MIN = 20
_CELL_LINES_MAX = 5
_FIRST_SHOWN_MAX = 40


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened.

    Attributes:
        at_ns: simulated time.
        process: whom it happened to: "JobManager", "tm0.1" = the first life of TaskManager tm0, "tm0.1/2" = its
            second process; "" = nobody, or all.
    """

    at_ns: int
    process: str
    text: str

    @property
    def host(self) -> str:
        """Where the process lives, whichever of its lives this is."""
        return self.process.partition("/")[0].partition(".")[0]


@dataclass(frozen=True, slots=True)
class Column:
    """Processes that are drawn below each other."""

    title: str
    host: str
    processes: frozenset[str]

    def with_(self, other: Column) -> Column:
        """Both in one."""
        is_same_host = self.host == other.host
        host = self.host if is_same_host else "others"
        has_daemon = any("/" not in process for process in self.processes)
        title = f"{host} and slots" if has_daemon else f"{host} slots"
        return Column(title if is_same_host else host, host, self.processes | other.processes)


def draw(moments: Sequence[Moment], width: int = WIDTH, moments_max: int | None = None) -> str:
    """The story of some moments, in the order of their time.

    Args:
        moments_max: of a longer story the middle is left out.

    Example:
        >>> print(draw([Moment(1_500_000, "JobManager", "> deploy a/0"), Moment(1_500_000, "tm0.1", "starts")], 53))
              ms  JobManager           tm0
           1.500  > deploy a/0         starts
    """
    left_out = max(0, len(moments) - moments_max) if moments_max is not None else 0
    first = min(_FIRST_SHOWN_MAX, (len(moments) - left_out) // 4)
    parts = [moments[:first], moments[first + left_out :]]
    count_max = max(1, (width - _TIME_WIDTH) // (_COLUMN_WIDTH_MIN + 1))
    columns = _fewer(columns_of([*parts[0], *parts[1]]), count_max)
    column_width = (width - _TIME_WIDTH) // max(1, len(columns)) - 1
    lines = [_line("ms", [column.title for column in columns], column_width)]
    speakers = [""] * len(columns)
    for part in parts:
        for row in _rows(part, columns):
            lines += _drawn(row, columns, speakers, column_width, width)
        if part is parts[0] and left_out:
            lines.append(f"{'…':>8}  … {left_out} moments are left out …")
    return "\n".join(lines)


def columns_of(moments: Iterable[Moment]) -> list[Column]:
    """A column for each daemon, and as many for the processes of a host as live at a time."""
    lives: dict[str, dict[str, tuple[int, int]]] = {}
    for index, moment in enumerate(moments):
        if moment.process:
            of_host = lives.setdefault(moment.host, {})
            begin, _ = of_host.get(moment.process, (index, index))
            of_host[moment.process] = begin, index
    columns = []
    for host in sorted(lives):
        daemons = frozenset(process for process in lives[host] if "/" not in process)
        columns += [Column(host, host, daemons)] if daemons else []
        for number, lane in enumerate(_lanes(lives[host]), start=1):
            columns.append(Column(f"{host} slot {number}", host, lane))
    return columns


def _lanes(lives: dict[str, tuple[int, int]]) -> list[frozenset[str]]:
    """Processes one after the other: each takes the first lane that is free when it begins."""
    lanes: list[list[str]] = []
    for process, (begin, _) in sorted(lives.items(), key=lambda life: life[1]):
        if "/" in process:
            free = [lane for lane in lanes if lives[lane[-1]][1] < begin]
            if free:
                free[0].append(process)
            else:
                lanes.append([process])
    return [frozenset(lane) for lane in lanes]


def _fewer(columns: list[Column], count_max: int) -> list[Column]:
    """Shares columns until there are few enough: those of the host that has most, at last different hosts'."""
    while len(columns) > count_max:
        counts = [sum(other.host == column.host for other in columns) for column in columns]
        most = max(counts)
        last = len(columns) - 1 - counts[::-1].index(most)
        merged = columns[last - 1].with_(columns[last])
        columns = [*columns[: last - 1], merged, *columns[last + 1 :]]
    return columns


def _rows(moments: Iterable[Moment], columns: Sequence[Column]) -> Iterator[list[Moment]]:
    """Moments that share a line: of the same time, and from left to right."""
    place = {process: at for at, column in enumerate(columns) for process in column.processes}
    for _, together in itertools.groupby(moments, key=lambda moment: moment.at_ns):
        row: list[Moment] = []
        for moment in together:
            is_right = not row or (
                bool(moment.process and row[-1].process)
                and place[moment.process] > place[row[-1].process]
            )
            if not is_right:
                yield row
                row = []
            row.append(moment)
        yield row


def _drawn(
    row: Sequence[Moment],
    columns: Sequence[Column],
    speakers: list[str],
    column_width: int,
    width: int,
) -> Iterator[str]:
    at = f"{row[0].at_ns / 1e6:.3f}"
    if not row[0].process:
        text = f"== {row[0].text} =="
        for number, piece in enumerate(_wrapped(text, width - _TIME_WIDTH)):
            yield f"{'' if number else at:>8}  {piece}"
        return
    cells: list[list[str]] = [[] for _ in columns]
    for place, column in enumerate(columns):
        for moment in row:
            if moment.process in column.processes:
                is_named = len(column.processes) > 1 and speakers[place] != moment.process
                speakers[place] = moment.process
                text = f"[{moment.process}] {moment.text}" if is_named else moment.text
                cells[place] = _wrapped(text, column_width)
    for number, pieces in enumerate(itertools.zip_longest(*cells, fillvalue="")):
        yield _line("" if number else at, pieces, column_width)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, max_lines=_CELL_LINES_MAX, placeholder="…") or [""]


def _line(at: str, cells: Iterable[str], column_width: int) -> str:
    drawn = (f"{cell[:column_width]:<{column_width}}" for cell in cells)
    return f"{at:>8}  {' '.join(drawn)}".rstrip()
