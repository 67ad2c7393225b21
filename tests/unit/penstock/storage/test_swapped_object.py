"""Aim: what nobody else has taken is never told to be lost, where its storage is away for a moment.

Method: a store that hides the object from chosen calls, as a directory does that is mounted anew between two of them.
"""

from __future__ import annotations

from itertools import product

import pytest
from typing_extensions import override

from penstock.errors import Fenced, StoreNotFound, StoreTransient
from penstock.storage.memory_store import MemoryStore
from penstock.storage.swap_counts import SwappedKind
from penstock.storage.swapped_object import SwappedObject

CALLS = 6


class FlappingStore(MemoryStore):
    """Each call takes the next word of ``there``: whether the object can be seen; at its end it can."""

    def __init__(self) -> None:
        super().__init__(1 << 16)
        self.there: list[bool] = []

    def _is_there(self) -> bool:
        return self.there.pop(0) if self.there else True

    @override
    def compare_and_swap(self, path: str, expected: bytes | None, new: bytes) -> bool:
        return self._is_there() and super().compare_and_swap(path, expected, new)

    @override
    def get(self, path: str) -> bytes:
        if not self._is_there():
            raise StoreNotFound(f"no {path}")
        return super().get(path)


def lost(content: bytes | None) -> Exception:
    return StoreNotFound("gone") if content is None else Fenced(f"another has it: {content!r}")


@pytest.mark.parametrize("there", list(product([True, False], repeat=CALLS)))
def test_what_is_its_own_is_not_told_to_be_anothers(there: tuple[bool, ...]) -> None:
    store = FlappingStore()
    swapped = SwappedObject(store, "record", SwappedKind.HEAD, lost)
    assert swapped.take_over(None, b"1")
    store.there = list(there)
    try:
        swapped.swap(b"2")
    except (StoreNotFound, StoreTransient):
        store.there.clear()
        swapped.swap(b"2")
    store.there.clear()
    assert store.get("record") == b"2"


def test_what_another_has_taken_meanwhile_is_told_so() -> None:
    store = FlappingStore()
    first, second = (SwappedObject(store, "record", SwappedKind.HEAD, lost) for _ in range(2))
    assert first.take_over(None, b"first")
    assert second.take_over(b"first", b"second")
    store.there = [False]
    with pytest.raises(Fenced, match="second"):
        first.swap(b"first again")
    assert store.get("record") == b"second"
