"""Logs who is turned away, and why: the same of the same host every few seconds at most, however often he comes."""

from __future__ import annotations

import time
from typing import Any, Final

_REPEAT_S: Final = 5.0
_REMEMBERED_MAX: Final = 256


class RefusalLog:
    """See the module. One thread uses it."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._told: dict[tuple[str, str], float] = {}

    def tell(self, event: str, peer: str, reason: str) -> None:
        """Somebody was not let through.

        Args:
            peer: his address, ending in ``:port``.
        """
        now_s = time.monotonic()
        key = (peer.rpartition(":")[0], reason)
        if self._told.get(key, now_s) > now_s:
            return
        if len(self._told) >= _REMEMBERED_MAX:
            self._told.clear()
        self._told[key] = now_s + _REPEAT_S
        self._log.warning(event, peer=peer, reason=reason)
