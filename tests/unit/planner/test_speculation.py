"""Aim: second attempts of slow subtasks run only where nothing but the one that counts is ever seen.

Method: one pipeline per rule; what the plan says and what the JobManager makes of it.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest
from typing_extensions import override

import penstock as ps
from jobmanager.rpc.graph_convert import plan_of
from penstock.graph.job_graph import explain, plan_dict, validate
from penstock.graph.logical import reachable
from penstock.graph.speculation import why_not_speculative
from penstock.pb import graph_pb2
from penstock.planner.planner import Planner

ON = {"execution.batch.speculative.enabled": "true"}
MAY = "a slow subtask may have a second attempt"


class Table(ps.Sink):
    """Writes rows at once."""

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        raise NotImplementedError

    @override
    def flush(self) -> None:
        raise NotImplementedError


class UpsertedTable(Table):
    """May write a row twice."""

    supports_concurrent_attempts = True


def totals(stream: ps.Stream) -> ps.Stream:
    return stream.key_by("auction").aggregate(price=ps.sum("price")).as_rows()


def planned(
    finish: Callable[[ps.Stream], object], mode: str = "batch", **config: object
) -> graph_pb2.JobGraph:
    """source -> exchange -> ``finish``."""
    env = ps.Environment(parallelism=2, config={**ON, **config})
    env.set_runtime_mode(mode)
    finish(totals(env.nexmark(10, columns=["auction", "price"])))
    graph = Planner(reachable(env._builder.sinks), env.config).plan()
    graph.config.update(env.config.to_mapping())
    validate(graph)
    return graph


@pytest.mark.parametrize(
    ("finish", "obstacle"),
    [
        (lambda s: s.write_parquet("/tmp/x"), ""),
        (lambda s: s.write_csv("/tmp/x", partition_by=["auction"]), ""),
        (lambda s: s.discard(), ""),
        (lambda s: s.sink(UpsertedTable()), ""),
        (lambda s: s.sink(Table()), "sink 'Table' does not support concurrent attempts"),
        (lambda s: s.print(), "sink 'print' does not support concurrent attempts"),
        (lambda s: s.collect(), "sink 'collect' does not support concurrent attempts"),
        (lambda s: s.persist("kept"), "sink 'persist' does not support concurrent attempts"),
    ],
)
def test_sinks_say_whether_two_attempts_may_write(
    finish: Callable[[ps.Stream], object], obstacle: str
) -> None:
    graph = planned(finish)
    assert why_not_speculative(graph) == {"v0": "", "v1": obstacle}
    assert [v.allows_rivals for v in plan_of(graph).vertices] == [True, not obstacle]
    fields = [vertex["why_not_speculative"] for vertex in plan_dict(graph)["vertices"]]
    assert fields == ["", obstacle]
    told = [line.strip() for line in explain(graph).splitlines() if "second attempt" in line]
    never = f"a slow subtask has no second attempt: {obstacle}"
    assert told == [MAY, never if obstacle else MAY]


@pytest.mark.parametrize(("exchange", "is_everywhere"), [("caching", True), ("pipelined", False)])
def test_rows_must_not_be_read_from_slots(exchange: str, is_everywhere: bool) -> None:
    """Caching exchanges keep them there; pipelined ones join their own ends alone."""

    def finish(stream: ps.Stream) -> None:
        totals(stream.exchange(exchange)).discard()

    reason = f"the exchange from v1 to v2 is {exchange}"
    expected = {"v0": reason if is_everywhere else "", "v1": reason, "v2": reason}
    assert why_not_speculative(planned(finish)) == expected


def test_colocated_subtasks_are_not_alone() -> None:
    reasons = why_not_speculative(planned(lambda s: s.colocate("pair").discard()))
    assert reasons == {"v0": "", "v1": "it is colocated as pair"}


@pytest.mark.parametrize(
    ("mode", "config"),
    [
        ("streaming", {}),
        ("batch", {"execution.checkpointing.interval": "10s"}),
        ("batch", {"execution.batch.speculative.enabled": "false"}),
    ],
)
def test_the_plan_says_nothing_of_it_where_it_is_off(mode: str, config: dict[str, object]) -> None:
    graph = planned(lambda s: s.discard(), mode, **config)
    assert "second attempt" not in explain(graph)
    assert {vertex["why_not_speculative"] for vertex in plan_dict(graph)["vertices"]} == {None}
