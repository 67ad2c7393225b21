"""Aim: a claimed savepoint becomes the first checkpoint of its new job, and leaves nothing, whichever call to the store
fails, or does what it was asked and answers with an error, and whoever goes on then.

Method: the whole way, from the claim to the second own checkpoint, on disk; the call of each number fails once, in turn.
What fails is tried again, by the same JobManager or the next.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_store_runner import CheckpointStoreRunner
from penstock.errors import JobRejected, StoreTransient
from penstock.pb import checkpoint_pb2
from penstock.storage.head import HeadStore
from penstock.storage.local_store import LocalStore
from penstock.storage.manifest import SharedIdentity, StoredRange, StoredReference, encode_manifest
from penstock.storage.restore_point import claim_savepoint, open_restore_point
from penstock.storage.savepoint import MANIFEST_PATH
from tests.unit.jobmanager.test_checkpoint_store import JOB, graph, manifest_of, snapshot, wanted

CALLS = ("put", "delete", "delete_many", "compare_and_swap", "copy_from", "list", "sizes", "get")
STATE, ITEMS = "state/7-v1-0-0-aaaaaaaaaaaa", "state/7-v1-0-0-bbbbbbbbbbbb"
OWN_STATE, OWN_ITEMS = STATE.replace("state", "shared"), ITEMS.replace("state", "shared")


def make_savepoint(path: Path) -> None:
    saved = snapshot(STATE)
    saved.operators[0].keyed.files[0].handle.checksum = zlib.crc32(b"0123456789")
    saved.operators[0].lists[0].handle.path = ITEMS
    manifest = manifest_of(graph(), [saved])
    manifest.job_id, manifest.checkpoint_id = "original", 7
    manifest.properties.kind = checkpoint_pb2.CHECKPOINT_KIND_SAVEPOINT
    store = LocalStore(path)
    store.put(STATE, [b"0123456789"])
    store.put(ITEMS, [b"0"])
    store.put(MANIFEST_PATH, [encode_manifest(manifest)])


class Faults:
    """Lets the call of one number fail, before or behind its effect."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, *, is_late: bool) -> None:
        self.left = number
        self.is_late = is_late
        for name in CALLS:
            monkeypatch.setattr(LocalStore, name, self._failing(getattr(LocalStore, name)))

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            fails = self.left == 0
            if fails and not self.is_late:
                raise StoreTransient("the disk is busy")
            answer = call(*arguments, **options)
            if fails:
                raise StoreTransient("no answer")
            return answer

        return failing


def tried(work: Callable[[], Any]) -> Any:
    """What it answers; where it fails, the second time."""
    try:
        return work()
    except StoreTransient:
        return work()


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("is_succeeded", [False, True])
def test_whatever_fails_on_the_way_all_is_there_once_and_nothing_is_left(
    tmp_path: Path, is_succeeded: bool, is_late: bool
) -> None:
    number, was_reached = 0, True
    while was_reached:
        number += 1
        assert number < 500
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
            was_reached = go(tmp_path / str(number), number, monkeypatch, is_succeeded, is_late)
    assert number > 30


def go(
    place: Path, number: int, monkeypatch: pytest.MonkeyPatch, is_succeeded: bool, is_late: bool
) -> bool:
    """False = there was no call of that number."""
    saved, store, epoch = place / "saved", LocalStore(place / "own"), 0
    make_savepoint(saved)
    store.put("shared/a", [b"0123456789"])
    store.put("chk-1/l", [b"0"])

    def leader() -> CheckpointStoreRunner:
        nonlocal epoch
        epoch += 1
        return CheckpointStoreRunner(
            JOB,
            graph(),
            store,
            leader_epoch=epoch,
            version="1",
            now_ms=lambda: 5_000,
            starts_from=str(saved),
        )

    faults = Faults(monkeypatch, number, is_late=is_late)
    tried(lambda: claim_savepoint(open_restore_point(str(saved)), JOB))
    one = leader()

    def prepared() -> Any:
        nonlocal one
        if is_succeeded and faults.left <= 0 and epoch == 1:
            one = leader()
        found = one.starts.prepare()
        assert found.sweep is not None
        return found

    found = tried(prepared)
    tried(lambda: found.sweep(()))
    assert found.is_of_another
    [first] = found.retained
    key = SharedIdentity("agg", 0, "i1", "run-1")
    named = StoredRange(OWN_STATE, 0, 10, zlib.crc32(b"0123456789"))
    assert StoredReference(key, named) in first.references, "it is counted, and may be built upon"
    assert (place / "own" / OWN_STATE).read_bytes() == b"0123456789"
    assert (place / "own" / OWN_ITEMS).read_bytes() == b"0"
    if is_succeeded and faults.left <= 0:
        one = leader()  # what the one before has not removed, this one does
        found = tried(prepared)
        tried(lambda: found.sweep(()))
    assert not saved.exists() or faults.left <= 0
    for checkpoint_id in (8, 9):
        stored = tried(partial(store_one, one, checkpoint_id))
        assert isinstance(stored, c.CheckpointStored)
    tried(lambda: one.starts.prepare().sweep(()))
    was_reached, faults.left = faults.left <= 0, 0
    assert [kept.checkpoint_id for kept in HeadStore(store).read().retained] == [9]
    assert not saved.exists()
    left = {found.path for found in store.list("")} - {"HEAD", "shared/a", "chk-1/l"}
    assert {path.split("/")[0] for path in left} <= {"chk-8", "chk-9", "done-splits"}, left
    with pytest.raises(JobRejected):
        open_restore_point(str(saved))
    return was_reached


def store_one(one: CheckpointStoreRunner, checkpoint_id: int) -> Any:
    stored = one.store(wanted(checkpoint_id))
    if isinstance(stored, c.CheckpointNotStored):
        raise StoreTransient(stored.error)
    return stored
