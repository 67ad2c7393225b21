"""Whoever is to be called is called when it is time, and only then: like a walk over all of them."""

from hypothesis import given
from hypothesis import strategies as st

from taskmanager.task.deadlines import Deadlines

EVENTS = st.one_of(
    st.tuples(st.integers(0, 4), st.none() | st.integers(0, 20)), st.tuples(st.none(), st.just(0))
)


@given(st.lists(EVENTS, max_size=100))
def test_who_is_due_is_who_a_walk_over_all_finds(
    events: list[tuple[int | None, int | None]],
) -> None:
    """Five of them put times, time goes on by one with each look."""
    deadlines, at_ns, now_ns = Deadlines[int](), dict[int, int](), 0
    for key, event_ns in events:
        if key is None:
            now_ns += 1
            due = {one for one, due_ns in at_ns.items() if due_ns <= now_ns}
            taken = deadlines.take_due(now_ns)
            assert len(taken) == len(due)
            assert set(taken) == due
            at_ns = {one: due_ns for one, due_ns in at_ns.items() if one not in due}
        else:
            deadlines.put(key, event_ns)
            at_ns.pop(key, None)
            if event_ns is not None:
                at_ns[key] = event_ns
        if now_ns % 2:
            assert deadlines.next_ns() == min(at_ns.values(), default=None)
