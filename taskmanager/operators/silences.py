"""What a source has waited for in vain for long: a mount that hangs, or a server that never answers, says nothing itself.

>>> silences = Silences()
>>> silences.begin("its listing", SteadyMs(1_000))
True
>>> silences.due(SteadyMs(30_999)), silences.due(SteadyMs(31_000)), silences.due(SteadyMs(99_000))
([], ['its listing'], [])
"""

from __future__ import annotations

from typing import Final

from common.clock import SteadyMs

SILENT_MS: Final = 30_000
"""After which time that is said."""


class Silences:
    """Each is due once; what is waited for again begins anew."""

    def __init__(self) -> None:
        self._due_at: dict[str, SteadyMs] = {}
        self._told: set[str] = set()

    def begin(self, what: str, now: SteadyMs) -> bool:
        """It is waited for now; false = it was before."""
        if what in self._due_at or what in self._told:
            return False
        self._due_at[what] = SteadyMs(now + SILENT_MS)
        return True

    def end(self, what: str) -> None:
        """It has come, or is waited for no more."""
        self._due_at.pop(what, None)
        self._told.discard(what)

    def due(self, now: SteadyMs) -> list[str]:
        """What has been waited for so long that it is to be told of now."""
        found = [what for what, due_at in self._due_at.items() if now >= due_at]
        for what in found:
            del self._due_at[what]
            self._told.add(what)
        return found

    def left_ms(self, now: SteadyMs) -> int | None:
        """Until more is due, 1 at least; None = nothing is waited for that was not told of."""
        due_at = min(self._due_at.values(), default=None)
        return None if due_at is None else max(due_at - now, 1)
