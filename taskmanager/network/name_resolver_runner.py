"""Where hosts are: their names are looked up on threads of their own.

A resolver that hangs cannot be interrupted, and must hold up nobody but those who want that very host. Invariant: each name
is looked up by one thread at a time, for which at most ``WAITING_MAX`` wait; whoever waits has a deadline of his own. All
but the look-up runs on the mailbox thread.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Final

from taskmanager.network.transport import Post

WAITING_MAX: Final = 256

Target = tuple[socket.AddressFamily, str | tuple[str, int]]
"""What a socket of that family connects to."""
Found = Callable[[Target], None]
Failed = Callable[[str], None]


class NameResolver:
    """The look-ups of one process.

    Args:
        post: adds mail to the mailbox.
    """

    def __init__(self, post: Post) -> None:
        self._post = post
        self._waiting: dict[tuple[str, int], list[tuple[Found, Failed]]] = {}

    def resolve(self, host: str, port: int, found: Found, failed: Failed) -> None:
        """Calls one of the two: at once where the host is an address or too many wait, else from the mailbox."""
        try:
            target = _look_up(host, port, socket.AI_NUMERICHOST)
        except (OSError, UnicodeError):
            self._await((host, port), found, failed)
        else:
            found(target)

    def _await(self, name: tuple[str, int], found: Found, failed: Failed) -> None:
        waiting = self._waiting.setdefault(name, [])
        if len(waiting) >= WAITING_MAX:
            failed(
                "looking up its name takes too long: see whether the resolver of this machine hangs"
            )
            return
        waiting.append((found, failed))
        if len(waiting) > 1:
            return
        try:
            threading.Thread(target=self._run, args=name, name="name-resolver", daemon=True).start()
        except RuntimeError as error:  # the process has no room for one more
            self._ended(name, None, str(error))

    def _run(self, host: str, port: int) -> None:
        """On a thread of its own."""
        target: Target | None = None
        reason = ""
        try:
            target = _look_up(host, port)
        except (OSError, UnicodeError) as error:
            reason = str(getattr(error, "strerror", None) or error)
        self._post(lambda: self._ended((host, port), target, reason))

    def _ended(self, name: tuple[str, int], target: Target | None, reason: str) -> None:
        for found, failed in self._waiting.pop(name):
            if target is None:
                failed(reason)
            else:
                found(target)


def _look_up(host: str, port: int, flags: int = 0) -> Target:
    first, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    family, _, _, _, address = first
    return family, (str(address[0]), int(address[1]))
