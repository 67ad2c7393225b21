"""Aim: drains are known to the next leader, and written by one who leads only.

Method: several leaders on one store in memory; swaps whose answers are lost; what lies there is damaged.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from common.pb import job_record_pb2
from jobmanager.stores.drains_store import DRAINS_PATH, DrainsStore
from jobmanager.stores.leader_store import LeaderStore
from penstock.errors import Fenced, StoreCorrupt, StoreNotFound, StoreTransient
from penstock.storage.local_store import LocalStore
from penstock.storage.memory_store import MemoryStore
from tests.unit.jobmanager.test_job_store import Lossy


def lead(kept: MemoryStore) -> DrainsStore:
    leader = LeaderStore(kept, "kept")
    leader.take_over()
    return DrainsStore(kept, "kept", leader)


def drained(*names: str) -> job_record_pb2.StoredDrains:
    return job_record_pb2.StoredDrains(drained=dict.fromkeys(names, "first"), operations=b"[]")


def test_what_was_written_is_read_by_the_next_leader() -> None:
    kept = MemoryStore(1 << 20)
    first = lead(kept)
    assert not first.read().drained
    first.write(drained("tm-1"))
    first.write(drained("tm-1", "tm-2"))
    assert sorted(lead(kept).read().drained) == ["tm-1", "tm-2"]


def test_who_was_deposed_writes_nothing_any_more() -> None:
    kept = MemoryStore(1 << 20)
    first = lead(kept)
    first.write(drained("tm-1"))
    second = lead(kept)
    second.read()
    with pytest.raises(Fenced):
        first.write(drained())
    assert list(second.read().drained) == ["tm-1"]


def test_who_was_deposed_before_there_was_anything_cannot_say_that_it_has_drained() -> None:
    kept = MemoryStore(1 << 20)
    first, second = lead(kept), lead(kept)
    with pytest.raises(Fenced):
        first.write(drained("tm-1"))
    second.write(drained("tm-2"))
    assert list(lead(kept).read().drained) == ["tm-2"]


def test_a_swap_whose_answer_is_lost_is_found_out() -> None:
    kept = Lossy()
    store = lead(kept)
    store.write(drained("tm-1"))
    kept.faults = ["lost"]
    store.write(drained("tm-2"))
    kept.faults = ["failing"]
    with pytest.raises(StoreTransient):
        store.write(drained("tm-3"))
    assert list(lead(kept).read().drained) == ["tm-2"]


@pytest.mark.parametrize("was_written", [True, False])
def test_storage_that_is_away_is_named_and_nothing_is_made_in_its_place(
    tmp_path: Path, was_written: bool
) -> None:
    root = tmp_path / "kept"
    leader = LeaderStore(LocalStore(root), "kept")
    leader.take_over()
    store = DrainsStore(LocalStore(root), "kept", leader)
    if was_written:
        store.write(drained("tm-1"))
    root.rename(tmp_path / "away")
    with pytest.raises(StoreNotFound, match="or the storage is not there any more"):
        store.write(drained("tm-2"))
    assert not root.exists()


def test_what_is_damaged_is_said_and_replaced_by_the_next_drain() -> None:
    kept = MemoryStore(1 << 20)
    lead(kept).write(drained("tm-1"))
    kept.put(DRAINS_PATH, [b"PSTKDRAN nonsense"])
    store = lead(kept)
    with pytest.raises(StoreCorrupt, match="drains"):
        store.read()
    store.write(drained("tm-2"))
    assert list(lead(kept).read().drained) == ["tm-2"]
