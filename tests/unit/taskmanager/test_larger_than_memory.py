"""Aim: state larger than managed memory gives the right answer with rocksdb, and with hashmap a refusal that helps.

Method: every operator with state is given, through ``penstock.testing``, several times as many bytes as its memory,
in batch and in streaming mode, rows out of order. What it makes is compared with plain Python.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock.testing import harness

pytestmark = pytest.mark.sampled(4)

ROWS, KEYS = 6_000, 1_000
HOUR_MS = 3_600_000
MEMORY = "4mb"


def _rows() -> list[dict[str, Any]]:
    numbers = random.Random(17)
    return [
        {
            "k": numbers.randrange(KEYS),
            "n": n,
            "text": f"{n:01200}",
            "ts": numbers.randrange(HOUR_MS),
        }
        for n in range(ROWS)
    ]


DATA = _rows()
SCHEMA = pa.schema(
    [("k", pa.int64()), ("n", pa.int64()), ("text", pa.string()), ("ts", pa.int64())]
)
TABLE = pa.Table.from_pylist(DATA, schema=SCHEMA)
BY_KEY: dict[int, list[dict[str, Any]]] = defaultdict(list)
for _row in DATA:
    BY_KEY[_row["k"]].append(_row)


HARNESS: Any = harness


class Texts(ps.WindowFunction):
    def process(self, key: Any, window: Any, rows: Any, out: Any) -> None:
        out.emit(k=key, texts=[row.text for row in rows])


class KeepsAll(ps.KeyedProcessFunction):
    """Keeps each row in every kind of state, and checks at the end that all say the same."""

    last = ps.ValueState("last", pa.string())
    kept = ps.ListState("kept", pa.string())
    by_number = ps.MapState("by_number", pa.int64(), pa.string())
    total = ps.ReducingState("total", pa.int64(), lambda one, two: one + two)
    count = ps.AggregatingState("count", ps.sum("n"), pa.int64())

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        self.last.update(row.text)
        self.kept.add(row.text)
        self.by_number.put(row.n, row.text)
        self.total.add(row.n)
        self.count.add(1)
        ctx.timers.event_time(ps.MAX_WATERMARK)

    def on_timer(self, timestamp: int, ctx: Any, out: Any) -> None:
        texts, items = self.kept.get(), self.by_number.items()
        assert self.last.value() == texts[-1]
        assert sorted(text for _, text in items) == sorted(texts)
        assert self.total.get() == sum(n for n, _ in items)
        assert self.count.get() == len(texts)
        out.emit(k=ctx.key, texts=texts)


class KeepsBoth(ps.KeyedCoProcessFunction):
    kept = ps.ListState("kept", pa.string())

    def process_left(self, row: Any, ctx: Any, out: Any) -> None:
        self.kept.add(row.text)
        ctx.timers.event_time(ps.MAX_WATERMARK)

    def process_right(self, row: Any, ctx: Any, out: Any) -> None:
        self.process_left(row, ctx, out)

    def on_timer(self, timestamp: int, ctx: Any, out: Any) -> None:
        out.emit(k=ctx.key, texts=self.kept.get())


class KeepsBesideBroadcast(ps.KeyedBroadcastProcessFunction):
    kept = ps.ListState("kept", pa.string())

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        self.kept.add(row.text)
        ctx.timers.event_time(ps.MAX_WATERMARK)

    def process_broadcast(self, row: Any, ctx: Any, out: Any) -> None:
        pass

    def on_timer(self, timestamp: int, ctx: Any, out: Any) -> None:
        out.emit(k=ctx.key, texts=self.kept.get())


MINUTE_MS = 60_000
TUMBLING, SLIDING = ps.tumbling("10 min"), ps.sliding("20 min", "10 min")
SESSION, COUNTS = ps.session("5 min"), ps.count_window(3)
LISTS = {"k": int, "texts": list[str]}
Found = Counter[tuple[Any, ...]]


def _ends_of(row: dict[str, Any]) -> list[int]:
    return [row["ts"] // (10 * MINUTE_MS)]


def _both_ends_of(row: dict[str, Any]) -> list[int]:
    return [row["ts"] // (10 * MINUTE_MS), row["ts"] // (10 * MINUTE_MS) + 1]


def _groups(kind: str) -> list[tuple[int, list[int]]]:
    """Each window's key and the numbers of its rows."""
    found: list[tuple[int, list[int]]] = []
    for key, rows in BY_KEY.items():
        if kind == "all":
            found.append((key, [row["n"] for row in rows]))
        elif kind == "counts":
            numbers = [row["n"] for row in rows]
            found += [(key, numbers[at : at + 3]) for at in range(0, len(rows) // 3 * 3, 3)]
        elif kind == "sessions":
            ordered = sorted(rows, key=lambda row: int(row["ts"]))
            before = ordered[0]["ts"] - HOUR_MS
            for row in ordered:
                if row["ts"] - before >= 5 * MINUTE_MS:
                    found.append((key, []))
                found[-1][1].append(row["n"])
                before = row["ts"]
        else:
            ends = _ends_of if kind == "tumbling" else _both_ends_of
            windows: dict[int, list[int]] = defaultdict(list)
            for row in rows:
                for end in ends(row):
                    windows[end].append(row["n"])
            found += [(key, numbers) for numbers in windows.values()]
    return found


def lists(kind: str) -> Found:
    return Counter((key, *sorted(numbers)) for key, numbers in _groups(kind))


def taken_lists(rows: list[dict[str, Any]]) -> Found:
    return Counter((row["k"], *sorted(map(int, row["texts"]))) for row in rows)


def sizes(kind: str) -> Found:
    return Counter((key, len(numbers)) for key, numbers in _groups(kind))


def taken_sizes(rows: list[dict[str, Any]]) -> Found:
    return Counter((row["k"], row["c"]) for row in rows)


def latest(kind: str) -> Found:
    return Counter((key, max(numbers)) for key, numbers in _groups(kind))


def taken_latest(rows: list[dict[str, Any]]) -> Found:
    return Counter((row["k"], int(row["text"])) for row in rows)


def pairs(fits: Callable[[dict[str, Any], dict[str, Any]], int]) -> Found:
    found: Found = Counter()
    for rows in BY_KEY.values():
        for one in rows:
            for two in rows:
                if times := fits(one, two):
                    found[one["n"], two["n"]] += times
    return found


def session_pairs() -> Found:
    return Counter(
        (one, two) for _, numbers in _groups("sessions") for one in numbers for two in numbers
    )


def taken_pairs(rows: list[dict[str, Any]]) -> Found:
    return Counter((int(row["text"]), int(row["text2"])) for row in rows)


def by_text(stream: Any, window: Any) -> Any:
    return stream.key_by("text").window(window).aggregate(c=ps.count(), s=ps.sum("n"))


def numbers_of_windows(each: Callable[[dict[str, Any]], list[int]]) -> Found:
    return Counter((row["n"], row["n"], 1) for row in DATA for _ in each(row))


def taken_numbers(rows: list[dict[str, Any]]) -> Found:
    return Counter((int(row["text"]), row["s"], row["c"]) for row in rows)


def joined(left: Any, right: Any, **options: Any) -> Any:
    return left.join(right.rename(n="n2", text="text2", ts="ts2"), on="k", **options)


def near(one: dict[str, Any], two: dict[str, Any]) -> int:
    return int(abs(one["ts"] - two["ts"]) <= 5 * MINUTE_MS)


Shape = tuple[Callable[..., Any], Callable[[], Found], Callable[[list[dict[str, Any]]], Found]]
SHAPES: dict[str, Shape] = {
    "running count": (
        lambda s: s.key_by("text").aggregate(c=ps.count(), s=ps.sum("n")),
        lambda: numbers_of_windows(_ends_of),
        taken_numbers,
    ),
    "count in tumbling windows": (
        lambda s: by_text(s, TUMBLING),
        lambda: numbers_of_windows(_ends_of),
        taken_numbers,
    ),
    "count in sliding windows": (
        lambda s: by_text(s, SLIDING),
        lambda: numbers_of_windows(_both_ends_of),
        taken_numbers,
    ),
    "count in sessions": (
        lambda s: by_text(s, SESSION),
        lambda: numbers_of_windows(_ends_of),
        taken_numbers,
    ),
    "reduce": (
        lambda s: (
            s.key_by("k").window(TUMBLING).reduce(lambda one, two: one if one.n > two.n else two)
        ),
        lambda: latest("tumbling"),
        taken_latest,
    ),
    "different values": (
        lambda s: s.key_by("k").window(SLIDING).aggregate(c=ps.count_distinct("text")),
        lambda: sizes("sliding"),
        taken_sizes,
    ),
    "interval join": (
        lambda a, b: joined(a, b, within=("-5 min", "5 min")),
        lambda: pairs(near),
        taken_pairs,
    ),
    "join in tumbling windows": (
        lambda a, b: joined(a, b, window=TUMBLING),
        lambda: pairs(lambda one, two: int(_ends_of(one) == _ends_of(two))),
        taken_pairs,
    ),
    "join in sliding windows": (
        lambda a, b: joined(a, b, window=SLIDING, how="full"),
        lambda: pairs(lambda one, two: len({*_both_ends_of(one)} & {*_both_ends_of(two)})),
        taken_pairs,
    ),
    "join in sessions": (lambda a, b: joined(a, b, window=SESSION), session_pairs, taken_pairs),
    "process": (
        lambda s: s.key_by("k").process(KeepsAll(), schema=LISTS),
        lambda: lists("all"),
        taken_lists,
    ),
    "connect": (
        lambda a, b: a.key_by("k").connect(b.key_by("k")).process(KeepsBoth(), schema=LISTS),
        lambda: Counter((key, *sorted(numbers * 2)) for key, numbers in _groups("all")),
        taken_lists,
    ),
    "connect with a broadcast": (
        lambda a, b: (
            a.key_by("k")
            .connect(b.broadcast(load_first=False))
            .process(KeepsBesideBroadcast(), schema=LISTS)
        ),
        lambda: lists("all"),
        taken_lists,
    ),
}
for _name, _window in (
    ("tumbling", TUMBLING),
    ("sliding", SLIDING),
    ("sessions", SESSION),
    ("counts", COUNTS),
):

    def _listed(stream: Any, window: Any = _window) -> Any:
        return stream.key_by("k").window(window).aggregate(texts=ps.collect_list("text"))

    def _handed(stream: Any, window: Any = _window) -> Any:
        return stream.key_by("k").window(window).process(Texts(), schema=LISTS)

    def _wanted(kind: str = _name) -> Found:
        return lists(kind)

    SHAPES[f"lists in {_name}"] = (lambda s, f=_listed: f(s), _wanted, taken_lists)
    SHAPES[f"functions of {_name}"] = (lambda s, f=_handed: f(s), _wanted, taken_lists)


def push(running: Any, inputs: int, start: int, stop: int) -> None:
    for at in range(start, stop, 300):
        for number in range(inputs):
            running.push_many(TABLE.slice(at, 300), "ts", input=number)
        running.advance("10ms")  # the size of what is kept in memory is looked at now and then


def opened(shape: str, backend: str, mode: str, **options: Any) -> Any:
    chain = SHAPES[shape][0]
    config = {"execution.runtime-mode": mode, "taskmanager.memory.managed.size": MEMORY}
    inputs = 2 if shape.startswith(("connect", "join", "interval")) else 1
    return HARNESS(
        chain, schema=SCHEMA, inputs=inputs, backend=backend, config=config, **options
    ), inputs


@pytest.mark.parametrize("mode", ["batch", "streaming"])
@pytest.mark.parametrize("shape", SHAPES)
def test_in_rocksdb_more_than_memory_gives_the_right_answer(shape: str, mode: str) -> None:
    """In streaming mode it goes on from a snapshot in between."""
    _, wanted, taken = SHAPES[shape]
    running, inputs = opened(shape, "rocksdb", mode)
    found: list[dict[str, Any]] = []
    with running:
        push(running, inputs, 0, ROWS // 2)
        if mode == "batch":
            push(running, inputs, ROWS // 2, ROWS)
            running.end()
        found += running.take()
        snapshot = running.snapshot() if mode == "streaming" else None
    if snapshot is not None:
        running, inputs = opened(shape, "rocksdb", mode, restore=snapshot)
        with running:
            push(running, inputs, ROWS // 2, ROWS)
            running.end()
            found += running.take()
    assert taken(found) == wanted()


ADDED_UP_BEFORE = {"count in tumbling windows", "count in sliding windows"}
"""Held in front of the exchange, up to 16 MB, which is as much as there is; ``test_batch_mode_time`` has more."""


@pytest.mark.parametrize("shape", sorted(SHAPES.keys() - ADDED_UP_BEFORE))
def test_in_memory_more_than_memory_is_refused_with_operator_and_remedy(shape: str) -> None:
    running, inputs = opened(shape, "hashmap", "batch")

    def whole() -> None:
        push(running, inputs, 0, ROWS)
        running.end()

    with running, pytest.raises(ps.JobFailed) as failed:
        whole()
    message = str(failed.value)
    assert "the largest is " in message
    for part in ("taskmanager.memory.managed.size", "state.backend.type: rocksdb"):
        assert part in message
