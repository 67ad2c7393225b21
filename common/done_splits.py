"""Which splits of a source have been read to their end: an exact set that only ever grows.

A source that lists again and again must know every split that it has read, also one that is not listed any
more: a mount that is empty for a minute would have everything read again. By name that is one object per file
for ever, in memory and in every checkpoint. Here it is 16 bytes: a BLAKE2b digest of the split's id, which holds
its name and, of a part of a file, what tells the content. Digests of 128 bits make the set exact for all that can
happen: that two of a million million splits share one has a probability below 2e-15.

Of a part of a whole, the whole and its content are kept as well: a whole that was read in one cut is never
read in another one.

The digests lie sorted in *chunks*, which never change, so that a manifest refers to those of the one before and
only what is new is written. A new chunk takes over those before it that are less than ``_GROWTH`` times as
large: so there are few, and each digest is written a few times in all. What is not enough for a chunk is
*loose*, and in the manifest itself.

Invariants: chunks and loose digests are disjoint; each chunk is at least ``_GROWTH`` times as large as the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.connectors.source import PART_OF
from penstock.errors import StoreCorrupt
from penstock.storage.manifest import StoredRange
from penstock.storage.split_digest import DIGEST_BYTES, digest_of

SEALED_FROM: Final = 32
"""As many loose digests become a chunk."""
_GROWTH: Final = 4
_TYPE: Final = np.dtype(f"S{DIGEST_BYTES}")

Digests = npt.NDArray[np.bytes_]
"""Sorted, each once."""

_NONE: Final[Digests] = np.empty(0, _TYPE)


@dataclass(frozen=True, slots=True, eq=False)
class DigestChunk:
    """Digests in an object of the checkpoint store."""

    digests: Digests
    location: StoredRange


@dataclass(frozen=True, slots=True, eq=False)
class DoneSplits:
    """A set of splits that were read to their end. It is never changed: adding makes another one, which shares
    what they have in common.

    Attributes:
        chunks: what is in the store, the largest and oldest first.
        loose: what is in no chunk.

    Example: what is in it is not read again, nor is another cut of a whole whose parts are in it.
        >>> done = DoneSplits().with_ids(["a.csv", "b.parquet\\0content 1\\0part 1"])
        >>> done.admits(["a.csv", "c.csv", "b.parquet\\0content 1\\0part 2", "b.parquet\\0content 2\\0part 1"])
        [False, True, True, False]
    """

    chunks: tuple[DigestChunk, ...] = ()
    loose: Digests = field(default_factory=lambda: _NONE)

    def __len__(self) -> int:
        return sum(len(chunk.digests) for chunk in self.chunks) + len(self.loose)

    def holds(self, split_ids: Sequence[str]) -> list[bool]:
        """Which of the splits are in it; of wholes that are read in parts, the first part counts."""
        if not len(self):
            return [False] * len(split_ids)
        found: list[bool] = self._has(_digests(split_ids)).tolist()
        return found

    def admits(self, split_ids: Sequence[str]) -> list[bool]:
        """Which of the splits are neither in it nor another cut of a whole in it."""
        admitted = [not is_held for is_held in self.holds(split_ids)]
        parts = [index for index, id in enumerate(split_ids) if admitted[index] and PART_OF in id]
        if parts:
            wholes = [_whole_and_content(split_ids[index]) for index in parts]
            knows_whole = self.holds([whole for whole, _ in wholes])
            knows_content = self.holds([content for _, content in wholes])
            for index, is_known, is_same in zip(parts, knows_whole, knows_content, strict=True):
                admitted[index] = not is_known or is_same
        return admitted

    def with_ids(self, split_ids: Iterable[str]) -> DoneSplits:
        """With these splits, too."""
        names = dict.fromkeys(
            name
            for id in split_ids
            for name in (id, *(_whole_and_content(id) if PART_OF in id else ()))
        )
        return self.with_digests(_digests(list(names)))

    def with_digests(self, digests: Digests) -> DoneSplits:
        """With these digests, in any order, too."""
        new = np.unique(digests[~self._has(digests)])
        return DoneSplits(self.chunks, _merged(self.loose, new)) if len(new) else self

    def unsealed(self) -> DoneSplits:
        """The same without chunks."""
        return DoneSplits((), _merged(self.loose, *(chunk.digests for chunk in self.chunks)))

    def to_seal(self) -> tuple[tuple[DigestChunk, ...], Digests] | None:
        """The chunks that stay, and what becomes one more behind them; None = all stays as it is."""
        if len(self.loose) < SEALED_FROM:
            return None
        kept, sealed = list(self.chunks), self.loose
        while kept and len(kept[-1].digests) < _GROWTH * len(sealed):
            sealed = _merged(kept.pop().digests, sealed)
        return tuple(kept), sealed

    def _has(self, digests: Digests) -> npt.NDArray[np.bool_]:
        found = np.zeros(len(digests), np.bool_)
        for held in (*(chunk.digests for chunk in self.chunks), self.loose):
            if len(held):
                places = np.minimum(np.searchsorted(held, digests), len(held) - 1)
                found |= held[places] == digests
        return found


NOTHING_DONE: Final = DoneSplits()


def digests_from_bytes(content: bytes) -> Digests:
    """Inverse of ``tobytes``.

    Raises:
        StoreCorrupt: these are no digests in their order.
    """
    if len(content) % DIGEST_BYTES:
        raise StoreCorrupt(f"{len(content)} bytes are no digests of {DIGEST_BYTES} bytes")
    found = np.frombuffer(content, _TYPE)
    if len(found) > 1 and not bool(np.all(found[:-1] < found[1:])):
        raise StoreCorrupt("digests of splits are not in their order")
    return found


def _digests(split_ids: Sequence[str]) -> Digests:
    return np.frombuffer(b"".join(map(digest_of, split_ids)), _TYPE)


def _whole_and_content(split_id: str) -> tuple[str, str]:
    """The whole that a split is a part of, and with it what tells its content, as names beside those of splits."""
    whole, _, part = split_id.partition(PART_OF)
    return whole, f"{whole}{PART_OF}{part.partition(PART_OF)[0]}"


def _merged(*sorted_digests: Digests) -> Digests:
    merged: Any = np.concatenate(sorted_digests)
    merged.sort(kind="stable")  # runs that are in order are merged
    return merged
