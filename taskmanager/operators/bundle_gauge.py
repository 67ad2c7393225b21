"""When rows of windows are aggregated in front of an exchange, and when that is not worth it (pure).

Rows are counted into *bundles*. A bundle is over after ``bundle_rows`` rows, ahead of the row that would
open one slice too many or make its keys longer than ``bundle_bytes``, or after ``trial_rows`` rows where these are
nearly as many groups. Where a bundle
was not worth it, the rows of the next ones go as they are: of 1, 2, 4 and at last ``_REST_MAX`` bundles, of 1 again
after one that was.

All of this is decided by positions in the sequence of rows: how they are cut into batches, and what comes
between them, makes no difference.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

BUNDLE_ROWS = 1 << 16
BUNDLE_BYTES = 16 << 20
TRIAL_ROWS = 1 << 13
SLICES_MAX = 64

_WORTHWHILE = 0.5
_HOPELESS = 0.95
_REST_MAX = 64
_STATE = struct.Struct("<qqqqqq")


class BundleGauge:
    """Counts the rows of a subtask.

    Args:
        bundle_rows: rows of a whole bundle.
        trial_rows: a bundle of fewer rows was not worth it.
        slices_max: slices that a bundle may open.
        bundle_bytes: of the keys of a bundle's rows, where their lengths differ; a longer key is alone.

    Attributes:
        rest_rows: so many of the next rows are to go as they are.

    Example: bundles of four rows; the one whose rows are four groups was not worth it.
        >>> gauge = BundleGauge(bundle_rows=4, trial_rows=4)
        >>> gauge.added(4, slices=1)
        >>> gauge.is_over(pending=4)
        True
        >>> gauge.sent(4)
        >>> gauge.end()
        >>> gauge.rest_rows  # the next four rows go as they are
        4
    """

    def __init__(
        self,
        bundle_rows: int = BUNDLE_ROWS,
        trial_rows: int = TRIAL_ROWS,
        slices_max: int = SLICES_MAX,
        bundle_bytes: int = BUNDLE_BYTES,
    ) -> None:
        assert 0 < trial_rows <= bundle_rows, "a trial is a part of a bundle"
        assert slices_max > 0, "a bundle lies in slices"
        self._bundle_rows = bundle_rows
        self._trial_rows = trial_rows
        self._slices_max = slices_max
        self._bundle_bytes = bundle_bytes
        self.rest_rows = 0
        self._next_rest = 1
        self._rows = 0
        self._sent = 0
        self._slices = 0
        self._bytes = 0

    @classmethod
    def of_rows(cls, row_bytes: int) -> BundleGauge:
        """One whose bundles of rows of this size, apart from keys, stay within ``BUNDLE_BYTES``."""
        rows = min(BUNDLE_ROWS, max(1, BUNDLE_BYTES // row_bytes))
        return cls(rows, min(TRIAL_ROWS, rows))

    @property
    def room(self) -> int:
        """Rows that may be added before ``is_over`` must be asked."""
        if self._slices > self._slices_max:
            return 0
        limit = self._trial_rows if self._rows < self._trial_rows else self._bundle_rows
        return max(0, limit - self._rows)

    @property
    def room_bytes(self) -> int:
        """Bytes of keys that may be added; more only where the bundle has no row."""
        return self._bundle_bytes - self._bytes

    @property
    def is_empty(self) -> bool:
        """No row has been added to the bundle."""
        return not self._rows

    @property
    def slices_left(self) -> int:
        """Slices that the bundle may still open."""
        return self._slices_max - self._slices

    def rested(self, rows: int) -> None:
        """Rows have gone as they are, of ``rest_rows``."""
        self.rest_rows -= rows

    def added(self, rows: int, slices: int, key_bytes: int = 0) -> None:
        """The bundle has got rows with keys of so many bytes, and slices that were not open."""
        self._rows += rows
        self._bytes += key_bytes
        self._slices += slices

    def sent(self, rows: int) -> None:
        """Rows and partial rows of the bundle have gone."""
        self._sent += rows

    def is_over(self, pending: int) -> bool:
        """Whether the bundle is over.

        Args:
            pending: groups of it that are not sent.
        """
        if self._rows >= self._bundle_rows or self._slices > self._slices_max:
            return True
        return self._rows == self._trial_rows and self._sent + pending > _HOPELESS * self._rows

    def end(self) -> None:
        """The bundle is over, and all of it has been sent."""
        if self._rows >= self._trial_rows and self._sent <= _WORTHWHILE * self._rows:
            self._next_rest = 1
        else:
            self.rest_rows = self._next_rest * self._bundle_rows
            self._next_rest = min(2 * self._next_rest, _REST_MAX)
        self._rows = self._sent = self._slices = self._bytes = 0

    def to_bytes(self) -> bytes:
        """What is counted, for ``restore``."""
        return _STATE.pack(
            self.rest_rows, self._next_rest, self._rows, self._sent, self._slices, self._bytes
        )

    def restore(self, kept: Iterable[bytes]) -> None:
        """Goes on where others have stopped: one, or several whose bundles are one now."""
        # Bytes were not counted at first: what was kept then says nothing of them.
        states = [_STATE.unpack(each.ljust(_STATE.size, b"\0")) for each in kept]
        if not states:
            return
        rests, next_rests, rows, sent, slices, sizes = zip(*states, strict=True)
        self.rest_rows, self._next_rest = min(rests), max(next_rests)
        self._rows, self._sent, self._slices = sum(rows), sum(sent), sum(slices)
        self._bytes = sum(sizes)
