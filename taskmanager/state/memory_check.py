"""When it is looked whether the states of a slot take more than they may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from common.clock import Clock
from taskmanager.state.memory import ManagedMemory, MemoryUser

_PAUSE_NS_MIN: Final = 5_000_000
_PAUSE_PER_CHECK: Final = 50
"""A check takes at most this part of the time."""


class MemoryCheck:
    """Checks a slot's memory now and then: each 5 ms, or 50 times as long after a check as it took. Of
    two checks the shorter one counts, since a thread that lost its processor in one would not look again
    for seconds. A check asks all states of the slot, so the pause is that of the slot, however many operators share it.

    Args:
        memory: what the states of the slot may take together.
        clock: says how long ago the last check was.
    """

    def __init__(self, memory: ManagedMemory, clock: Clock) -> None:
        self._memory = memory
        self._clock = clock
        self._users: list[MemoryUser] = []

    def register(self, name: str, used_bytes: Callable[[], int]) -> None:
        """Adds a user of the memory."""
        self._users.append(self._memory.register(name, used_bytes))

    def check(self) -> None:
        """Called for every batch: looks at the sizes where it is some time ago and has users of its own.

        Raises:
            Unrecoverable: the states are larger than the limit.
        """
        if not self._users:
            return
        pace, now = self._memory.pace, self._clock.monotonic_ns()
        if now < pace.next_ns:
            return
        self._memory.check()
        done = self._clock.monotonic_ns()
        shorter = min(pace.last_ns, done - now)
        pace.last_ns = done - now
        pace.next_ns = done + max(_PAUSE_NS_MIN, _PAUSE_PER_CHECK * shorter)

    def close(self) -> None:
        """Removes all users."""
        for user in self._users:
            self._memory.unregister(user)
