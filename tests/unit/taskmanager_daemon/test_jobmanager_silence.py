"""Aim: a JobManager that does not answer is away after the timeout and given up after the grace.

Method: the machine alone, on a made-up clock; a property over any pattern of answers.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from taskmanager.rpc.jobmanager_silence import JobManagerSilence, Presence


def test_the_three_stretches() -> None:
    silence = JobManagerSilence(10, 30, now_s=100)
    assert silence.patience_s(100) == 5
    assert silence.unanswered(109.9) is Presence.PRESENT
    assert not silence.is_away
    assert silence.unanswered(110) is Presence.AWAY
    assert silence.is_away
    assert silence.unanswered(139.9) is Presence.AWAY
    silence.answered(139.9)
    assert not silence.is_away
    assert silence.unanswered(149) is Presence.PRESENT
    assert silence.unanswered(179.9) is Presence.GIVEN_UP


def test_without_grace_it_is_given_up_after_the_timeout() -> None:
    silence = JobManagerSilence(10, 0, now_s=0)
    assert silence.unanswered(9) is Presence.PRESENT
    assert silence.unanswered(10) is Presence.GIVEN_UP


def test_after_a_pause_it_is_asked_once_more_with_time_to_answer() -> None:
    silence = JobManagerSilence(10, 30, now_s=0)
    assert silence.patience_s(1000) == 5
    silence.answered(1001)
    assert silence.unanswered(1002) is Presence.PRESENT


@given(
    st.floats(0.05, 100),
    st.floats(0, 100),
    st.lists(st.tuples(st.floats(0, 50), st.booleans()), max_size=50),
)
def test_calls_that_are_made_one_after_the_other(
    timeout_s: float, grace_s: float, calls: list[tuple[float, bool]]
) -> None:
    """None is awaited past the end of a stretch, and only silence gives it up."""
    silence, now_s, heard_s = JobManagerSilence(timeout_s, grace_s, 0), 0.0, 0.0
    for pause_s, is_answered in calls:
        now_s += pause_s
        patience_s = silence.patience_s(now_s)
        assert 0.01 <= patience_s <= max(timeout_s / 2, 0.01)
        for end in (timeout_s, timeout_s + grace_s):
            if now_s - heard_s < end:
                assert patience_s <= max(end - (now_s - heard_s), 0.01) + 1e-6
        now_s += patience_s
        if is_answered:
            silence.answered(now_s)
            heard_s = now_s
        else:
            is_over = silence.unanswered(now_s) is Presence.GIVEN_UP
            assert is_over == (now_s - heard_s >= timeout_s + grace_s)
