"""Aim: every exchange has the type that operator, mode and configuration ask for; what cannot be is refused.

Method: small plans; edges are compared as (producing operator, partitioning, type).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock import col
from penstock.errors import JobRejected
from penstock.graph.exchanges import EXCHANGES, exchange_name, exchange_of
from penstock.graph.job_graph import validate
from penstock.graph.logical import reachable
from penstock.graph.operator_checks import shown_name
from penstock.pb import graph_pb2
from penstock.planner.planner import Planner

NUMBER = {"n": "int64"}


def environment(**config: object) -> ps.Environment:
    return ps.Environment(parallelism=2, config=config)


def bids(env: ps.Environment, events: int | None = 10) -> ps.Stream:
    return env.nexmark(events, columns=["auction", "price"])


def planned(env: ps.Environment) -> graph_pb2.JobGraph:
    """The graph without the user's code, which takes a while to collect."""
    graph = Planner(reachable(env._builder.sinks), env.config).plan()
    validate(graph)
    return graph


def edges(env: ps.Environment) -> list[tuple[str, str, str]]:
    graph = planned(env)
    vertices = {vertex.id: vertex for vertex in graph.vertices}
    return [
        (
            shown_name(vertices[edge.source_vertex].operators[edge.source_output.operator_index]),
            graph_pb2.Partitioning.Name(edge.partitioning).removeprefix("PARTITIONING_").lower(),
            exchange_name(edge.partition_type),
        )
        for edge in graph.edges
    ]


def identity(row: Any) -> Any:
    return row


# ---------------------------------------------------------------- .exchange


@pytest.mark.parametrize("name", EXCHANGES)
def test_it_is_a_property_of_the_operator_in_front(name: str) -> None:
    env = environment()
    keyed = bids(env).filter(col("price") > 1).exchange(name).key_by("auction")
    keyed.aggregate(n=ps.last("price")).rebalance().discard()
    assert edges(env) == [("filter", "hash", name), ("aggregate", "rebalance", "pipelined")]
    assert exchange_name(exchange_of(name)) == name


@pytest.mark.parametrize("name", ["blocking", "caching", "caching-memory"])
def test_kept_rows_break_a_chain(name: str) -> None:
    env = environment()
    bids(env).exchange(name).filter(col("price") > 1).discard()
    assert edges(env) == [("nexmark", "forward", name)]


def test_pipelined_does_not_break_a_chain() -> None:
    env = environment()
    bids(env).exchange("pipelined").filter(col("price") > 1).discard()
    assert edges(env) == []


def test_it_holds_for_every_reader_of_the_main_output_alone() -> None:
    env = environment()
    parsed = bids(env).map(identity, schema=NUMBER).on_error("bad").exchange("caching")
    parsed.key_by("n").aggregate(m=ps.last("n")).discard()
    parsed.discard()
    parsed.side_output("bad").rebalance().discard()
    assert edges(env) == [
        ("map", "hash", "caching"),
        ("map", "forward", "caching"),
        ("map", "rebalance", "pipelined"),
    ]


def test_what_prepares_a_call_is_not_in_the_way() -> None:
    env = environment()
    stream = bids(env).exchange("caching")
    stream.key_by(lambda row: row.auction % 3).aggregate(n=ps.last("price")).discard()
    stream.key_by("auction").aggregate(n=ps.last(col("price") * 2)).discard()
    assert edges(env) == [("key_by", "hash", "caching"), ("with_columns", "hash", "caching")]


def test_routing_in_front_of_a_key_function_is_the_exchange_meant() -> None:
    env = environment()
    keyed = bids(env).exchange("caching").rebalance().key_by(lambda row: row.auction % 3)
    keyed.aggregate(n=ps.last("price")).discard()
    assert edges(env) == [("nexmark", "rebalance", "caching"), ("key_by", "hash", "pipelined")]


def test_event_time_is_a_call_of_its_own() -> None:
    env = environment()
    stream = bids(env).exchange("caching").with_event_time("price")
    stream.key_by("auction").window(ps.tumbling("1s")).aggregate(n=ps.count()).discard()
    assert edges(env)[0] == ("nexmark", "forward", "caching")


def test_of_a_union_it_is_that_of_its_inputs_unless_it_has_its_own() -> None:
    def of(union_exchange: str) -> list[tuple[str, str, str]]:
        env = environment()
        first = bids(env).filter(col("price") > 1).exchange("blocking")
        both = first.union(bids(env))
        if union_exchange:
            both.exchange(union_exchange)
        both.key_by("auction").aggregate(n=ps.last("price")).discard()
        return edges(env)

    assert of("") == [
        ("filter", "forward", "blocking"),
        ("history", "hash", "pipelined"),
        ("nexmark", "hash", "pipelined"),
    ]
    assert of("caching") == [("filter", "hash", "caching"), ("nexmark", "hash", "caching")]


def test_wrong_calls_are_refused() -> None:
    env = environment()
    stream = bids(env)
    with pytest.raises(JobRejected, match=r"'cacheing' is no type of exchange \(did you mean 'ca"):
        stream.exchange("cacheing")
    with pytest.raises(JobRejected, match=r"None is no type of exchange; there are 'pipelined', "):
        stream.exchange(None)  # type: ignore[arg-type]
    with pytest.raises(JobRejected, match=r"call it before the routing$"):
        stream.key_by("auction").exchange("caching")
    with pytest.raises(JobRejected, match=r"nothing reads from the sink 'discard'"):
        stream.discard().exchange("caching")


# ---------------------------------------------------------------- defaults and modes


def shapes(env: ps.Environment) -> None:
    """One exchange of each partitioning, forward included."""
    stream = bids(env).filter(col("price") > 1)
    stream.key_by("auction").aggregate(n=ps.last("price")).discard()
    stream.rebalance().discard()
    stream.rescale().discard()
    stream.broadcast().discard()
    stream.discard().slot_group("other")


def kinds(env: ps.Environment) -> dict[str, str]:
    return {partitioning: kind for _, partitioning, kind in edges(env)}


@pytest.mark.parametrize("name", EXCHANGES)
def test_the_default_is_for_exchanges_that_move_rows(name: str) -> None:
    env = environment(**{"execution.exchange.default": name})
    shapes(env)
    moved = dict.fromkeys(("hash", "rebalance", "rescale", "broadcast"), name)
    assert kinds(env) == {**moved, "forward": "pipelined"}


def test_batch_blocks_where_rows_move_whatever_the_default() -> None:
    env = environment(**{"execution.exchange.default": "caching"})
    env.set_runtime_mode("batch")
    shapes(env)
    moved = dict.fromkeys(("hash", "rebalance", "rescale", "broadcast"), "blocking")
    assert kinds(env) == {**moved, "forward": "pipelined"}


def test_an_operators_own_exchange_wins_over_mode_and_default() -> None:
    env = environment(**{"execution.exchange.default": "blocking"})
    env.set_runtime_mode("batch")
    bids(env).exchange("pipelined").rebalance().discard()
    bids(env).exchange("caching").rebalance().discard()
    assert [kind for _, _, kind in edges(env)] == ["pipelined", "caching"]


def test_parallelism_that_differs_is_an_exchange_too() -> None:
    env = environment(**{"execution.exchange.default": "caching"})
    bids(env).filter(col("price") > 1).parallelism(1).discard()
    assert edges(env) == [("nexmark", "rebalance", "caching"), ("filter", "rebalance", "caching")]


@pytest.mark.parametrize(
    ("behind", "partitioning"),
    [
        (lambda newest: newest, "hash"),
        (lambda newest: newest.filter(col("n") > 1).select("n", "auction"), "hash"),
        (lambda newest: newest.union(newest.filter(lambda row: row.n > 1)), "hash"),
        (lambda newest: newest.union(newest.as_rows()), "hash"),
        (lambda newest: newest.rename(auction="key").filter(col("n") > 1), "hash"),
        (lambda newest: newest.with_columns(k2=col("auction")).drop("k2"), "hash"),
        (lambda newest: newest.with_columns(k2=col("auction")).drop("auction"), "hash"),
        (
            lambda newest: newest.with_columns(k2=col("auction")).with_columns(k2=col("k2") + 1),
            "hash",
        ),
        (
            lambda newest: newest.with_columns(k2=col("auction")).union(
                newest.with_columns(k2=col("auction") + 0)
            ),
            "hash",
        ),
        (lambda newest: newest.select("n"), "rebalance"),
        (lambda newest: newest.with_columns(auction=col("auction") + 1), "rebalance"),
        (lambda newest: newest.map(identity, schema=newest.schema), "rebalance"),
        (lambda newest: newest.as_rows(), "rebalance"),
        (lambda newest: newest.rebalance(), "rebalance"),
    ],
)
def test_updates_of_a_key_go_to_one_subtask_of_another_parallelism(
    behind: Callable[[ps.Stream], ps.Stream], partitioning: str
) -> None:
    env = environment()
    newest = bids(env).key_by("auction").aggregate(n=ps.count())
    behind(newest).discard().parallelism(3)
    assert {how for name, how, _ in edges(env) if name != "pre_aggregate"} == {partitioning}


def test_united_updates_are_dealt_out_each_by_their_keys() -> None:
    """Those of different keys were dealt out evenly, so that an older one could be written last."""
    env = environment()
    by_auction = bids(env).key_by("auction").aggregate(price=ps.last("price"))
    by_price = bids(env).key_by("price").aggregate(auction=ps.last("auction"))
    by_price = by_price.select("auction", "price")
    by_auction.union(by_price.union(bids(env))).discard().parallelism(3)
    by_auction.union(by_price).as_rows().discard().parallelism(5)
    graph = planned(env)
    width = {vertex.id: vertex.parallelism for vertex in graph.vertices}
    ways = [(width[edge.target_vertex], [*edge.key_columns]) for edge in graph.edges]
    of_sinks = sorted(way for way in ways if way[0] != 2)
    assert of_sinks == [(3, ["auction"]), (3, ["price"]), (3, ["price"]), (5, []), (5, [])]


def test_updates_of_several_keys_in_one_stream_are_not_dealt_out() -> None:
    env = environment()
    by_auction = bids(env).key_by("auction").aggregate(price=ps.last("price"))
    by_price = bids(env).key_by("price").aggregate(auction=ps.last("auction"))
    both = by_auction.union(by_price.select("auction", "price")).name("both")
    both.discard().name("same")
    planned(env)
    both.discard().name("wide").parallelism(3)
    with pytest.raises(
        JobRejected, match=r"'wide' has another parallelism than 'both'.*of several keys"
    ):
        planned(env)


def test_batch_needs_sources_with_an_end_and_names_the_others() -> None:
    env = environment()
    env.set_runtime_mode("batch")
    bids(env, events=None).name("endless bids").union(bids(env)).discard()
    with pytest.raises(JobRejected, match=r"batch mode.*'endless bids' reads without end.*streami"):
        env.plan()


def test_blocking_behind_a_source_without_end_names_both() -> None:
    env = environment()
    endless = bids(env, events=None).name("endless bids").rebalance().filter(col("price") > 1)
    endless.exchange("blocking").name("dear").rebalance().discard()
    with pytest.raises(
        JobRejected,
        match=r"operator 'dear' \(vertex v1\).*source 'endless bids' reads without end\. "
        r"Use \.exchange\('caching'\) .*on 'dear'.*execution\.exchange\.default",
    ):
        env.plan()


def test_blocking_without_end_names_the_operator_before_narrowing_and_pre_aggregation() -> None:
    env = environment()
    endless = bids(env, events=None).filter(col("price") > 1).name("dear").exchange("blocking")
    endless.key_by("auction").aggregate(bids=ps.count()).name("totals").discard()
    with pytest.raises(JobRejected, match=r"operator 'dear' \(vertex v0\).*on 'dear'"):
        env.plan()


def test_blocking_beside_a_source_without_end_is_fine() -> None:
    env = environment()
    bids(env).exchange("blocking").rebalance().filter(col("price") > 1).discard()
    bids(env, events=None).rebalance().discard()
    assert edges(env) == [
        ("nexmark", "rebalance", "blocking"),
        ("nexmark", "rebalance", "pipelined"),
    ]


def test_the_runtime_mode_decides_whether_checkpoints_are_taken() -> None:
    env = environment()
    assert env.config.checkpoint_interval_ms == 10_000
    env.set_runtime_mode("batch")
    assert env.config.checkpoint_interval_ms is None
    chosen = environment(**{"execution.checkpointing.interval": "1s"})
    chosen.set_runtime_mode("batch")
    assert chosen.config.checkpoint_interval_ms == 1000
    chosen.set_runtime_mode("streaming")
    assert chosen.config.checkpoint_interval_ms == 1000


def test_the_mode_travels_with_the_job() -> None:
    env = environment()
    env.set_runtime_mode("batch")
    bids(env).discard()
    assert env.plan().graph.config["execution.runtime-mode"] == "batch"


# ---------------------------------------------------------------- colocation


def test_colocated_operators_carry_their_group() -> None:
    env = environment()
    stream = bids(env).colocate("pair")
    stream.rebalance().filter(col("price") > 1).colocate("pair").discard()
    stream.rebalance().discard()
    assert [v.colocation_group for v in planned(env).vertices] == ["pair", "pair", ""]


def test_operators_of_two_groups_are_not_chained_and_a_chain_takes_the_one_it_has() -> None:
    env = environment()
    stream = bids(env).filter(col("price") > 1).colocate("one")
    stream.filter(col("price") > 2).colocate("two").discard()
    assert [v.colocation_group for v in planned(env).vertices] == ["one", "two"]


def test_colocation_of_what_cannot_share_slots_is_refused() -> None:
    env = environment()
    bids(env).colocate("pair").rebalance().discard().parallelism(3).colocate("pair")
    with pytest.raises(
        JobRejected, match=r"colocated with .*'pair', but its parallelism is 3 and the other's 2"
    ):
        planned(env)
    env = environment()
    bids(env).colocate("pair").rebalance().discard().slot_group("sinks").colocate("pair")
    with pytest.raises(JobRejected, match=r"its slot group is sinks and the other's default"):
        planned(env)
    with pytest.raises(JobRejected, match="'' is not a name"):
        bids(env).colocate("")


# ---------------------------------------------------------------- tests of functions


def test_a_harness_runs_chains_whatever_their_exchanges() -> None:
    import penstock.testing as pt

    schema = pa.schema([("n", pa.int64())])
    with pt.harness(
        lambda s: s.exchange("blocking").filter(col("n") > 1).exchange("caching"), schema=schema
    ) as harness:
        harness.push({"n": 1})
        harness.push({"n": 2})
        assert [row["n"] for row in harness.output] == [2]


# ---------------------------------------------------------------- formats of files


def kept_graph(exchange: str, **columns: pa.DataType) -> graph_pb2.JobGraph:
    """One kept exchange of a table."""
    env = environment()
    table = pa.table({name: pa.array([], kind) for name, kind in columns.items()})
    env.from_arrow(table).exchange(exchange).rebalance().discard()
    graph = Planner(reachable(env._builder.sinks), env.config).plan()
    graph.artifacts.add(id=graph.vertices[0].operators[0].source.arrow.artifact)
    graph.edges[0].spill_format = graph_pb2.SPILL_FORMAT_PARQUET
    return graph


@pytest.mark.parametrize("exchange", ["blocking", "caching"])
def test_an_edge_may_ask_for_parquet_files(exchange: str) -> None:
    validate(kept_graph(exchange, n=pa.uint64(), wait=pa.duration("us"), text=pa.large_string()))


def test_a_column_that_parquet_cannot_hold_is_refused_where_files_have_to_be_parquet() -> None:
    graph = kept_graph("blocking", n=pa.int64(), at=pa.list_(pa.timestamp("s")))
    with pytest.raises(
        JobRejected, match=r"'from_arrow' .*: what reads .* Parquet.*column at\[\]: .*sec"
    ):
        validate(graph)
    graph.edges[0].spill_format = graph_pb2.SPILL_FORMAT_ARROW
    validate(graph)


@pytest.mark.parametrize("exchange", ["pipelined", "caching-memory"])
def test_what_has_no_files_has_no_format_of_them(exchange: str) -> None:
    with pytest.raises(JobRejected, match=f"edge e0 asks for a format of its files.*'{exchange}'"):
        validate(kept_graph(exchange, n=pa.int64()))


def test_a_format_of_a_later_version_is_refused() -> None:
    graph = kept_graph("blocking", n=pa.int64())
    graph.edges[0].spill_format = 9  # type: ignore[assignment]
    with pytest.raises(JobRejected, match="unknown format 9"):
        validate(graph)
