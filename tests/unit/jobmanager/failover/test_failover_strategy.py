"""Restart sets on hand-drawn graphs: which subtasks a failure restarts, in every case that the rules tell apart.

The expected sets are written by hand. A failure is told as the failed subtasks and the partitions that cannot be
read any more; those blamed by a consumer count as such whatever else is known of them.
"""

from __future__ import annotations

import itertools
import time

import pytest

from jobmanager.failover.failover_strategy import (
    FailoverStrategyName,
    FailoverView,
    strategy_problem,
    tasks_to_restart,
)
from jobmanager.failover.regions import KeptOutput, RegionGraph
from jobmanager.graph.job_plan import EdgePlan, Exchange, JobPlan, Partitioning, VertexPlan
from tests.support.drawn_plans import drawn, in_words, partitions, subtasks

FULL, REGION, INDIVIDUAL = FailoverStrategyName


def restarted(
    plan: JobPlan,
    failed: str,
    *,
    gone: str = "",
    missing: str = "",
    unstarted: str = "",
    finished: str = "",
    name: FailoverStrategyName = REGION,
    not_repeated: str = "",
) -> str:
    graph = RegionGraph(plan)
    everything = {subtask for region in graph.regions for subtask in region.subtasks}
    lost = partitions(gone)
    view = FailoverView(
        frozenset(everything - subtasks(unstarted)),
        subtasks(finished),
        lambda part: part not in lost,
        frozenset(not_repeated.split()),
    )
    return in_words(tasks_to_restart(name, graph, subtasks(failed), partitions(missing), view))


PIPELINES = drawn("a:3 b:3", "a>b forward pipelined")


def test_a_failure_restarts_its_pipeline_alone() -> None:
    assert restarted(PIPELINES, "b1") == "a1 b1"
    assert restarted(PIPELINES, "b1 a2") == "a1 a2 b1 b2"
    assert restarted(PIPELINES, "") == ""


def test_full_restarts_all_that_was_started() -> None:
    assert restarted(PIPELINES, "b1", name=FULL) == "a0 a1 a2 b0 b1 b2"
    assert restarted(PIPELINES, "b1", unstarted="a0 b0", name=FULL) == "a1 a2 b1 b2"


def test_an_all_to_all_pipeline_restarts_whole() -> None:
    plan = drawn("a:2 b:2 c:2", "a>b hash pipelined", "b>c forward pipelined")
    assert restarted(plan, "c1") == "a0 a1 b0 b1 c0 c1"
    assert restarted(plan, "c1", finished="a0 a1") == "a0 a1 b0 b1 c0 c1"


def test_what_was_never_started_is_left_alone_and_passes_nothing_on() -> None:
    plan = drawn("a:1 b:1 c:1", "a>b hash blocking", "b>c hash blocking")
    assert restarted(plan, "a0", unstarted="b0 c0") == "a0"
    assert restarted(plan, "b0", unstarted="b0", gone="a>b/0") == ""
    # Not a state that scheduling leads to, but one that says how far a restart reaches.
    assert restarted(plan, "a0", unstarted="b0") == "a0"


# The example of FLIP-1: regions A -> B, and B's output read by C and by D; C1, one of two in C, fails. Rows: which
# can be read of A's partition and of B's partitions for C and for D. Columns: the regions restarted where D waits;
# where D runs or has finished and nothing is said of B; where B is deterministic and D runs, or has finished.
FLIP_MATRIX = {
    "ab bc bd": ("C", "C", "C", "C"),
    "ab bc": ("C", "C", "C", "C"),
    "bc bd": ("C", "C", "C", "C"),
    "bc": ("C", "C", "C", "C"),
    "ab bd": ("BC", "BCD", "BC", "BC"),
    "ab": ("BC", "BCD", "BCD", "BC"),
    "bd": ("ABC", "ABCD", "ABC", "ABC"),
    "": ("ABC", "ABCD", "ABCD", "ABC"),
}


@pytest.mark.parametrize("readable", FLIP_MATRIX)
@pytest.mark.parametrize("is_blamed", [False, True])
def test_the_example_of_the_proposal(readable: str, *, is_blamed: bool) -> None:
    lost = {"ab": "a>b/0", "bc": "b>c/0", "bd": "b>d/0"}
    for edge in readable.split():
        del lost[edge]
    because = {"missing" if is_blamed else "gone": " ".join(lost.values())}

    def regions_restarted(claim: str, a_to_b: str = "deterministic", **states: str) -> str:
        plan = drawn(
            "a:1 b:1 c:2 d:2 s:1 t:1",
            f"a>b hash blocking {a_to_b}",
            f"b>c hash blocking {claim}",
            f"b>d hash blocking {claim}",
            "c>s hash pipelined",
            "d>t hash pipelined",
        )
        got = restarted(plan, "c1", **because, **states)
        members = {"A": "a0", "B": "b0", "C": "c0 c1 s0", "D": "d0 d1 t0"}
        names = [name for name, those in members.items() if subtasks(those) <= subtasks(got)]
        assert sum(len(subtasks(members[name])) for name in names) == len(subtasks(got))
        return "".join(names)

    waits, restarts_anyway, runs, has_finished = FLIP_MATRIX[readable]
    assert regions_restarted("", unstarted="d0 d1 t0", finished="a0 b0") == waits
    assert regions_restarted("", finished="a0 b0") == restarts_anyway
    assert regions_restarted("", finished="a0 b0 d0 d1 t0") == restarts_anyway
    assert regions_restarted("deterministic", unstarted="d0 d1 t0", finished="a0 b0") == waits
    assert regions_restarted("deterministic", finished="a0 b0") == runs
    # A region has finished when all its subtasks have, those that do not read included.
    for part_of_d in ("d0 t0", "d0 d1"):
        assert regions_restarted("deterministic", finished=f"a0 b0 {part_of_d}") == runs
    assert regions_restarted("deterministic", finished="a0 b0 d0 d1 t0") == has_finished
    # What B makes of other rows are other rows, whatever it promises.
    for finished in ("a0 b0", "a0 b0 d0 d1 t0"):
        expected = "ABCD" if "A" in runs else regions_restarted("deterministic", finished=finished)
        assert regions_restarted("deterministic", "", finished=finished) == expected


def test_only_missing_partitions_that_are_read_again_restart_their_producers() -> None:
    plan = drawn("a:2 b:2", "a>b forward blocking")
    assert restarted(plan, "b0", missing="a>b/1") == "b0"
    assert restarted(plan, "b0", missing="a>b/0") == "a0 b0"


SHUFFLE = "a>b hash caching"


def test_losing_a_taskmanager_behind_a_reproducible_caching_shuffle_restarts_what_ran_there() -> (
    None
):
    plan = drawn("a:4 b:4", f"{SHUFFLE} reproducible")
    gone = "a>b/0 a>b/1"
    assert restarted(plan, "a0 a1 b0 b1", gone=gone) == "a0 a1 b0 b1"
    assert restarted(plan, "b2") == "b2"
    # Consumers that have finished stay as well.
    assert restarted(plan, "a0 a1 b0 b1", gone=gone, finished="b2") == "a0 a1 b0 b1"


def test_behind_a_savepoint_what_its_barrier_has_cut_is_not_reproducible() -> None:
    plan = drawn("a:4 b:4", f"{SHUFFLE} reproducible")
    assert restarted(plan, "a0", not_repeated="b") == "a0"
    assert restarted(plan, "a0", not_repeated="a") == "a0 b0 b1 b2 b3"
    assert restarted(plan, "b2", not_repeated="a") == "b2"


@pytest.mark.parametrize("claim", ["", "deterministic"])
def test_a_caching_shuffle_that_is_not_reproducible_restarts_all_consumers(claim: str) -> None:
    """Their offsets mean other rows in the new attempt. The other producers keep what they have sent."""
    plan = drawn("a:4 b:4", f"{SHUFFLE} {claim}")
    assert restarted(plan, "a0 b0", gone="a>b/0") == "a0 b0 b1 b2 b3"
    assert restarted(plan, "a0 b0", gone="a>b/0", finished="b3") == "a0 b0 b1 b2 b3"
    # A log that could be read, had its producer not failed, protects nobody.
    assert restarted(plan, "a0") == "a0 b0 b1 b2 b3"
    # A failed consumer alone reads again from the producers, which run on.
    assert restarted(plan, "b0") == "b0"


def test_rows_that_memory_has_dropped_restart_their_producers() -> None:
    plan = drawn("a:3 b:3", "a>b hash caching-memory reproducible")
    assert restarted(plan, "b0") == "b0"
    assert restarted(plan, "b0", gone="a>b/1") == "a1 b0"
    assert restarted(plan, "b0", missing="a>b/1 a>b/2") == "a1 a2 b0"
    plan = drawn("a:3 b:3", "a>b hash caching-memory")
    assert restarted(plan, "b0", gone="a>b/1") == "a1 b0 b1 b2"


def test_a_second_shuffle_behind_what_is_not_reproducible() -> None:
    """The shuffled rows reach b in any order, so c cannot go on where it is; a and the other b can."""
    plan = drawn("a:2 b:2 c:2", f"{SHUFFLE} reproducible", "b>c hash caching deterministic")
    gone = "a>b/0 b>c/0"
    assert restarted(plan, "a0 b0 c0", gone=gone) == "a0 b0 c0 c1"
    assert restarted(plan, "c0") == "c0"
    assert restarted(plan, "a0", gone="a>b/0") == "a0"


def test_every_edge_must_protect() -> None:
    """c reads from a restarted producer over one edge that protects it, and over another that does not."""
    plan = drawn("a:1 c:1", "a>c hash caching reproducible", "a>c.2 hash caching")
    assert restarted(plan, "a0") == "a0 c0"
    plan = drawn("a:1 c:1", "a>c hash caching reproducible", "a>c.2 hash blocking deterministic")
    assert restarted(plan, "a0") == "a0"
    assert restarted(plan, "a0", gone="a>c.2/0") == "a0 c0"
    assert restarted(plan, "a0", gone="a>c.2/0", finished="c0") == "a0"


def test_half_a_blocking_partition_protects_nobody() -> None:
    """b reads from both producers, and a1's old partition has gone with it."""
    plan = drawn("a:2 b:2", "a>b hash blocking deterministic")
    assert restarted(plan, "a0 a1", gone="a>b/1") == "a0 a1 b0 b1"
    assert restarted(plan, "a0 a1") == "a0 a1"
    # a1 is not restarted: whether its partition can be read is the affair of those that read it again.
    assert restarted(plan, "a0", gone="a>b/1") == "a0"


def test_joins_restart_with_either_side() -> None:
    plan = drawn(
        "a:2 b:2 j:2 k:2", "a>j hash blocking", "b>j forward caching", "j>k forward pipelined"
    )
    assert restarted(plan, "k0") == "j0 k0"
    assert restarted(plan, "k0", gone="b>j/0") == "b0 j0 k0"
    assert restarted(plan, "k0", gone="a>j/1") == "a1 j0 j1 k0 k1"
    assert restarted(plan, "b1") == "b1 j1 k1"


def test_mixed_kinds_along_one_way() -> None:
    """pipelined into a region, blocking, caching, then a chain of blocking ones."""
    plan = drawn(
        "a:2 b:2 c:2 d:2 e:1",
        "a>b hash pipelined",
        "b>c hash blocking deterministic",
        "c>d forward caching reproducible",
        "d>e hash blocking",
    )
    assert restarted(plan, "e0") == "e0"
    assert restarted(plan, "e0", gone="d>e/1") == "d1 e0"
    assert restarted(plan, "e0", gone="d>e/1 c>d/1") == "c1 d1 e0"
    # c0 and c1 read the same rows again, but in another order: d0 cannot read on.
    assert restarted(plan, "e0", gone="d>e/1 c>d/1 b>c/0") == "a0 a1 b0 b1 c0 c1 d0 d1 e0"
    assert restarted(plan, "e0", gone="d>e/1 c>d/1 b>c/0", finished="c0") == "a0 a1 b0 b1 c1 d1 e0"
    assert restarted(plan, "a0", unstarted="e0") == "a0 a1 b0 b1"
    assert restarted(plan, "d0", unstarted="e0") == "d0"


def test_a_chain_of_blocking_regions_goes_back_to_what_is_there() -> None:
    plan = drawn("a:1 b:1 c:1 d:1", "a>b hash blocking", "b>c hash blocking", "c>d hash blocking")
    assert restarted(plan, "d0") == "d0"
    assert restarted(plan, "d0", gone="c>d/0") == "c0 d0"
    assert restarted(plan, "d0", gone="a>b/0") == "d0"
    assert restarted(plan, "d0", gone="c>d/0 a>b/0") == "c0 d0"
    assert restarted(plan, "d0", gone="c>d/0 b>c/0 a>b/0") == "a0 b0 c0 d0"
    assert restarted(plan, "b0") == "b0 c0 d0"


def test_colocated_subtasks_restart_together() -> None:
    plan = drawn("a:2@x b:2@x c:2", "a>c hash caching reproducible", "b>c forward blocking")
    assert restarted(plan, "a0", unstarted="c0 c1") == "a0 b0"
    assert restarted(plan, "b1") == "a1 b1 c1"


def test_regions_merged_by_a_cycle_restart_together() -> None:
    plan = drawn(
        "a:1@x c:1 d:1 b:1@x",
        "a>c hash blocking deterministic",
        "c>d forward pipelined",
        "d>b hash blocking deterministic",
    )
    for failed in ("a0", "b0", "c0", "d0"):
        assert restarted(plan, failed) == "a0 b0 c0 d0"


DIAMOND = ("a>b hash blocking", "a>c hash blocking", "b>d hash blocking", "c>d hash blocking")


def test_diamonds_end() -> None:
    """Each way up and each way down leads into the other."""
    plan = drawn("a:1 b:1 c:1 d:1", *DIAMOND)
    every = "a>b/0 a>c/0 b>d/0 c>d/0"
    assert restarted(plan, "d0", gone=every) == "a0 b0 c0 d0"
    assert restarted(plan, "b0", gone=every) == "a0 b0 c0 d0"
    assert restarted(plan, "b0") == "b0 d0"
    # d must read c's partition again, c its input, and what a sends again b reads as well.
    assert restarted(plan, "b0", gone="c>d/0 a>c/0") == "a0 b0 c0 d0"


def test_individual_is_refused_where_subtasks_share_a_region() -> None:
    alone = drawn("a:2 b:2", "a>b hash caching")
    for name in FailoverStrategyName:
        assert strategy_problem(name, RegionGraph(alone)) is None
    pipelined = RegionGraph(drawn("a:4 b:4 c:1", "a>b hash pipelined", "b>c hash caching"))
    assert strategy_problem(REGION, pipelined) is None
    problem = strategy_problem(INDIVIDUAL, pipelined)
    assert problem is not None
    assert "1 of the job's 2 regions" in problem
    assert "a/0, a/1, a/2, a/3, ..." in problem
    assert "the pipelined edge a>b from a to b" in problem
    assert "b>c" not in problem
    colocated = RegionGraph(drawn("a:2@x b:2@x c:1@y", "a>b forward caching"))
    problem = strategy_problem(INDIVIDUAL, colocated)
    assert problem is not None
    assert "the colocation group 'x' of a, b" in problem
    assert "'y'" not in problem


@pytest.mark.parametrize("claim", ["", "reproducible"])
def test_individual_restarts_what_the_failed_subtask_needs(claim: str) -> None:
    plan = drawn("a:2 b:2", f"{SHUFFLE} {claim}")
    for failed, gone in itertools.product(("a0", "b0", "a0 b1"), ("", "a>b/0", "a>b/0 a>b/1")):
        individual = restarted(plan, failed, gone=gone, name=INDIVIDUAL)
        assert individual == restarted(plan, failed, gone=gone, name=REGION)


def blocking_shuffles(*, is_deterministic: bool) -> RegionGraph:
    """500 x 500 x 3 channels."""
    plan = JobPlan(
        tuple(VertexPlan(name, 500) for name in "abcd"),
        tuple(
            EdgePlan(
                f"{source}>{target}",
                source,
                target,
                Partitioning.HASH,
                Exchange.BLOCKING,
                is_deterministic=is_deterministic,
            )
            for source, target in ("ab", "bc", "cd")
        ),
    )
    return RegionGraph(plan)


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize(
    ("is_available", "failed", "expected_count"),
    [(False, "d0", 2000), (True, "d0", 1), (True, "a0 b0 c0", None)],
)
def test_a_partition_is_asked_for_twice_at_most_however_many_read_it(
    *, is_deterministic: bool, is_available: bool, failed: str, expected_count: int | None
) -> None:
    graph = blocking_shuffles(is_deterministic=is_deterministic)
    started = frozenset(subtask for region in graph.regions for subtask in region.subtasks)
    asked = []

    def answer(part: KeptOutput) -> bool:
        asked.append(part)
        return is_available

    view = FailoverView(started, frozenset(), answer)
    before = time.process_time()
    got = tasks_to_restart(REGION, graph, subtasks(failed), (), view)
    assert time.process_time() - before < 1
    assert len(got) == (expected_count or (3 if is_deterministic else 1 + 3 * 500))
    assert len(asked) <= 2 * 1500
