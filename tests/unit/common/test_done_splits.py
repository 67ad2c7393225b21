"""Aim: a set of done splits says of every split what a set of their names would, and costs 16 bytes each.

Method: drawn histories of splits, whole and in parts, against names kept for ever; what is sealed is sealed as a
checkpoint store would, and read back.
"""

from __future__ import annotations

import hashlib
import math
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import done_splits
from common.done_splits import (
    SEALED_FROM,
    DigestChunk,
    DoneSplits,
    digests_from_bytes,
)
from penstock.connectors.source import PART_OF
from penstock.errors import StoreCorrupt
from penstock.storage.manifest import StoredRange
from penstock.storage.split_digest import DIGEST_BYTES, digest_of
from tests.support.examples import examples

SOMEWHERE = StoredRange("shared/x", 0, 0, 0)


def sealed(done: DoneSplits) -> tuple[DoneSplits, int]:
    """The set after a checkpoint, and how many digests that has written."""
    wanted = done.to_seal()
    if wanted is None:
        return done, 0
    kept, digests = wanted
    written = digests_from_bytes(digests.tobytes())
    return DoneSplits((*kept, DigestChunk(written, SOMEWHERE))), len(written)


class Names:
    """The same by name."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.contents: dict[str, set[str]] = {}

    def add(self, split_id: str) -> None:
        whole, _, part = split_id.partition(PART_OF)
        self.known.add(split_id)
        self.contents.setdefault(whole, set()).add(part.partition(PART_OF)[0])

    def holds(self, split_id: str) -> bool:
        return split_id in self.known or split_id in self.contents

    def admits(self, split_id: str) -> bool:
        whole, _, part = split_id.partition(PART_OF)
        contents = self.contents.get(whole)
        return split_id not in self.known and (
            contents is None or part.partition(PART_OF)[0] in contents
        )


WHOLES = st.sampled_from(["a", "b", "c/d", "", "x\1"])
SPLITS = st.one_of(
    WHOLES,
    st.builds(
        lambda *names: PART_OF.join(names),
        WHOLES,
        st.sampled_from(["1", "2"]),
        st.sampled_from(["0-1", "2-3"]),
    ),
)


@given(st.lists(st.lists(SPLITS, max_size=6), max_size=8), st.lists(SPLITS), st.booleans())
def test_it_is_a_set_of_names(
    history: list[list[str]], asked: list[str], seals_early: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if seals_early:
            patch.setattr(done_splits, "SEALED_FROM", 1)
        done, names = DoneSplits(), Names()
        for splits in history:
            # What one checkpoint knows at once was assigned by the rule: whole splits or parts of one content.
            taken = [split for split in dict.fromkeys(splits) if names.admits(split)]
            for split in taken:
                names.add(split)
            done, _ = sealed(done.with_ids(taken))
    assert done.holds(asked) == [names.holds(split) for split in asked]
    assert done.admits(asked) == [names.admits(split) for split in asked]


@examples(30)
@given(st.lists(st.integers(0, 400), max_size=25))
def test_chunks_are_few_and_what_is_sealed_is_rarely_sealed_again(news: list[int]) -> None:
    done, total, written = DoneSplits(), 0, 0
    for news_count in news:
        done = done.with_ids(f"file-{number}" for number in range(total, total + news_count))
        total += news_count
        done, count = sealed(done)
        written += count
        assert len(done) == total
        assert len(done.loose) < SEALED_FROM
        sizes = [len(chunk.digests) for chunk in done.chunks]
        assert all(before >= 4 * after for before, after in pairwise(sizes))
    levels = 1 + math.log(max(total / SEALED_FROM, 1), 4)
    assert len(done.chunks) <= levels
    assert written <= total * 4 * (levels + 1)


def test_a_hundred_thousand_are_1_6_megabytes() -> None:
    ids = [f"/data/in/part-{number:06}.parquet" for number in range(100_000)]
    tracemalloc.start()
    try:
        done, _ = sealed(DoneSplits().with_ids(ids))
        del ids
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(done) == 100_000
    # In numpy's own memory, which tracemalloc sees, and a few objects.
    assert 100_000 * DIGEST_BYTES <= size < 100_000 * DIGEST_BYTES + 20_000


def test_a_digest_is_part_of_the_format() -> None:
    expected = hashlib.blake2b(b"/data/a.csv", digest_size=16, person=b"penstock split").digest()
    assert digest_of("/data/a.csv") == expected
    assert expected.hex() == "a23e314370b4e9d9891f35a1f8fae286"
    assert digest_of("h\u00e9\U0001f600").hex() == "ecd14722e078d7662a87cb91934b4a71"


def test_digests_that_differ_in_their_last_bytes_differ() -> None:
    """Text that is compared in memory ends at its last byte that is not 0."""
    digests = [bytes(15) + b"\0", bytes(15) + b"\1", b"\1" + bytes(15), bytes(14) + b"\1\0"]
    held = digests_from_bytes(b"".join(sorted(digests)))
    assert held.tobytes() == b"".join(sorted(digests))
    done = DoneSplits().with_digests(held[:2])
    assert done.with_digests(held).loose.tobytes() == held.tobytes()
    assert len(done.with_digests(held[:1])) == 2


@pytest.mark.parametrize("content", [b"x" * 15, b"b" * 16 + b"a" * 16, b"a" * 32])
def test_what_is_no_sorted_set_is_damage(content: bytes) -> None:
    with pytest.raises(StoreCorrupt):
        digests_from_bytes(content)
