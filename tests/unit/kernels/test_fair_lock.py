"""Who waits for the lock gets it, however often the other thread takes it again."""

from __future__ import annotations

import threading
import time

import pytest

from taskmanager.kernels.fair_lock import FairLock

DEADLINE_S = 30.0


def test_a_thread_that_takes_it_again_does_not_pass_one_that_waits() -> None:
    for _ in range(50):
        lock, turns = FairLock(), list[str]()

        def wait_for_it(lock: FairLock, turns: list[str]) -> None:
            with lock:
                turns.append("who waited")

        waiting = threading.Thread(target=wait_for_it, args=(lock, turns))
        with lock:
            waiting.start()
            give_up_at = time.monotonic() + DEADLINE_S
            while not lock.is_awaited:
                assert time.monotonic() < give_up_at
        with lock:
            turns.append("who had it")
        waiting.join(DEADLINE_S)
        assert turns == ["who waited", "who had it"]


def test_one_thread_at_a_time_is_in_it() -> None:
    lock = FairLock()
    inside = 0
    most = 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(2_000):
            with lock:
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert (most, inside) == (1, 0)


def test_it_is_given_back_after_an_error() -> None:
    lock = FairLock()
    with pytest.raises(ValueError, match="in the midst"), lock:
        raise ValueError("in the midst of it")
    with lock:
        pass
