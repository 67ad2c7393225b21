"""Aim: all output of a checkpoint counts as committed exactly when each of its tasks has committed it, or begun again from
there.

Method: random histories of three tasks, beside an oracle that keeps by task the newest checkpoint that it has committed.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jobmanager.checkpoint.owed_commits import OwedCommits
from jobmanager.graph.execution_attempt import SubtaskId

TASKS = [SubtaskId("sink", index) for index in range(3)]
INDEXES = st.integers(0, 2)

STEPS = st.lists(
    st.one_of(
        st.just(("complete",)),
        st.tuples(st.just("commit"), INDEXES, st.integers(0, 3)),
        st.tuples(st.just("finish"), INDEXES),
        st.tuples(st.just("restart"), st.sets(INDEXES, min_size=1), st.integers(0, 2)),
        st.just(("started",)),
    ),
    max_size=30,
)


@given(STEPS)
def test_a_checkpoint_is_committed_when_no_task_owes_it(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    owed = OwedCommits()
    complete: list[int] = []
    committed = dict.fromkeys(range(3), 0)
    beginning: dict[int, int] = {}
    told = 0
    for number, step in enumerate(steps, 1):
        answer = None
        match step:
            case ("complete",):
                complete.append(number)
                answer = owed.expect(number, TASKS)
            case ("commit", index, back) if complete[-1 - back :]:
                newest = complete[-1 - back :][0]
                committed[index] = max(committed[index], newest)
                answer = owed.committed(TASKS[index], newest)
            case ("finish", index):
                committed[index] = max([committed[index], *complete])
                answer = owed.finished(TASKS[index])
            case ("restart", indexes, back):
                restored_id = ([0, *complete])[-1 - back :][0]
                complete = [id for id in complete if id <= restored_id]
                committed = {index: min(id, restored_id) for index, id in committed.items()}
                beginning |= dict.fromkeys(indexes, restored_id)
                owed.restored(restored_id, [TASKS[index] for index in indexes])
            case ("started",):
                for index, restored_id in beginning.items():
                    committed[index] = max(committed[index], restored_id)
                beginning = {}
                answer = owed.started()
            case _:
                continue
        by_all = max((id for id in complete if id <= min(committed.values())), default=0)
        assert (answer or told) == max(told, by_all)
        told = max(told, by_all)
