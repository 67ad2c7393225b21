"""One small object that only its owner replaces: HEAD of a job, a job's record, the leader's name.

Whoever takes it over replaces it whatever it is; from then on it replaces it only while it is what it wrote last.
So an owner that was deposed can change nothing. The answer to a swap may be lost: what has become of it is found
out by reading, and where that fails, too, or the swap may be made yet, by the next swap.

Invariants: the object is only ever replaced by compare-and-swap; no two contents that an owner writes are the
same (each has an epoch, a token or a counter of its own), so that a swap that comes late finds another content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from penstock.errors import Fenced, InvariantViolation, StoreNotFound, StoreTransient, StreamError
from penstock.storage.object_store import ObjectStore, SwapUnanswered
from penstock.storage.swap_counts import SWAPS, SwapOutcome, SwappedKind


class SwapOutcomeUnknown(StoreTransient):
    """A swap may or may not have happened, or may still, until a later one has returned or was refused."""


class NewerLeader(Fenced):
    """An object is that of a leader with a larger epoch: who meets it leads no more.

    Attributes:
        epoch: that leader's.
    """

    def __init__(self, message: str, epoch: int) -> None:
        super().__init__(message)
        self.epoch = epoch


class SwappedObject:
    """An object of a store, seen by one who may own it. Used by one thread at a time.

    Args:
        store: has it.
        path: where.
        kind: what it is, for metrics.
        lost: the error for a content that is not the owner's, None = there is no object.
    """

    def __init__(
        self,
        store: ObjectStore,
        path: str,
        kind: SwappedKind,
        lost: Callable[[bytes | None], StreamError],
    ) -> None:
        self.name = path
        """What messages call it."""
        self.why_absent = ""
        """Where the last look found nothing: what the store said."""
        self._store = store
        self._path = path
        self._kind = kind
        self._lost = lost
        # What it is, as far as this instance knows; None = it was not taken over.
        self._last: bytes | None = None
        # What it may be as well: digests of what swaps were to write whose outcome is not known. Storage may be silent for
        # long, and each try leaves one.
        self._uncertain: set[bytes] = set()
        self._may_come = False
        """One of those may be made yet, so that what it is now says nothing of it."""

    @property
    def is_own(self) -> bool:
        """It was taken over."""
        return self._last is not None

    @property
    def is_uncertain(self) -> bool:
        """What it is now is not known for sure."""
        return bool(self._uncertain)

    def content(self) -> bytes | None:
        """What it is now, whoever wrote it; None = there is none.

        Raises:
            StoreTransient: it cannot be read now.
        """
        try:
            return self._store.get(self._path)
        except StoreNotFound as error:
            self.why_absent = str(error)
            return None

    def take_over(self, found: bytes | None, new: bytes) -> bool:
        """Makes it this instance's; False where it is no longer what was found.

        Args:
            found: what it was, None = nothing.
            new: what it becomes; names its new owner.

        Raises:
            StoreTransient: it cannot be read or written now.
        """
        if not self._give(found, new):
            return False
        self._note_own(new)
        return True

    def hand_over(self, found: bytes, new: bytes) -> bool:
        """Makes it somebody else's; False where it is no longer what was found.

        Args:
            found: what it was.
            new: what it becomes; names its new owner.

        Raises:
            StoreTransient: it cannot be read or written now.
        """
        return self._give(found, new)

    def swap(self, new: bytes) -> None:
        """Replaces it. When this returns, the new content counts and survives a crash.

        Raises:
            StreamError: what ``lost`` says: it is not what this instance wrote last.
            StoreTransient: nothing has changed, and the same call may succeed later.
            SwapOutcomeUnknown: see there.
        """
        if self._last is None:
            raise InvariantViolation(f"{self.name} is swapped by one who has not taken it over")
        try:
            self._replace_or_resolve(new)
        except SwapOutcomeUnknown:
            self._count(SwapOutcome.UNKNOWN)
            raise
        except StoreTransient:
            self._count(SwapOutcome.FAILED)
            raise
        except StreamError:
            self._count(SwapOutcome.REFUSED)
            raise
        self._count(SwapOutcome.OK)

    def verify(self) -> None:
        """Makes sure that nobody else has taken it over so far.

        Raises:
            StreamError: what ``lost`` says.
            StoreTransient: it cannot be read now.
        """
        if self._last is None:
            raise InvariantViolation(f"{self.name} is verified by one who has not taken it over")
        content = self.content()
        if content != self._last and not self._may_be(content):
            raise self._lost(content)

    def _give(self, found: bytes | None, new: bytes) -> bool:
        """Replaces what was found, whoever's it is."""
        try:
            is_done = self._store.compare_and_swap(self._path, found, new)
        except StoreTransient:
            self._count(SwapOutcome.UNKNOWN)
            raise
        self._count(SwapOutcome.OK if is_done else SwapOutcome.REFUSED)
        return is_done

    def _count(self, outcome: SwapOutcome) -> None:
        SWAPS.add(self._kind, outcome)

    def _replace_or_resolve(self, new: bytes) -> None:
        try:
            self._replace(new)
        except StoreTransient as error:
            self._resolve(new, error)

    def _replace(self, new: bytes) -> None:
        if not self._store.compare_and_swap(self._path, self._last, new):
            # One of our own swaps may have happened although we were told that it failed, or it was out of reach for a
            # moment: a directory that is mounted anew.
            content = self.content()
            if not self._is_own(content, new):
                raise self._not_own(content, new)
            if not self._store.compare_and_swap(self._path, content, new):
                content = self.content()
                if not self._is_own(content, new):
                    raise self._not_own(content, new)
                raise StoreTransient(f"{self.name} is there at one moment and gone at the next")
        self._note_own(new)

    def _is_own(self, content: bytes | None, new: bytes) -> bool:
        return content is not None and (content in (new, self._last) or self._may_be(content))

    def _note_own(self, new: bytes) -> None:
        self._last = new
        self._uncertain, self._may_come = set(), False

    def _resolve(self, new: bytes, error: StoreTransient) -> None:
        """Finds out what a swap that failed has done, and finishes it where it has happened."""
        self._may_come |= isinstance(error, SwapUnanswered)
        try:
            content = self.content()
            if content == new:
                # It is there, but does it survive a crash? Only a swap that succeeds says so.
                self._replace(new)
                return
        except StoreTransient as again:
            self._may_come |= isinstance(again, SwapUnanswered)
            self._uncertain.add(_digest(new))
            raise self._unknown(again) from error
        if content == self._last and not self._may_come:
            self._uncertain = set()
            raise error
        if content == self._last or self._may_be(content):
            self._uncertain.add(_digest(new))
            raise self._unknown(error) from error
        raise self._not_own(content, new) from error

    def _not_own(self, content: bytes | None, new: bytes) -> StreamError:
        """What is told; where nothing is to be seen, what was to be written may be there once it is."""
        if content is None:
            self._uncertain.add(_digest(new))
        return self._lost(content)

    def _may_be(self, content: bytes | None) -> bool:
        return content is not None and _digest(content) in self._uncertain

    def _unknown(self, error: StoreTransient) -> SwapOutcomeUnknown:
        return SwapOutcomeUnknown(f"{self.name} may or may not have been replaced: {error}")


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
