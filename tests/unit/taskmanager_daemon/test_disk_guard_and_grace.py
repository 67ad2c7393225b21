"""Aim: what is decided about disks and absent JobManagers, value by value."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from common.clock import SystemClock
from common.pb import internal_pb2
from penstock.config import Configuration
from penstock.errors import ConfigurationError
from penstock.partition_id import PartitionId
from taskmanager.daemon.disk_guard import DiskGuard, DiskLimits, DiskState
from taskmanager.daemon.disk_guard_runner import DiskFullError, DiskGuardRunner
from taskmanager.daemon.grace_period import GracePeriod
from taskmanager.daemon.held_partitions import (
    LISTED_MAX,
    HeldPartitionsReport,
    partition_id_of,
    summarize,
)
from taskmanager.daemon.partition_keeper_runner import PartitionKeeper
from taskmanager.daemon.partition_server_runner import PartitionServerRunner
from taskmanager.daemon.spill_directory import own_spill_directory
from taskmanager.partitions.spilling import Spilling
from tests.support.sealed_partitions import seal_rows

if TYPE_CHECKING:
    from taskmanager.processes.forkserver_runner import ForkserverRunner

LIMITS = DiskLimits(min_free_bytes=800, hard_min_free_bytes=100, wait_timeout_ms=3_000)
MIB = 1 << 20


@pytest.mark.parametrize(
    ("free", "states"),
    [
        ([800, 799, 800, 899, 900], ["ROOM", *["NEARLY_FULL"] * 3, "ROOM"]),
        ([100, 99, 1000], ["NEARLY_FULL", "FULL", "FULL"]),
        ([0], ["FULL"]),
        (
            [700, 700, 700, 700, 899, 900, 700],
            [*["NEARLY_FULL"] * 3, *["TOO_LONG"] * 2, "ROOM", "NEARLY_FULL"],
        ),
    ],
)
def test_states_of_a_disk(free: list[int], states: list[str]) -> None:
    guard = DiskGuard(LIMITS)
    seen, changes = [], []
    before = guard.state
    for second, free_bytes in enumerate(free, 1):
        changes.append(guard.observe(free_bytes, 1_000 * second))
        seen.append(guard.state.name)
        assert changes[-1] is (guard.state is not before)
        before = guard.state
    assert seen == states


def test_limits_of_zero_are_off() -> None:
    guard = DiskGuard(DiskLimits(0, 0, 4_000))
    assert not guard.observe(0, 1_000)
    assert guard.state is DiskState.ROOM


def test_the_hard_limit_is_the_lower_one() -> None:
    with pytest.raises(ConfigurationError, match="hard-min-free must not be more"):
        Configuration.from_mapping({"taskmanager.spill.min-free": "1mb"})


@pytest.mark.parametrize(
    ("length_ms", "history", "ends"),
    [
        (100, [(0, True), (50, False), (149, False), (150, False), (900, False)], [150]),
        (100, [(0, False), (99, False), (100, True), (150, False), (249, False)], []),
        (100, [(0, False), (100, False), (101, True), (102, False), (202, False)], [100, 202]),
        (0, [(0, True), (1, False), (2, False)], [1]),
    ],
)
def test_a_grace_ends_once_per_absence(
    length_ms: int, history: list[tuple[int, bool]], ends: list[int]
) -> None:
    grace = GracePeriod(length_ms)
    assert [
        now_ms for now_ms, is_present in history if grace.observe(now_ms, is_present=is_present)
    ] == ends


def test_what_is_held_is_counted_once_and_listed_up_to_a_bound() -> None:
    one, two = PartitionId("e0", "v0", 0, 1), PartitionId("e0", "v0", 1, 1)
    assert summarize([], []) == HeldPartitionsReport()
    held = summarize([("job", one, 5, 50), ("job", two, 3, 30)], [("name", ("job", one, 5, 50))])
    assert (held.count, held.size_bytes) == (2, 80)
    assert [(partition_id_of(p.partition), p.promoted_as) for p in held.listed] == [
        (one, "name"),
        (one, ""),
        (two, ""),
    ]
    many = [("job", PartitionId("e0", "v0", index, 0), 1, 2) for index in range(LISTED_MAX + 9)]
    held = summarize(many, [])
    assert (len(held.listed), held.count, held.size_bytes) == (
        LISTED_MAX,
        LISTED_MAX + 9,
        2 * LISTED_MAX + 18,
    )


def test_no_two_taskmanagers_share_a_spill_directory(tmp_path: Path) -> None:
    (tmp_path / "spill-of-the-user").mkdir()
    mine, swept = own_spill_directory(str(tmp_path), tmp_path / "work", "tm")
    assert (mine.path, swept) == (tmp_path / "spill-tm", [])
    with pytest.raises(ConfigurationError, match="belongs to a running process"):
        own_spill_directory(str(tmp_path), tmp_path / "work", "tm")
    other, swept = own_spill_directory(str(tmp_path), tmp_path / "work", "tm2")
    assert swept == []
    for directory in (mine, other):
        directory.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["spill-of-the-user"]
    own, _ = own_spill_directory("", tmp_path / "work", "tm")
    assert own.path == tmp_path / "work" / "spill"
    own.remove()


def test_a_small_disk_is_watched(small_disk: Path) -> None:
    told: list[Spilling] = []

    async def note(spilling: Spilling) -> None:
        told.append(spilling)

    limits = DiskLimits(8 * MIB, 2 * MIB, 0)
    runner = DiskGuardRunner(small_disk, limits, SystemClock(), note)
    file = small_disk / "file"

    def look_with(size_bytes: int) -> None:
        file.write_bytes(b"x" * size_bytes)
        asyncio.run(runner.look())

    for size_mib in (1, 9, 9, 7, 5, 5):
        look_with(size_mib * MIB)
    # At 7 MiB 9 MiB are free: an eighth more than the limit, which is enough to go on.
    assert told == [Spilling.STOPPED, Spilling.GIVEN_UP, Spilling.ALLOWED]
    assert runner.free_bytes == 11 * MIB
    with pytest.raises(
        DiskFullError, match=rf"bytes are free on the disk of {small_disk}.*hard-min"
    ):
        look_with(15 * MIB)


def test_what_a_disk_does_not_let_go_is_dropped_later(small_disk: Path) -> None:
    """The JobManager is away for good, and the TaskManager goes on waiting for another one."""
    one = PartitionId("e0", "v0", 0, 0)
    is_registered = False
    server = PartitionServerRunner(
        internal_pb2.SlotConfiguration(), Path(), cast("ForkserverRunner", None), SystemClock(), ""
    )
    keeper = PartitionKeeper(
        directory=small_disk,
        server=server,  # it is not running: there is nobody to tell
        clock=SystemClock(),
        grace_ms=0,
        is_registered=lambda: is_registered,
        writing=list,
    )

    def mount(options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(small_disk)], check=True)

    partition = seal_rows(small_disk, "job", one, 5)
    mount("ro")
    for _ in range(2):
        asyncio.run(keeper.look())
        assert partition.exists()
    mount("rw")
    asyncio.run(keeper.look())
    assert not partition.exists()
    # What another JobManager has had made meanwhile is its own.
    is_registered = True
    partition = seal_rows(small_disk, "other", one, 5)
    asyncio.run(keeper.look())
    assert partition.exists()
