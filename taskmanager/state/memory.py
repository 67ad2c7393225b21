"""What the states of a slot may take together (``taskmanager.memory.managed.size``), and who takes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.errors import Unrecoverable


@dataclass(frozen=True, slots=True, eq=False)
class MemoryUser:
    """Somebody who takes memory.

    Attributes:
        name: operator and state, for the message; others may have the same.
        used_bytes: how much it takes now.
    """

    name: str
    used_bytes: Callable[[], int]


@dataclass(slots=True)
class CheckPace:
    """How often users are asked for their sizes.

    Attributes:
        next_ns: when they are to be asked again.
        last_ns: how long it took last.
    """

    next_ns: int = 0
    last_ns: int = 0


class ManagedMemory:
    """One ledger per slot. Used on the mailbox thread; ``apart`` is for others.

    Args:
        limit_bytes: for all states of the slot.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._users: set[MemoryUser] = set()
        self._used_bytes = 0
        """Of all users, when they were last asked."""
        self._pace = CheckPace()
        self._apart = threading.local()

    @contextmanager
    def apart(self) -> Iterator[set[MemoryUser]]:
        """For a thread that opens states while others of the slot are in use: its users are kept apart
        and checked alone, as nobody may ask a state of another thread for its size.

        Yields:
            The users it has registered; to be given to ``join`` on the mailbox thread.
        """
        users: set[MemoryUser] = set()
        self._apart.users, self._apart.pace = users, CheckPace()
        try:
            yield users
        finally:
            del self._apart.users, self._apart.pace

    def join(self, users: set[MemoryUser]) -> None:
        """Adds users that were registered apart."""
        self._users |= users

    @property
    def _own_users(self) -> set[MemoryUser]:
        users: set[MemoryUser] | None = getattr(self._apart, "users", None)
        return self._users if users is None else users

    @property
    def pace(self) -> CheckPace:
        """Of the checks of all who share the ledger; of a thread apart its own."""
        pace: CheckPace = getattr(self._apart, "pace", self._pace)
        return pace

    def register(self, name: str, used_bytes: Callable[[], int]) -> MemoryUser:
        """Adds a user; see there. What is returned is for ``unregister``."""
        user = MemoryUser(name, used_bytes)
        self._own_users.add(user)
        return user

    def unregister(self, user: MemoryUser) -> None:
        """Removes a user; one that is not there any more is no error."""
        self._own_users.discard(user)

    def used_bytes(self) -> int:
        """What all users take together."""
        return sum(user.used_bytes() for user in self._users)

    def check(self) -> None:
        """Ends the task while there is still memory to do so in order.

        Raises:
            Unrecoverable: the states are larger than the limit; names the largest. A restart would only
                come here again.
        """
        users = self._own_users
        sizes = [(user.used_bytes(), user.name) for user in users]
        total = sum(size for size, _ in sizes)
        if users is self._users:
            self._used_bytes = total
        else:
            total += self._used_bytes
        if total <= self.limit_bytes:
            return
        largest, name = max(sizes)
        raise Unrecoverable(
            f"the state of this slot takes {total >> 20} MB, its limit is {self.limit_bytes >> 20} MB "
            f"(taskmanager.memory.managed.size); the largest is {name} with {largest >> 20} MB: raise the "
            "limit, run with a higher parallelism, give the state a TTL, or use state.backend.type: rocksdb"
        )
