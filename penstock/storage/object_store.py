"""Where checkpoints are kept: the interface of a store of objects.

Paths are relative, with ``/`` between their parts. An object appears whole or not at all, and when a
call that writes has returned, what it wrote survives a crash of the machine. ``StoreTransient`` means
that the same call may succeed later; ``StoreNotFound`` and ``StoreCorrupt`` that it will not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


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
    """Objects by path. Every method may be called from any thread, and blocks."""

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

    def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects whose path begins with ``prefix``, sorted by path; none is no error."""

    def delete(self, path: str) -> None:
        """Removes an object, and directories that are empty then; none is no error.

        Raises:
            StoreTransient: it cannot be removed now.
        """

    def compare_and_swap(self, path: str, expected: bytes | None, new: bytes) -> bool:
        """Replaces the content of a small object if it is ``expected`` (None = there is no such object).

        Of several callers that expect the same content, in any processes, one succeeds.

        Returns:
            False where the content is another; nothing has changed.

        Raises:
            StoreTransient: it cannot be read or written now.
        """
