"""Aim: a harness restores what a cluster would: all state, whatever its size, at any parallelism.

Method: rows are pushed into every subtask of a number of them, as the harness keeps those with its own keys;
snapshots of all are restored at other parallelisms, once and again, and the results add up to what went in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
import penstock.testing as pt

ROW = pa.schema([("key", pa.int64()), ("n", pa.int64())])
LARGE = 30_000
ROWS = [{"key": n % 10, "n": n} for n in range(70)]


def windows(stream: ps.Stream) -> ps.Stream:
    return (
        stream.key_by("key")
        .window(ps.tumbling("10s"))
        .aggregate(rows=ps.count(), total=ps.sum("n"))
        .uid("windows")
    )


def sliding(stream: ps.Stream) -> ps.Stream:
    return (
        stream.key_by("key")
        .window(ps.sliding("20s", "10s"))
        .aggregate(rows=ps.count(), total=ps.sum("n"))
        .uid("windows")
    )


def sessions(stream: ps.Stream) -> ps.Stream:
    return (
        stream.key_by("key")
        .window(ps.session("10s"))
        .aggregate(rows=ps.count(), total=ps.sum("n"))
        .uid("windows")
    )


def running(stream: ps.Stream) -> ps.Stream:
    return stream.key_by("key").aggregate(rows=ps.count(), total=ps.sum("n")).uid("running")


def collected(stream: ps.Stream) -> ps.Stream:
    lists = stream.key_by("key").window(ps.tumbling("10s"))
    return lists.aggregate(rows=ps.count(), total=ps.sum("n"), all=ps.collect_list("n")).uid("w")


def snapshots(
    build: Any, rows: list[dict[str, int]], parallelism: int, restore: Any, backend: str
) -> list[bytes]:
    found = []
    for subtask in range(parallelism):
        with pt.harness(
            build, schema=ROW, subtask=subtask, parallelism=parallelism, restore=restore,
            backend=backend,
        ) as h:  # fmt: skip
            h.push_many(rows, event_times=[1_000 + row["n"] for row in rows])
            found.append(h.snapshot())
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("build", [windows, sliding, sessions, collected, running])
@pytest.mark.parametrize(
    ("steps", "backend"),
    [
        ((1, 2), "hashmap"),
        ((1, 2), "rocksdb"),
        ((2, 1), "hashmap"),
        ((2, 2), "hashmap"),
        ((2, 3, 1), "rocksdb"),
        ((3, 2, 4), "hashmap"),
    ],
)
def test_rows_that_wait_in_windows_are_found_at_any_parallelism(
    build: Callable[[ps.Stream], ps.Stream], steps: tuple[int, ...], backend: Any
) -> None:
    held: Any = None
    for number, parallelism in enumerate(steps):
        part = ROWS[number * 20 : (number + 1) * 20]
        held = snapshots(build, part, parallelism, held, backend)
    expected = Counter(row["key"] for row in ROWS[: len(steps) * 20])
    totals = Counter[int]()
    for row in ROWS[: len(steps) * 20]:
        totals[row["key"]] += row["n"]
    for last in (1, steps[-1], 5):
        found = []
        for subtask in range(last):
            with pt.harness(
                build, schema=ROW, subtask=subtask, parallelism=last, restore=held, backend=backend
            ) as h:
                if build is running:
                    h.push_many([{"key": key, "n": 0} for key in range(10)])
                    found += [(row["key"], row["rows"] - 1, row["total"]) for row in h.take()]
                else:
                    h.end()
                    first: dict[int, Any] = {}
                    for row in h.take():
                        first.setdefault(row["key"], row)
                    rows = list(first.values())
                    found += [(row["key"], row["rows"], row["total"]) for row in rows]
        assert sorted(found) == [(key, expected[key], totals[key]) for key in sorted(expected)]


def items_of(redistribute: str) -> ps.ProcessFunction:
    class Items(ps.ProcessFunction):
        items = ps.OperatorListState("items", pa.string(), redistribute=redistribute)

        def process(self, row: Any, ctx: Any, out: Any) -> None:
            self.items.add(f"{row.n}:" + "x" * LARGE)

    return Items()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
@pytest.mark.parametrize("parallelism", [1, 2, 3])
@pytest.mark.parametrize("redistribute", ["split", "union"])
def test_large_operator_lists_are_restored(
    redistribute: str, parallelism: int, backend: Any
) -> None:
    held = []
    for subtask in range(2):
        with pt.harness(
            items_of(redistribute), schema=ROW, output_schema=ROW,
            subtask=subtask, parallelism=2, backend=backend,
        ) as h:  # fmt: skip
            h.push_many([{"n": 10 * subtask + n} for n in range(3)])
            held.append(h.snapshot())
    names = []
    for subtask in range(parallelism):
        with pt.harness(
            items_of(redistribute), schema=ROW, output_schema=ROW,
            subtask=subtask, parallelism=parallelism, restore=held, backend=backend,
        ) as h:  # fmt: skip
            names.append([int(item.split(":")[0]) for item in h.state("items")])
    everything = [0, 1, 2, 10, 11, 12]
    if redistribute == "union":
        assert names == [everything] * parallelism
    else:
        assert sorted(name for own in names for name in own) == everything
        assert max(map(len, names)) - min(map(len, names)) <= 1


class Enrich(ps.BroadcastProcessFunction):
    names = ps.BroadcastState("names", pa.int64(), pa.string())

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        out.emit(key=row.key, n=len(self.names.get(row.n) or ""))

    def process_broadcast(self, row: Any, ctx: Any, out: Any) -> None:
        self.names.put(row.key, "x" * LARGE)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("parallelism", [1, 3])
def test_large_broadcast_state_is_restored(parallelism: int) -> None:
    with pt.harness(Enrich(), schema=ROW, output_schema=ROW) as h:
        h.push_many([{"key": key} for key in range(3)], input=1)
        held = h.snapshot()
    for subtask in range(parallelism):
        with pt.harness(
            Enrich(), schema=ROW, output_schema=ROW, restore=held,
            subtask=subtask, parallelism=parallelism,
        ) as h:  # fmt: skip
            assert len(h.state("names")) == 3
            h.push({"key": 1, "n": 2})
            assert h.take() == [{"key": 1, "n": LARGE}]


def enriching(value_type: Any) -> ps.BroadcastProcessFunction:
    """A function whose broadcast state has values of a type."""

    class Kept(ps.BroadcastProcessFunction):
        names = ps.BroadcastState("names", pa.int64(), value_type)

        def process(self, row: Any, ctx: Any, out: Any) -> None:
            """Nothing."""

        def process_broadcast(self, row: Any, ctx: Any, out: Any) -> None:
            self.names.put(row.key, {"n": row.n})

    return Kept()


def test_broadcast_state_migrates_to_what_is_declared() -> None:
    stored = pa.struct([("n", pa.int32())])
    with pt.harness(enriching(stored), schema=ROW, output_schema=ROW) as h:
        h.push_many([{"key": 1, "n": 7}], input=1)
        held = h.snapshot()
    declared = pa.struct(
        [ps.field("number", pa.int64(), alias="n"), ps.field("seen", pa.int64(), default=3)]
    )
    with pt.harness(enriching(declared), schema=ROW, output_schema=ROW, restore=held) as h:
        assert h.state("names") == {1: {"number": 7, "seen": 3}}
        again = h.snapshot()
    with pt.harness(enriching(declared), schema=ROW, output_schema=ROW, restore=again) as h:
        assert h.state("names") == {1: {"number": 7, "seen": 3}}
    other = pa.struct([("n", pa.string())])
    with (
        pytest.raises(Exception, match=r"'names' was stored as .* and is declared as"),
        pt.harness(enriching(other), schema=ROW, output_schema=ROW, restore=held),
    ):
        pass


def counting(*names: str) -> ps.KeyedProcessFunction:
    """A function that counts rows of each key in states of these names."""

    class Counts(ps.KeyedProcessFunction):
        def process(self, row: Any, ctx: Any, out: Any) -> None:
            for name in names:
                state = getattr(self, name)
                state.update((state.value() or 0) + 1)
                out.emit(key=row.key, n=state.value())

    for name in names:
        setattr(Counts, name, ps.ValueState(name, pa.int64()))
    return Counts()


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_a_state_that_was_not_declared_for_a_while_goes_on_from_what_it_held(backend: Any) -> None:
    held, counts = None, []
    for names in (("a", "b"), ("b",), ("a", "b")):
        with pt.harness(
            counting(*names), schema=ROW, keys="key", output_schema=ROW, restore=held,
            backend=backend,
        ) as h:  # fmt: skip
            h.push({"key": 1, "n": 0})
            counts.append([row["n"] for row in h.take()])
            held = h.snapshot()
    assert counts == [[1, 1], [2], [2, 3]]
