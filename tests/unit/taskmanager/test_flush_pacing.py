"""A slot that has time sends at once; one that is busy waits for company, but never for long."""

from hypothesis import given
from hypothesis import strategies as st

from taskmanager.task.flush_pacing import BUSY_LINGER_NS, LINGER_NS, FlushPacing

MS = 1_000_000


def test_nothing_is_due_while_nothing_is_held_back() -> None:
    pacing = FlushPacing(0, 0)
    pacing.worked(0, 5 * MS, 5 * MS, has_more=False)
    assert pacing.due_ns(has_work=False) is None
    assert pacing.due_ns(has_work=True) is None


def test_a_slot_that_was_idle_for_as_long_as_it_worked_sends_at_once() -> None:
    pacing = FlushPacing(0, 0)
    pacing.held(20 * MS)
    pacing.worked(18 * MS, 20 * MS, 20 * MS, has_more=False)
    due_ns = pacing.due_ns(has_work=False)
    assert due_ns is not None
    assert due_ns <= 20 * MS


def test_a_slot_that_worked_all_the_time_waits_as_long_again() -> None:
    pacing = FlushPacing(0, 0)
    pacing.held(3 * MS)
    pacing.worked(0, 3 * MS, 3 * MS, has_more=False)
    assert pacing.due_ns(has_work=False) == 6 * MS
    assert pacing.due_ns(has_work=True) == 3 * MS + BUSY_LINGER_NS


def test_it_never_waits_longer_than_the_linger() -> None:
    pacing = FlushPacing(0, 0)
    pacing.held(1 * MS)
    pacing.worked(0, 40 * MS, 40 * MS, has_more=True)
    pacing.worked(40 * MS, 60 * MS, 60 * MS, has_more=False)
    pacing.worked(61 * MS, 62 * MS, 62 * MS, has_more=False)
    assert pacing.due_ns(has_work=False) == 60 * MS + LINGER_NS


def test_a_slot_that_was_held_up_once_has_not_worked_all_the_time() -> None:
    pacing = FlushPacing(0, 0)
    pacing.worked(0, 12 * MS, 1 * MS, has_more=False)  # it waited for the interpreter lock
    pacing.held(12 * MS)
    due_ns = pacing.due_ns(has_work=False)
    assert due_ns is not None
    assert due_ns <= 12 * MS


def test_a_slot_that_shares_its_core_is_as_busy_as_one_with_twice_the_work() -> None:
    pacing = FlushPacing(0, 0)
    for end in range(2, 12, 2):
        pacing.worked((end - 2) * MS, end * MS, end // 2 * MS, has_more=False)
        pacing.held(end * MS)
    assert pacing.due_ns(has_work=False) == 2 * MS + LINGER_NS
    pacing.flushed(12 * MS, 5 * MS)
    pacing.worked(12 * MS, 14 * MS, 6 * MS, has_more=False)
    pacing.held(14 * MS)
    assert pacing.due_ns(has_work=False) == 16 * MS


def test_what_was_sent_is_not_waited_for_again() -> None:
    pacing = FlushPacing(0, 0)
    pacing.held(3 * MS)
    pacing.worked(0, 3 * MS, 3 * MS, has_more=False)
    pacing.flushed(6 * MS, 6 * MS)
    assert pacing.due_ns(has_work=False) is None
    pacing.held(7 * MS)
    assert pacing.due_ns(has_work=False) == 6 * MS


def test_idle_time_of_before_lets_a_slot_send_at_once_again() -> None:
    pacing = FlushPacing(0, 0)
    pacing.worked(20 * MS, 21 * MS, 21 * MS, has_more=False)
    pacing.held(21 * MS)
    pacing.flushed(21 * MS, 21 * MS)
    pacing.worked(21 * MS, 23 * MS, 23 * MS, has_more=False)  # what it sent has kept itself busy
    pacing.held(23 * MS)
    due_ns = pacing.due_ns(has_work=False)
    assert due_ns is not None
    assert due_ns <= 23 * MS
    for end in range(24, 34):  # busy all the time: the spare time is used up
        pacing.flushed((end - 1) * MS, (end - 1) * MS)
        pacing.worked((end - 1) * MS, end * MS, end * MS, has_more=False)
        pacing.held(end * MS)
    assert pacing.due_ns(has_work=False) == 34 * MS


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 50), st.booleans(), st.booleans()), max_size=30
    )
)
def test_whatever_happens_what_is_held_back_is_due_soon(
    turns: list[tuple[int, int, bool, bool]],
) -> None:
    pacing = FlushPacing(0, 0)
    now_ms, held_since_ns = 0, None
    for idle_ms, work_ms, has_more, is_held in turns:
        begun_ns = (now_ms + idle_ms) * MS
        now_ms += idle_ms + work_ms
        if is_held:
            pacing.held(now_ms * MS)
            held_since_ns = now_ms * MS if held_since_ns is None else held_since_ns
        pacing.worked(begun_ns, now_ms * MS, now_ms * MS, has_more=has_more)
        due_ns = pacing.due_ns(has_work=has_more)
        if held_since_ns is None:
            assert due_ns is None
            continue
        assert due_ns is not None
        assert due_ns <= held_since_ns + BUSY_LINGER_NS
        assert has_more or due_ns <= max(now_ms * MS, held_since_ns) + LINGER_NS
        if due_ns <= now_ms * MS:
            pacing.flushed(now_ms * MS, now_ms * MS)
            held_since_ns = None
