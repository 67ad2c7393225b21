"""Aim: rows that a savepoint covers are published once, however its job and those that start from it, or from before it,
come and go.

Method: each job is a list of steps, as the daemons take them; interleavings are drawn from a seed, with jobs that end
between any two steps or begin again, and swaps whose answers are lost before or behind. What was published is counted by
which making of the rows it is of: the one that the savepoint names, committed however often, or one behind an older checkpoint.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from typing_extensions import override

from penstock.errors import StoreCorrupt, StoreTransient
from penstock.storage import output_claim
from penstock.storage.memory_store import MemoryStore
from penstock.storage.output_claim import (
    OutputClaim,
    OutputUse,
    make_claim,
    read_claim,
    release_claim,
)
from penstock.storage.savepoint import OUTPUT_PATH

RUNS = 500
ORIGINAL = "original"


class Forgetful(MemoryStore):
    """Does not say of every swap what has become of it."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(1 << 16)
        self._draw = draw

    @override
    def compare_and_swap(self, path: str, expected: bytes | None, new: bytes) -> bool:
        if self._draw.random() < 0.1:
            raise StoreTransient("before")
        is_done = super().compare_and_swap(path, expected, new)
        if self._draw.random() < 0.1:
            raise StoreTransient("behind")
        return is_done


class Story:
    """One savepoint, and the jobs that may publish what it covers."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._store = Forgetful(self._draw)
        self._ended = set[str]()
        self._is_in_head = False
        """HEAD of the original names a checkpoint that has what the savepoint covers."""
        self.published = set[str]()
        self.met = Counter[str]()

    def run(self) -> None:
        """All of them, until none has a step left."""
        jobs = [self._original(), self._branch("b"), self._branch("c"), self._older("d")]
        while jobs:
            job = self._draw.choice(jobs)
            try:
                next(job)
            except StopIteration:
                jobs.remove(job)

    def _is_drawn(self, chance: float, what: str) -> bool:
        is_it = self._draw.random() < chance
        self.met[what] += is_it
        return is_it

    def _asks(self, use: OutputUse, name: str) -> Iterator[bool]:
        """Until it is answered: whether it may."""
        wanted = OutputClaim(use, name)
        while True:
            try:
                found = make_claim(self._store, wanted, self._ended.__contains__)
            except StoreTransient:
                yield False
            else:
                self.met[f"{name} won"] += found == wanted
                self.met[f"{name} lost"] += found != wanted
                if found == wanted:
                    yield True
                return

    def _branch(self, name: str) -> Iterator[None]:
        """Started with ``--in-doubt commit``: commits what the savepoint names, once more after each failure."""
        for may in self._asks(OutputUse.COMMITS, name):
            yield
            while may and not self._is_drawn(0.4, f"{name} ended"):
                self.published.add("named")
                yield
        self._ended.add(name)

    def _original(self) -> Iterator[None]:
        """Its tasks go on, and their next checkpoint commits; or it goes back behind the savepoint, more than once maybe."""
        if self._is_drawn(0.2, "went on"):
            yield
            self.published.add("named")
            self._is_in_head = True
            return
        while True:
            answers = list[bool]()
            for may in self._asks(OutputUse.TAKES_BACK, ORIGINAL):
                answers.append(may)
                yield
            if not any(answers):
                break
            if self._is_drawn(0.3, "made again"):
                self.published.add("made by the original")
                self._is_in_head = True
                return
            if self._is_drawn(0.4, "ended behind it"):
                with contextlib.suppress(StoreTransient):
                    release_claim(self._store, OutputClaim(OutputUse.TAKES_BACK, ORIGINAL))
                break
        self._ended.add(ORIGINAL)

    def _older(self, name: str) -> Iterator[None]:
        """Started from the checkpoint before it, where the original has ended, and HEAD names none behind it."""
        while ORIGINAL not in self._ended:
            yield
            if self._is_in_head:
                return
        for may in self._asks(OutputUse.TAKES_BACK, name):
            yield
            if may:
                self.published.add(f"made by {name}")


def test_rows_are_published_once_in_any_order() -> None:
    met = Counter[str]()
    for seed in range(RUNS):
        story = Story(seed)
        story.run()
        assert len(story.published) < 2, (seed, story.published)
        met += story.met
        met.update(story.published)
    claims = {f"{name} {end}" for name in ("b", "c", "d", ORIGINAL) for end in ("won", "lost")}
    ends = {"named", "made by the original", "made by d", "went on", "ended behind it"}
    assert met.keys() >= claims | ends, met


def test_the_rule_is_what_keeps_them_from_coming_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_claim, "may_claim", lambda *_: True)
    stories = [Story(seed) for seed in range(RUNS)]
    for story in stories:
        story.run()
    assert any(len(story.published) > 1 for story in stories)


def test_what_is_damaged_is_nobodys() -> None:
    store = MemoryStore(1 << 16)
    store.put(OUTPUT_PATH, [b"commi"])
    with pytest.raises(StoreCorrupt, match="OUTPUT beside the manifest"):
        make_claim(store, OutputClaim(OutputUse.COMMITS, "b"))


def test_what_another_job_has_taken_back_stays_so_where_a_later_one_is_given_back() -> None:
    store = MemoryStore(1 << 16)
    runs, refused, late = (OutputClaim(OutputUse.TAKES_BACK, name) for name in ("a", "b", "c"))
    for one in (runs, refused, late):
        assert make_claim(store, one) == one
    release_claim(store, refused)
    assert read_claim(store) == late
    release_claim(store, late)
    assert read_claim(store) == runs
    commits = OutputClaim(OutputUse.COMMITS, "d")
    assert make_claim(store, commits) == runs
    release_claim(store, runs)
    assert read_claim(store) is None
    assert make_claim(store, commits) == commits
    store.put(OUTPUT_PATH, [b"taken back by job a"])  # as an earlier version says it
    assert make_claim(store, refused) == refused
    release_claim(store, refused)
    assert read_claim(store) == runs


def test_an_empty_claim_is_a_damaged_one() -> None:
    store = MemoryStore(1 << 16)
    store.put(OUTPUT_PATH, [b""])
    with pytest.raises(StoreCorrupt):
        read_claim(store)
