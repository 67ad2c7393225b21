"""How long the state of an attempt may be read without anything being read (pure).

A mount that hangs, or a connection that has died without a word, would leave the attempt INITIALIZING for ever, and its
job without an answer. Whoever reads slowly goes on as long as it reads. The thread that waits cannot be interrupted,
and the few that read are shared by all attempts of a slot: its process ends with it, so that the next attempt has
threads, whatever becomes of the storage.

Example: at 10 s without another byte it is over, counted from the last one that was seen.
    >>> silence = RestoreSilence(limit_ms=10_000, now_ms=0)
    >>> silence.look(read_bytes=500, now_ms=10_000), silence.due_ms
    (False, 20000)
    >>> silence.look(read_bytes=500, now_ms=19_999), silence.look(read_bytes=500, now_ms=20_000)
    (False, True)
"""

from __future__ import annotations

from typing import NoReturn

from common.clock import SteadyMs
from penstock.errors import StoreTransient

LIMIT_MS_MIN = 120_000
"""However short checkpoints have to be: building tables from what was read counts as silence, too."""


class RestoreSilence:
    """One attempt's.

    Args:
        limit_ms: without another byte.
        now_ms: it begins to read.

    Attributes:
        due_ms: when to look next.
    """

    def __init__(self, limit_ms: int, now_ms: SteadyMs) -> None:
        self.limit_ms = limit_ms
        self.due_ms = now_ms + limit_ms
        self._read_bytes = 0

    def look(self, read_bytes: int, now_ms: SteadyMs) -> bool:
        """Whether it is over.

        Args:
            read_bytes: since the beginning.
        """
        if now_ms < self.due_ms:
            return False
        if read_bytes == self._read_bytes:
            return True
        self._read_bytes, self.due_ms = read_bytes, now_ms + self.limit_ms
        return False

    def error(self) -> StoreTransient:
        """Why the attempt ends, once it is over."""
        return StoreTransient(
            f"the state was not restored: after {self._read_bytes} bytes nothing was read for {self.limit_ms // 1000} s; "
            "the storage of the checkpoints does not answer, or the machine is too busy"
        )


def end_process() -> NoReturn:
    """Ends the slot process where it is the mailbox's; whoever needs the slot gets a new one.

    Raises:
        StoreTransient: always.
    """
    raise StoreTransient(
        "the slot process ends: a thread that reads the state of an attempt has not come back, and the attempts to come "
        "need it"
    )
