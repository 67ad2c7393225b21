"""What the states of a slot may take together (``taskmanager.memory.managed.size``), and who takes it."""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import Unrecoverable


class ManagedMemory:
    """One ledger per slot. Used on the mailbox thread.

    Args:
        limit_bytes: for all states of the slot.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._users: dict[str, Callable[[], int]] = {}

    def register(self, name: str, used_bytes: Callable[[], int]) -> None:
        """Adds a user, with how much it takes now.

        Args:
            name: operator and state, for the message; unique within the slot.
        """
        self._users[name] = used_bytes

    def unregister(self, name: str) -> None:
        """Removes a user; none is no error."""
        self._users.pop(name, None)

    def used_bytes(self) -> int:
        """What all users take together."""
        return sum(used() for used in self._users.values())

    def check(self) -> None:
        """Ends the task while there is still memory to do so in order.

        Raises:
            Unrecoverable: the states are larger than the limit; names the largest. A restart would only
                come here again.
        """
        sizes = {name: used() for name, used in self._users.items()}
        total = sum(sizes.values())
        if total <= self.limit_bytes:
            return
        name, largest = max(sizes.items(), key=lambda item: item[1])
        raise Unrecoverable(
            f"the state of this slot takes {total >> 20} MB, its limit is {self.limit_bytes >> 20} MB "
            f"(taskmanager.memory.managed.size); the largest is {name} with {largest >> 20} MB: raise the "
            "limit, run with a higher parallelism, give the state a TTL, or use state.backend.type: rocksdb"
        )
