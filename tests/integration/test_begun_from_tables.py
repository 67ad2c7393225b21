"""Aim: a job that begins with state and positions which no job has written goes on exactly.

Method: what plain Python makes of the first rows of each split becomes a savepoint, by the job's own declaration; the job
reads the rest. What it writes is what plain Python makes of all rows. Every row has its key in one split, so that the order
in which a key's rows come is known.
"""

from __future__ import annotations

import decimal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typing_extensions import override

import penstock as ps
from tests.integration.conftest import NewEnvironment
from tests.support.jobs import DEADLINE_S

pytestmark = pytest.mark.integration

ROWS, HISTORY = 600, 400
SLICE_MS, SIZE_MS, GAP_MS = 10_000, 20_000, 5_000
SCHEMA = pa.schema(
    [
        ("k", pa.int64()),
        ("n", pa.int64()),
        ("text", pa.string()),
        ("price", pa.decimal128(10, 2)),
        ("ts", pa.timestamp("ms", "UTC")),
    ]
)


def row(n: int) -> dict[str, Any]:
    price = (decimal.Decimal(n) / 4).quantize(decimal.Decimal("0.01"))
    return {"k": n % 10, "n": n, "text": f"t{n % 3}", "price": price, "ts": n * 100}


class Numbers(ps.Source):
    """Even numbers in one split, odd ones in another."""

    bounded = True

    @property
    @override
    def schema(self) -> pa.Schema:
        return SCHEMA

    @override
    def discover(self, ctx: ps.SourceContext) -> list[ps.Split]:
        return [ps.Split(f"half-{index}", bytes([index])) for index in range(2)]

    @override
    def open(self, split: ps.Split, position: bytes | None) -> ps.Reader:
        return HalfReader(split.payload[0], int(position or b"0"))


class HalfReader(ps.Reader):
    def __init__(self, index: int, done: int) -> None:
        self._index, self._done = index, done

    @override
    def read(self, max_rows: int) -> Any:
        numbers = range(self._index, ROWS, 2)[self._done : self._done + 7]
        self._done += len(numbers)
        return pa.RecordBatch.from_pylist([row(n) for n in numbers], SCHEMA) if numbers else ps.END

    @override
    def position(self) -> bytes:
        return str(self._done).encode()


class Keeps(ps.KeyedProcessFunction):
    plain = ps.ValueState("plain")
    items = ps.ListState("items", pa.int64())
    by_text = ps.MapState("by_text", pa.string(), pa.int64(), ttl=ps.Ttl("1000d"))

    @override
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        seen = self.plain.value() or {"count": 0, "pair": (0, None)}
        self.plain.update({"count": seen["count"] + 1, "pair": (row.n, seen["pair"][0])})
        self.items.add(row.n)
        self.by_text.put(row.text, row.n)
        ctx.timers.event_time(10**9)

    @override
    def on_timer(self, time: int, ctx: Any, out: Any) -> None:
        value = self.plain.value()
        assert isinstance(value["pair"], tuple)
        kept = [value["count"], *value["pair"], sum(self.items.get()), sorted(self.by_text.items())]
        out.emit(k=ctx.key, said=str(kept))


RUNNING = {
    "c": ps.count(),
    "first": ps.first("n"),
    "last": ps.last("n"),
    "listed": ps.collect_list("n"),
    "texts": ps.count_distinct("text"),
    "low": ps.min("text"),
    "total": ps.sum("price"),
    "mean": ps.mean("n"),
    "high": ps.max("n"),
}


def build(env: ps.Environment, output: Path) -> None:
    rows = env.source(Numbers()).uid("numbers").with_event_time("ts", out_of_orderness="0s")
    keyed = rows.uid("time").key_by("k")
    sinks = {
        "running": keyed.aggregate(**RUNNING).uid("running"),
        "sliding": keyed.window(ps.sliding(f"{SIZE_MS}ms", f"{SLICE_MS}ms"))
        .aggregate(s=ps.sum("n"), c=ps.count())
        .uid("sliding"),
        "sessions": keyed.window(ps.session(f"{GAP_MS}ms"))
        .aggregate(s=ps.sum("n"))
        .uid("sessions"),
        "keeps": keyed.process(Keeps(), schema={"k": "int64", "said": "string"}).uid("keeps"),
    }
    for name, stream in sinks.items():
        stream.write_parquet(output / name).uid(f"{name}-files")


def by_key(count: int) -> dict[int, list[dict[str, Any]]]:
    found = defaultdict(list)
    for n in range(count):
        found[n % 10].append(row(n))
    return found


def places_of(count: int, first: int | None) -> dict[str, Any]:
    if first is None:
        return {}
    places = list(range(first, first + count))
    return {
        "first_sequence": places[0],
        "last_sequence": places[-1],
        "listed_sequence": places,
    }


def history(first_place: int | None = None) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """What the operators have kept of the first rows, which came at places from one on, or at none that is told."""
    states: dict[str, dict[str, list[dict[str, Any]]]] = {
        "running": {"running": []},
        "sliding": {"slices": []},
        "sessions": {"sessions": []},
        "keeps": {"plain": [], "items": [], "by_text": [], "timers.event": []},
    }
    for k, rows in by_key(HISTORY).items():
        numbers = [one["n"] for one in rows]
        states["running"]["running"].append(
            {
                "k": k,
                "c": len(rows),
                "first": numbers[0],
                "last": numbers[-1],
                "listed": numbers,
                "texts": sorted({one["text"] for one in rows}),
                "low": min(one["text"] for one in rows),
                "total": sum(one["price"] for one in rows),
                "mean_sum": float(sum(numbers)),
                "mean_count": len(rows),
                "high": numbers[-1],
                **places_of(len(rows), first_place),
            }
        )
        slices = defaultdict(list)
        for one in rows:
            slices[one["ts"] // SLICE_MS * SLICE_MS].append(one["n"])
        states["sliding"]["slices"] += [
            {"k": k, "slice_start": start, "s": sum(own), "c": len(own)}
            for start, own in slices.items()
        ]
        states["sessions"]["sessions"].append(
            {
                "k": k,
                "window_start": rows[0]["ts"],
                "window_end": rows[-1]["ts"] + GAP_MS,
                "s": sum(numbers),
            }
        )
        keeps = states["keeps"]
        pair = f'{{"$tuple":[{numbers[-1]},{numbers[-2]}]}}'
        keeps["plain"].append({"k": k, "value": f'{{"count":{len(rows)},"pair":{pair}}}'})
        keeps["items"].append({"k": k, "value": numbers})
        keeps["timers.event"].append({"k": k, "time_ms": 10**9})
        last = {one["text"]: one["n"] for one in rows}
        keeps["by_text"] += [{"k": k, "map_key": text, "value": n} for text, n in last.items()]
    return states


def expected() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {
        "running": set(),
        "sliding": set(),
        "sessions": set(),
        "keeps": set(),
    }
    for k, rows in by_key(ROWS).items():
        numbers = [one["n"] for one in rows]
        total = sum(one["price"] for one in rows)
        mean = sum(numbers) / len(numbers)
        values = [len(rows), numbers[0], numbers[-1], numbers, 3, "t0", total, mean, numbers[-1]]
        found["running"].add(str([k, *values]))
        for start in range(-SLICE_MS, ROWS * 100, SLICE_MS):
            own = [one["n"] for one in rows if start <= one["ts"] < start + SIZE_MS]
            if own:
                found["sliding"].add(str([k, start, sum(own), len(own)]))
        found["sessions"].add(str([k, rows[0]["ts"], rows[-1]["ts"] + GAP_MS, sum(numbers)]))
        by_text = sorted({one["text"]: one["n"] for one in rows}.items())
        said = [len(rows), numbers[-1], numbers[-2], sum(numbers), by_text]
        found["keeps"].add(str([k, str(said)]))
    return found


def written(output: Path) -> dict[str, set[str]]:
    def rows_of(name: str) -> list[dict[str, Any]]:
        files = [path for path in (output / name).glob("*.parquet") if path.name[0] not in "._"]
        return [one for path in files for one in pq.read_table(path).to_pylist()]

    def ms(time: Any) -> int:
        return round(time.timestamp() * 1000)

    newest: dict[int, list[Any]] = {}
    for one in rows_of("running"):
        if one["c"] > newest.get(one["k"], [0, 0])[1]:
            newest[one["k"]] = [one["k"], *(one[name] for name in RUNNING)]
    sliding = rows_of("sliding")
    assert len(sliding) == len({(one["k"], one["window_start"]) for one in sliding})
    return {
        "running": {str(values) for values in newest.values()},
        "sliding": {str([o["k"], ms(o["window_start"]), o["s"], o["c"]]) for o in sliding},
        "sessions": {
            str([o["k"], ms(o["window_start"]), ms(o["window_end"]), o["s"]])
            for o in rows_of("sessions")
        },
        "keeps": {str([o["k"], o["said"]]) for o in rows_of("keeps")},
    }


@pytest.mark.parametrize(
    ("backend", "parallelism", "first_place"), [("hashmap", 2, None), ("rocksdb", 3, 10_000)]
)
def test_history_then_live(
    new_env: NewEnvironment,
    tmp_path: Path,
    backend: str,
    parallelism: int,
    first_place: int | None,
) -> None:
    config = {
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "state.backend.type": backend,
    }
    build(env := new_env(parallelism, config), tmp_path / "out")
    done = str(HISTORY // 2).encode()
    savepoint = ps.write_savepoint(
        tmp_path / "savepoint",
        history(first_place),
        job=env,
        sources={"numbers": {f"half-{index}": done for index in range(2)}},
    )
    assert env.submit("live", from_savepoint=Path(savepoint)).wait(DEADLINE_S).status == "FINISHED"
    assert written(tmp_path / "out") == expected()


class Tells(ps.KeyedProcessFunction):
    nested = ps.ListState("nested", pa.list_(pa.int64()))
    texts = ps.ListState("texts", pa.string())
    plain = ps.ListState("plain")
    pickled = ps.ListState("pickled", codec="pickle")
    by_name = ps.MapState("by_name", pa.string(), pa.struct([("a", pa.int64())]))

    @override
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        lists = [self.nested.get(), self.texts.get(), self.plain.get(), self.pickled.get()]
        out.emit(said=repr([*map(list, lists), sorted(self.by_name.items())]))


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_none_in_lists_and_maps_is_none(
    new_env: NewEnvironment, tmp_path: Path, backend: str
) -> None:
    """Null is what ``add(None)`` and ``put(key, None)`` have left, where values are stored encoded as well."""
    directory = str(tmp_path / "checkpoints")
    config = {"execution.checkpointing.dir": directory, "state.backend.type": backend}
    env = new_env(1, config)
    said = env.from_rows([{"k": 1}]).key_by("k").process(Tells(), schema={"said": str}).uid("tells")
    result = said.collect()
    nested = pa.list_(pa.list_(pa.int64()))
    struct = pa.struct([("a", pa.int64())])

    def of(**columns: tuple[list[Any], pa.DataType]) -> pa.Table:
        return pa.table(
            {"k": [1] * len(next(iter(columns.values()))[0])}
            | {n: pa.array(*c) for n, c in columns.items()}
        )

    tables = {
        "nested": of(value=([[[1], None, []]], nested)),
        "texts": of(value=([["x", None]], pa.list_(pa.string()))),
        "plain": of(value=([["[1]", None, "null"]], pa.list_(pa.string()))),
        "pickled": of(value=([[None]], pa.list_(pa.binary()))),
        "by_name": of(map_key=(["a", "b"], pa.string()), value=([None, {"a": 2}], struct)),
    }
    path = ps.write_savepoint(tmp_path / "begun", {"tells": tables}, job=env)
    env.submit("tells", from_savepoint=path).wait(DEADLINE_S)
    [row] = result.to_pylist()
    assert row["said"] == repr(
        [[[1], None, []], ["x", None], [[1], None, None], [None], [("a", None), ("b", {"a": 2})]]
    )
