"""A lock that goes to whoever waits for it."""

from __future__ import annotations

from threading import Lock


class FairLock:
    """A mutual exclusion of two threads, one of which takes it again and again.

    An ordinary lock goes back to the thread that has just released it, since the other one must wake up
    first. Here who waits holds the turnstile, so the other one cannot pass him.
    """

    def __init__(self) -> None:
        self._turnstile = Lock()
        self._lock = Lock()

    def __enter__(self) -> None:
        with self._turnstile:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @property
    def is_awaited(self) -> bool:
        """Whether a thread waits for it, or is just taking it."""
        return self._turnstile.locked()
