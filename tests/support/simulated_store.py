"""A checkpoint store in memory that can fail, and that is looked through after every change.

Whatever HEAD names has to be there, whole, at every moment: a store call that breaks this fails at once.
Each process of a simulation has its own ``StoreAccess``, so that the calls of one can be cut off.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from penstock.errors import StoreTransient
from penstock.pb import checkpoint_pb2
from penstock.storage.head import HEAD_PATH, decode_head
from penstock.storage.manifest import decode_manifest, references
from penstock.storage.memory_store import MemoryStore
from penstock.storage.object_store import (
    TEMPORARY_AGE_MAX_MS,
    ObjectInfo,
    ObjectStore,
    SwapUnanswered,
)
from tests.support.simulated_threads import die_here, pause

_UNLIMITED = 1 << 40
_NS_PER_MS = 1_000_000
_ARRIVING, _NEVER_MADE = 0.3, 0.3
"""Shares: of the calls that a late swap comes before, and of the late swaps that do not come."""


@dataclass(frozen=True, slots=True)
class StoreWeather:
    """How the store treats a process.

    Attributes:
        failures: share of the calls that fail with ``StoreTransient``.
        lost_answers: share of the writing calls that are done but fail all the same.
        hanging: share of the calls that hang, before what they are for or behind it.
        hanging_max_ms: how long at most; of those, every fourth hangs until its process ends.
        late_swaps: share of the swaps that are not answered, and are made behind some later call of somebody, or never.
    """

    failures: float = 0.0
    lost_answers: float = 0.0
    hanging: float = 0.0
    hanging_max_ms: int = 1_000
    late_swaps: float = 0.0


CALM = StoreWeather()


def _raise(error: AssertionError) -> None:
    raise error


class AuditedStore:
    """The objects of one job."""

    def __init__(self, on_broken: Callable[[AssertionError], None] = _raise) -> None:
        self._on_broken = on_broken
        self.objects = MemoryStore(_UNLIMITED)
        self.audits = 0
        self.changes = 0
        self.failures = 0
        """Calls that have failed, or seemed to."""
        self.hangs = 0
        self.unsure_puts = 0
        """Objects that are there although their writers were told that they are not."""
        self.on_their_way: list[Callable[[], bool]] = []
        """Swaps that nobody has been answered, and that may be made yet."""
        self.late_swaps = 0
        """Those that were made after all, where their condition held then."""

    def arrive(self, draws: random.Random) -> None:
        """A late swap may come now."""
        if not self.on_their_way or draws.random() >= _ARRIVING:
            return
        swap = self.on_their_way.pop(draws.randrange(len(self.on_their_way)))
        if draws.random() >= _NEVER_MADE and swap():
            self.late_swaps += 1
            self.changed()

    def clear(self) -> None:
        """Somebody removes the directory."""
        for path in self.paths():
            self.objects.delete(path)

    def paths(self) -> set[str]:
        """All that is there."""
        return {found.path for found in self.objects.list("")}

    def changed(self) -> None:
        """Looks through it after a change; also where nobody waits for the call that has made it."""
        self.changes += 1
        try:
            self.named()
        except AssertionError as error:
            self._on_broken(error)
            raise

    def newest(self) -> checkpoint_pb2.CheckpointManifest | None:
        """The checkpoint that HEAD ends with; None = it has none."""
        head = self.head()
        if head is None or not head.retained:
            return None
        path = head.retained[-1].manifest_path
        return decode_manifest(self.objects.get(path), path)

    def head(self) -> checkpoint_pb2.CheckpointHead | None:
        """What HEAD says."""
        return decode_head(self.objects.get(HEAD_PATH)) if HEAD_PATH in self.paths() else None

    def named(self) -> set[str]:
        """HEAD and all that it leads to; fails where something of it is missing or too short."""
        head = self.head()
        if head is None:
            return set()
        self.audits += 1
        sizes = {found.path: found.size_bytes for found in self.objects.list("")}
        named = {HEAD_PATH}
        for retained in head.retained:
            path = retained.manifest_path
            assert path in sizes, f"HEAD names {path}, which is gone"
            named.add(path)
            for reference in references(decode_manifest(self.objects.get(path), path)):
                location = reference.location
                end = location.offset + location.size_bytes
                found = sizes.get(location.path)
                assert found is not None, f"{path} refers to {location.path}, which is gone"
                assert found >= end, f"{path} refers to {location.path}, which is too short"
                named.add(location.path)
        return named


@dataclass(slots=True)
class Countdown:
    """Calls of a process until it dies in one.

    Attributes:
        left: None = it does not.
    """

    left: int | None = None

    def count(self) -> None:
        """A call is made."""
        if self.left is not None:
            if self.left == 0:
                die_here()
            self.left -= 1


class StoreAccess(ObjectStore):
    """The store as one process sees it.

    Args:
        audited: what is there.
        draws: decides about each call.
        weather: how the store is now.
        countdown: of the process' calls, in any store.
    """

    def __init__(
        self,
        audited: AuditedStore,
        draws: random.Random,
        weather: Callable[[], StoreWeather] = lambda: CALM,
        countdown: Countdown | None = None,
    ) -> None:
        self._audited = audited
        self._draws = draws
        self._weather = weather
        self.countdown = countdown or Countdown()

    def _enter(self, call: str) -> None:
        self.countdown.count()
        self._audited.arrive(self._draws)
        weather = self._weather()
        self._hang(weather)
        if weather.failures and self._draws.random() < weather.failures:
            self._audited.failures += 1
            raise StoreTransient(f"{call}: the simulated store does not answer")

    def _hang(self, weather: StoreWeather) -> None:
        if weather.hanging and self._draws.random() < weather.hanging / 2:
            self._audited.hangs += 1
            is_endless = self._draws.random() < 0.25
            pause(
                None if is_endless else self._draws.randrange(weather.hanging_max_ms) * _NS_PER_MS
            )

    def _leave(self, call: str) -> None:
        self._audited.changed()
        weather = self._weather()
        self._hang(weather)
        if weather.lost_answers and self._draws.random() < weather.lost_answers:
            self._audited.failures += 1
            raise StoreTransient(f"{call}: the answer of the simulated store is lost")

    @override
    def put(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        content = b"".join(bytes(chunk) for chunk in chunks)
        self._enter(f"put {path}")
        size_bytes = self._audited.objects.put(path, [content])
        try:
            self._leave(f"put {path}")
        except StoreTransient:
            self._audited.unsure_puts += 1
            raise
        return size_bytes

    @override
    def get(self, path: str) -> bytes:
        self._enter(f"get {path}")
        return self._audited.objects.get(path)

    @override
    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        self._enter(f"read {path}")
        return self._audited.objects.read(path, offset, size_bytes)

    @override
    def sizes(self, paths: Iterable[str]) -> Mapping[str, int]:
        wanted = list(paths)
        self._enter(f"sizes {len(wanted)}")
        return self._audited.objects.sizes(wanted)

    @override
    def list(self, prefix: str) -> list[ObjectInfo]:
        self._enter(f"list {prefix}")
        return self._audited.objects.list(prefix)

    @override
    def delete(self, path: str) -> None:
        self._enter(f"delete {path}")
        self._audited.objects.delete(path)
        self._leave(f"delete {path}")

    @override
    def compare_and_swap(self, path: str, expected: bytes | None, new: bytes) -> bool:
        self._enter(f"swap {path}")
        swap = partial(self._audited.objects.compare_and_swap, path, expected, new)
        late_swaps = self._weather().late_swaps
        if late_swaps and self._draws.random() < late_swaps:
            self._audited.failures += 1
            self._audited.on_their_way.append(swap)
            raise SwapUnanswered(f"swap {path}: the simulated store has not answered yet")
        swapped = swap()
        self._leave(f"swap {path}")
        return swapped

    @override
    def first_parts(self) -> tuple[str, ...]:
        self._enter("first parts")
        return self._audited.objects.first_parts()

    @override
    def check_writable(self) -> None:
        self._audited.objects.check_writable()

    @override
    def temporaries(self) -> tuple[ObjectInfo, ...]:
        return self._audited.objects.temporaries()

    @override
    def remove_temporary(self, path: str) -> None:
        self._audited.objects.remove_temporary(path)

    @override
    def sweep_temporaries(self, age_min_ms: int = TEMPORARY_AGE_MAX_MS) -> tuple[str, ...]:
        return self._audited.objects.sweep_temporaries(age_min_ms)

    @override
    def remove_remains(self) -> None:
        self._audited.objects.remove_remains()
