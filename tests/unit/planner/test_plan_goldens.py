"""Aim: plans stay as they are. Method: the readable plan of typical jobs is compared with a stored text.

To accept a change, run ``PENSTOCK_REWRITE_GOLDENS=1 pytest tests/unit/planner`` and read the diff.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock import col
from penstock.graph.job_graph import validate
from penstock.pb import graph_pb2

GOLDENS = Path(__file__).parent / "goldens"

BIDS = pa.schema(
    [
        ("auction", pa.int64()),
        ("bidder", pa.int64()),
        ("price", pa.int64()),
        ("ts", pa.int64()),
        ("extra", pa.string()),
    ]
)


def bids(env: ps.Environment) -> ps.Stream:
    return env.generate(no_rows, rows=1000, schema=BIDS)


def no_rows(start: int, count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=BIDS)


def hot_items(env: ps.Environment) -> None:
    (
        bids(env)
        .with_event_time("ts", out_of_orderness="5s", idle_timeout="30s")
        .filter(col("price") > 100)
        .with_columns(euro=col("price") * 0.908)
        .key_by("auction")
        .window(ps.tumbling("10s"))
        .aggregate(bids=ps.count(), total=ps.sum("euro"), best=ps.max("euro"))
        .uid("hot-auctions")
        .discard()
    )


def late_rows(env: ps.Environment) -> None:
    counts = (
        bids(env)
        .on_error("broken")
        .with_event_time("ts")
        .key_by("auction", "bidder")
        .window(ps.sliding("1 min", "10s"), allowed_lateness="5s", late_to="late")
        .aggregate(n=ps.count(), sum=ps.sum(col("price") * 2), names=ps.collect_list("extra"))
    )
    counts.discard().name("counts")
    counts.side_output("late").select("auction", "ts").print()


def no_pre_aggregation(env: ps.Environment) -> None:
    bids(env).key_by("auction").aggregate(names=ps.collect_list("bidder")).print()


def running_aggregate(env: ps.Environment) -> None:
    bids(env).key_by("auction").aggregate(n=ps.count(), last=ps.max("ts")).print()


def union_into_keyed(env: ps.Environment) -> None:
    cheap = bids(env).filter(col("price") < 10).select("auction", "price")
    dear = bids(env).filter(col("price") > 1000).select("price", "auction")
    cheap.union(dear).key_by("auction").aggregate(total=ps.sum("price")).discard()


def two_readers_of_a_union(env: ps.Environment) -> None:
    both = bids(env).union(bids(env))
    both.select("auction").discard()
    both.select("price").filter(col("price") > 3).print()


def unkeyed_window(env: ps.Environment) -> None:
    top = (
        bids(env).with_event_time("ts").window(ps.tumbling("1 min")).aggregate(top=ps.max("price"))
    )
    top.key_by("top").window(ps.tumbling("1h")).aggregate(n=ps.count()).discard()


def routing(env: ps.Environment) -> None:
    stream = bids(env).select("auction")
    stream.rebalance().filter(col("auction") > 1).discard().name("rebalanced")
    stream.broadcast().filter(col("auction") > 2).discard().name("broadcast")
    stream.rescale().select("auction").parallelism(4).discard().parallelism(4).name("rescaled")
    stream.select("auction").slot_group("other").discard().name("in another slot")
    stream.print().parallelism(1)


def tree(env: ps.Environment) -> None:
    stream = bids(env).filter(col("price") > 100)
    stream.select("auction", "price").discard()
    stream.select("extra").print()


def kept_exchanges(env: ps.Environment) -> None:
    totals = (
        bids(env)
        .filter(col("price") > 100)
        .exchange("caching")
        .key_by("auction")
        .aggregate(total=ps.sum("price"))
        .uid("totals")
    )
    totals.exchange("blocking").as_rows().key_by("total").aggregate(n=ps.count()).uid("n").discard()
    doubled = bids(env).map(twice, schema={"auction": "int64"}).colocate("pair")
    doubled.exchange("caching-memory").print().colocate("pair")


def twice(row: Any) -> dict[str, int]:
    return {"auction": row.auction * 2}


JOBS: dict[str, Callable[[ps.Environment], None]] = {
    job.__name__: job
    for job in (
        hot_items,
        late_rows,
        no_pre_aggregation,
        running_aggregate,
        union_into_keyed,
        two_readers_of_a_union,
        unkeyed_window,
        routing,
        tree,
        kept_exchanges,
    )
}


def planned(job: Callable[[ps.Environment], None], **config: object) -> graph_pb2.JobGraph:
    env = ps.Environment(parallelism=2, config=config)
    job(env)
    return env.plan(job.__name__).graph


@pytest.mark.parametrize("name", JOBS)
def test_plan_is_as_stored(name: str) -> None:
    env = ps.Environment(parallelism=2)
    JOBS[name](env)
    text = str(env.plan(name)).replace(f"{__name__}.", "") + "\n"
    golden = GOLDENS / f"{name}.txt"
    if os.environ.get("PENSTOCK_REWRITE_GOLDENS"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("name", JOBS)
def test_plans_are_deterministic_and_valid(name: str) -> None:
    first, second = planned(JOBS[name]), planned(JOBS[name])
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(
        deterministic=True
    )
    validate(first)


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize(
    "option", ["pipeline.operator-chaining.enabled", "execution.pre-aggregation"]
)
def test_plans_are_valid_with_options_off(name: str, option: str) -> None:
    validate(planned(JOBS[name], **{option: False}))


def test_plan_dict_is_json_with_stable_fields() -> None:
    env = ps.Environment(parallelism=2)
    hot_items(env)
    plan = env.plan("hot-items").to_dict()
    assert json.loads(json.dumps(plan)) == plan
    assert list(plan) == [
        "name",
        "vertices",
        "edges",
        "artifacts",
        "config",
        "requirements",
        "python_version",
        "cloudpickle_version",
    ]
    assert plan["config"] == {"parallelism.default": "2"}
    edge = plan["edges"][0]
    assert (edge["partitioning"], edge["keys"], edge["type"]) == ("hash", ["auction"], "pipelined")
    assert [column["name"] for column in edge["columns"]] == ["auction", "euro", "__event_time"]


def test_chaining_off_puts_every_operator_of_the_user_into_its_own_vertex() -> None:
    graph = planned(tree, **{"pipeline.operator-chaining.enabled": False})
    assert [vertex.name for vertex in graph.vertices] == [
        "generate",
        "filter -> (narrow, narrow)",
        "select",
        "discard",
        "select",
        "print",
    ]
