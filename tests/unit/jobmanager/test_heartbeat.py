"""Aim: who is silent for too long is lost, nobody else, and doubts shorten what is too long.

Method: the monitor alone on a made-up clock, looked at whenever it asks to be; a property over any
history of heartbeats, doubts and pauses of the monitor.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jobmanager.liveness.heartbeat import HeartbeatMonitor, Silent
from jobmanager.liveness.reachability import JOBMANAGER, Reachability, doubts

INTERVAL_MS = 10
TIMEOUT_MS = 100


def monitor_of(*ids: str, now_ms: int = 0) -> HeartbeatMonitor:
    monitor = HeartbeatMonitor(INTERVAL_MS, TIMEOUT_MS)
    for taskmanager_id in ids:
        monitor.register(taskmanager_id, "1", now_ms)
    return monitor


def look_until(monitor: HeartbeatMonitor, end_ms: int) -> list[tuple[int, Silent]]:
    """Looks whenever it is due, up to and including ``end_ms``; who was lost when."""
    lost = []
    while (due_ms := monitor.next_deadline_ms()) is not None and due_ms <= end_ms:
        lost += [(due_ms, silent) for silent in monitor.expire(due_ms)]
    return lost


def test_silence_is_looked_at_twice() -> None:
    monitor = monitor_of()
    assert monitor.next_deadline_ms() is None
    monitor.register("a", "1", 0)
    monitor.register("b", "1", 0)
    assert look_until(monitor, 95) == []
    assert monitor.beat("b", "1", 95)
    assert look_until(monitor, 194) == [(100, Silent("a", 100, ()))]
    assert not monitor.beat("a", "1", 194)
    assert not monitor.beat("b", "2", 194)
    assert look_until(monitor, 1000) == [(195, Silent("b", 100, ()))]
    assert monitor.next_deadline_ms() is None


def test_alive_is_who_was_heard_of_within_two_intervals() -> None:
    monitor = monitor_of("a")
    assert (monitor.is_alive("a", 20), monitor.is_alive("a", 21)) == (True, False)
    assert monitor.beat("a", "1", 30)
    assert monitor.is_alive("a", 50)
    assert not monitor.is_alive("b", 50)


def test_a_monitor_that_slept_counts_that_as_nobodys_silence() -> None:
    monitor = monitor_of("a", "b")
    look_until(monitor, 50)
    monitor.remove("b")
    assert monitor.expire(1000) == []
    # It has 50 ms of silence left, and no more: the monitor slept from 60 on.
    assert look_until(monitor, 2000) == [(1040, Silent("a", 1040, ()))]


def test_sleeping_gives_nobody_more_time_than_a_heartbeat() -> None:
    monitor = monitor_of("a")
    look_until(monitor, 10)
    assert monitor.beat("a", "1", 1000)  # it lay in the socket and is read first
    assert monitor.expire(1000) == []
    assert [at_ms for at_ms, _ in look_until(monitor, 2000)] == [1100]


def test_each_witness_shortens_the_silence_that_is_borne() -> None:
    for witnesses, lost_ms in ((0, 100), (1, 50), (2, 33), (3, 25), (4, 20), (50, 20)):
        monitor = monitor_of("a")
        for number in range(witnesses):
            assert monitor.suspect("a", f"tm-{number}")
            assert not monitor.suspect("a", f"tm-{number}")
        ((at_ms, silent),) = look_until(monitor, 1000)
        assert (at_ms, len(silent.witnesses)) == (lost_ms, witnesses)


def test_a_late_doubt_leaves_an_interval_to_be_heard_in() -> None:
    monitor = monitor_of("a", "b")
    assert look_until(monitor, 85) == []
    assert monitor.suspect("a", JOBMANAGER)
    assert monitor.suspect("b", JOBMANAGER)
    assert monitor.expire(85) == []
    assert monitor.beat("b", "1", 94)
    assert look_until(monitor, 95) == [(95, Silent("a", 95, (JOBMANAGER,)))]


def test_a_heartbeat_dispels_all_doubts() -> None:
    monitor = monitor_of("a")
    assert monitor.suspect("a", "tm-1")
    assert monitor.beat("a", "1", 15)
    assert look_until(monitor, 1000) == [(115, Silent("a", 100, ()))]
    assert not monitor.suspect("a", "tm-1")


def test_who_doubts_after_a_probe() -> None:
    reporters = {"tm-2", "tm-1"}
    assert doubts(Reachability.ANSWERED, reporters) == ()
    assert doubts(Reachability.REFUSED, reporters) == ()
    assert doubts(Reachability.SILENT, reporters) == ("tm-1", "tm-2")
    assert doubts(Reachability.SILENT, ()) == ()  # paused: the heartbeat timeout decides
    assert doubts(Reachability.UNREACHABLE, ()) == (JOBMANAGER,)
    assert doubts(Reachability.UNREACHABLE, reporters) == (JOBMANAGER, "tm-1", "tm-2")


EVENTS = st.one_of(
    st.tuples(st.just("wait"), st.integers(1, 60)),
    st.tuples(st.just("sleep"), st.integers(1, 500)),
    st.tuples(st.just("beat"), st.just(0)),
    st.tuples(st.just("suspect"), st.integers(0, 5)),
)


@given(st.lists(EVENTS, max_size=60))
def test_nobody_is_lost_early_and_nobody_lives_for_ever(events: list[tuple[str, int]]) -> None:
    monitor, now_ms, heard_ms, slept_ms, doubted = monitor_of("a"), 0, 0, 0, False
    lost: list[tuple[int, Silent]] = []
    for kind, number in [*events, ("wait", 3 * TIMEOUT_MS)]:
        if lost:
            break
        match kind:
            case "wait":
                now_ms += number
                lost = look_until(monitor, now_ms)
            case "sleep":
                now_ms += number
                slept_ms += number
                lost = [(now_ms, silent) for silent in monitor.expire(now_ms)]
            case "beat":
                assert monitor.beat("a", "1", now_ms)
                heard_ms, slept_ms, doubted = now_ms, 0, False
            case _:
                monitor.suspect("a", f"tm-{number}")
                doubted = True
    ((at_ms, silent),) = lost
    assert silent.silent_ms == at_ms - heard_ms
    assert silent.silent_ms >= (2 * INTERVAL_MS if doubted else TIMEOUT_MS)
    assert bool(silent.witnesses) == doubted
    # Each sleep can delay it by itself and by a second look.
    sleeps = sum(kind == "sleep" for kind, _ in events)
    assert silent.silent_ms <= TIMEOUT_MS + slept_ms + (sleeps + 2) * 2 * INTERVAL_MS
