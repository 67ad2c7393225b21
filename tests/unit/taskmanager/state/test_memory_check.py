"""When the memory of a slot is looked at."""

from __future__ import annotations

import pytest

from penstock.errors import Unrecoverable
from taskmanager.harness.manual_clock import ManualClock
from taskmanager.state.memory import ManagedMemory
from taskmanager.state.memory_check import MemoryCheck


class CostlyMemory:
    """A user whose size is asked for at a cost of time."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.costs_ms: list[int] = []
        self.asked = 0
        self.bytes = 0

    def used_bytes(self) -> int:
        """Takes the next of ``costs_ms``."""
        self.asked += 1
        self.clock.time_ms += self.costs_ms.pop(0) if self.costs_ms else 0
        return self.bytes


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000)


@pytest.fixture
def user(clock: ManualClock) -> CostlyMemory:
    return CostlyMemory(clock)


@pytest.fixture
def check(clock: ManualClock, user: CostlyMemory) -> MemoryCheck:
    check = MemoryCheck(ManagedMemory(limit_bytes=100), clock)
    check.register("counts", user.used_bytes)
    return check


def asked_after(check: MemoryCheck, clock: ManualClock, user: CostlyMemory) -> int:
    """After how many milliseconds it is looked again."""
    asked, start = user.asked, clock.time_ms
    while user.asked == asked:
        clock.time_ms += 1
        check.check()
    return clock.time_ms - start


def test_a_check_takes_a_fiftieth_of_the_time(
    check: MemoryCheck, clock: ManualClock, user: CostlyMemory
) -> None:
    user.costs_ms = [1, 1]
    check.check()
    assert asked_after(check, clock, user) == 5 + 1
    assert asked_after(check, clock, user) == 50


def test_one_check_that_was_interrupted_puts_the_next_one_off_by_nothing(
    check: MemoryCheck, clock: ManualClock, user: CostlyMemory
) -> None:
    user.costs_ms = [0, 200, 0]
    check.check()
    assert asked_after(check, clock, user) == 5 + 200
    assert asked_after(check, clock, user) == 5
    user.bytes = 101
    with pytest.raises(Unrecoverable, match="the largest is counts"):
        asked_after(check, clock, user)


def test_operators_that_share_a_slot_ask_once_for_all(
    clock: ManualClock, user: CostlyMemory
) -> None:
    memory = ManagedMemory(limit_bytes=100)
    checks = [MemoryCheck(memory, clock) for _ in range(3)]
    for check in checks:
        check.register("counts", user.used_bytes)
    for check in checks:
        check.check()
    assert user.asked == len(checks), "each is asked by one check, and not by each of them"
    with memory.apart():
        apart = MemoryCheck(memory, clock)
        apart.register("opened", user.used_bytes)
        user.bytes = 101
        with pytest.raises(Unrecoverable, match="the largest is opened"):
            apart.check()
