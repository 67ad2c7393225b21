"""Where neither a savepoint nor a job's checkpoints may be made: inside of those that are there.

Who owns what is there copies it, claims it or removes it as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from penstock.errors import JobRejected, StoreCorrupt, StoreNotFound, StoreTransient
from penstock.storage import head, manifest
from penstock.storage.object_store import ObjectStore
from penstock.storage.open_store import open_store, place_of
from penstock.storage.savepoint import GIVEN_UP, MANIFEST_PATH
from penstock.storage.store_names import SCHEME

_MAGIC_BYTES: Final = 8
_KINDS: Final = {
    (MANIFEST_PATH, manifest.FORMAT.magic): "the savepoint",
    (MANIFEST_PATH, GIVEN_UP[:_MAGIC_BYTES]): "the savepoint, which was given up,",
    (head.HEAD_PATH, head.FORMAT.magic): "the directory of a job's checkpoints",
}


def check_is_outside(uri: str, opened: Callable[[str], ObjectStore] = open_store) -> None:
    """Refuses a place, however it is spelt, inside of a savepoint or of the directory of a job's checkpoints. May block.

    Args:
        uri: where something new is to be made; it need not be there.
        opened: opens stores by their names.

    Raises:
        JobRejected: it is inside of one; the message names both.
    """
    place = place_of(uri)
    for above in _places_above(place):
        kind = _kind_of(opened(above))
        if kind is not None:
            raise JobRejected(
                f"{uri} is inside of {kind} {above}: that is copied and removed as a whole; name a directory outside of it"
            )


def _places_above(place: str) -> Iterator[str]:
    """From the innermost to the file system's root, or the bucket.

    Example:
        >>> [*_places_above("/srv/kept")], [*_places_above("s3://bucket/a/b")]
        (['/srv', '/'], ['s3://bucket/a', 's3://bucket'])
    """
    scheme = SCHEME.match(place)
    start = scheme.end() if scheme else 1
    while len(place) > start and (scheme is None or "/" in place[start:]):
        place = place[: max(place.rindex("/"), start)]
        yield place


def _kind_of(store: ObjectStore) -> str | None:
    """What a directory is; None = neither, or one that may not be looked into, as a prefix above the one that a bucket's
    policy allows."""
    paths = dict.fromkeys(path for path, _ in _KINDS)
    try:
        found = [path for path, size in store.sizes(paths).items() if size >= _MAGIC_BYTES]
        begins = [(path, store.read(path, 0, _MAGIC_BYTES)) for path in found]
    except (StoreTransient, StoreNotFound, StoreCorrupt):
        return None
    return next((_KINDS[one] for one in begins if one in _KINDS), None)
