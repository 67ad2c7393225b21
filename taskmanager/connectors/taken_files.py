"""Which files a watched directory has given already, and which of them have changed since (pure).

Names are kept of those that are listed now; of all that ever were, 16 bytes each: a file that is away for a while
is not taken again.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.done_splits import NOTHING_DONE

Version = int | str
"""What changes when rows are appended to a file or others take their place: its size, or an object's ETag."""


class TakenFiles:
    """Paths of files that were taken.

    Example: what comes back is known, and what grows is told once.
        >>> taken = TakenFiles()
        >>> taken.add({"a": 10, "b": 10})
        >>> taken.new_among({"b": 10, "c": 10}), taken.new_among({"b": 12, "a": 10, "c": 10})
        (['c'], ['c'])
        >>> taken.changed_among({"a": 10, "b": 12}), taken.changed_among({"a": 10, "b": 15})
        (['b'], [])
    """

    def __init__(self) -> None:
        self._ever = NOTHING_DONE
        self._listed: dict[str, Version | None] = {}

    def new_among(self, listed: Mapping[str, Version]) -> list[str]:
        """Those of a listing that have not been taken, sorted."""
        others = sorted(path for path in listed if path not in self._listed)
        is_known = dict(zip(others, self._ever.holds(others), strict=True))
        self._listed = {
            path: self._listed.get(path, version)
            for path, version in listed.items()
            if is_known.get(path, True)
        }
        return [path for path in others if not is_known[path]]

    def changed_among(self, listed: Mapping[str, Version]) -> list[str]:
        """Those taken that are no longer what they were then, each once."""
        changed = [
            path
            for path, taken in self._listed.items()
            if taken is not None and listed.get(path, taken) != taken
        ]
        self._listed.update(dict.fromkeys(changed))
        return changed

    def add(self, taken: Mapping[str, Version]) -> None:
        """These are taken as they are now."""
        if taken:
            self._ever = self._ever.with_ids(list(taken))
            self._listed.update(taken)
