"""Aim: what was done under an earlier JobManager is adopted as far as that is sound, and no further.

Method: jobs drawn by hand, and random ones against the largest of all sets of regions, tried one by one, that
an independent model of the failover rules leaves as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import event, given
from hypothesis import strategies as st

from jobmanager.checkpoint.restored_checkpoint import RestoredCheckpoint, RestoredRead
from jobmanager.failover.adoption import Version, adopted, pinned
from jobmanager.failover.regions import KeptOutput, RegionGraph
from jobmanager.graph.execution_attempt import SubtaskId
from jobmanager.graph.job_plan import EdgePlan, Exchange, JobPlan, Partitioning
from tests.support.drawn_plans import drawn, in_words, partition, subtask, subtasks
from tests.support.examples import examples
from tests.support.failover_model import Failure, Model, closure
from tests.support.plan_strategies import few_of, plans, subsets

# ---------------------------------------------------------------- drawn by hand


def read(text: str) -> RestoredRead:
    """The read of ``b0 a>b/1#3``: b0 had begun to read what attempt 3 of a1 has sent to b."""
    reader, what = text.split()
    name, _, attempt = what.partition("#")
    made = partition(name)
    return RestoredRead(
        subtask(reader), made.edge_id, made.producer.subtask_index, int(attempt), rows=5
    )


def checkpoint(begun: str, *reads: str, finished: str = "") -> RestoredCheckpoint:
    """A checkpoint; who is read from had finished."""
    named = tuple(map(read, reads))
    done = subtasks(finished)
    return RestoredCheckpoint(4, done, (), named, subtasks(begun) | done)


def held(*texts: str) -> set[Version]:
    """The versions of ``a>b/0#3``."""
    split = (text.split("#") for text in texts)
    return {(partition(name), int(attempt)) for name, attempt in split}


def words(plan: JobPlan, restored: RestoredCheckpoint, there: set[Version]) -> str:
    found = adopted(RegionGraph(plan), restored, there)
    return in_words(found)


STAGES = drawn("a:2 b:2", "a>b hash blocking")
HALF_READ = ("b0 a>b/0#3", "b0 a>b/1#3", "b1 a>b/0#3", "b1 a>b/1#3")


def test_what_the_checkpoint_names_and_somebody_holds_is_adopted() -> None:
    restored = checkpoint("b0 b1", *HALF_READ, finished="a0 a1")
    there = held("a>b/0#3", "a>b/1#3")
    assert pinned(RegionGraph(STAGES), restored) == there
    found = adopted(RegionGraph(STAGES), restored, there)
    assert found == {subtask("a0"): 3, subtask("a1"): 3}


def test_what_is_lost_is_done_again_and_the_rest_is_not() -> None:
    restored = checkpoint("b0 b1", *HALF_READ, finished="a0 a1")
    assert words(STAGES, restored, held("a>b/1#3")) == "a1"
    assert words(STAGES, restored, held("a>b/1#2")) == ""
    assert words(STAGES, restored, set()) == ""


def test_nothing_is_looked_for_where_nobody_had_begun_to_read() -> None:
    restored = checkpoint("a0 a1")
    assert pinned(RegionGraph(STAGES), restored) == frozenset()
    assert words(STAGES, restored, held("a>b/0#3", "a>b/1#3")) == ""


def test_caching_partitions_are_nothing_to_adopt() -> None:
    plan = drawn("a:1 b:1", "a>b hash caching reproducible")
    restored = checkpoint("a0 b0", "b0 a>b/0#3")
    assert pinned(RegionGraph(plan), restored) == frozenset()
    assert words(plan, restored, held("a>b/0#3")) == ""


def test_stages_in_front_of_what_is_adopted_are_not_done_again_though_their_rows_are_gone() -> None:
    plan = drawn("a:1 b:1 c:1", "a>b hash blocking", "b>c hash blocking")
    restored = checkpoint("c0", "c0 b>c/0#3", finished="a0 b0")
    assert words(plan, restored, held("b>c/0#3")) == "a0 b0"
    assert words(plan, restored, set()) == ""


def test_what_was_made_of_rows_that_are_made_anew_is_void_unless_they_come_the_same() -> None:
    """a0 is lost and made anew for c0, and b0 had read it."""
    for claim, expected in (("", ""), ("deterministic", "b0")):
        plan = drawn(
            "a:1 b:1 c:1",
            f"a>b hash blocking {claim}",
            f"a>c hash blocking {claim}",
            "b>c hash blocking",
        )
        restored = checkpoint("c0", "c0 a>c/0#1", "c0 b>c/0#2", finished="a0 b0")
        assert words(plan, restored, held("a>b/0#1", "b>c/0#2")) == expected


def test_who_waits_for_the_output_of_a_finished_stage_gets_it_made_again() -> None:
    """c0 had not begun, so nobody knows which attempt of a0 it is to read."""
    plan = drawn("a:1 b:1 c:1", "a>c hash blocking", "b>c hash blocking")
    restored = checkpoint("b0", finished="a0")
    assert words(plan, restored, held("a>c/0#0")) == ""


def test_readers_of_one_source_are_adopted_together() -> None:
    plan = drawn("a:2 b:2", "a>b forward blocking")
    vertices = tuple(replace(v, source_uids=("src",) if v.id == "a" else ()) for v in plan.vertices)
    with_source = JobPlan(vertices, plan.edges)
    restored = checkpoint("b0 b1", "b0 a>b/0#3", "b1 a>b/1#3", finished="a0 a1")
    assert words(plan, restored, held("a>b/0#3")) == "a0"
    assert words(with_source, restored, held("a>b/0#3")) == ""
    assert words(with_source, restored, held("a>b/0#3", "a>b/1#3")) == "a0 a1"


def test_what_outlives_the_job_is_looked_for_too() -> None:
    kept = EdgePlan("a>", "a", "", Partitioning.FORWARD, Exchange.BLOCKING)
    plan = drawn("a:1 b:1", "a>b hash blocking")
    plan = JobPlan(plan.vertices, (*plan.edges, kept))
    restored = checkpoint("b0", "b0 a>b/0#3", finished="a0")
    promised = (KeptOutput("a>", subtask("a0")), 3)
    assert pinned(RegionGraph(plan), restored) == held("a>b/0#3") | {promised}
    assert words(plan, restored, held("a>b/0#3")) == ""
    assert words(plan, restored, held("a>b/0#3") | {promised}) == "a0"


# ---------------------------------------------------------------- random jobs


@dataclass(frozen=True)
class Found:
    """A checkpoint of a job, and what is left of what it names."""

    model: Model
    restored: RestoredCheckpoint
    held: frozenset[Version]


@st.composite
def findings(draw: st.DrawFn) -> Found:
    plan = draw(plans())
    sources = few_of(draw, list(plan.vertices))
    vertices = (replace(v, source_uids=("src",)) if v in sources else v for v in plan.vertices)
    edges = plan.edges
    if draw(st.integers(0, 3)):  # mostly stages
        edges = tuple(replace(edge, exchange=Exchange.BLOCKING) for edge in edges)
    model = Model(JobPlan(tuple(vertices), edges))
    writers = {edge.source for edge in edges}
    finished = frozenset(s for s in model.subtasks if s.vertex in writers)
    finished -= few_of(draw, sorted(finished))
    readers = frozenset(model.subtasks) - finished - few_of(draw, model.subtasks)
    blocking = [one for one in model.kept if one.edge.exchange is Exchange.BLOCKING]
    reads = [one for one in blocking if one.consumer in readers]
    odd = few_of(draw, [one.partition for one in reads])
    named = {one.producer for one in reads}
    restored = RestoredCheckpoint(
        4,
        finished,
        (),
        tuple(
            RestoredRead(
                one.consumer,
                one.edge.id,
                one.producer.subtask_index,
                2 if one.partition in odd else 1,
                rows=1,
            )
            for one in reads
        ),
        finished | readers | named,
    )
    there = frozenset((one.partition, number) for one in blocking for number in (1, 2))
    return Found(model, restored, there - few_of(draw, sorted(there, key=str)))


def is_sound(found: Found, numbers: dict[SubtaskId, int], union: frozenset[SubtaskId]) -> bool:
    """Whether all of these can count as finished."""
    model, restored = found.model, found.restored
    available = frozenset(
        partition for partition, number in found.held if numbers.get(partition.producer) == number
    )
    failure = Failure(restored.subtasks - union, restored.subtasks, union, available, frozenset())
    if closure(model, failure) & union:
        return False
    siblings = {
        s for v in model.plan.vertices if v.source_uids for s in model.subtasks if s.vertex == v.id
    }
    return all(
        channel.partition in available or channel.consumer in union
        for channel in model.kept
        if channel.producer in union
    ) and all(
        one in union for s in union & siblings for one in model.subtasks if one.vertex == s.vertex
    )


@examples(300)
@given(findings())
def test_the_most_is_adopted_that_is_sound(found: Found) -> None:
    model, restored = found.model, found.restored
    named: dict[SubtaskId, set[int]] = {}
    edges = {edge.id: edge for edge in model.plan.edges}
    for one in restored.reads:
        producer = SubtaskId(edges[one.edge_id].source, one.producer_index)
        named.setdefault(producer, set()).add(one.attempt)
    blocking = {e.source for e in model.plan.edges if e.exchange is Exchange.BLOCKING}
    candidates = [
        region
        for region in model.regions
        if any(s.vertex in blocking for s in region)
        and region <= restored.finished
        and len(set[int]().union(*(named.get(s, set()) for s in region))) <= 1
    ]
    numbers = {
        s: next((n for other in region for n in named.get(other, ())), 0)
        for region in candidates
        for s in region
    }
    unions = [frozenset[SubtaskId]().union(*some) for some in subsets(candidates)]
    sound = [union for union in unions if is_sound(found, numbers, union)]
    most = frozenset[SubtaskId]().union(*sound)
    got = adopted(RegionGraph(model.plan), restored, found.held)
    assert most in sound
    assert got.keys() == most
    assert all(got[s] == numbers[s] for s in got)
    event("all" if got and len(got) == len(numbers) else "some" if got else "none")
