"""A compare-and-swap whose answer may be lost: what has become of it is found out before anybody acts on it.

For who removes what he has written for an object that another one has written before him: it may be his own that he finds.
"""

from __future__ import annotations

from typing import Final

from penstock.errors import StoreNotFound, StoreTransient
from penstock.storage.object_store import ObjectStore, SwapUnanswered

_TRIES: Final = 3


def settled_swap(store: ObjectStore, path: str, expected: bytes | None, new: bytes) -> bool:
    """As ``ObjectStore.compare_and_swap``; no two who call it write the same content.

    Returns:
        False where the content is another's; nothing has changed.

    Raises:
        SwapUnanswered: the new content may be there, or may be yet.
        StoreTransient: nothing has changed.
    """
    failure: StoreTransient | None = None
    may_come = False
    for _ in range(_TRIES):
        try:
            if store.compare_and_swap(path, expected, new):
                return True
        except StoreTransient as error:
            failure = error
            may_come |= isinstance(error, SwapUnanswered)
        try:
            content: bytes | None = store.get(path)
        except StoreNotFound:
            content = None
        except StoreTransient as error:
            raise SwapUnanswered(
                f"{path} may or may not have been written: {failure or error}"
            ) from error
        if content not in (expected, new):
            return False
        if content != new and failure is not None and not may_come:
            raise failure
        # Only a swap that succeeds says that what is there survives a crash, or that what is not there does not come.
        expected = content
    raise SwapUnanswered(f"{path} may or may not have been written: {failure}")
