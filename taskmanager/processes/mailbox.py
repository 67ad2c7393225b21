"""The mailbox of a slot: what other threads want done on the mailbox thread.

Any thread may post; one thread takes. Mail runs to its end before the next is taken, so whatever
mail touches needs no lock. The mailbox is unbounded by itself: each sender is bounded by its own
protocol (credit of a channel, one outstanding wake-up of a subtask, commands of the daemon).
"""

from __future__ import annotations

import queue
from collections.abc import Callable

Mail = Callable[[], None]


class Mailbox:
    """A queue of functions with many posters and one taker."""

    def __init__(self) -> None:
        self._mail: queue.SimpleQueue[Mail] = queue.SimpleQueue()

    def post(self, mail: Mail) -> None:
        """Adds mail; callable from any thread."""
        self._mail.put(mail)

    def take(self) -> Mail | None:
        """The next mail, or None at once when there is none."""
        if self._mail.empty():
            return None
        return self._mail.get_nowait()

    def wait(self, timeout_s: float) -> Mail | None:
        """The next mail, waiting for it at most ``timeout_s`` seconds; else None.

        ``SimpleQueue.get`` of Python before 3.13 may wait for ever: where mail has come and gone since it waited last, it
        takes its lock at once, and counts what is left of the time without looking whether that is over already. A look
        that finds nothing leaves the lock as a wait finds it that counts right.
        """
        try:
            if self._mail.empty():
                return self._mail.get_nowait()
        except queue.Empty:
            pass
        try:
            return self._mail.get(timeout=timeout_s)
        except queue.Empty:
            return None
