"""Aim: a type that cannot run is refused when the graph is built, wherever a column of it is used.

Method: every kind of use with every odd Arrow type, and the types that people have; what is not refused runs, over a
checkpoint and a restore, on both backends.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from typing_extensions import override

import penstock as ps
import penstock.testing as pt
from penstock import col
from penstock.connectors.inference import plain_type
from penstock.errors import JobRejected, StreamError

pytestmark = pytest.mark.sampled(9)


def ree(kind: pa.DataType, values: list[Any]) -> pa.Array:
    return pc.run_end_encode(pa.array(values, kind))


def extension(kind: Any, values: list[Any]) -> pa.Array:
    return pa.ExtensionArray.from_storage(kind, pa.array(values, kind.storage_type))


REFUSED: dict[str, pa.Array] = {
    "string_view": pa.array(["a", "b"], pa.string_view()),
    "binary_view": pa.array([b"a", b"b"], pa.binary_view()),
    "run ends of text": ree(pa.string(), ["a", "b"]),
    "run ends of numbers": ree(pa.int64(), [1, 2]),
    "list of views": pa.array([["a"], ["b"]], pa.list_(pa.string_view())),
    "struct of views": pa.array([{"x": "a"}, {"x": "b"}], pa.struct([("x", pa.string_view())])),
    "map to views": pa.array([[("a", "b")], []], pa.map_(pa.string(), pa.string_view())),
    "struct of run ends": pa.StructArray.from_arrays([ree(pa.int64(), [1, 2])], names=["x"]),
    "union": pa.UnionArray.from_sparse(
        pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["a", "b"])]
    ),
    "json": extension(pa.json_(), ["1", "2"]),
    "list_view": pa.array([[1], [2]], pa.list_view(pa.int64())),
    "bool8": extension(pa.bool8(), [1, 0]),
    "tensor": extension(pa.fixed_shape_tensor(pa.int32(), [2]), [[1, 2], [3, 4]]),
}
RUNS: dict[str, pa.Array] = {
    "uuid": extension(pa.uuid(), [b"0" * 16, b"1" * 16]),
    "interval": pa.array([(1, 2, 3), (1, 2, 4)], pa.month_day_nano_interval()),
    "float16": pa.array([1.5, 2.5]).cast(pa.float16()),
    "decimal": pa.array([Decimal(1), Decimal(2)], pa.decimal256(50, 2)),
    "duration": pa.array([dt.timedelta(1), dt.timedelta(2)], pa.duration("ms")),
    "dictionary": pa.array(["a", "b"]).dictionary_encode(),
    "list of dictionary": pa.ListArray.from_arrays(
        pa.array([0, 1, 2], pa.int32()), pa.array(["a", "b"]).dictionary_encode()
    ),
    "null": pa.nulls(2),
}


class Pass(ps.ProcessFunction):
    @override
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        out.emit(row)


class Counts(ps.KeyedProcessFunction):
    count = ps.ValueState("count", pa.int64())

    @override
    def process(self, row: Any, ctx: Any, out: Any) -> None:
        self.count.update((self.count.value() or 0) + 1)
        ctx.timers.event_time(5)

    @override
    def on_timer(self, timestamp: int, ctx: Any, out: Any) -> None:
        """Timers of such keys fire."""


class Rows(ps.WindowFunction):
    @override
    def process(self, key: Any, window: Any, rows: Any, out: Any) -> Any:
        return list(rows)


def holder(kind: str, of: pa.DataType) -> ps.KeyedProcessFunction:
    declare: dict[str, Callable[[], Any]] = {
        "value": lambda: ps.ValueState("held", of),
        "list": lambda: ps.ListState("held", of),
        "keys": lambda: ps.MapState("held", of, pa.int64()),
        "values": lambda: ps.MapState("held", pa.int64(), of),
    }

    class Holds(ps.KeyedProcessFunction):
        held = declare[kind]()

        @override
        def process(self, row: Any, ctx: Any, out: Any) -> None:
            if kind == "value":
                self.held.update(row.v)
            elif kind == "list":
                self.held.add(row.v)
            elif kind == "keys":
                self.held.put(row.v, 1)
            else:
                self.held.put(1, row.v)

    return Holds()


NONE = {"n": "int64"}
WINDOW = ps.tumbling("1s")
Use = Callable[[Any], Any]


def aggregates(name: str) -> dict[str, Use]:
    def of(group: Use) -> Use:
        return lambda s: group(s.key_by("i")).aggregate(x=getattr(ps, name)("v"))

    return {
        f"running {name}": of(lambda s: s),
        f"windowed {name}": of(lambda s: s.window(WINDOW)),
        f"sessions' {name}": of(lambda s: s.window(ps.session("1s"))),
        f"counted {name}": of(lambda s: s.window(ps.count_window(1))),
    }


def held(kind: str) -> Use:
    def build(stream: Any) -> Any:
        function = holder(kind, stream.schema.field("v").type)
        return stream.key_by("i").process(function, schema=NONE)

    return build


def uses(tmp_path: Path) -> dict[str, Use]:
    found: dict[str, Use] = {
        "key": lambda s: s.key_by("v").aggregate(n=ps.count()),
        "window key": lambda s: s.key_by("v").window(WINDOW).aggregate(n=ps.count_distinct("i")),
        "session key": lambda s: s.key_by("v").window(ps.session("1s")).reduce(lambda a, _: a),
        "state key": lambda s: s.key_by("i", "v").process(Counts(), schema=NONE),
        "window join key": lambda s: s.join(s.filter(col("i") > 0), on="v", window=WINDOW),
        "interval join key": lambda s: s.join(s, on="v", within=("-1s", "1s")),
        "joined column": lambda s: s.join(
            s.filter(col("i") > 0), on="i", window=WINDOW, how="full"
        ),
        "column joined by time": lambda s: s.join(s, on="i", within=("-1s", "1s")),
        "window column": lambda s: s.key_by("i").window(WINDOW).process(Rows(), schema=s.schema),
        "session column": lambda s: s.key_by("i").window(ps.session("1s")).reduce(lambda a, _: a),
        "counted column": lambda s: s.key_by("i").window(ps.count_window(1)).reduce(lambda a, _: a),
        "event time": lambda s: s.with_event_time("v"),
        "map": lambda s: s.map(lambda r: r, schema=s.schema),
        "filter": lambda s: s.filter(lambda r: r.v is not None),
        "process": lambda s: s.process(Pass(), schema=s.schema),
        "print": lambda s: s.print(),
        "parquet": lambda s: s.write_parquet(str(tmp_path / "parquet")),
        "partitions": lambda s: s.write_parquet(str(tmp_path / "parts"), partition_by=["v"]),
        "csv": lambda s: s.write_csv(str(tmp_path / "csv")),
        "json": lambda s: s.write_json(str(tmp_path / "json")),
    }
    for kind in ("value", "list", "keys", "values"):
        found[f"{kind} state"] = held(kind)
    for name in (
        "count",
        "sum",
        "min",
        "max",
        "mean",
        "first",
        "last",
        "count_distinct",
        "collect_list",
    ):
        found.update(aggregates(name))
    return found


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
@pytest.mark.parametrize("name", RUNS)
def test_what_is_not_refused_runs(name: str, backend: Any, tmp_path: Path) -> None:
    schema = pa.schema([("i", pa.int64()), ("v", RUNS[name].type)])
    rows = pa.RecordBatch.from_arrays([pa.array([1, 2]), RUNS[name]], schema=schema)
    ran = []
    place = list(RUNS).index(name)
    for number, (use, build) in enumerate(uses(tmp_path).items()):
        # A database for each use of each type would take minutes: each use meets two types, each type all kinds.
        if backend == "rocksdb" and (number + place) % 4:
            continue
        try:
            h = pt.harness(build, schema=schema, backend=backend)
        except StreamError:
            continue
        try:
            with h:
                h.push_many(rows, [1, 2])
                snapshot = h.snapshot()
                h.end()
            with pt.harness(build, schema=schema, backend=backend, restore=snapshot) as again:
                again.end()
        except Exception as error:
            raise AssertionError(f"{use} of {name}") from error
        ran.append(use)
    assert len(ran) > 5
    assert backend == "rocksdb" or {"filter", "map", "process", "window column"} <= set(ran)


@pytest.mark.parametrize("name", REFUSED)
def test_a_type_that_cannot_run_is_refused_wherever_it_comes_from(name: str) -> None:
    env = ps.Environment()
    kind = REFUSED[name].type
    table = pa.table({"i": pa.array([1, 2]), "v": REFUSED[name]})
    refused = r"column 'v' is .*, which the rows of a stream cannot have: (make|decode|give)"
    if plain_type(kind) == kind:  # sources give encoded columns out as plain ones
        with pytest.raises(JobRejected, match=rf"from_arrow: {refused}"):
            env.from_arrow(table)
        with pytest.raises(JobRejected, match=refused):
            env.generate(lambda start, count: table.to_batches()[0], rows=1, schema=table.schema)
    plain = env.from_rows([{"i": 1}])
    with pytest.raises(JobRejected, match=rf"map: {refused}"):
        plain.map(lambda row: row, schema=table.schema)
    with pytest.raises(JobRejected, match=refused):
        plain.process(Pass(), schema={"v": kind})
    with pytest.raises(StreamError, match="cannot"):
        plain.with_columns(v=ps.lit(None).cast(kind))


def test_functions_are_tried_on_decoded_columns() -> None:
    env = ps.Environment()
    for name in ("string_view", "run ends of text"):
        rows = env.from_arrow(pa.table({"v": REFUSED[name]}))
        assert rows.map(lambda row: {"w": row.v}).schema.field("w").type == pa.string()


def test_a_view_is_cast_in_front() -> None:
    env = ps.Environment()
    table = pa.table({"v": REFUSED["string_view"]}).cast(pa.schema([("v", pa.string())]))
    env.from_arrow(table).key_by("v").aggregate(n=ps.count()).discard()
    env.plan()


@pytest.mark.parametrize(
    "kind", [pa.float16(), pa.float32(), pa.float64(), pa.decimal128(10, 2), pa.decimal256(40, 0)]
)
def test_event_time_of_numbers_that_are_no_integers_is_refused(kind: pa.DataType) -> None:
    env = ps.Environment()
    rows = env.from_rows([], schema=pa.schema([("t", kind)]))
    with pytest.raises(JobRejected, match=r"event time is an integer .*\.cast\('int64'\)"):
        rows.with_event_time("t")
    if kind != pa.float16():
        rows.with_columns(t=col("t").cast("int64")).with_event_time("t").discard()


@pytest.mark.parametrize(
    ("column", "form", "word"),
    [("interval", "parquet", "Parquet"), ("interval", "csv", "CSV"), ("uuid", "csv", "CSV")],
)
def test_files_that_cannot_hold_a_column_are_refused(column: str, form: str, word: str) -> None:
    stream = ps.Environment().from_arrow(pa.table({"i": [1, 2], "v": RUNS[column]}))
    with pytest.raises(JobRejected, match=f'column "v" is .*, which {word} cannot hold'):
        getattr(stream, f"write_{form}")("/tmp/x")


@pytest.mark.parametrize("kind", [pa.decimal128(5, -2), pa.struct([]), pa.binary(0)])
def test_a_column_that_parquet_has_no_type_for_is_refused_when_it_is_built(
    kind: pa.DataType,
) -> None:
    """It was an error of the disk when the first row came."""
    for column in (kind, pa.list_(kind)):
        stream = ps.Environment().from_rows(
            [], schema=pa.schema([("i", pa.int64()), ("v", column)])
        )
        with pytest.raises(JobRejected, match=r'column "v" is .*, which Parquet cannot hold'):
            stream.write_parquet("/tmp/x")
        stream.write_json("/tmp/x")
