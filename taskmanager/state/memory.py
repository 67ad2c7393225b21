"""What the states of a slot may take together (``taskmanager.memory.managed.size``), and who takes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.errors import Unrecoverable

UsedBytes = dict[str, Callable[[], int]]
"""By the name of a user of the memory, how much it takes now."""


class ManagedMemory:
    """One ledger per slot. Used on the mailbox thread; ``apart`` is for others.

    Args:
        limit_bytes: for all states of the slot.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._users: UsedBytes = {}
        self._used_bytes = 0
        """Of all users, when they were last asked."""
        self._apart = threading.local()

    @contextmanager
    def apart(self) -> Iterator[UsedBytes]:
        """For a thread that opens states while others of the slot are in use: its users are kept apart
        and checked alone, as nobody may ask a state of another thread for its size.

        Yields:
            The users it has registered; to be given to ``join`` on the mailbox thread.
        """
        users: UsedBytes = {}
        self._apart.users = users
        try:
            yield users
        finally:
            del self._apart.users

    def join(self, users: UsedBytes) -> None:
        """Adds users that were registered apart."""
        self._users |= users

    @property
    def _own_users(self) -> UsedBytes:
        users: UsedBytes | None = getattr(self._apart, "users", None)
        return self._users if users is None else users

    def register(self, name: str, used_bytes: Callable[[], int]) -> None:
        """Adds a user, with how much it takes now.

        Args:
            name: operator and state, for the message; unique within the slot.
        """
        self._own_users[name] = used_bytes

    def unregister(self, name: str) -> None:
        """Removes a user; none is no error."""
        self._own_users.pop(name, None)

    def used_bytes(self) -> int:
        """What all users take together."""
        return sum(used() for used in self._users.values())

    def check(self) -> None:
        """Ends the task while there is still memory to do so in order.

        Raises:
            Unrecoverable: the states are larger than the limit; names the largest. A restart would only
                come here again.
        """
        users = self._own_users
        sizes = {name: used() for name, used in users.items()}
        total = sum(sizes.values())
        if users is self._users:
            self._used_bytes = total
        else:
            total += self._used_bytes
        if total <= self.limit_bytes:
            return
        name, largest = max(sizes.items(), key=lambda item: item[1])
        raise Unrecoverable(
            f"the state of this slot takes {total >> 20} MB, its limit is {self.limit_bytes >> 20} MB "
            f"(taskmanager.memory.managed.size); the largest is {name} with {largest >> 20} MB: raise the "
            "limit, run with a higher parallelism, give the state a TTL, or use state.backend.type: rocksdb"
        )
