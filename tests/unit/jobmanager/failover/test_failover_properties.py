"""Regions and restart sets of random jobs against a model that names every channel.

The model (``tests.support.failover_model``) knows no groups, no order and no worklist. A restart set is the least of
all sets of regions, tried one by one, that the rules leave as it is; that there is a least one is checked as well.
"""

from __future__ import annotations

from hypothesis import event, given
from hypothesis import strategies as st

from jobmanager.failover.failover_strategy import (
    FailoverStrategyName,
    FailoverView,
    kept_stages,
    strategy_problem,
    tasks_to_restart,
)
from jobmanager.failover.regions import RegionGraph
from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.graph.job_plan import Exchange, JobPlan
from tests.support.examples import examples
from tests.support.failover_model import Failure, Model, closure, demanded, failing
from tests.support.plan_strategies import BITS, few_of, plans, some_of, subsets

FULL, REGION, INDIVIDUAL = FailoverStrategyName


def least_restart(model: Model, failure: Failure) -> frozenset[SubtaskId]:
    started = [region for region in model.regions if region & failure.started]
    closed = [restart for restart in subsets(started) if not demanded(model, restart, failure)]
    least = closed[0].intersection(*closed)
    assert least in closed, "the rules leave a choice"
    return frozenset[SubtaskId]().union(*least) & failure.started


@st.composite
def failures(draw: st.DrawFn) -> tuple[Model, Failure]:
    model = Model(draw(plans()))
    subtasks = model.subtasks
    held = sorted({channel.partition for channel in model.kept}, key=str)
    # Mostly jobs of which all runs, so that there is something to restart.
    unstarted = few_of(draw, subtasks) if draw(st.booleans()) else frozenset()
    started = frozenset(subtasks) - unstarted
    vertices = [vertex.id for vertex in model.plan.vertices]
    return model, Failure(
        failed=few_of(draw, subtasks) | {subtasks[draw(BITS) % len(subtasks)]},
        started=started,
        finished=some_of(draw, subtasks) & started,
        available=frozenset(held) - few_of(draw, held),
        missing=few_of(draw, held),
        not_repeated=few_of(draw, vertices) if draw(st.booleans()) else frozenset(),
    )


@examples(200)
@given(failures())
def test_a_failure_of_the_whole_job_spares_what_is_done_for_blocking_exchanges(
    drawn: tuple[Model, Failure],
) -> None:
    model, failure = drawn
    everyone = frozenset(model.subtasks)
    kept = kept_stages(RegionGraph(model.plan), failure.view)
    assert everyone - kept == failing(model, failure.finished)


@examples(200)
@given(plans())
def test_regions_are_those_of_the_model(plan: JobPlan) -> None:
    model, graph = Model(plan), RegionGraph(plan)
    assert {region.subtasks for region in graph.regions} == model.regions
    assert len(graph.regions) == len(model.regions)
    assert [region.index for region in graph.regions] == list(range(len(graph.regions)))
    for subtask in model.subtasks:
        assert subtask in graph.region_of(subtask).subtasks
    for region in graph.regions:
        read = {channel.partition for channel in model.read_by[region.subtasks]}
        assert set(graph.consumed_by(region)) == read
        assert len(graph.consumed_by(region)) == len(read)
        written = {one.partition for one in model.kept if one.producer in region.subtasks}
        assert set(graph.produced_by(region)) == written
        assert len(graph.produced_by(region)) == len(written)
        for partition in read:
            assert graph.region_of(partition.producer).index < region.index
        for partition in written:
            readers = [one.consumer for one in model.kept if one.partition == partition]
            assert list(graph.consumers_of(partition)) == sorted(readers)
    assert [region.subtasks for region in RegionGraph(plan).regions] == [
        region.subtasks for region in graph.regions
    ]


@examples(200)
@given(failures())
def test_startable_regions_are_those_of_the_model(case: tuple[Model, Failure]) -> None:
    """Here the partitions that can be read are the complete ones."""
    model, failure = case
    waiting = {region for region in model.regions if not region & failure.started}
    startable = set(waiting)
    while True:
        held_back = {
            region
            for region in startable
            for channel in model.read_by[region]
            if (
                channel.partition not in failure.available
                if channel.edge.exchange is Exchange.BLOCKING
                else model.region_of[channel.producer] in waiting - startable
            )
        }
        if not held_back:
            break
        startable -= held_back
    got = RegionGraph(model.plan).startable(failure.started, failure.available.__contains__)
    assert [region.index for region in got] == sorted(region.index for region in got)
    assert {region.subtasks for region in got} == startable


@examples(400)
@given(failures())
def test_restart_sets_are_the_least_that_the_rules_allow(case: tuple[Model, Failure]) -> None:
    model, failure = case
    expected = least_restart(model, failure)
    assert closure(model, failure) == expected
    graph = RegionGraph(model.plan)
    got = tasks_to_restart(REGION, graph, failure.failed, failure.missing, failure.view)
    assert got == expected
    event("all" if got == failure.started else "none" if not got else "some")

    assert got <= tasks_to_restart(FULL, graph, failure.failed, failure.missing, failure.view)
    if strategy_problem(INDIVIDUAL, graph) is None:
        assert all(len(region.subtasks) == 1 for region in graph.regions)
        assert got == tasks_to_restart(
            INDIVIDUAL, graph, failure.failed, failure.missing, failure.view
        )
    else:
        assert any(len(region.subtasks) > 1 for region in graph.regions)


@examples(200)
@given(failures(), st.data())
def test_worse_failures_never_restart_less(
    case: tuple[Model, Failure], data: st.DataObject
) -> None:
    """Restart sets grow with what has failed and with what cannot be read."""
    model, failure = case
    graph = RegionGraph(model.plan)
    before = tasks_to_restart(REGION, graph, failure.failed, failure.missing, failure.view)
    more_failed = failure.failed | few_of(data.draw, model.subtasks)
    worse = failure.available & some_of(data.draw, sorted(failure.available, key=str))
    not_repeated = failure.view.not_repeated
    view = FailoverView(failure.started, failure.finished, worse.__contains__, not_repeated)
    assert before <= tasks_to_restart(REGION, graph, more_failed, failure.missing, view)
    # What is to be restarted needs no more than itself: failing all of it changes nothing.
    assert before == tasks_to_restart(
        REGION, graph, failure.failed | before, failure.missing, failure.view
    )
