"""Aim: what state is written as before any job has run is what operators keep.

Method: the columns that the TaskManager makes for every aggregate of every type are those that its declaration gives;
and the states of a real job, as it has kept them, are those that its graph declares.
"""

from __future__ import annotations

import tarfile
from itertools import product
from pathlib import Path

import pyarrow as pa
import pytest

import penstock as ps
from penstock.aggregates.aggregates import Aggregate
from penstock.aggregates.stored_fields import accumulator_fields
from penstock.pb import graph_pb2
from penstock.rows.schema import schema_to_bytes
from penstock.state_tables.declared_tables import declared_lists, declared_tables
from penstock.state_tables.state_view import StateView
from taskmanager.operators.aggregation import Aggregation
from taskmanager.operators.key_columns import KeyColumns
from tests.support.golden_job import build

GOLDEN = Path(__file__).parents[3] / "golden"
TYPES = [
    pa.int8(),
    pa.int64(),
    pa.uint64(),
    pa.float32(),
    pa.float64(),
    pa.bool_(),
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.decimal128(10, 2),
    pa.date32(),
    pa.timestamp("us", "UTC"),
    pa.duration("ms"),
    pa.dictionary(pa.int32(), pa.string()),
]
FUNCTIONS = [
    "count",
    "sum",
    "min",
    "max",
    "mean",
    "first",
    "last",
    "count_distinct",
    "collect_list",
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_aggregates_are_kept_in_the_columns_that_are_declared(function: str) -> None:
    compared = 0
    for kind, nullable in product(TYPES, (True, False)):
        try:
            output = Aggregate(function, "x").output_type(kind)
        except ps.ExpressionError:
            continue
        schema = pa.schema([("k", pa.string()), pa.field("x", kind, nullable=nullable)])
        results = pa.schema([("k", pa.string()), ("it", output), ("all", pa.int64())])
        aggregates = [Aggregate(function, "x").to_proto("it"), Aggregate("count").to_proto("all")]
        operator = graph_pb2.Operator(
            input_schema=schema_to_bytes(schema),
            output_schema=schema_to_bytes(results),
            running_aggregate=graph_pb2.RunningAggregateSpec(keys=["k"], aggregates=aggregates),
        )
        made = Aggregation(aggregates, operator, KeyColumns(["k"], schema))
        wanted = accumulator_fields(made.kinds, made.layout.slot_uses())
        wanted += [column.state_field() for column in made.new_columns()]
        declared = declared_tables(operator)["running"].schema
        found = [one for one in declared if one.name not in ("__key_group", "__deleted", "key_0")]
        assert [(one.name, one.type) for one in found] == [(one.name, one.type) for one in wanted]
        uses = [one.metadata[b"uses"] for one in found]
        assert uses == [one.metadata[b"uses"] for one in wanted]
        compared += 1
    assert compared


@pytest.mark.parametrize("name", ["hashmap-canonical", "rocksdb-native"])
def test_a_job_keeps_what_its_graph_declares(name: str, tmp_path: Path) -> None:
    with tarfile.open(max(GOLDEN.glob(f"runs-*/{name}.tar.gz"))) as archive:
        archive.extractall(tmp_path / "kept", filter="data")
    state = ps.open_state(tmp_path / "kept")
    build(env := ps.Environment(parallelism=1), tmp_path / "out")
    graph = env.plan().graph
    operators = {one.uid: one for vertex in graph.vertices for one in vertex.operators}
    for uid in ("sums", "distinct", "sessions", "counts", "states"):
        declared = declared_tables(operators[uid])
        for table, view in state.views_of(uid).items():
            assert view.kind == declared[table].kind
            wanted = [(one.name, one.type) for one in declared[table].schema]
            assert [(one.name, one.type) for one in view.stored_schema] == wanted
            codecs = [(one.metadata or {}).get(b"codec") for one in declared[table].schema]
            assert [(one.metadata or {}).get(b"codec") for one in view.stored_schema] == codecs
        assert {*state.views_of(uid)} <= {*declared}


class Lists(ps.KeyedBroadcastProcessFunction):
    dealt = ps.OperatorListState("dealt", pa.int64())
    shared = ps.OperatorListState("shared", "int64", "union")
    rules = ps.BroadcastState("rules", pa.string(), pa.int64())

    def process(self, row: object, ctx: object, out: object) -> None: ...

    def process_broadcast(self, row: object, ctx: object, out: object) -> None: ...


def test_lists_say_who_gets_their_items() -> None:
    env = ps.Environment(parallelism=1)
    rows = env.from_rows([{"k": 1}])
    other = env.from_rows([{"r": 1}]).broadcast()
    rows.key_by("k").connect(other).process(Lists(), schema={"k": "int64"}).uid("it").discard()
    graph = env.plan().graph
    operator = next(one for v in graph.vertices for one in v.operators if one.uid == "it")
    found = declared_lists(operator)
    assert {name: (one.codec, one.redistribution) for name, one in found.items()} == {
        "dealt": ("arrow.int64/1", 0),
        "shared": ("arrow.int64/1", 1),
        "rules": ("arrow.string/1 -> arrow.int64/1", 2),
    }


def test_accumulators_of_one_name_are_refused() -> None:
    """The sum of the mean was lost, and the state was written from the other one."""
    for aggregates in (
        {"m": ps.mean("x"), "m_sum": ps.sum("y")},
        {"m_count": ps.count(), "m": ps.mean("x")},
    ):
        with pytest.raises(ps.JobRejected, match=r"keep a column 'm_(sum|count)'.*another name"):
            ps.accumulators(**aggregates)
    both = ps.accumulators(m=ps.mean("x"), n_sum=ps.sum("y"))
    assert both == {"m_sum": ("sum", "x"), "m_count": ("count", "x"), "n_sum": ("sum", "y")}


@pytest.mark.parametrize(
    "aggregates",
    [
        {"m": ps.mean("x"), "m_sum": ps.sum("y"), "m_count": ps.count()},
        {"m": ps.mean("x"), "m_sum": ps.sum("x"), "m_sum_": ps.max("x")},
        {"f": ps.first("x"), "f_sequence": ps.last("x")},
        {"filled": ps.count("x"), "l": ps.collect_list("y"), "l_sequence": ps.min("y")},
    ],
    ids=["mean", "float", "first", "filled"],
)
def test_what_is_kept_is_read_by_different_names(aggregates: dict[str, ps.Aggregate]) -> None:
    """Two columns of one name were read, and none could be written."""
    env = ps.Environment(parallelism=1)
    rows = env.from_rows([{"k": 1, "x": 1.5, "y": 2}])
    rows.key_by("k").window(ps.count_window(2)).aggregate(**aggregates).uid("it").discard()
    graph = env.plan().graph
    operator = next(one for v in graph.vertices for one in v.operators if one.uid == "it")
    for name, table in declared_tables(operator).items():
        names = StateView(name, table.kind, table.schema, operator).schema.names
        assert len({*names}) == len(names)
        assert {*aggregates} - {"m"} <= {*names}
