"""Where checkpoints are kept: the interface of a store of objects.

Paths are relative, with ``/`` between their parts. An object appears whole or not at all, and when a
call that writes has returned, what it wrote survives a crash of the machine. ``StoreTransient`` means
that the same call may succeed later; ``StoreNotFound`` and ``StoreCorrupt`` that it will not.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

from penstock.errors import InvariantViolation, StoreTransient

TEMPORARY_AGE_MAX_MS: Final = 3_600_000
"""What has not been written to for this long under a hidden name has no living writer."""

FIRST_ANSWER_MS: Final = 5_000
"""Whoever names a wrong address is to hear of it; what has answered once is waited for as configured."""

RANGE_BYTES: Final = 8 << 20
"""What is best read at once, or as several of this size at the same time."""

Range = tuple[str, int, int]
"""Of an object: its path, offset and size in bytes."""


class SwapUnanswered(StoreTransient):
    """Whether an object was replaced is not known, and it may be yet: only a later swap that succeeds makes sure that it
    is not."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object of a listing.

    Attributes:
        path: relative to the store.
        modified_at_ms: by the store's clock.
    """

    path: str
    size_bytes: int
    modified_at_ms: int


class ObjectStore(Protocol):
    """Objects by path. Every method may be called from any thread, and blocks.

    Attributes:
        files_at_once: how many whole objects are best read at the same time.
    """

    files_at_once: ClassVar[int] = 1

    def put(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Writes an object from its parts, in order; replaces one that is there. Returns its size.

        Raises:
            StoreTransient: it cannot be written (disk full, permissions, timeouts); nothing is left.
        """

    def get(self, path: str) -> bytes:
        """The whole object.

        Raises:
            StoreNotFound: there is none.
            StoreTransient: it cannot be read now.
        """

    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        """A range of an object.

        Raises:
            StoreNotFound: there is none.
            StoreCorrupt: it is shorter than that.
            StoreTransient: it cannot be read now.
        """

    def ranges(self, wanted: Iterable[Range]) -> Generator[bytes]:
        """Ranges of objects, in order; where the store is far away, some of what follows is on its way meanwhile.

        Raises:
            StoreNotFound, StoreCorrupt, StoreTransient: as ``read``.
        """
        for one in wanted:
            yield self.read(*one)

    def sizes(self, paths: Iterable[str]) -> Mapping[str, int]:
        """Sizes in bytes of these objects, as far as they are there; lists nothing.

        Raises:
            StoreTransient: one cannot be looked at now.
        """

    def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects whose path begins with ``prefix``, sorted by path; none is no error."""

    def delete(self, path: str) -> None:
        """Removes an object, and directories that are empty then; none is no error.

        Raises:
            StoreTransient: it cannot be removed now.
        """

    def delete_many(self, paths: Iterable[str]) -> dict[str, StoreTransient]:
        """Removes objects, in as few calls as the store needs; in which order is the store's affair.

        Returns:
            Those that cannot be removed now, each with the reason.
        """
        left = {}
        for path in paths:
            try:
                self.delete(path)
            except StoreTransient as error:
                left[path] = error
        return left

    def compare_and_swap(self, path: str, expected: bytes | None, new: bytes) -> bool:
        """Replaces the content of a small object if it is ``expected`` (None = there is no such object).

        Of several callers that expect the same content, in any processes, one succeeds.

        Returns:
            False where the content is another; nothing has changed.

        Raises:
            SwapUnanswered: see there.
            StoreTransient: it cannot be read or written now.
        """

    def can_copy_from(self, source: ObjectStore) -> bool:
        """Whether ``copy_from`` can take objects of that store without anybody reading them."""
        return False

    def copy_from(self, source: ObjectStore, paths: Mapping[str, str]) -> None:
        """Takes over objects of another store, which stay there; only where ``can_copy_from``.

        Args:
            source: has them.
            paths: by path in the source the path here; what is here is replaced.

        Raises:
            StoreNotFound: the source has one of them no more.
            StoreTransient: they cannot be copied now.
        """
        if paths:
            raise InvariantViolation(f"{self!r} copies nothing from {source!r}")

    def first_parts(self) -> tuple[str, ...]:
        """What paths begin with up to their first ``/``, sorted, each once; asks for no object below.

        Raises:
            StoreNotFound: the store has no place yet; a write makes it.
            StoreTransient: it cannot be listed now.
        """

    def check_answers(self, within_ms: int) -> None:
        """Says sooner than other calls would that nothing answers there, as long as nothing ever has; whoever waits
        for the answer is a user.

        Args:
            within_ms: so soon.

        Raises:
            StoreTransient: nothing has answered.
        """
        del within_ms  # what is no server answers, or hangs, for everybody

    def note_place(self) -> None:
        """The place of the objects has been made: where it is missing from now on, the storage is away, which is
        ``StoreTransient`` and no loss of objects, until ``remove_remains``."""
        return None  # noqa: RET501 - what has no directory says so anyway

    def check_writable(self) -> None:
        """Says early what the first write would say, and makes the place of the objects.

        Raises:
            StoreTransient: nothing can be written here.
        """

    def temporaries(self) -> tuple[ObjectInfo, ...]:
        """What writers that are at work or dead have not finished, sorted by path; no listing shows it."""

    def remove_temporary(self, path: str) -> None:
        """Removes one of ``temporaries``; none is no error. A writer that is at work on it will fail.

        Raises:
            StoreTransient: it cannot be removed.
        """

    def sweep_temporaries(self, age_min_ms: int = TEMPORARY_AGE_MAX_MS) -> tuple[str, ...]:
        """Removes temporaries that nobody has written to for some time; returns their paths.

        Args:
            age_min_ms: since the last write; 0 only where no writer can be alive.

        Raises:
            StoreTransient: one cannot be removed.
        """

    def remove_remains(self) -> None:
        """Removes what is left of a store whose objects are gone and that nobody writes to any more.

        Raises:
            StoreTransient: it cannot be removed now.
        """


def ranges_of(path: str, offset: int, size_bytes: int) -> Iterator[Range]:
    """A range, cut into such as are best read at once.

    Example:
        >>> [*ranges_of("one", 100, RANGE_BYTES + 20)]
        [('one', 100, 8388608), ('one', 8388708, 20)]
    """
    end = offset + size_bytes
    for start in range(offset, end, RANGE_BYTES):
        yield path, start, min(RANGE_BYTES, end - start)


def delete_all(store: ObjectStore, paths: Iterable[str]) -> None:
    """Removes objects.

    Raises:
        StoreTransient: some cannot be removed now; the others are gone.
    """
    for error in store.delete_many(paths).values():
        raise error


def copy_all(source: ObjectStore, target: ObjectStore, paths: Mapping[str, str]) -> None:
    """Copies objects from one store to another, by the stores themselves where they can.

    Args:
        paths: by path in the source the path in the target.

    Raises:
        StoreNotFound: the source has one of them no more.
        StoreTransient: they cannot be copied now.
    """
    if target.can_copy_from(source):
        target.copy_from(source, paths)
        return
    for source_path, path in paths.items():
        target.put(path, _parts(source, source_path))


def _parts(store: ObjectStore, path: str) -> Iterator[bytes]:
    [size] = [one.size_bytes for one in store.list(path) if one.path == path] or [0]
    if not size:
        yield store.get(path)
    for offset in range(0, size, RANGE_BYTES):
        yield store.read(path, offset, min(RANGE_BYTES, size - offset))
