"""Aim: a job is not started on state that was gathered under another declaration; what only decides from now on may change.

Method: a job is planned, a checkpoint of its graph is made up, and the job is planned again with one change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock.graph.added_aggregates import mark_added
from penstock.graph.fingerprint import fingerprint
from penstock.graph.logical import reachable
from penstock.graph.restore_check import Fate, check_restore
from penstock.graph.state_meaning import EVENT_TIMERS, PROCESSING_TIMERS
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.planner.planner import Planner

SCHEMA = {"key": "int64", "name": "string", "n": "int64", "x": "float64", "at": "timestamp[ms]"}
MINUTE = 60_000


class Seen(ps.KeyedProcessFunction):
    """Keeps something per key."""

    seen = ps.ValueState("seen", pa.int64())

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        """Nothing."""


def untimed(env: ps.Environment) -> Any:
    return env.generate(lambda start, count: None, rows=10, schema=SCHEMA).uid("rows")


def timed(env: ps.Environment) -> Any:
    return untimed(env).with_event_time("at", out_of_orderness="1s")


def planned(build: Callable[[Any], Any], rows: Callable[[Any], Any] = timed) -> graph_pb2.JobGraph:
    env = ps.Environment(parallelism=2)
    build(rows(env)).uid("stateful").discard()
    return Planner(reachable(env._builder.sinks), env.config).plan()


def left_by(graph: graph_pb2.JobGraph) -> checkpoint_pb2.CheckpointManifest:
    """A checkpoint in which the operator with keys has some state."""
    manifest = checkpoint_pb2.CheckpointManifest(vertices=fingerprint(graph))
    for vertex in graph.vertices:
        for operator in vertex.operators:
            if operator.uid == "stateful":
                held = manifest.subtasks.add(vertex=vertex.id).operators.add(
                    operator_uid="stateful"
                )
                held.keyed.max_parallelism = vertex.max_parallelism
                held.keyed.tables.add(name="rows", kind="group")
                held.keyed.segments.add(table=0)
    assert manifest.subtasks
    return manifest


def refusals(before: Callable[[Any], Any], after: Callable[[Any], Any]) -> tuple[str, ...]:
    check = check_restore(planned(after), left_by(planned(before)), ignores_unclaimed=False)
    assert all(fate.fate in (Fate.MAPS, Fate.REFUSED, Fate.NEW) for fate in check.fates)
    return check.refusals


def windowed(
    window: Any, key: str = "key", lateness: Any = 0, **aggregates: Any
) -> Callable[[Any], Any]:
    named = aggregates or {"total": ps.sum("n")}
    return lambda stream: (
        stream.key_by(key).window(window, allowed_lateness=lateness).aggregate(**named)
    )


def running(key: str = "key", **aggregates: Any) -> Callable[[Any], Any]:
    return lambda stream: stream.key_by(key).aggregate(**aggregates)


def joined(**options: Any) -> Callable[[Any], Any]:
    def build(stream: Any) -> Any:
        right = stream.select(key=ps.col("key"), y=ps.col("x"))
        return stream.join(right, on="key", **options)

    return build


def reduced(stream: Any) -> Any:
    return stream.key_by("key").window(TUMBLING).reduce(lambda one, two: one)


class Listed(ps.WindowFunction):
    """Is given all rows."""

    def process(self, key: Any, window: Any, rows: Any, out: Any) -> None:
        """Nothing."""


def processed(stream: Any) -> Any:
    return stream.key_by("key").window(TUMBLING).process(Listed(), schema={"n": "int64"})


class Held(ps.KeyedProcessFunction):
    """Keeps one aggregate."""

    def __init__(self, aggregate: Any) -> None:
        self.rows = ps.AggregatingState("rows", aggregate)

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        """Nothing."""


class Answered(Seen):
    """Does something at timers."""

    def on_timer(self, timestamp: int, ctx: Any, out: Any) -> None:
        """Nothing."""


class Batches(ps.KeyedBatchFunction):
    """Has no timers at all."""

    seen = ps.ValueState("seen", pa.int64())

    def process_batch(self, keys: Any, batch: Any, out: Any) -> None:
        """Nothing."""


def with_function(function: Any) -> Callable[[Any], Any]:
    return lambda s: s.key_by("key").process(function, schema={"n": "int64"})


def with_more(build: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda stream: build(stream.with_columns(more=ps.col("n")))


def without_name(build: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda stream: build(stream.drop("name"))


TUMBLING = ps.tumbling("1 min")
CHANGES = {
    "size": (
        windowed(TUMBLING),
        windowed(ps.tumbling("2 min")),
        "size 60000 ms, and has size 120000 ms",
    ),
    "slide": (
        windowed(ps.sliding("1 min", "10s")),
        windowed(ps.sliding("1 min", "20s")),
        "slide 10000 ms",
    ),
    "offset": (windowed(TUMBLING), windowed(ps.tumbling("1 min", offset="5s")), "offset 0 ms"),
    "gap": (windowed(ps.session("5s")), windowed(ps.session("6s")), "gap 5000 ms"),
    "kind": (windowed(TUMBLING), windowed(ps.session("6s")), "tumbling windows, and has session"),
    "key type": (
        windowed(TUMBLING),
        windowed(TUMBLING, "name"),
        r"\(int64\), and are \(string\) now",
    ),
    "order of keys": (
        lambda s: s.key_by("key", "n").aggregate(total=ps.sum("x")),
        lambda s: s.key_by("n", "key").aggregate(total=ps.sum("x")),
        r"its keys were stored in the order \(key, n\), and are \(n, key\) now",
    ),
    "aggregate": (
        windowed(TUMBLING),
        windowed(TUMBLING, total=ps.max("n")),
        r"'total' was stored as sum\(n: int64\), and is max\(n: int64\) now",
    ),
    "column": (
        windowed(TUMBLING),
        windowed(TUMBLING, total=ps.sum("x")),
        r"is sum\(x: double\) now",
    ),
    "running": (
        running(total=ps.sum("n")),
        running("name", total=ps.sum("n")),
        r"\(int64\), and are",
    ),
    "operator": (running(total=ps.sum("n")), windowed(TUMBLING), "is a window aggregate now"),
    "process": (
        lambda s: s.key_by("key").process(Seen(), schema=SCHEMA),
        lambda s: s.key_by("name").process(Seen(), schema=SCHEMA),
        "the types of keys never change",
    ),
    "aggregate of a state": (
        lambda s: s.key_by("key").process(Held(ps.sum("n")), schema=SCHEMA),
        lambda s: s.key_by("key").process(Held(ps.max("n")), schema=SCHEMA),
        "'rows' .* was stored as the aggregate 'sum', and is 'max' now: give it another name",
    ),
    "how": (
        joined(window=TUMBLING),
        joined(window=TUMBLING, how="left"),
        "of kind inner, and is left now",
    ),
    "bounds": (
        joined(within=("-5s", "5s")),
        joined(within=("-5s", "6s")),
        "-5000 to 5000 ms around each row, and joins from -5000 to 6000",
    ),
    "join": (joined(within=(0, "5s")), joined(window=TUMBLING), "is the other one now"),
    "reduced": (reduced, with_more(reduced), r"x: double, at: .*\), and are .*more: int64\) now"),
    "processed": (processed, without_name(processed), "name: string, .*, and are "),
    "rows joined": (joined(within=(0, "5s")), with_more(joined(within=(0, "5s"))), "more: int64"),
    "windows joined": (joined(window=TUMBLING), without_name(joined(window=TUMBLING)), "name: s"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_meaning_of_state_is_refused(change: str) -> None:
    before, after, reason = CHANGES[change]
    assert refusals(before, before) == ()
    (refusal,) = refusals(before, after)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(refusal)
    assert "give it another name" in refusal or "--allow-non-restored-state" in refusal


@pytest.mark.parametrize("change", CHANGES)
def test_under_another_uid_what_was_refused_begins_empty(change: str) -> None:
    before, after, _ = CHANGES[change]
    graph = planned(after)
    for operator in (one for vertex in graph.vertices for one in vertex.operators):
        operator.uid = operator.uid.replace("stateful", "other")
    check = check_restore(graph, left_by(planned(before)), ignores_unclaimed=True)
    assert not check.refusals
    assert Fate.DROPPED in {one.fate for one in check.fates if one.uid == "stateful"}


def test_an_aggregate_that_was_refused_begins_under_another_name() -> None:
    assert not check_restore(
        planned(windowed(TUMBLING, other=ps.max("n"))),
        left_by(planned(windowed(TUMBLING, total=ps.sum("n")))),
        ignores_unclaimed=False,
    ).refusals


def with_timers(graph: graph_pb2.JobGraph) -> checkpoint_pb2.CheckpointManifest:
    """A checkpoint in which its function has asked for timers of both kinds."""
    manifest = left_by(graph)
    keyed = manifest.subtasks[0].operators[0].keyed
    del keyed.tables[:], keyed.segments[:]
    for table, name in enumerate((EVENT_TIMERS, PROCESSING_TIMERS)):
        keyed.tables.add(name=name, kind="timers")
        keyed.segments.add(table=table, row_count=1)
    return manifest


def test_timers_of_which_there_are_none_are_no_question() -> None:
    manifest, graph = (
        with_timers(planned(with_function(Answered()))),
        planned(with_function(Seen())),
    )
    event, processing = manifest.subtasks[0].operators[0].keyed.segments
    event.is_empty, event.row_count = True, 0
    (refusal,) = check_restore(graph, manifest, ignores_unclaimed=False).refusals
    assert "state 'timers.processing' of operator" in refusal
    processing.is_empty, processing.row_count = True, 0
    check = check_restore(graph, manifest, ignores_unclaimed=False)
    assert not check.refusals
    assert not check.dropped
    event.is_empty = False  # another subtask's, or a program's before there was such a mark
    assert check_restore(graph, manifest, ignores_unclaimed=False).refusals


@pytest.mark.parametrize("after", [Seen(), Batches()])
def test_timers_that_no_function_answers_are_refused_or_left_out(after: Any) -> None:
    manifest, graph = with_timers(planned(with_function(Answered()))), planned(with_function(after))
    (refusal,) = check_restore(graph, manifest, ignores_unclaimed=False).refusals
    assert "'timers.event', 'timers.processing' of operator" in refusal
    assert "the function has none now: define it, or leave them out with --allow-non" in refusal
    check = check_restore(graph, manifest, ignores_unclaimed=True)
    assert not check.refusals
    assert [one.state for one in check.dropped] == [EVENT_TIMERS, PROCESSING_TIMERS]


@pytest.mark.parametrize(
    ("before", "after"), [(Answered(), Answered()), (Seen(), Seen()), (Seen(), Answered())]
)
def test_timers_that_are_answered_or_left_out_already_are_no_question(
    before: Any, after: Any
) -> None:
    manifest = with_timers(planned(with_function(before)))
    check = check_restore(planned(with_function(after)), manifest, ignores_unclaimed=False)
    assert {one.fate for one in check.fates} == {Fate.MAPS}


def test_timers_are_no_question_where_it_was_not_noted_who_answers_them() -> None:
    """RocksDB lists them also for functions that never had any."""
    manifest = with_timers(planned(with_function(Seen()), timed))
    (stored,) = (
        one for each in manifest.vertices for one in each.operators if one.uid == "stateful"
    )
    stored.declared.process.ClearField("answers_timers")
    check = check_restore(
        planned(with_function(Seen()), untimed), manifest, ignores_unclaimed=False
    )
    assert {one.fate for one in check.fates} == {Fate.MAPS}


def test_timers_of_event_time_need_it() -> None:
    with_time, without = (planned(with_function(Answered()), rows) for rows in (timed, untimed))
    check = check_restore(without, with_timers(with_time), ignores_unclaimed=True)
    (refusal,) = check.refusals
    assert "'timers.event' of operator" in refusal
    assert "would wait for the end of the data: give the stream event time" in refusal
    assert not check_restore(without, with_timers(without), ignores_unclaimed=False).refusals


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (windowed(TUMBLING), windowed(TUMBLING, lateness="5s")),
        (windowed(ps.count_window(5)), windowed(ps.count_window(5, ttl=ps.Ttl("1h")))),
        (
            lambda s: s.key_by("key").process(Seen(), schema=SCHEMA),
            lambda s: s.rename(key="id").key_by("id").process(Seen(), schema=SCHEMA),
        ),
    ],
)
def test_what_only_decides_from_now_on_may_change(before: Any, after: Any) -> None:
    assert refusals(before, after) == ()


@pytest.mark.parametrize(
    ("grouped", "begins"),
    [
        (lambda **named: windowed(TUMBLING, **named), "'mean' begin with the next window"),
        (running, "'mean' begin empty"),
    ],
)
def test_what_becomes_of_aggregates_that_come_and_go_is_said(grouped: Any, begins: str) -> None:
    before = planned(grouped(total=ps.sum("n"), gone=ps.max("n")))
    after = planned(grouped(mean=ps.mean("n"), total=ps.sum("n")))
    check = check_restore(after, left_by(before), ignores_unclaimed=False)
    assert not check.refusals
    [fate] = [one for one in check.fates if one.state == "rows"]
    assert fate.fate is Fate.MIGRATES
    assert fate.reason == f"the new aggregates {begins}; without 'gone', which are gone"


def test_both_phases_of_an_aggregation_know_what_was_added() -> None:
    graph = planned(windowed(TUMBLING, mean=ps.mean("n"), total=ps.sum("n")))
    mark_added(graph, left_by(planned(windowed(TUMBLING, total=ps.sum("n")))))
    phases = [
        operator.window_aggregate
        for vertex in graph.vertices
        for operator in vertex.operators
        if operator.HasField("window_aggregate")
    ]
    assert [[one.since for one in phase.aggregates] for phase in phases] == [[1, 0], [1, 0]]


def test_what_goes_and_comes_back_has_not_seen_the_rows_in_between() -> None:
    first = planned(windowed(TUMBLING, mean=ps.mean("n"), total=ps.sum("n")))
    second = planned(windowed(TUMBLING, total=ps.sum("n")))
    mark_added(second, left_by(first))
    third = planned(windowed(TUMBLING, mean=ps.mean("n"), total=ps.sum("n")))
    mark_added(third, left_by(second))
    fourth = planned(windowed(TUMBLING, mean=ps.mean("n"), rows=ps.count(), total=ps.sum("n")))
    mark_added(fourth, left_by(third))
    [spec] = [
        operator.window_aggregate
        for vertex in fourth.vertices
        for operator in vertex.operators
        if operator.uid == "stateful"
    ]
    assert [one.since for one in spec.aggregates] == [1, 2, 0]
