"""What a job's machine keeps does not grow with its restarts.

Aim: a job that is restarted for months keeps no more than after a few restarts.
Method: one way to fail, again and again; everything that can be reached from the machine is counted early and late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from jobmanager.graph.execution_attempt import AttemptState
from jobmanager.job.job_master import JobMaster
from jobmanager.messages import job_events
from tests.support.drawn_plans import drawn
from tests.unit.jobmanager.test_partial_restarts import CACHING, CAUSE, Story, apart, released

pytestmark = pytest.mark.sampled(3)

FEW, MANY = 40, 200
"""The histories that are bounded by themselves are full after few."""
BLOCKING = apart(drawn("a:2 b:2", "a>b hash blocking"))
DETERMINISTIC = apart(drawn("a:2 b:2", "a>b hash blocking deterministic"))
RUNNING, FINISHED = AttemptState.RUNNING, AttemptState.FINISHED


def kept(master: JobMaster) -> dict[str, int]:
    """What is in all containers that the machine leads to, by the way to them."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    pending: list[tuple[str, Any]] = [("", master)]
    while pending:
        way, one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        inside: Iterable[tuple[str, Any]]
        if isinstance(one, Mapping):
            inside = [("[]", value) for pair in one.items() for value in pair]
            found[way] = found.get(way, 0) + len(one)
        elif isinstance(one, list | tuple | set | frozenset | deque):
            inside = [("[]", value) for value in one]
            found[way] = found.get(way, 0) + len(one)
        elif type(one).__module__.startswith("jobmanager"):
            slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
            names = {*vars(one)} if hasattr(one, "__dict__") else set(slots)
            inside = [(f".{name}", getattr(one, name)) for name in names if hasattr(one, name)]
        else:
            continue
        pending += [(way + step, value) for step, value in inside]
    return found


def again(story: Story, names: str, state: AttemptState = RUNNING) -> None:
    """The restart comes, and these run, or have finished."""
    story.due()
    story.now_ms += 1_000
    story.run(names)
    if state is FINISHED:
        story.report(names, FINISHED)


def a_task_fails(story: Story) -> None:
    story.fail("b0")
    again(story, "b0")


def a_producer_fails(story: Story) -> None:
    story.fail("a1")
    again(story, "a1")


def a_taskmanager_is_lost(story: Story) -> None:
    story.lose("b1")
    again(story, "b1")


def a_finished_producer_is_missed(story: Story) -> None:
    """Its consumer finds nothing, and both begin again."""
    story.fail("b0", job_events.MissingPartition("a>b", story.key("a1")))
    again(story, "a1", FINISHED)
    for name in ("b0", "b1"):
        if story.state(name) is AttemptState.DEPLOYING:
            story.run(name)


def a_finished_producers_taskmanager_is_lost(story: Story) -> None:
    story.lose("a1")
    again(story, "a1", FINISHED)
    for name in ("b0", "b1"):
        if story.state(name) is AttemptState.DEPLOYING:
            story.run(name)


def everything_fails(story: Story) -> None:
    story.do(job_events.FailureRequested(CAUSE))
    again(story, "a0 a1", FINISHED)
    story.run("b0 b1")


STORIES = [
    (BLOCKING, "a0 a1", "a0 a1", everything_fails),
    (DETERMINISTIC, "a0 a1", "a0 a1", everything_fails),
    (CACHING, "a0 a1 b0 b1", "", a_task_fails),
    (CACHING, "a0 a1 b0 b1", "", a_producer_fails),
    (CACHING, "a0 a1 b0 b1", "", a_taskmanager_is_lost),
    (apart(CACHING), "a0 a1 b0 b1", "a0 a1", a_finished_producer_is_missed),
    (apart(CACHING), "a0 a1 b0 b1", "a0 a1", a_finished_producers_taskmanager_is_lost),
    (BLOCKING, "a0 a1", "a0 a1", a_task_fails),
    (BLOCKING, "a0 a1", "a0 a1", a_finished_producer_is_missed),
    (BLOCKING, "a0 a1", "a0 a1", a_finished_producers_taskmanager_is_lost),
    (DETERMINISTIC, "a0 a1", "a0 a1", a_finished_producer_is_missed),
    (DETERMINISTIC, "a0 a1", "a0 a1", a_finished_producers_taskmanager_is_lost),
]


@pytest.mark.parametrize("checkpoints", [True, False])
@pytest.mark.parametrize(("plan", "running", "finished", "happens"), STORIES)
def test_what_a_job_keeps_does_not_grow_with_its_restarts(
    plan: Any, running: str, finished: str, happens: Callable[[Story], None], checkpoints: bool
) -> None:
    story = Story(plan, checkpoints=checkpoints)
    story.run(running)
    story.report(finished, FINISHED)
    if running == finished:
        story.run("b0 b1")
    for _ in range(FEW):
        happens(story)
    few = kept(story.master)
    for _ in range(MANY - FEW):
        happens(story)
    many = kept(story.master)
    assert story.master.restarts == MANY
    grown = {way: (few.get(way, 0), size) for way, size in many.items() if size > few.get(way, 0)}
    assert not grown


def test_an_old_partition_goes_when_who_was_spared_has_read_it() -> None:
    """A producer begins again for one consumer while another one reads what it had made first."""
    plan = drawn("a:1 b:1 c:1", "a>b hash blocking deterministic", "a>c hash caching reproducible")
    story = Story(apart(plan), checkpoints=True)
    story.run("a0 c0")
    story.report("a0", FINISHED)
    story.run("b0")
    first = story.key("a0")
    effects = [*story.do(job_events.KeptRowsLost(first, CAUSE)), *story.due()]
    story.run("a0")
    effects += story.report("a0", FINISHED)
    assert story.attempts("a0 b0 c0") == [1, 0, 0]
    assert ("a>b", first) not in released(effects)
    assert ("a>b", first) in released(story.report("c0 b0", FINISHED))
