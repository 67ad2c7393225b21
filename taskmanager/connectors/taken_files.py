"""Which files a watched directory has given already (pure).

Names are kept of those that are listed now; of all that ever were, 16 bytes each: a file that is away for a while
is not taken again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.done_splits import NOTHING_DONE


class TakenFiles:
    """Paths of files that were taken.

    Example: what comes back is known.
        >>> taken = TakenFiles()
        >>> taken.add(["a", "b"])
        >>> taken.new_among(["b", "c"]), taken.new_among(["a", "c"])
        (['c'], ['c'])
    """

    def __init__(self) -> None:
        self._ever = NOTHING_DONE
        self._listed: set[str] = set()

    def new_among(self, paths: Sequence[str]) -> list[str]:
        """Those of a listing that have not been taken."""
        others = [path for path in paths if path not in self._listed]
        is_known = dict(zip(others, self._ever.holds(others), strict=True))
        self._listed = {path for path in paths if is_known.get(path, True)}
        return [path for path in others if not is_known[path]]

    def add(self, paths: Iterable[str]) -> None:
        """These are taken."""
        paths = list(paths)
        if paths:
            self._ever = self._ever.with_ids(paths)
            self._listed.update(paths)
