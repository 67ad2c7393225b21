"""Who writes a snapshot leaves the core to who processes rows, unless nobody does: the rule, then a thread beside a busy one."""

from __future__ import annotations

import time
from threading import Event, Thread

import pytest

from common.clock import SystemClock
from taskmanager.state.pacer_runner import Pacer
from taskmanager.state.pacing import FIRST_SHARE, pause_seconds, work_share


class Pauses(Event):
    """Counts how often was to be waited."""

    count = 0

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout
        self.count += not self.is_set()
        return super().wait(timeout)


def test_older_checkpoints_may_work_more() -> None:
    shares = [work_share(age, 8.0) for age in (-5, 0, 1, 4, 8, 1000)]
    assert shares == sorted(shares)
    assert shares[0] == shares[1] == FIRST_SHARE
    assert shares[-1] == 1.0
    assert pause_seconds(0.01, 1.0, 1.0, 0, 8.0) == pytest.approx(0.09)
    assert pause_seconds(0.01, 1.0, 0.25, 0, 8.0) == pytest.approx(0.36)
    assert pause_seconds(0.01, 1.0, 0.0, 0, 8.0) == pytest.approx(0.9)
    assert pause_seconds(0.01, 1.0, 1.0, 100, 8.0) == 0
    assert pause_seconds(-1, 1.0, 1.0, 0, 8.0) == 0


@pytest.mark.parametrize(
    ("is_busy", "is_urgent", "pauses"),
    [(True, False, True), (False, False, False), (True, True, False)],
    ids=["beside rows", "alone", "waited for"],
)
def test_it_pauses_for_a_thread_that_works(
    is_busy: bool, is_urgent: bool, pauses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = Pauses()
    pacer = Pacer(SystemClock())
    monkeypatch.setattr(pacer, "_is_urgent", waits)
    if is_urgent:
        pacer.hurry()
    writer = Thread(target=_write, args=(pacer, 0.05), daemon=True)
    writer.start()
    while is_busy and writer.is_alive():
        sum(range(1000))
    writer.join(60)
    assert not writer.is_alive()
    # Of 0.05 s of work 0.02 are free; then there is one about every 2 ms. On a crowded machine a thread that has nothing
    # to do any more may have waited for a core a moment ago.
    assert (waits.count > 6) == pauses, waits.count


def test_the_thread_that_processes_rows_does_not_wait_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits, pacer = Pauses(), Pacer(SystemClock())
    monkeypatch.setattr(pacer, "_is_urgent", waits)
    _write(pacer, 0.05)
    assert waits.count == 0


def _write(pacer: Pacer, cpu_seconds: float) -> None:
    """Works, for a snapshot that was frozen just now."""
    began = time.thread_time()
    while time.thread_time() < began + cpu_seconds:
        sum(range(1000))
        pacer.pause(SystemClock().now_ms())
