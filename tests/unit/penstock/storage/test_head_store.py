"""Aim: HEAD has one owner, never goes back, and is never lost to a mistake.

Method: leaders side by side on one store; a store whose swaps fail before, after or without telling.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from penstock.errors import (
    Fenced,
    InvariantViolation,
    StoreCorrupt,
    StoreFull,
    StoreNotFound,
    StoreTransient,
)
from penstock.pb import checkpoint_pb2 as pb
from penstock.storage.head import HeadOutcomeUnknown, HeadStore, decode_head, find_manifests
from penstock.storage.local_store import LocalStore
from penstock.storage.manifest import encode_manifest, manifest_path
from penstock.storage.memory_store import MemoryStore
from penstock.storage.object_store import SwapUnanswered
from tests.support.examples import examples


def named(head: pb.CheckpointHead, *ids: int) -> pb.CheckpointHead:
    new = pb.CheckpointHead()
    new.CopyFrom(head)
    del new.retained[:]
    new.retained.extend(
        pb.RetainedCheckpoint(checkpoint_id=id_, manifest_path=manifest_path(id_)) for id_ in ids
    )
    new.next_checkpoint_id = max(ids) + 1
    return new


def ids(head: pb.CheckpointHead | None) -> list[int]:
    assert head is not None
    return [one.checkpoint_id for one in head.retained]


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return LocalStore(tmp_path / "j1") if request.param == "local" else MemoryStore(1 << 16)


def test_the_first_claim_makes_it(store: Any) -> None:
    heads = HeadStore(store)
    assert heads.read() is None
    head = heads.claim("j1", 3)
    assert (head.job_id, head.leader_epoch, head.next_checkpoint_id) == ("j1", 3, 1)
    assert ids(head) == []
    assert HeadStore(store).read() == head


def test_swaps_count_and_a_claim_keeps_them(store: Any) -> None:
    first = HeadStore(store)
    head = first.claim("j1", 3)
    for id_ in (1, 2, 3):
        head = named(head, *range(max(1, id_ - 1), id_ + 1))
        first.swap(head)
        assert ids(HeadStore(store).read()) == ids(head)
    claimed = HeadStore(store).claim("j1", 4)
    assert ids(claimed) == [2, 3]
    assert (claimed.leader_epoch, claimed.next_checkpoint_id) == (4, 4)


def test_a_deposed_leader_can_add_nothing(store: Any) -> None:
    old, new = HeadStore(store), HeadStore(store)
    head = old.claim("j1", 3)
    old.swap(named(head, 1))
    claimed = new.claim("j1", 4)
    for _ in range(2):
        with pytest.raises(Fenced, match="epoch 3 no longer has HEAD of job j1: epoch 4 has"):
            old.swap(named(head, 1, 2))
    with pytest.raises(Fenced, match="claimed by leader epoch 4, which is newer than 3"):
        old.claim("j1", 3)
    assert ids(new.read()) == [1]
    new.swap(named(claimed, 1, 5))
    assert ids(old.read()) == [1, 5]


def test_who_is_deposed_by_another_job_is_told_which(store: Any) -> None:
    old, new = HeadStore(store), HeadStore(store)
    head = named(old.claim("j1", 3), 1)
    old.swap(head)
    new.take_over("j2", "j1", 1, pb.StartedFrom())
    with pytest.raises(Fenced, match="epoch 3 no longer has HEAD of job j1: job j2 has claimed it"):
        old.swap(named(head, 2))
    new.claim("j2", 1)
    with pytest.raises(Fenced, match="job j2 has claimed it"):
        old.verify()


def test_a_second_claim_of_one_epoch_ends_the_first(store: Any) -> None:
    first, second = HeadStore(store), HeadStore(store)
    head = first.claim("j1", 3)
    assert second.claim("j1", 3) == head
    with pytest.raises(Fenced):
        first.swap(named(head, 1))
    second.swap(named(head, 1))


def test_a_leader_can_see_that_it_leads(store: Any) -> None:
    old, new = HeadStore(store), HeadStore(store)
    with pytest.raises(InvariantViolation, match="before it has been claimed"):
        old.verify()
    head = old.claim("j1", 3)
    old.verify()
    old.swap(named(head, 1))
    old.verify()
    new.claim("j1", 4)
    with pytest.raises(Fenced, match="epoch 4 has claimed it"):
        old.verify()
    new.verify()


def test_it_belongs_to_who_claimed_it(store: Any) -> None:
    heads = HeadStore(store)
    with pytest.raises(InvariantViolation, match="before it has been claimed"):
        heads.swap(pb.CheckpointHead())
    head = heads.claim("j1", 3)
    head.leader_epoch = 4
    with pytest.raises(InvariantViolation, match="epoch 4"):
        heads.swap(head)
    with pytest.raises(StoreCorrupt, match="that of job j1, not of job j2"):
        HeadStore(store).claim("j2", 9)


def test_a_head_that_is_gone_is_not_made_again(store: Any) -> None:
    heads = HeadStore(store)
    head = heads.claim("j1", 3)
    heads.swap(named(head, 1))
    path = manifest_path(1)
    store.put(path, [b"one"])
    store.delete("HEAD")
    for call in (lambda: heads.swap(named(head, 1, 2)), heads.verify):
        with pytest.raises(StoreNotFound, match=r"is gone: .*removed it"):
            call()
    store.delete(path)
    for call in (lambda: heads.swap(named(head, 1, 2)), heads.verify):
        with pytest.raises(StoreTransient, match=r"is gone: .*no checkpoint is there either"):
            call()
    assert heads.read() is None


def test_damage_is_seen_and_left_alone(store: Any) -> None:
    heads = HeadStore(store)
    heads.swap(named(heads.claim("j1", 3), 1, 2))
    content = store.get("HEAD")
    altered = [content[:size] for size in range(len(content))]
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        altered.append(bytes(flipped))
    for one in altered:
        with pytest.raises(StoreCorrupt, match="HEAD"):
            decode_head(one)
    for one in altered[::17]:
        store.put("HEAD", [one])
        for call in (heads.read, lambda: HeadStore(store).claim("j1", 9)):
            with pytest.raises(StoreCorrupt, match="HEAD"):
                call()
        with pytest.raises(StoreCorrupt, match="HEAD of job j1 was damaged"):
            heads.swap(named(pb.CheckpointHead(job_id="j1", leader_epoch=3), 4))
        assert store.get("HEAD") == one


def test_manifests_are_found_newest_first(store: Any) -> None:
    for id_, epoch in ((2, 1), (10, 1), (9, 2), (10, 3)):
        manifest = pb.CheckpointManifest(checkpoint_id=id_, leader_epoch=epoch)
        store.put(manifest_path(id_, epoch), [encode_manifest(manifest)])
    store.put(manifest_path(11), [b"PSTKMANI damaged"])
    store.put("chk-12/other", [b""])
    store.put("shared/manifest", [encode_manifest(pb.CheckpointManifest(checkpoint_id=99))])
    found = find_manifests(store)
    assert [(one.manifest.checkpoint_id, one.path) for one in found] == [
        (10, "chk-10/manifest-3"),
        (10, "chk-10/manifest-1"),
        (9, "chk-9/manifest-2"),
        (2, "chk-2/manifest-1"),
    ]


class Flaky(MemoryStore):
    """Calls fail as told: "before" or "after" they have done their work."""

    def __init__(self) -> None:
        super().__init__(1 << 16)
        self.script: list[str] = []

    def _next(self) -> str:
        return self.script.pop(0) if self.script else "ok"

    @override
    def get(self, path: str) -> bytes:
        if self._next() != "ok":
            raise StoreTransient("get")
        return super().get(path)

    @override
    def compare_and_swap(self, path: str, expected: bytes | None, new: bytes) -> bool:
        step = self._next()
        if step == "before":
            raise StoreTransient("swap")
        done = super().compare_and_swap(path, expected, new)
        if step == "after":
            raise StoreTransient("swap")
        return done


def test_a_swap_that_did_nothing_can_be_repeated() -> None:
    store = Flaky()
    heads = HeadStore(store)
    head = heads.claim("j1", 1)
    store.script = ["before"]
    with pytest.raises(StoreTransient) as caught:
        heads.swap(named(head, 1))
    assert not isinstance(caught.value, HeadOutcomeUnknown)
    assert ids(heads.read()) == []
    heads.swap(named(head, 2))
    assert ids(heads.read()) == [2]


def test_a_swap_that_happened_after_all_has_happened() -> None:
    store = Flaky()
    heads = HeadStore(store)
    head = heads.claim("j1", 1)
    store.script = ["after"]
    heads.swap(named(head, 1))
    heads.swap(named(head, 2))
    assert ids(heads.read()) == [2]


def test_a_swap_of_which_nothing_is_known_says_so() -> None:
    for outcome, expected in (("before", []), ("after", [1])):
        store = Flaky()
        heads = HeadStore(store)
        head = heads.claim("j1", 1)
        store.script = [outcome, "before"]
        with pytest.raises(HeadOutcomeUnknown, match="may or may not"):
            heads.swap(named(head, 1))
        assert ids(HeadStore(store).read()) == expected
        heads.verify()
        heads.swap(named(head, 2))
        assert ids(heads.read()) == [2]


class Late(MemoryStore):
    """Of some swaps nobody is told anything, and they are made later, where their condition holds then."""

    def __init__(self) -> None:
        super().__init__(1 << 16)
        self.fails = ""
        self.on_their_way: list[tuple[str, bytes | None, bytes]] = []

    @override
    def compare_and_swap(self, path: str, expected: bytes | None, new: bytes) -> bool:
        if self.fails == "unanswered":
            self.on_their_way.append((path, expected, new))
            raise SwapUnanswered("swap")
        if self.fails == "refused":
            raise StoreTransient("swap")
        return super().compare_and_swap(path, expected, new)

    def arrive(self) -> None:
        for one in self.on_their_way:
            super().compare_and_swap(*one)


@pytest.mark.parametrize("later", [["unanswered"], ["unanswered", "refused"]])
def test_a_swap_that_may_come_yet_is_not_taken_for_one_that_did_nothing(later: list[str]) -> None:
    """Who took it for that would remove what HEAD is about to name."""
    store = Late()
    heads = HeadStore(store)
    head = heads.claim("j1", 1)
    for id, store.fails in enumerate(later, 1):
        with pytest.raises(HeadOutcomeUnknown, match="may or may not"):
            heads.swap(named(head, id))
    heads.verify()
    store.arrive()
    assert ids(heads.read()) == [1]
    heads.verify()
    store.fails = ""
    heads.swap(named(head, 7))
    store.arrive()
    assert ids(heads.read()) == [7]
    store.fails = "refused"
    with pytest.raises(StoreTransient) as caught:
        heads.swap(named(head, 8))
    assert not isinstance(caught.value, HeadOutcomeUnknown), "what could come cannot any more"


def test_a_full_store_changes_nothing() -> None:
    store = MemoryStore(300)
    heads = HeadStore(store)
    head = heads.claim("j1", 1)
    heads.swap(named(head, 1))
    with pytest.raises(StoreFull):
        heads.swap(named(head, *range(1, 50)))
    heads.swap(named(head, 2))


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["claim", "swap"]),
        st.lists(st.sampled_from(["ok", "before", "after"]), max_size=4),
    ),
    max_size=25,
)


@examples(200)
@given(STEPS)
def test_leaders_never_undo_each_other(steps: list[tuple[int, str, list[str]]]) -> None:
    """Whatever fails: after each call HEAD is what its outcome allows, and only the newest owner's."""
    store = Flaky()
    leaders = [HeadStore(store) for _ in range(3)]
    claims: list[pb.CheckpointHead | None] = [None] * 3
    owner = -1
    for number, (index, what, script) in enumerate(steps, 1):
        before = HeadStore(store).read()
        store.script = list(script)
        outcome = "ok"
        try:
            if what == "claim":
                claims[index] = leaders[index].claim("j1", number)
            elif (claim := claims[index]) is not None:
                leaders[index].swap(named(claim, number))
            else:
                outcome = "skipped"
        except Fenced:
            outcome = "fenced"
        except HeadOutcomeUnknown:
            outcome = "unknown"
        except StoreTransient:
            outcome = "failed"
        store.script = []
        after = HeadStore(store).read()
        if what == "claim":
            if outcome == "ok":
                owner = index
                assert after == claims[index]
            elif after != before:  # it happened, and who claimed does not know
                owner = -1
            assert ids(after or pb.CheckpointHead()) == ids(before or pb.CheckpointHead())
        elif outcome == "skipped":
            assert after == before
        elif outcome == "ok":
            assert index == owner
            assert ids(after) == [number]
        elif outcome == "unknown":
            assert index == owner or after == before
        else:
            assert after == before
            assert outcome == "failed" or index != owner


def test_each_leader_reserves_ids_once_and_more_where_it_asks(store: Any) -> None:
    def next_id(epoch: int, **ids: int) -> int:
        return HeadStore(store).claim("j1", epoch, reserved_ids=16, **ids).next_checkpoint_id

    assert next_id(1) == 17
    assert next_id(1) == 17, "a claim whose answer was lost is made again"
    assert next_id(1, more_ids=16) == 33
    assert next_id(3) == 49
