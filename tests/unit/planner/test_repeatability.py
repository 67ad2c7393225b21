"""Aim: an exchange is called reproducible only where its rows come again, in order, and the reason is told.

Method: one pipeline per rule; random pipelines against what the rules add up to, worked out from the
channels that the JobManager would connect; plans as text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from jobmanager.graph.deployment import producers_of
from jobmanager.graph.job_plan import Exchange, JobPlan
from jobmanager.rpc.graph_convert import plan_of
from penstock import col
from penstock.errors import JobRejected
from penstock.graph.exchanges import EXCHANGES, keeps_rows
from penstock.graph.job_graph import explain, plan_dict, validate
from penstock.graph.logical import reachable
from penstock.graph.operator_checks import is_partial
from penstock.pb import graph_pb2
from penstock.planner.planner import Planner
from tests.support.examples import examples

COLUMNS = {"auction": "int64", "price": "int64"}
SCHEMA = pa.schema([("auction", pa.int64()), ("price", pa.int64())])


def environment(parallelism: int = 2, **config: object) -> ps.Environment:
    return ps.Environment(
        parallelism=parallelism, config={"execution.exchange.default": "caching", **config}
    )


def bids(env: ps.Environment) -> ps.Stream:
    return env.nexmark(columns=["auction", "price"])


def planned(env: ps.Environment) -> graph_pb2.JobGraph:
    """The graph without the user's code, which takes a while to collect."""
    graph = Planner(reachable(env._builder.sinks), env.config).plan()
    validate(graph)
    return graph


def same(row: Any) -> Any:
    return {"auction": row.auction, "price": row.price}


class Counting(ps.KeyedProcessFunction):
    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(auction=row.auction, price=1)


class Plain(ps.ProcessFunction):
    def process(self, row: Any, ctx: ps.ProcessContext, out: ps.Collector) -> None:
        out.emit(auction=row.auction, price=1)


class Numbers(ps.Source):
    schema = SCHEMA

    def discover(self, ctx: object) -> list[ps.Split]:
        return []

    def open(self, split: ps.Split, position: bytes | None) -> Any:
        raise NotImplementedError


Build = Callable[[ps.Environment], ps.Stream]


def last_exchange(build: Build, parallelism: int = 2, **config: object) -> tuple[bool, bool, str]:
    """Of a keyed exchange behind what is built: deterministic, reproducible, and why not."""
    env = environment(parallelism, **config)
    build(env).name("last").key_by("auction").process(Counting(), schema=COLUMNS).discard()
    edge = plan_dict(planned(env))["edges"][-1]
    assert edge["partitioning"] == "hash"
    return edge["deterministic"], edge["reproducible"], edge["why_not_reproducible"]


def reproducible(build: Build, parallelism: int = 2, **config: object) -> bool:
    is_deterministic, is_reproducible, why = last_exchange(build, parallelism, **config)
    assert is_reproducible <= is_deterministic
    assert is_reproducible == (why == "")
    return is_reproducible


# ---------------------------------------------------------------- operators


@pytest.mark.parametrize(
    "build",
    [
        bids,
        lambda env: bids(env).filter(col("price") > 1).with_columns(price=col("price") * 2),
        lambda env: bids(env).with_event_time("price").select("auction", "price"),
        lambda env: env.read_arrow(__file__, schema=SCHEMA),
        lambda env: env.generate(
            lambda start, count: pa.RecordBatch.from_pylist([]), schema=SCHEMA
        ),
    ],
    ids=["source", "columnar", "event_time", "files", "generator"],
)
def test_sources_that_replay_and_columnar_operators_are(build: Build) -> None:
    assert reproducible(build)
    assert not reproducible(lambda env: build(env).deterministic(False))


@pytest.mark.parametrize(
    "build",
    [
        lambda env: bids(env).map(same, schema=COLUMNS),
        lambda env: bids(env).flat_map(lambda row: [same(row)], schema=COLUMNS),
        lambda env: bids(env).filter(lambda row: row.price > 1),
        lambda env: bids(env).map_batches(lambda batch: batch, schema=SCHEMA),
        lambda env: bids(env).process(Plain(), schema=COLUMNS),
        lambda env: env.source(Numbers()),
    ],
    ids=["map", "flat_map", "filter", "map_batches", "process", "source"],
)
def test_python_code_is_when_it_was_declared(build: Build) -> None:
    is_deterministic, _, why = last_exchange(build)
    assert not is_deterministic
    assert why.startswith("'last' runs Python code (")
    assert why.endswith(") that was not declared .deterministic(True)")
    assert reproducible(lambda env: build(env).deterministic(True))
    assert reproducible(build, **{"pipeline.deterministic": True})
    assert not reproducible(
        lambda env: build(env).deterministic(False), **{"pipeline.deterministic": True}
    )


def test_splits_that_are_read_in_turn_have_no_order_whatever_was_declared() -> None:
    class Endless(Numbers):
        bounded = False

    is_deterministic, is_reproducible, why = last_exchange(
        lambda env: env.source(Endless()).deterministic(True)
    )
    assert (is_deterministic, is_reproducible) == (True, False)
    assert "the subtasks of 'last' may read several splits in turn" in why


def test_the_function_of_key_by_is_declared_on_the_keyed_stream() -> None:
    def flags(*, declared: bool) -> tuple[bool, bool]:
        env = environment()
        keyed = bids(env).key_by(lambda row: row.auction % 3)
        if declared:
            keyed.deterministic(True)
        keyed.process(Counting(), schema=COLUMNS).discard()
        (edge,) = planned(env).edges
        return edge.deterministic, edge.reproducible

    assert flags(declared=True) == (True, True)
    assert flags(declared=False) == (False, False)


def test_declaring_the_whole_job() -> None:
    env = environment()
    env.set_deterministic(True)
    bids(env).map(same, schema=COLUMNS).key_by("auction").process(
        Counting(), schema=COLUMNS
    ).discard()
    assert planned(env).edges[0].reproducible
    env.set_deterministic(False)
    assert not planned(env).edges[0].reproducible
    with pytest.raises(JobRejected, match="'yes' is neither True nor False"):
        env.set_deterministic("yes")  # type: ignore[arg-type]


def windowed(stream: ps.Stream, **options: Any) -> ps.Stream:
    window = stream.with_event_time("price").key_by("auction").window(ps.tumbling("1s"), **options)
    return window.aggregate(price=ps.count())


def test_windows_are_deterministic_when_they_themselves_were_declared() -> None:
    def is_deterministic(declared: bool | None, **config: object) -> tuple[bool, bool]:
        def build(env: ps.Environment) -> ps.Stream:
            result = windowed(bids(env))
            return result if declared is None else result.deterministic(declared)

        return last_exchange(build, **config)[:2]

    assert is_deterministic(None) == (False, False)
    assert is_deterministic(None, **{"pipeline.deterministic": True}) == (False, False)
    assert is_deterministic(True) == (True, False)
    # What pre-aggregation does to the rows before the window, the window undoes.
    pipelined = {"execution.exchange.default": "pipelined"}
    assert is_deterministic(True, **pipelined) == (True, False)
    *_, why = last_exchange(lambda env: windowed(bids(env)))
    assert why.startswith("which rows are late for 'last' depends on when watermarks arrive")


def test_late_rows_never_are() -> None:
    env = environment()
    stream = bids(env).with_event_time("price").key_by("auction")
    counts = stream.window(ps.tumbling("1s"), late_to="late").aggregate(n=ps.count())
    counts.deterministic(True).discard()
    counts.side_output("late").rebalance().discard().parallelism(1)
    edge = plan_dict(planned(env))["edges"][-1]
    assert not edge["deterministic"]
    assert edge["why_not_reproducible"].startswith("which rows are late for 'window_aggregate'")


def test_what_can_never_be_is_refused_when_declared() -> None:
    env = environment()
    keyed = bids(env).key_by("auction")
    running = keyed.aggregate(n=ps.count())
    with pytest.raises(JobRejected, match=r"'aggregate' cannot be: a running aggregate gives out"):
        running.deterministic(True)
    clock = keyed.window(ps.tumbling("1s"), time="processing").aggregate(n=ps.count())
    with pytest.raises(JobRejected, match=r"depend on the machine's clock; use event time"):
        clock.deterministic(True)
    with pytest.raises(JobRejected, match=r"'read_socket' cannot be: .*cannot be read again"):
        env.read_socket("localhost", 9).deterministic(True)
    with pytest.raises(JobRejected, match=r"nothing reads from the sink 'discard'"):
        running.discard().deterministic(True)
    with pytest.raises(JobRejected, match=r"1 is neither True nor False"):
        running.deterministic(1)  # type: ignore[arg-type]
    running.deterministic(False)
    keyed.window(ps.count_window(3)).aggregate(n=ps.count()).deterministic(True)


def test_running_aggregates_and_sockets_never_are() -> None:
    whole_job = {"pipeline.deterministic": True}
    *_, why = last_exchange(
        lambda env: bids(env).key_by("auction").aggregate(n=ps.count()), 1, **whole_job
    )
    assert why == "'last' gives out its values once per key and batch"
    env = environment(**whole_job)
    env.read_socket("localhost", 9).rebalance().discard()
    (edge,) = plan_dict(planned(env))["edges"]
    assert edge["why_not_reproducible"] == (
        "what 'read_socket' reads from a socket cannot be read again"
    )


# ---------------------------------------------------------------- order


def counted(stream: ps.Stream) -> ps.Stream:
    keyed = stream.key_by("auction")
    return keyed.process(Plain(), schema=COLUMNS).name("counted").deterministic(True)


def test_several_channels_lose_the_order() -> None:
    build: Build = lambda env: counted(bids(env))  # noqa: E731
    assert reproducible(build, parallelism=1)
    assert last_exchange(build, parallelism=2) == (
        True,
        False,
        "the subtasks of 'last' have several input channels",
    )
    assert reproducible(lambda env: counted(bids(env).parallelism(1)), parallelism=2)


def test_a_forward_exchange_keeps_the_order_and_a_union_loses_it() -> None:
    assert reproducible(lambda env: bids(env).exchange("caching").filter(col("price") > 1))
    union: Build = lambda env: bids(env).union(bids(env)).filter(col("price") > 1)  # noqa: E731
    is_deterministic, is_reproducible, _ = last_exchange(union)
    assert (is_deterministic, is_reproducible) == (True, False)


def test_timers_and_windows_lose_the_order_of_a_single_channel() -> None:
    def timed(env: ps.Environment) -> ps.Stream:
        keyed = bids(env).key_by("auction")
        return keyed.process(Counting(), schema=COLUMNS).deterministic(True)

    assert last_exchange(timed, 1) == (
        True,
        False,
        "the timers of 'last' fire when watermarks arrive",
    )
    *_, why = last_exchange(lambda env: windowed(bids(env)).deterministic(True), 1)
    assert why == "the results of 'last' have no fixed order"


def test_dealing_rows_out_in_turn_depends_on_batches() -> None:
    def flags(route: Callable[[ps.Stream], ps.Stream], readers: int) -> tuple[bool, bool]:
        env = environment()
        route(bids(env)).filter(col("price") > 1).parallelism(readers).discard()
        edge = planned(env).edges[0]
        return edge.deterministic, edge.reproducible

    assert flags(lambda s: s.rebalance(), 2) == (False, False)
    assert flags(lambda s: s.rebalance(), 1) == (True, True)
    assert flags(lambda s: s.rescale(), 4) == (False, False)
    assert flags(lambda s: s.rescale(), 2) == (True, True)
    assert flags(lambda s: s.broadcast(), 4) == (True, True)


def test_what_is_read_again_from_a_kept_exchange_is_given() -> None:
    def behind(kind: str, parallelism: int) -> tuple[bool, bool, str]:
        def build(env: ps.Environment) -> ps.Stream:
            mapped = bids(env).map(same, schema=COLUMNS).exchange(kind)
            return counted(mapped)

        return last_exchange(build, parallelism)

    for kind in ("caching", "caching-memory"):
        assert behind(kind, 1) == (True, True, "")
        assert behind(kind, 2)[:2] == (True, False)
    assert behind("pipelined", 1)[2].startswith("'map' runs Python code (")
    assert behind("pipelined", 2)[:2] == (False, False)


# ---------------------------------------------------------------- pre-aggregation


def has_partial(graph: graph_pb2.JobGraph) -> bool:
    return any(is_partial(operator) for vertex in graph.vertices for operator in vertex.operators)


def summed(stream: ps.Stream) -> ps.Stream:
    return stream.key_by("auction").aggregate(price=ps.sum("price")).as_rows()


@pytest.mark.parametrize(
    ("exchange", "mode", "partial", "is_reproducible"),
    [
        ("pipelined", "auto", True, False),
        ("pipelined", "always", True, False),
        ("pipelined", "never", False, True),
        ("caching", "auto", False, True),
        ("caching", "always", True, False),
        ("caching", "never", False, True),
        ("caching-memory", "auto", False, True),
    ],
)
def test_pre_aggregation_is_left_out_where_that_makes_an_exchange_reproducible(
    exchange: str, mode: str, partial: bool, is_reproducible: bool
) -> None:
    env = environment(**{"execution.pre-aggregation": mode})
    summed(bids(env).exchange(exchange)).discard()
    graph = planned(env)
    assert has_partial(graph) == partial
    assert graph.edges[0].reproducible == is_reproducible


def test_pre_aggregation_stays_where_the_exchange_is_not_reproducible_anyway() -> None:
    env = environment()
    summed(bids(env).map(same, schema=COLUMNS)).discard()
    assert has_partial(planned(env))
    env = environment()
    summed(bids(env).map(same, schema=COLUMNS).deterministic(True)).discard()
    assert not has_partial(planned(env))


def test_pre_aggregation_stays_in_front_of_blocking_exchanges() -> None:
    env = environment()
    env.set_runtime_mode("batch")
    summed(env.nexmark(10, columns=["auction", "price"])).discard()
    assert has_partial(planned(env))


def in_windows(stream: ps.Stream) -> ps.Stream:
    return stream.key_by("auction").window(ps.tumbling("1s")).aggregate(price=ps.sum("price"))


def timed(env: ps.Environment, **options: Any) -> ps.Stream:
    return bids(env).with_event_time("price", "100ms", **options)


@pytest.mark.parametrize(
    "build",
    [
        timed,
        lambda env: timed(env).on_error("skip"),
        lambda env: bids(env).filter(col("price") > 1).with_event_time("price", "100ms"),
        lambda env: timed(env).with_columns(price=col("price") * 2).select("auction", "price"),
        lambda env: timed(env).map(same, schema=COLUMNS).deterministic(True),
        lambda env: timed(env, idle_timeout="1s").with_event_time("auction", "100ms"),
    ],
    ids=["event_time", "skipped", "filter_before", "columns", "map", "again"],
)
def test_windows_repeat_what_they_pre_aggregate_where_rows_say_what_has_ended(build: Build) -> None:
    env = environment()
    in_windows(build(env)).discard()
    graph = planned(env)
    (partial,) = [op for vertex in graph.vertices for op in vertex.operators if is_partial(op)]
    assert partial.window_aggregate.HasField("out_of_orderness_ms")
    assert partial.window_aggregate.out_of_orderness_ms == 100
    assert graph.edges[0].reproducible
    env = environment(**{"execution.exchange.default": "pipelined"})
    in_windows(build(env)).discard()
    graph = planned(env)
    (partial,) = [op for vertex in graph.vertices for op in vertex.operators if is_partial(op)]
    assert not partial.window_aggregate.HasField("out_of_orderness_ms")
    assert not graph.edges[0].reproducible


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda env: timed(env, idle_timeout="1s"), ": 'with_event_time' has an idle timeout"),
        (
            lambda env: timed(env).filter(col("price") > 1).name("dear"),
            ": 'dear' may leave out rows behind with_event_time",
        ),
        (
            lambda env: timed(env).flat_map(lambda row: [same(row)], schema=COLUMNS).name("flat"),
            ": 'flat' may leave out rows behind with_event_time",
        ),
        (
            lambda env: timed(env).with_columns(price=col("price") * 2).on_error("skip"),
            ": 'with_columns' may leave out rows behind with_event_time",
        ),
        (
            lambda env: timed(env).parallelism(1).key_by("auction").process(Plain(), schema=COLUMNS),
            ": event time begins in front of another exchange",
        ),
    ],
    ids=["idle", "filter", "flat_map", "skip", "exchange"],
)  # fmt: skip
def test_elsewhere_windows_are_not_pre_aggregated_and_the_plan_says_why(
    build: Build, why: str
) -> None:
    def edge(mode: str) -> tuple[bool, Any]:
        env = environment(**{"execution.pre-aggregation": mode, "pipeline.deterministic": True})
        in_windows(build(env)).name("sums").discard()
        graph = planned(env)
        return has_partial(graph), plan_dict(graph)["edges"][-1]

    is_partial, planned_edge = edge("auto")
    assert (is_partial, planned_edge["reproducible"]) == (False, True)
    is_partial, planned_edge = edge("always")
    assert (is_partial, planned_edge["reproducible"]) == (True, False)
    assert planned_edge["why_not_reproducible"] == (
        f"the pre-aggregation for 'sums' depends on when watermarks arrive{why}"
    )


def test_windows_over_rows_in_no_fixed_order_follow_watermarks() -> None:
    env = environment(**{"pipeline.deterministic": True})
    several = bids(env).key_by("auction").process(Counting(), schema=COLUMNS)
    in_windows(several.with_event_time("price")).discard()
    graph = planned(env)
    (partial,) = [op for vertex in graph.vertices for op in vertex.operators if is_partial(op)]
    assert not partial.window_aggregate.HasField("out_of_orderness_ms")
    assert not graph.edges[-1].reproducible


# ---------------------------------------------------------------- random pipelines

STEPS = (
    "filter",
    "map",
    "declared",
    "process",
    "rebalance",
    "rescale",
    "running",
    "window",
    "union",
)


def random_stream(env: ps.Environment, seed: random.Random, depth: int) -> ps.Stream:
    """A pipeline with the columns of ``COLUMNS`` from end to end."""
    if depth == 0:
        return bids(env).parallelism(seed.randint(1, 3))
    stream = random_stream(env, seed, depth - 1)
    if seed.random() < 0.5:
        stream.exchange(seed.choice([name for name in EXCHANGES if name != "blocking"]))
    match seed.choice(STEPS):
        case "filter":
            stream = stream.filter(col("price") > 1)
        case "map":
            stream = stream.map(same, schema=COLUMNS)
        case "declared":
            stream = stream.map(same, schema=COLUMNS).deterministic(True)
        case "process":
            stream = counted(stream)
        case "rebalance":
            stream = stream.rebalance().filter(col("price") > 2)
        case "rescale":
            stream = stream.rescale().filter(col("price") > 3)
        case "running":
            stream = summed(stream)
        case "window":
            timed = stream.with_event_time("price")
            if seed.random() < 0.5:
                timed = timed.exchange("caching")
            stream = in_windows(timed).select("auction", "price")
        case _:
            other = random_stream(env, seed, seed.randint(0, depth - 1))
            stream = stream.union(other).filter(col("price") > 4)
    return stream.parallelism(seed.randint(1, 3)) if seed.random() < 0.5 else stream


def random_graph(seed: int, depth: int, **config: object) -> graph_pb2.JobGraph:
    env = environment(**{"execution.exchange.default": "pipelined", **config})
    chosen = random.Random(seed)
    random_stream(env, chosen, depth).key_by("auction").process(Plain(), schema=COLUMNS).discard()
    return planned(env)


def channels(plan: JobPlan, vertex_id: str) -> int:
    """Most channels that a subtask of a vertex reads."""
    vertex = plan.vertex(vertex_id)
    return max(
        sum(
            len(
                producers_of(
                    edge.partitioning,
                    plan.vertex(edge.source).parallelism,
                    vertex.parallelism,
                    subtask,
                )
            )
            for edge in plan.edges
            if edge.target == vertex_id
        )
        for subtask in range(vertex.parallelism)
    )


def way_to(vertex: graph_pb2.Vertex, index: int) -> list[graph_pb2.Operator]:
    """The operators of a chain that rows go through up to one of them."""
    operator = vertex.operators[index]
    before = way_to(vertex, operator.input.operator_index) if index else []
    return [*before, operator]


pipelines = given(seed=st.integers(0, 1 << 30), depth=st.integers(0, 5))


@pipelines
@examples(60)
def test_random_pipelines_are_called_reproducible_only_where_they_are(
    seed: int, depth: int
) -> None:
    graph = random_graph(seed, depth)
    plan = plan_of(graph)
    flags = {edge.id: edge for edge in plan.edges}
    vertices = {vertex.id: vertex for vertex in graph.vertices}
    for edge in graph.edges:
        known = flags[edge.id]
        assert known.is_reproducible <= known.is_deterministic
        if not known.is_deterministic:
            continue
        source = vertices[edge.source_vertex]
        way = way_to(source, edge.source_output.operator_index)
        assert all(operator.deterministic for operator in way)
        feeding = [each for each in graph.edges if each.target_vertex == source.id]
        if not known.is_reproducible:
            continue
        assert channels(plan, source.id) <= 1
        order = {"window_aggregate", "running_aggregate", "window_function", "join"}
        partial = [operator for operator in way if is_partial(operator)]
        rest = [operator for operator in way if not is_partial(operator)]
        assert order.isdisjoint(operator.WhichOneof("spec") for operator in rest)
        assert all(each.window_aggregate.HasField("out_of_orderness_ms") for each in partial)
        for each in feeding:
            is_given = flags[each.id].exchange is not Exchange.PIPELINED
            assert is_given or flags[each.id].is_reproducible


@pipelines
@examples(40)
def test_declaring_or_keeping_more_never_makes_an_exchange_less_reproducible(
    seed: int, depth: int
) -> None:
    never = {"execution.pre-aggregation": "never"}
    before = random_graph(seed, depth, **never)
    declared = random_graph(seed, depth, **never, **{"pipeline.deterministic": True})
    assert len(before.edges) == len(declared.edges)
    for one, other in zip(before.edges, declared.edges, strict=True):
        assert one.deterministic <= other.deterministic
        assert one.reproducible <= other.reproducible


@pipelines
@examples(40)
def test_automatic_pre_aggregation_gives_up_no_reproducible_exchange(seed: int, depth: int) -> None:
    without = random_graph(seed, depth, **{"execution.pre-aggregation": "never"})
    chosen = random_graph(seed, depth)
    for one, other in zip(without.edges, chosen.edges, strict=True):
        if keeps_rows(one.partition_type):
            assert one.reproducible == other.reproducible


# ---------------------------------------------------------------- what is told


def test_the_plan_says_what_a_restart_reaches() -> None:
    env = environment()
    first = bids(env).key_by("auction").process(Counting(), schema=COLUMNS).name("first")
    first.key_by("auction").process(Plain(), schema=COLUMNS).colocate("pair").discard()
    graph = planned(env)
    lines = [line.strip() for line in explain(graph).splitlines()]
    assert "<- v0/0  hash by auction, caching  (auction)" in lines
    assert "a restart of v0 leaves v1 running: the same rows come again in the same order" in lines
    (line,) = [line for line in lines if line.startswith("a restart of v1")]
    assert line.startswith("a restart of v1 restarts v2: 'first' runs Python code (")
    assert any("colocated as pair]" in line for line in lines)
    operators = plan_dict(graph)["vertices"][0]["operators"]
    assert [operator["deterministic"] for operator in operators] == [True]


def test_the_plan_says_when_only_the_order_may_differ() -> None:
    env = environment()
    counted(bids(env)).key_by("auction").process(Plain(), schema=COLUMNS).discard()
    assert (
        "a restart of v1 restarts v2: the same rows may come in another order: the subtasks of "
        "'counted' have several input channels"
    ) in explain(planned(env))


def test_the_plan_says_whom_a_blocking_exchange_spares() -> None:
    env = environment()
    env.set_runtime_mode("batch")
    stream = env.nexmark(10, columns=["auction", "price"])
    stream.broadcast().discard()
    stream.map(same, schema=COLUMNS).broadcast().discard()
    lines = [line.strip() for line in explain(planned(env)).splitlines()]
    assert "a restart of v0 spares what has finished of v1: the same rows come again" in lines
    assert any(line.startswith("a restart of v0 restarts v2: 'map' runs") for line in lines)


def test_the_plan_says_nothing_of_restarts_where_nothing_is_kept() -> None:
    env = environment(**{"execution.exchange.default": "pipelined"})
    counted(bids(env)).discard()
    assert "restart" not in explain(planned(env))


def test_the_job_manager_gets_what_the_plan_says() -> None:
    env = environment()
    counted(bids(env).colocate("pair")).exchange("caching-memory").key_by("auction").process(
        Plain(), schema=COLUMNS
    ).discard()
    plan = plan_of(planned(env))
    assert [vertex.colocation_group for vertex in plan.vertices] == ["pair", "", ""]
    assert [
        (edge.exchange, edge.is_deterministic, edge.is_reproducible) for edge in plan.edges
    ] == [(Exchange.CACHING, True, True), (Exchange.CACHING_MEMORY, True, False)]


def test_a_type_of_another_version_is_refused_by_the_job_manager() -> None:
    env = environment()
    bids(env).rebalance().discard()
    graph = planned(env)
    graph.edges[0].partition_type = 9  # type: ignore[assignment]
    with pytest.raises(JobRejected, match="edge e0 has the unknown type of exchange 9"):
        plan_of(graph)
