"""Bytes that may be held at once.

Who takes from it holds at most one reservation that is not on its way out already, so that takers cannot
wait for each other in a ring.
"""

from __future__ import annotations

import threading
import time

from penstock.errors import StoreTransient


class ByteBudget:
    """Reservations of bytes, by any thread.

    Args:
        limit_bytes: of all reservations together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._free_bytes = limit_bytes
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition()

    def take(self, size_bytes: int, timeout_s: float) -> None:
        """Waits until so much is free.

        Raises:
            StoreTransient: it did not come free in time.
        """
        assert 0 < size_bytes <= self._limit_bytes, "what can come free at all"
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._free_bytes < size_bytes:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise StoreTransient(
                        f"other uploads have held the {self._limit_bytes} bytes of "
                        f"s3.upload.memory for {timeout_s:.0f} s: the store is slow"
                    )
            self._free_bytes -= size_bytes

    def give_back(self, size_bytes: int) -> None:
        """A reservation is over."""
        with self._changed:
            self._free_bytes += size_bytes
            self._changed.notify_all()
