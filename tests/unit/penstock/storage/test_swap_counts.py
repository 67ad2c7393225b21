"""Aim: metrics tell what has become of swaps: done, refused, failed without a trace, or nobody knows.

Method: two owners of one object, in a store that fails before or after it has replaced it.
"""

from __future__ import annotations

from collections import Counter

import pytest
from typing_extensions import override

from penstock.errors import Fenced, StoreTransient
from penstock.storage.memory_store import MemoryStore
from penstock.storage.swap_counts import SWAPS, SwapOutcome, SwappedKind
from penstock.storage.swapped_object import SwapOutcomeUnknown, SwappedObject


class FailingStore(MemoryStore):
    """Fails swaps; also reads where it is to be dark."""

    def __init__(self) -> None:
        super().__init__(1 << 16)
        self.fails = self.is_dark = False

    @override
    def compare_and_swap(self, path: str, expected: bytes | None, new: bytes) -> bool:
        if self.fails:
            raise StoreTransient("it fails")
        return super().compare_and_swap(path, expected, new)

    @override
    def get(self, path: str) -> bytes:
        if self.is_dark:
            raise StoreTransient("it is dark")
        return super().get(path)


def owner(store: MemoryStore) -> SwappedObject:
    return SwappedObject(store, "HEAD", SwappedKind.HEAD, lambda _: Fenced("another has it"))


def test_every_swap_is_counted_as_what_became_of_it() -> None:
    before = Counter(SWAPS.all())
    store = FailingStore()
    first, second = owner(store), owner(store)
    assert first.take_over(None, b"first 1")
    first.swap(b"first 2")
    store.fails = True
    with pytest.raises(StoreTransient, match="it fails"):
        first.swap(b"first 3")
    store.is_dark = True
    with pytest.raises(SwapOutcomeUnknown):
        first.swap(b"first 4")
    store.fails = store.is_dark = False
    assert not second.take_over(b"nothing of the kind", b"second 1")
    assert second.take_over(second.content(), b"second 1")
    with pytest.raises(Fenced):
        first.swap(b"first 5")
    counted = Counter(SWAPS.all()) - before
    assert {outcome: count for (_, outcome), count in counted.items()} == {
        SwapOutcome.OK: 3,
        SwapOutcome.FAILED: 1,
        SwapOutcome.UNKNOWN: 1,
        SwapOutcome.REFUSED: 2,
    }
    assert {kind for kind, _ in counted} == {SwappedKind.HEAD}
