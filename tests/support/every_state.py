"""A job with every kind of state, whose source goes on where it is told to, and what it has to write, told in plain Python.

What the source gives comes in phases: each waits for a file. Rows of one split come in order, those of several in any: all
that is told of the output holds whatever the order.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import penstock as ps

SPLITS, KEYS, PHASES, PER_PHASE = 5, 11, 3, 44
DEALT = ((40, 40, 20, 0, 0), (40, 40, 30, 20, 20), (40,) * 5)
"""What may be read of each of several splits of one source, phase by phase: one after the other by one subtask."""
ROWS = SPLITS * PHASES * PER_PHASE
OF_KEY = ROWS // KEYS
OUT = {"name": "string", "key": "int64", "count": "int64", "value": "string"}
RULES = [{"rule": f"rule {n}"} for n in range(3)]

_NUMBERS = pa.schema(
    [
        ("n", pa.int64()),
        ("k", pa.int64()),
        ("text", pa.string()),
        ("ts", pa.int64()),
        ("late", pa.int64()),
    ]
)
_PHASE_MS, _AHEAD_MS, _GAP_MS = 100_000, 50_000, 500
_FAR_MS = 10**9
_POLL_MS = 20
_JOINED = 5 * KEYS
_COUNTED = OF_KEY // 3


def row(split: int, place: int) -> dict[str, Any]:
    """One of the source. The column ``late`` goes back behind what has passed, so that sessions that fired are merged."""
    n, (phase, step) = place * SPLITS + split, divmod(place, PER_PHASE)
    if step < PER_PHASE - 4:
        late = (0 if step % 2 else 900, 450, 1_350)[phase] + step
    else:
        late = _AHEAD_MS * (phase + 1) + split
    ts = phase * _PHASE_MS + step * 100 + split
    return {"n": n, "k": n % KEYS, "text": f"text {n % 7}", "ts": ts, "late": late}


ALL = [row(split, place) for place in range(PHASES * PER_PHASE) for split in range(SPLITS)]


class Phases(ps.Source):
    """Rows in splits, each as far as it may be read.

    Args:
        gates: the directory with a file per phase that may be read.
        end_at_ms: the data ends then at the earliest.
        allowed: rows of each split that may be read in each phase.
        first: number of the first split.
    """

    schema = _NUMBERS

    def __init__(
        self, gates: Path, end_at_ms: int, allowed: tuple[tuple[int, ...], ...], first: int = 0
    ) -> None:
        self.gates, self.end_at_ms = gates, end_at_ms
        self.allowed, self.first = allowed, first

    def discover(self, ctx: ps.SourceContext) -> list[ps.Split]:
        return [ps.Split(str(split), b"", size=1) for split in range(len(self.allowed[0]))]

    def open(self, split: ps.Split, position: bytes | None) -> ps.Reader:
        return _Reader(self, int(split.id), int(position or b"0"))

    def may_read(self, split: int) -> int:
        """How many rows of a split there are by now."""
        phases = [phase for phase in range(PHASES) if (self.gates / str(phase)).exists()]
        return self.allowed[phases[-1]][split] if phases else 0


class _Reader(ps.Reader):
    def __init__(self, source: Phases, split: int, given: int) -> None:
        self.source, self.split, self.given = source, split, given

    def read(self, max_rows: int) -> Any:
        end = min(self.source.may_read(self.split), self.given + 10)
        if end > self.given:
            number = self.source.first + self.split
            rows = [row(number, place) for place in range(self.given, end)]
            self.given = end
            return pa.RecordBatch.from_pylist(rows, schema=_NUMBERS)
        is_whole = self.given == self.source.allowed[-1][self.split]
        return ps.END if is_whole and now_ms() > self.source.end_at_ms else None

    def next_read_at_ms(self) -> int | None:
        return now_ms() + _POLL_MS

    def position(self) -> bytes:
        return str(self.given).encode()


def now_ms() -> int:
    """By the clock on the wall, as timers of processing time go."""
    return time.time_ns() // 1_000_000


class States(ps.KeyedProcessFunction):
    """Every kind of keyed state, and timers of both times."""

    seen = ps.ValueState("seen", pa.int64(), default=0)
    items = ps.ListState("items", pa.int64())
    places = ps.MapState("places", pa.string(), pa.int64())
    total = ps.ReducingState("total", pa.int64(), lambda a, b: a + b)
    number = ps.AggregatingState("number", "count", pa.int64())

    def __init__(self, timer_ms: int) -> None:
        self.timer_ms = timer_ms

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        if not self.seen.value():
            ctx.timers.processing_time(self.timer_ms)
            ctx.timers.event_time(_FAR_MS)
        self.seen.update(self.seen.value() + 1)
        self.items.add(row.n)
        self.places.put(row.text, row.n % 7)
        self.total.add(row.n)
        self.number.add(row.n)

    def on_timer(self, time: int, ctx: Any, out: Any) -> None:
        if time == self.timer_ms:
            out.emit(name="timer", key=ctx.key, count=0, value="")
            return
        places = sorted((text, place) for text, place in self.places.items())
        found = [sorted(self.items.get()), places, self.total.get(), self.number.get()]
        out.emit(name="states", key=ctx.key, count=self.seen.value(), value=str(found))


class Ruled(ps.KeyedBroadcastProcessFunction):
    """What every subtask has been told."""

    rules = ps.BroadcastState("rules", pa.string(), pa.bool_())
    seen = ps.ValueState("seen", pa.int64(), default=0)

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        self.seen.update(self.seen.value() + 1)
        told = str(sorted(self.rules.keys()))
        out.emit(name="rules", key=ctx.key, count=self.seen.value(), value=told)

    def process_broadcast(self, row: Any, ctx: Any, out: Any) -> None:
        self.rules.put(row.rule, True)


class Lists(ps.ProcessFunction):
    """State of subtasks: what each has seen, and what all have."""

    split = ps.OperatorListState("split", pa.int64())
    union = ps.OperatorListState("union", pa.int64(), redistribute="union")

    def open(self, ctx: ps.FunctionContext) -> None:
        self.union.update(sorted(set(self.union.get())))

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        self.split.add(row.n)
        self.union.add(row.n)
        for name, held in (("split", self.split), ("union", self.union)):
            items = sorted(held.get())
            out.emit(
                name=name, key=0, count=len(items), value=str(items if len(items) == ROWS else "")
            )


class RowsOf(ps.WindowFunction):
    """Keeps the rows of a window."""

    def process(self, key: object, window: ps.WindowInfo, rows: Any, out: ps.Collector) -> None:
        numbers = str(sorted(row.n for row in rows))
        out.emit(name="rows", key=key, count=window.start_ms, value=numbers)


@dataclass(frozen=True)
class EveryState:
    """The job.

    Attributes:
        gates: as of the source.
        timer_ms: when its timers of processing time are due.
    """

    gates: Path
    files: Path
    output: Path
    timer_ms: int

    def open_phase(self, phase: int) -> None:
        """Lets the source read on."""
        (self.gates / str(phase)).touch()

    def write_files(self) -> None:
        """What a source of files reads."""
        self.files.mkdir()
        for number in range(6):
            table = pa.table({"k": [number % 2] * 10, "m": list(range(10))})
            pq.write_table(table, self.files / f"{number}.parquet")

    def build(self, env: ps.Environment) -> None:
        """Adds it to an environment."""
        allowed = tuple(((phase + 1) * PER_PHASE,) for phase in range(PHASES))
        numbers = [
            env.source(Phases(self.gates, self.timer_ms + 300, allowed, split)).uid(
                f"numbers-{split}"
            )
            for split in range(SPLITS)
        ]
        rows, late = (
            _union(
                [
                    one.with_event_time(column, out_of_orderness="0s").uid(f"{column}-{split}")
                    for split, one in enumerate(numbers)
                ]
            )
            for column in ("ts", "late")
        )
        dealt = env.source(Phases(self.gates, 0, DEALT)).uid("dealt")
        keyed = rows.key_by("k")
        day, aggregates = ps.tumbling("1d"), {"c": ps.count(), "total": ps.sum("n")}
        found = [
            rows.map(lambda row: out("raw", 0, row.n), schema=OUT).uid("raw"),
            dealt.map(lambda row: out("dealt", 0, row.n), schema=OUT).uid("dealt-out"),
            *self._windows(keyed, aggregates),
            late.key_by("k")
            .window(ps.session(_GAP_MS), allowed_lateness="1h")
            .aggregate(c=ps.count())
            .uid("late-sessions")
            .map(lambda row: out("late", row.k, row.c, window_of(row)), schema=OUT)
            .uid("late-out"),
            keyed.aggregate(c=ps.count(), d=ps.count_distinct("text"), numbers=ps.collect_list("n"))
            .uid("running")
            .map(lambda row: out("running", row.k, row.c, [row.d, sorted(row.numbers)]), schema=OUT)
            .uid("running-out"),
            keyed.process(States(self.timer_ms), schema=OUT).uid("states"),
            keyed.connect(env.from_rows(RULES).uid("rules").broadcast())
            .process(Ruled(), schema=OUT)
            .uid("ruled"),
            rows.process(Lists(), schema=OUT).uid("lists"),
            env.read_parquet(self.files)
            .uid("file-splits")
            .key_by("k")
            .window(ps.count_window(30))
            .aggregate(total=ps.sum("m"))
            .uid("file-sums")
            .map(lambda row: out("files", row.k, row.total), schema=OUT)
            .uid("files-out"),
        ]
        first = rows.filter(ps.col("n") < _JOINED).uid("first").select("k", low=ps.col("n"))
        last = rows.filter(ps.col("n") >= ROWS - _JOINED).uid("last").select("k", high=ps.col("n"))
        for name, how in (("interval", {"within": ("-1d", "1d")}), ("window", {"window": day})):
            joined = (
                first.uid("first-n").join(last.uid("last-n"), on="k", **how).uid(f"{name}-join")
            )
            found.append(
                joined.map(
                    lambda row, name=name: out(name, row.k, row.low, row.high), schema=OUT
                ).uid(f"{name}-join-out")
            )
        _union(found).write_parquet(self.output).uid("output")

    def _windows(self, keyed: Any, aggregates: dict[str, Any]) -> list[Any]:
        def told(stream: Any, name: str) -> Any:
            named = stream.uid(name).map(
                lambda row: out(name, row.k, row.c, [row.total, window_of(row)]), schema=OUT
            )
            return named.uid(f"{name}-out")

        counts = keyed.window(ps.count_window(_COUNTED)).aggregate(**aggregates).uid("counted")
        reduced = keyed.window(ps.tumbling("1d")).reduce(lambda a, b: a if a.n > b.n else b)
        return [
            told(keyed.window(ps.tumbling("150s")).aggregate(**aggregates), "tumbling"),
            told(keyed.window(ps.sliding("200s", "100s")).aggregate(**aggregates), "sliding"),
            told(keyed.window(ps.session("1d")).aggregate(**aggregates), "sessions"),
            counts.map(lambda row: out("counted", row.k, row.c, row.total), schema=OUT).uid(
                "counted-out"
            ),
            keyed.window(ps.tumbling("150s")).process(RowsOf(), schema=OUT).uid("rows"),
            reduced.uid("reduced")
            .map(lambda row: out("reduced", row.k, row.n), schema=OUT)
            .uid("reduced-out"),
        ]

    def check(self) -> None:
        """What was written is what had to be."""
        files = [path for path in self.output.glob("*.parquet") if path.name[0] not in "._"]
        written: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for path in files:
            for one in pq.read_table(path).to_pylist():
                written[one["name"]].append((one["key"], one["count"], one["value"]))
        for name, wanted in exact().items():
            assert Counter(written.pop(name)) == Counter(wanted), name
        totals = Counter[int]()
        for key, count, total in written.pop("counted"):
            assert count == _COUNTED
            totals[key] += int(total)
        assert totals == {key: sum(one["n"] for one in mine) for key, mine in by_key().items()}
        for name, final in newest().items():
            last = {key: (count, value) for key, count, value in sorted(written.pop(name))}
            assert last == final, name
        sessions = set(written.pop("late"))
        assert late_sessions() <= sessions, "of each the last word"
        assert all(
            any(key == k and count <= c and _lies_in(value, v) for k, c, v in late_sessions())
            for key, count, value in sessions
        )
        assert not written


def _union(streams: list[Any]) -> Any:
    return streams[0].union(*streams[1:])


def out(name: str, key: int, count: int, value: object = "") -> dict[str, Any]:
    """A row of the output."""
    return {"name": name, "key": key, "count": count, "value": str(value)}


def window_of(row: Any) -> list[int]:
    """Start and end of the row's window, in ms."""
    return [round(row.window_start.timestamp() * 1000), round(row.window_end.timestamp() * 1000)]


def _lies_in(window: str, other: str) -> bool:
    (start, end), (first, last) = (map(int, one.strip("[]").split(",")) for one in (window, other))
    return first <= start and end <= last


def by_key() -> dict[int, list[dict[str, Any]]]:
    """All rows of the source."""
    return {key: [one for one in ALL if one["k"] == key] for key in range(KEYS)}


def exact() -> dict[str, list[tuple[int, int, str]]]:
    """What comes once each."""
    found: dict[str, list[tuple[int, int, str]]] = {
        "raw": [(0, n, "") for n in range(ROWS)],
        "dealt": [
            (0, row(split, place)["n"], "")
            for split, rows in enumerate(DEALT[-1])
            for place in range(rows)
        ],
        "files": [(key, 3 * sum(range(10)), "") for key in range(2)],
        "timer": [(key, 0, "") for key in range(KEYS)],
    }
    for key, mine in by_key().items():
        numbers = sorted(one["n"] for one in mine)
        places = sorted({(one["text"], one["n"] % 7) for one in mine})
        states = [numbers, places, sum(numbers), len(mine)]
        ends = [min(one["ts"] for one in mine), max(one["ts"] for one in mine) + 86_400_000]
        add = lambda name, *told: found.setdefault(name, []).append((key, *told))  # noqa: E731, B023
        add("states", OF_KEY, str(states))
        add("reduced", max(numbers), "")
        add("sessions", len(mine), str([sum(numbers), ends]))
        for name, size, slide in (("tumbling", 150_000, 150_000), ("sliding", 200_000, 100_000)):
            for start in range(slide - size, PHASES * _PHASE_MS, slide):
                held = [one["n"] for one in mine if start <= one["ts"] < start + size]
                if held:
                    add(name, len(held), str([sum(held), [start, start + size]]))
                if held and name == "tumbling":
                    add("rows", start, str(sorted(held)))
        low = [n for n in numbers if n < _JOINED]
        high = [n for n in numbers if n >= ROWS - _JOINED]
        for one, other in ((one, other) for one in low for other in high):
            add("interval", one, str(other))
            add("window", one, str(other))
    return found


def newest() -> dict[str, dict[int, tuple[int, str]]]:
    """The last word of what is told again and again."""
    numbers = {key: sorted(one["n"] for one in mine) for key, mine in by_key().items()}
    rules = str(sorted(one["rule"] for one in RULES))
    return {
        "running": {key: (OF_KEY, str([7, mine])) for key, mine in numbers.items()},
        "rules": dict.fromkeys(range(KEYS), (OF_KEY, rules)),
        "split": {0: (ROWS, str(list(range(ROWS))))},
        "union": {0: (ROWS, str(list(range(ROWS))))},
    }


def late_sessions() -> set[tuple[int, int, str]]:
    """As they are when all has come."""
    found = set()
    for key, mine in by_key().items():
        times = sorted(one["late"] for one in mine)
        begins = [0, *(i for i in range(1, len(times)) if times[i] - times[i - 1] >= _GAP_MS)]
        for begin, end in zip(begins, [*begins[1:], len(times)], strict=True):
            window = [times[begin], times[end - 1] + _GAP_MS]
            found.add((key, end - begin, str(window)))
    return found
