"""Aim: uids, parallelism, slot groups and warnings come out as the user said. Method: small plans."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock import col, testing
from penstock.errors import JobRejected
from penstock.graph.operator_checks import is_partial, shown_name
from penstock.pb import graph_pb2
from penstock.planner import plan_job

ROWS = [{"a": 1, "b": 2, "ts": 3}]


def uids(graph: graph_pb2.JobGraph) -> dict[str, str]:
    return {shown_name(op): op.uid for vertex in graph.vertices for op in vertex.operators}


def test_derived_uids_do_not_depend_on_names_functions_parallelism_or_readers() -> None:
    first, second = ps.Environment(parallelism=1), ps.Environment(parallelism=4)
    first.from_rows(ROWS).filter(col("a") > 1).discard()
    stream = second.from_rows([{"a": 5, "b": 6}]).filter(col("b") < 7).name("mine")
    stream.discard()
    stream.print()
    one, two = uids(first.plan().graph), uids(second.plan().graph)
    assert one["from_rows"] == two["from_rows"]
    assert one["filter"] == two["mine"]
    assert one["discard"] == two["discard"]


def test_equal_operators_get_different_uids() -> None:
    env = ps.Environment()
    stream = env.from_rows(ROWS)
    for number in range(3):
        stream.filter(col("a") > 1).name(f"f{number}").discard().name(f"d{number}")
    found = uids(env.plan().graph)
    assert len(set(found.values())) == len(found) == 7


def test_given_uid_is_kept_and_changes_what_is_downstream() -> None:
    plain, named = ps.Environment(), ps.Environment()
    plain.from_rows(ROWS).filter(col("a") > 1).discard()
    named.from_rows(ROWS).uid("rows").filter(col("a") > 1).discard()
    one, two = uids(plain.plan().graph), uids(named.plan().graph)
    assert two["from_rows"] == "rows"
    assert one["filter"] != two["filter"]


def test_inserted_operators_do_not_change_the_users_uids() -> None:
    with_it = ps.Environment(parallelism=2)
    without = ps.Environment(parallelism=2, config={"execution.pre-aggregation": False})
    for env in (with_it, without):
        env.from_rows(ROWS).key_by("a").aggregate(n=ps.count()).uid("n").discard()
    one, two = uids(with_it.plan().graph), uids(without.plan().graph)
    assert "pre_aggregate" in one
    assert "pre_aggregate" not in two
    assert {name: uid for name, uid in one.items() if name in two} == two


def test_state_without_uid_is_a_warning_or_refused() -> None:
    env = ps.Environment()
    env.from_rows(ROWS).key_by("a").aggregate(n=ps.count()).name("totals").discard()
    planned = plan_job("job", env._builder.sinks, env.config)
    assert len(planned.warnings) == 1
    assert "'totals'" in planned.warnings[0]
    strict = ps.Environment(config={"pipeline.auto-generate-uids": False})
    stream = strict.from_rows(ROWS).key_by("a").aggregate(n=ps.count()).name("totals")
    stream.discard()
    with pytest.raises(JobRejected, match=r"no uid: 'totals'.*auto-generate-uids is false"):
        strict.plan()
    stream.uid("totals")
    strict.plan()


def test_parallelism_of_sources_windows_and_inserted_operators() -> None:
    env = ps.Environment(parallelism=3)
    stream = env.from_rows(ROWS).with_event_time("ts")
    stream.window(ps.tumbling("1s")).aggregate(n=ps.count()).discard()
    graph = env.plan().graph
    assert [(v.name, v.parallelism) for v in graph.vertices] == [
        ("from_rows -> with_event_time -> window_aggregate -> narrow", 1),
        ("discard", 3),
    ]
    socket = ps.Environment(parallelism=3)
    socket.read_socket("localhost", 9).discard()
    assert [v.parallelism for v in socket.plan().graph.vertices] == [1, 3]


def test_max_parallelism_is_derived_given_or_configured() -> None:
    env = ps.Environment(parallelism=200)
    env.nexmark(10).filter(col("price") > 1).max_parallelism(1000).discard()
    (vertex,) = env.plan().graph.vertices
    assert vertex.max_parallelism == 1000
    env = ps.Environment(parallelism=200)
    env.nexmark(10).discard()
    assert env.plan().graph.vertices[0].max_parallelism == 512
    env = ps.Environment(config={"pipeline.max-parallelism": 64})
    env.nexmark(10).discard()
    assert env.plan().graph.vertices[0].max_parallelism == 64


def test_operators_of_different_max_parallelism_are_not_chained() -> None:
    env = ps.Environment()
    stream = env.nexmark(10)
    stream.filter(col("price") > 1).max_parallelism(100).discard()
    stream.filter(col("price") > 2).max_parallelism(200).discard()
    assert [v.max_parallelism for v in env.plan().graph.vertices] == [100, 200]


def test_slot_group_is_inherited() -> None:
    env = ps.Environment()
    stream = env.nexmark(10).slot_group("reading")
    stream.filter(col("price") > 1).slot_group("work").rebalance().select("price").discard()
    groups = [(v.name, v.slot_group) for v in env.plan().graph.vertices]
    assert groups == [
        ("nexmark", "reading"),
        ("filter", "work"),
        ("select -> discard", "work"),
    ]


def test_contradicting_properties_are_refused() -> None:
    env = ps.Environment(parallelism=2)
    stream = env.from_rows(ROWS).with_event_time("ts")
    stream.forward().filter(col("a") > 1).name("wide").discard()
    with pytest.raises(JobRejected, match=r"'wide'.*forward\(\) needs the same parallelism"):
        env.plan()
    env = ps.Environment()
    stream = env.from_rows(ROWS).with_event_time("ts")
    top = stream.window(ps.tumbling("1s")).aggregate(n=ps.count()).parallelism(2)
    top.discard()
    with pytest.raises(JobRejected, match=r"'window_aggregate'.*parallelism is 1, not 2"):
        env.plan()
    env = ps.Environment()
    env.nexmark(10).parallelism(10).max_parallelism(5).name("bids").discard()
    with pytest.raises(JobRejected, match=r"parallelism is 10.*max_parallelism, which is 5"):
        env.plan()


def test_bad_records_keep_every_column_of_the_operators_input() -> None:
    env = ps.Environment()
    stream = env.from_rows([{"a": 1, "b": 2, "c": "x"}])
    doubled = stream.map(lambda row: {"n": row.a}, schema={"n": "int64"}).on_error("bad")
    doubled.discard()
    bad = doubled.side_output("bad")
    assert bad.schema.names == ["a", "b", "c", "error"]
    bad.select("c", "error").print()
    (vertex,) = env.plan().graph.vertices
    names = [
        [c["name"] for c in o["columns"]] for o in env.plan().to_dict()["vertices"][0]["operators"]
    ]
    assert names[0] == ["a", "c"]
    assert vertex.operators[1].on_error.tag == "bad"


def test_pre_aggregation_needs_decomposable_aggregates_and_no_late_rows() -> None:
    def has_partial(build: object, **config: object) -> bool:
        env = ps.Environment(parallelism=2, config=config)
        build(env.from_rows(ROWS).with_event_time("ts").key_by("a")).discard()  # type: ignore[operator]
        return "pre_aggregate" in uids(env.plan().graph)

    window = ps.tumbling("1s")
    assert has_partial(lambda s: s.window(window).aggregate(n=ps.count(), m=ps.mean("b")))
    assert has_partial(lambda s: s.aggregate(n=ps.sum("b")))
    assert not has_partial(
        lambda s: s.aggregate(n=ps.sum("b")), **{"execution.pre-aggregation": False}
    )
    assert not has_partial(lambda s: s.window(window).aggregate(n=ps.collect_list("b")))
    assert not has_partial(lambda s: s.window(window, late_to="late").aggregate(n=ps.count()))
    assert not has_partial(lambda s: s.window(ps.session("1s")).aggregate(n=ps.count()))
    assert not has_partial(lambda s: s.window(window, time="processing").aggregate(n=ps.count()))


def test_pre_aggregation_has_the_name_of_the_users_operator() -> None:
    for window in (None, ps.tumbling("1s")):
        env = ps.Environment(parallelism=2)
        keyed = env.from_rows(ROWS).with_event_time("ts").key_by("a")
        grouped = keyed if window is None else keyed.window(window)
        grouped.aggregate(n=ps.sum("b")).name("totals").discard()
        plan = env.plan()
        operators = [operator for vertex in plan.graph.vertices for operator in vertex.operators]
        (partial,) = filter(is_partial, operators)
        assert partial.name == "totals"
        assert plan.graph.vertices[0].name.endswith("pre_aggregate")


def test_a_union_may_have_one_stream_twice_in_front_of_an_aggregate() -> None:
    def chain(stream: ps.Stream) -> ps.Stream:
        timed = stream.with_event_time("ts")
        both = timed.union(timed.filter(col("ts") > 1), timed)
        return both.key_by("a").window(ps.tumbling("1s")).aggregate(n=ps.count())

    rows = [{"a": 1, "ts": 1}, {"a": 2, "ts": 2}, {"a": 1, "ts": 3}]
    with testing.harness(chain, schema=rows, event_time=False) as job:
        job.push_many(rows)
        job.end()
        assert sorted((row["a"], row["n"]) for row in job.output) == [(1, 5), (2, 3)]
