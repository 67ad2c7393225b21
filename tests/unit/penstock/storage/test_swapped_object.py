"""Aim: what nobody else has taken is never told to be lost, where its storage is away for a moment or loses an answer.

Method: all sequences of a few calls that find the object, do not see it, as in a directory that is mounted anew, or are
done without an answer.
"""

from __future__ import annotations

import contextlib
from itertools import product

import pytest
from typing_extensions import override

from penstock.errors import Fenced, StoreNotFound, StoreTransient
from penstock.storage.memory_store import MemoryStore
from penstock.storage.swap_counts import SwappedKind
from penstock.storage.swapped_object import SwappedObject

OK, AWAY, LOST = "ok", "away", "its answer is lost"
CALLS = 6


class FlappingStore(MemoryStore):
    """Each call takes what becomes of it from ``calls``; at its end all is well."""

    def __init__(self) -> None:
        super().__init__(1 << 16)
        self.calls: list[str] = []

    @override
    def compare_and_swap(self, path: str, expected: bytes | None, new: bytes) -> bool:
        call = self.calls.pop(0) if self.calls else OK
        is_done = call != AWAY and super().compare_and_swap(path, expected, new)
        if call == LOST:
            raise StoreTransient(LOST)
        return is_done

    @override
    def get(self, path: str) -> bytes:
        call = self.calls.pop(0) if self.calls else OK
        if call == AWAY:
            raise StoreNotFound(f"no {path}")
        if call == LOST:
            raise StoreTransient(LOST)
        return super().get(path)


def lost(content: bytes | None) -> Exception:
    return StoreNotFound("gone") if content is None else Fenced(f"another has it: {content!r}")


def test_what_is_its_own_is_not_told_to_be_anothers() -> None:
    for calls in product((OK, AWAY, LOST), repeat=CALLS):
        store = FlappingStore()
        swapped = SwappedObject(store, "record", SwappedKind.HEAD, lost)
        assert swapped.take_over(None, b"0")
        store.calls = list(calls)
        content = 0
        while store.calls:
            content += 1
            try:
                swapped.swap(b"%d" % content)
            except Fenced as error:
                pytest.fail(f"after {calls}: {error}")
            except (StoreNotFound, StoreTransient):
                pass
        swapped.swap(b"at last")
        assert store.get("record") == b"at last"


def test_what_another_has_taken_meanwhile_is_told_so() -> None:
    for calls in product((OK, AWAY, LOST), repeat=CALLS):
        store = FlappingStore()
        first, second = (SwappedObject(store, "record", SwappedKind.HEAD, lost) for _ in range(2))
        assert first.take_over(None, b"first")
        store.calls = list(calls[:3])
        with contextlib.suppress(StoreNotFound, StoreTransient):
            first.swap(b"first 2")
        store.calls = []
        assert second.take_over(second.content(), b"second")
        store.calls = list(calls[3:])
        for _ in range(CALLS):
            with pytest.raises((Fenced, StoreNotFound, StoreTransient)):
                first.swap(b"first 3")
        assert store.get("record") == b"second"
