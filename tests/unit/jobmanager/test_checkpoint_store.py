"""What is done to the store of a job's checkpoints: manifests, HEAD, sweeping, failures of the store."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typing_extensions import override

from jobmanager.checkpoint import claimed_head_store
from jobmanager.checkpoint import messages as c
from jobmanager.checkpoint.checkpoint_ids import IDS_RESERVED_AT_ONCE
from jobmanager.checkpoint.checkpoint_store_runner import CheckpointStoreRunner
from jobmanager.checkpoint.next_head import head_opened
from jobmanager.checkpoint.prepared_checkpoints import PreparedCheckpoints
from jobmanager.checkpoint.snapshot_convert import references_of, with_replaced
from jobmanager.graph.execution_attempt import AttemptKey, SubtaskId
from jobmanager.job.restored_tasks import restored_checkpoint, restored_tasks
from penstock.errors import Fenced, StoreTransient, Unrecoverable
from penstock.graph.fingerprint import fingerprint
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.storage.head import HEAD_PATH, HeadOutcomeUnknown, HeadStore
from penstock.storage.local_store import LocalStore
from penstock.storage.manifest import SharedIdentity, StoredRange, manifest_path
from penstock.storage.memory_store import MemoryStore
from penstock.storage.object_store import ObjectInfo, ObjectStore
from penstock.storage.output_claim import OutputClaim, OutputUse, read_claim
from penstock.storage.snapshot_files import snapshot_file_name

JOB = "ab" * 16
DEADLINE_S = 30.0
KEY = SharedIdentity("agg", 0, "i1", "run-1")


def graph() -> graph_pb2.JobGraph:
    source, sink = (
        graph_pb2.Vertex(id="v0", parallelism=2, max_parallelism=8),
        graph_pb2.Vertex(id="v1", parallelism=1, max_parallelism=8),
    )
    source.operators.add(uid="src").source.bounded = True
    sink.operators.add(uid="agg").sink.discard.SetInParent()
    return graph_pb2.JobGraph(name="job", vertices=[source, sink])


def runner(store: ObjectStore, epoch: int = 1) -> CheckpointStoreRunner:
    return CheckpointStoreRunner(
        JOB, graph(), store, leader_epoch=epoch, version="1", now_ms=lambda: 5_000
    )


def snapshot(path: str, size_bytes: int = 10) -> checkpoint_pb2.SubtaskSnapshot:
    found = checkpoint_pb2.SubtaskSnapshot(vertex="v1", subtask_index=0)
    operator = found.operators.add(operator_uid="agg")
    operator.keyed.instance = "i1"
    operator.keyed.last_key_group, operator.keyed.max_parallelism = 7, 8
    handle = checkpoint_pb2.StateHandle(path=path, size_bytes=size_bytes, checksum=7)
    operator.keyed.files.add(name="run-1", shared=True, handle=handle)
    operator.keyed.files.add(name="own", handle=checkpoint_pb2.StateHandle(inline=b"x"))
    operator.lists.add(name="l", handle=checkpoint_pb2.StateHandle(path="chk-1/l", size_bytes=1))
    operator.lists.add(name="u", redistribution=checkpoint_pb2.REDISTRIBUTION_UNION, items=[b"one"])
    return found


def manifest_of(
    job: graph_pb2.JobGraph, subtasks: list[checkpoint_pb2.SubtaskSnapshot]
) -> checkpoint_pb2.CheckpointManifest:
    return checkpoint_pb2.CheckpointManifest(
        checkpoint_id=3, vertices=fingerprint(job), subtasks=subtasks
    )


def wanted(
    checkpoint_id: int, path: str = "shared/a", retained: tuple[int, ...] = ()
) -> c.StoreCheckpoint:
    source = checkpoint_pb2.SubtaskSnapshot(vertex="v0", subtask_index=0)
    source.operators.add(operator_uid="src").splits.add(id="x", position=b"3", size=4)
    return c.StoreCheckpoint(
        checkpoint_id=checkpoint_id,
        triggered_at_ms=1_000,
        snapshots=((AttemptKey("v1", 0, 0), snapshot(path)), (AttemptKey("v0", 0, 0), source)),
        finished=(AttemptKey("v0", 1, 0),),
        replaced=(),
        retained=(*retained, checkpoint_id),
        next_checkpoint_id=checkpoint_id + 1 + IDS_RESERVED_AT_ONCE,
        state_bytes=11,
    )


def files(store: ObjectStore) -> None:
    """What the snapshots refer to."""
    store.put("shared/a", [b"0123456789"])
    store.put("chk-1/l", [b"0"])


DONE = ((AttemptKey("v0", 1, 0), "src", ("y", "z")),)


def swept(found: PreparedCheckpoints) -> PreparedCheckpoints:
    assert found.sweep is not None
    found.sweep(())
    return found


def test_a_stored_checkpoint_is_what_the_next_attempt_starts_from(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    first = runner(store)
    empty = first.starts.prepare()
    assert (empty.newest, empty.retained, empty.next_checkpoint_id) == (None, (), 1)
    stored = first.store(wanted(1), DONE)
    assert isinstance(stored, c.CheckpointStored)
    dead, unknown = f"shared/{snapshot_file_name(1, 'v1', 0, 3, 'u')}", "shared/unknown"
    for path in ("shared/a", dead, "chk-1/l", unknown, "taskowned/t"):
        store.put(path, [b"0123456789"])
    found = swept(first.starts.prepare())
    assert found.next_checkpoint_id == 2
    (kept,) = found.retained
    assert kept.references == references_of(snapshot("shared/a"))
    assert [r.identity for r in kept.references] == [KEY, None]
    assert kept.manifest_path == stored.manifest_path
    left = {info.path for info in store.list("")}
    assert left == {"HEAD", stored.manifest_path, "shared/a", "chk-1/l", unknown, "taskowned/t"}
    assert found.newest is not None
    tasks = restored_tasks(found.newest, graph())
    assert tasks[SubtaskId("v0", 1)].finished
    assert [one.name for one in tasks[SubtaskId("v1", 0)].operators[0].lists] == ["l", "u"]
    seen = restored_checkpoint(1, tasks, graph())
    assert seen.finished == {SubtaskId("v0", 1)}
    assert {(s.subtask_index, s.split_id, s.done) for s in seen.splits} == {
        (0, "x", False),
        (1, "y", True),
        (1, "z", True),
    }


def test_a_part_that_begins_again_sweeps_what_its_dead_attempts_have_uploaded(
    tmp_path: Path,
) -> None:
    """A region may be restarted any number of times while others run: what is left must not add up."""

    def upload(checkpoint_id: int, vertex: str, subtask_index: int, attempt: int) -> str:
        name = snapshot_file_name(checkpoint_id, vertex, subtask_index, attempt, "u")
        store.put(f"shared/{name}", [b"0123456789"])
        return f"shared/{name}"

    store = LocalStore(tmp_path)
    one = runner(store)
    one.starts.prepare()
    kept = upload(1, "v1", 0, 3)
    store.put("chk-1/l", [b"0"])
    stored = one.store(wanted(1, kept))
    assert isinstance(stored, c.CheckpointStored)
    living = [upload(2, "v0", 0, 3), upload(2, "v1", 1, 3)]
    for attempt in (3, 4):
        upload(2, "v1", 0, attempt)
    store.put("shared/unknown", [b"x"])
    store.put(manifest_path(2, 1), [b"of a checkpoint that has failed"])
    of_running = f"shared/{snapshot_file_name(3, 'v1', 0, 5, 'u')}"
    found = one.starts.prepare(alone={SubtaskId("v1", 0)}, ended_id=2)
    store.put(of_running, [b"of the checkpoint that came next"])
    swept(found)
    store.delete(of_running)
    left = {info.path for info in store.list("")}
    assert left == {"HEAD", stored.manifest_path, kept, "chk-1/l", "shared/unknown", *living}
    with pytest.raises(Unrecoverable):
        one.starts.prepare(unusable=(1,), alone={SubtaskId("v1", 0)})
    assert {info.path for info in store.list("")} == left


def test_the_location_that_counts_is_written(tmp_path: Path) -> None:
    location = StoredRange("shared/first", 3, 10, 7)
    changed = with_replaced(snapshot("shared/second"), {KEY: location})
    assert references_of(changed)[0].location == location
    assert references_of(snapshot("shared/second"))[0].location.path == "shared/second"


def test_retained_checkpoints_are_those_that_are_wanted(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    one = runner(store)
    one.starts.prepare()
    one.store(wanted(1))
    one.store(wanted(2, retained=(1,)))
    one.store(wanted(4, retained=(2,)))
    head = HeadStore(store).read()
    assert head is not None
    assert [kept.checkpoint_id for kept in head.retained] == [2, 4]
    assert head.next_checkpoint_id == 5 + IDS_RESERVED_AT_ONCE


def test_a_store_without_room_for_head_is_hopeless() -> None:
    with pytest.raises(Unrecoverable, match="no room for checkpoints: HEAD"):
        runner(MemoryStore(10)).starts.prepare()


def test_unreadable_manifests_are_skipped_and_then_nothing_is_swept(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    one = runner(store)
    one.starts.prepare()
    files(store)
    older = one.store(wanted(1))
    newer = one.store(wanted(2, retained=(1,)))
    assert isinstance(older, c.CheckpointStored)
    assert isinstance(newer, c.CheckpointStored)
    store.delete(newer.manifest_path)
    store.put("shared/orphan", [b"x"])
    found = runner(store, 2).starts.prepare()
    assert found.newest is not None
    assert found.newest.checkpoint_id == 1
    assert found.sweep is None
    assert store.list("shared/orphan")
    # What tasks could not restore, and what refers to a truncated file, is skipped as well.
    with pytest.raises(Unrecoverable, match=f"{newer.manifest_path}: .* does not exist"):
        runner(store, 2).starts.prepare(unusable=(1,))
    store.put("shared/a", [b"012345678"])
    with pytest.raises(
        Unrecoverable, match="shared/a, which it refers to, is missing or truncated"
    ):
        runner(store, 2).starts.prepare()
    store.put(older.manifest_path, [b"junk"])
    with pytest.raises(Unrecoverable, match=older.manifest_path):
        runner(store, 3).starts.prepare()
    store.put(HEAD_PATH, [b"junk"])
    with pytest.raises(Unrecoverable, match="nothing has been deleted"):
        runner(store, 4).starts.prepare()
    assert store.list("shared/orphan")


def test_the_next_leader_knows_what_tasks_could_not_restore(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    one = runner(store)
    one.starts.prepare()
    files(store)
    one.store(wanted(1))
    one.store(wanted(2, retained=(1,)))
    assert one.starts.prepare(unusable=(2,)).goes_back
    # What runs now is further than checkpoint 1 and knows nothing of 2: taking it over as if it did would lose splits.
    later = runner(store, 2)
    found = later.starts.prepare()
    assert found.newest is not None
    assert (found.newest.checkpoint_id, found.goes_back) == (1, True)
    later.store(wanted(3, retained=(1,)))
    found = runner(store, 3).starts.prepare()
    assert found.newest is not None
    assert (found.newest.checkpoint_id, found.goes_back) == (3, False)


def test_a_savepoint_stays_in_head_as_long_as_a_checkpoint_before_it_is_kept(
    tmp_path: Path,
) -> None:
    """What lies between is damaged, and the job goes back behind the savepoint after all."""
    store, saved = LocalStore(tmp_path / "job"), str(tmp_path / "saved")
    one = runner(store)
    one.starts.prepare()
    files(store)
    one.store(wanted(1))
    heads = HeadStore(store)
    heads.swap(head_opened(heads.claim(JOB, 1), saved, 2))
    one.forget()
    one.starts.prepare()
    one.store(wanted(3, retained=(1,)))
    found = one.starts.prepare(unusable=(3,))
    assert (found.goes_back, found.open_savepoints) == (True, {2})
    one.behind = frozenset({2})
    one.savepoint(saved).write(checkpoint_pb2.CheckpointManifest(job_id=JOB, checkpoint_id=2))
    one.store(wanted(4, retained=(1,)))
    claim = read_claim(LocalStore(Path(saved)))
    assert claim == OutputClaim(OutputUse.TAKES_BACK, JOB)
    one.store(wanted(5, retained=(4,)))
    head = heads.read()
    assert head is not None
    assert not head.open_savepoints


def test_a_directory_that_is_not_there_any_more_starts_nothing_anew(tmp_path: Path) -> None:
    elsewhere = LocalStore(tmp_path / "not-mounted")
    with pytest.raises(StoreTransient, match=r"not-mounted.*mounted") as caught:
        runner(elsewhere, epoch=2).starts.prepare(must_exist=True)
    assert JOB in str(caught.value)
    assert elsewhere.list("") == []
    assert runner(elsewhere, epoch=2).starts.prepare().newest is None


def test_a_deposed_leader_sweeps_and_discards_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    deposed = runner(store, epoch=1)
    late = deposed.starts.prepare().sweep
    assert late is not None
    successor = runner(store, epoch=2)
    successor.starts.prepare()
    files(store)
    stored = successor.store(wanted(1))
    assert isinstance(stored, c.CheckpointStored)
    present = [found.path for found in store.list("")]
    with pytest.raises(Fenced):
        deposed.starts.prepare()
    with pytest.raises(Fenced):
        late(())
    with pytest.raises(Fenced):
        deposed.deletions.discard()
    assert [found.path for found in store.list("")] == present


def test_a_deposed_leader_adds_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    old = runner(store, 1)
    old.starts.prepare()
    runner(store, 2).starts.prepare()
    with pytest.raises(Fenced):
        old.store(wanted(1))
    with pytest.raises(Fenced):
        runner(store, 1).starts.prepare()


class _Failing(MemoryStore):
    """Writes fail while ``broken`` is set: puts, swaps that nobody knows the outcome of, or swaps that are not
    made and deletions."""

    broken = ""

    @override
    def put(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        if self.broken == "put":
            raise StoreTransient("disk full")
        return super().put(path, chunks)

    @override
    def get(self, path: str) -> bytes:
        if self.broken == "swap" and path == HEAD_PATH:
            raise StoreTransient("no answer")
        return super().get(path)

    @override
    def compare_and_swap(self, path: str, expected: bytes | None, new: bytes) -> bool:
        if self.broken == "all":
            raise StoreTransient("no answer")
        swapped = super().compare_and_swap(path, expected, new)
        if self.broken == "swap":
            raise StoreTransient("no answer")
        return swapped

    @override
    def delete(self, path: str) -> None:
        if self.broken == "all":
            raise StoreTransient("no answer")
        super().delete(path)


class _LateListing(MemoryStore):
    """The next listing waits, before it is made, until it is let go."""

    def __init__(self) -> None:
        super().__init__(100_000)
        self.hangs, self.goes_on = threading.Event(), threading.Event()
        self.is_bad = False

    @override
    def list(self, prefix: str) -> list[ObjectInfo]:
        if self.is_bad:
            self.is_bad = False
            self.hangs.set()
            assert self.goes_on.wait(DEADLINE_S)
        return super().list(prefix)


class _LateReading(MemoryStore):
    """The next reading of a manifest waits until it is let go."""

    def __init__(self) -> None:
        super().__init__(100_000)
        self.hangs, self.goes_on = threading.Event(), threading.Event()
        self.is_bad = False

    @override
    def get(self, path: str) -> bytes:
        if self.is_bad and path != HEAD_PATH:
            self.is_bad = False
            self.hangs.set()
            assert self.goes_on.wait(DEADLINE_S)
        return super().get(path)


def test_a_sweep_that_comes_late_takes_nothing_of_the_attempts_that_run_now() -> None:
    """Its listing hung; the next start was made, tasks have uploaded, a checkpoint is complete; then it goes on."""
    store = _LateListing()
    one = runner(store)
    dead = f"shared/{snapshot_file_name(1, 'v1', 0, 1, 'u')}"
    living = f"shared/{snapshot_file_name(2, 'v1', 0, 2, 'u')}"
    one.starts.prepare()
    store.put(dead, [b"0123456789"])
    found = one.starts.prepare(ended_id=1)
    store.is_bad = True
    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(swept, found)
        assert store.hangs.wait(DEADLINE_S)
        one.starts.prepare(ended_id=1)
        files(store)
        store.put(living, [b"0123456789"])
        assert isinstance(one.store(wanted(2, living)), c.CheckpointStored)
        store.goes_on.set()
        late.result(DEADLINE_S)
    assert not store.list(dead)
    newest = swept(runner(store, epoch=2).starts.prepare()).newest
    assert newest is not None
    assert newest.checkpoint_id == 2
    assert store.list(living)


def test_a_start_lists_nothing() -> None:
    store = _LateListing()
    one = runner(store)
    files(store)
    one.starts.prepare()
    one.store(wanted(1))
    store.is_bad = True  # a listing would hang
    found = one.starts.prepare()
    assert found.newest is not None
    one = runner(store, epoch=2)
    assert one.starts.prepare().retained == found.retained
    store.delete("shared/a")
    with pytest.raises(Unrecoverable, match="none of the checkpoints"):
        one.starts.prepare()
    assert not store.hangs.is_set()


def test_a_preparation_that_begins_when_it_was_given_up_on_sweeps_nothing() -> None:
    """Its thread had no turn before the next start was prepared, and tasks have uploaded since."""
    store = MemoryStore(100_000)
    one = runner(store)
    late = one.starts.begin_preparation()
    one.starts.prepare(preparation=one.starts.begin_preparation())
    files(store)
    with pytest.raises(StoreTransient, match="another preparation"):
        one.starts.prepare(preparation=late)
    assert isinstance(one.store(wanted(1)), c.CheckpointStored)
    assert [kept.checkpoint_id for kept in one.starts.prepare().retained] == [1]


def test_a_preparation_that_was_given_up_on_behind_its_listing_takes_nothing_from_the_next() -> (
    None
):
    """HEAD has been claimed again: it may delete nothing, and what the next one has claimed stays claimed."""
    store = _LateReading()
    one = runner(store)
    one.starts.prepare()
    files(store)
    one.store(wanted(1))
    store.is_bad = True
    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(one.starts.prepare)
        assert store.hangs.wait(DEADLINE_S)
        one.starts.prepare()
        one.store(wanted(2, retained=(1,)))
        store.goes_on.set()
        with pytest.raises(StoreTransient):
            late.result(DEADLINE_S)
    assert isinstance(one.store(wanted(3, retained=(1, 2))), c.CheckpointStored)
    assert [kept.checkpoint_id for kept in one.starts.prepare().retained] == [1, 2, 3]


class _LateSwap(MemoryStore):
    """The next swap is done, and says so only when it is let go."""

    def __init__(self) -> None:
        super().__init__(100_000)
        self.hangs, self.goes_on = threading.Event(), threading.Event()
        self.is_bad = False

    @override
    def compare_and_swap(self, path: str, expected: bytes | None, new: bytes) -> bool:
        swapped = super().compare_and_swap(path, expected, new)
        if self.is_bad:
            self.is_bad = False
            self.hangs.set()
            assert self.goes_on.wait(DEADLINE_S)
        return swapped


def test_a_claim_that_was_given_up_on_does_not_say_what_became_of_a_later_checkpoint() -> None:
    """HEAD names the checkpoint: who took it for not stored would delete its files."""
    store = _LateSwap()
    one = runner(store)
    store.is_bad = True
    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(one.starts.prepare)
        assert store.hangs.wait(DEADLINE_S)
        one.starts.prepare()
        files(store)
        assert isinstance(one.store(wanted(1)), c.CheckpointStored)
        store.goes_on.set()
        with pytest.raises(StoreTransient):
            late.result(DEADLINE_S)
    one.give_up(1)  # the answer of the store was lost, say
    assert isinstance(one.settle(1), c.CheckpointStored)


def test_the_manifest_of_what_is_not_stored_goes_or_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it lies there until the job begins again, which may be never."""
    monkeypatch.setattr(claimed_head_store, "_SWAP_PAUSE_S", 0)
    store = _Failing(100_000)
    one = runner(store)
    one.starts.prepare()
    files(store)
    written = "chk-1/manifest-1"
    store.broken = "all"
    failed = one.store(wanted(1))
    assert isinstance(failed, c.CheckpointNotStored)
    assert written in failed.left
    assert store.sizes([written])
    store.broken = ""
    settled = one.settle(1)
    assert isinstance(settled, c.CheckpointNotStored)
    assert settled.left == ()
    assert not store.sizes([written])


def test_failures_of_the_store_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claimed_head_store, "_SWAP_PAUSE_S", 0)
    store = _Failing(100_000)
    one = runner(store)
    one.starts.prepare()
    files(store)
    store.broken = "put"
    failed = one.store(wanted(1))
    assert isinstance(failed, c.CheckpointNotStored)
    assert not failed.is_too_large
    store.broken = "swap"
    with pytest.raises(HeadOutcomeUnknown):
        one.store(wanted(2))
    store.broken = ""
    # It had happened.
    settled = one.settle(2)
    assert isinstance(settled, c.CheckpointStored)
    found = one.starts.prepare()
    assert [kept.checkpoint_id for kept in found.retained] == [2]


class _Hanging(MemoryStore):
    """A swap of HEAD waits until ``go_on`` is set, and happens then."""

    def __init__(self) -> None:
        super().__init__(100_000)
        self.hangs = False
        self.entered, self.go_on = threading.Event(), threading.Event()

    @override
    def compare_and_swap(self, path: str, expected: bytes | None, new: bytes) -> bool:
        if self.hangs:
            self.hangs = False
            self.entered.set()
            assert self.go_on.wait(10)
        return super().compare_and_swap(path, expected, new)


@pytest.mark.parametrize("claims_first", [True, False])
def test_a_swap_that_was_given_up_on_cannot_happen_once_it_is_settled(claims_first: bool) -> None:
    store = _Hanging()
    one = runner(store)
    one.starts.prepare()
    files(store)
    store.hangs = True
    outcomes: list[object] = []

    def late() -> None:
        try:
            outcomes.append(one.store(wanted(1)))
        except HeadOutcomeUnknown as error:
            outcomes.append(error)

    thread = threading.Thread(target=late)
    thread.start()
    assert store.entered.wait(10)
    one.give_up(1)
    if not claims_first:  # it happens after all, before anybody looks
        store.go_on.set()
        thread.join(10)
    settled = one.settle(1)
    store.go_on.set()
    thread.join(10)
    assert isinstance(settled, c.CheckpointNotStored if claims_first else c.CheckpointStored)
    assert isinstance(outcomes[0], HeadOutcomeUnknown if claims_first else c.CheckpointStored)
    assert [kept.checkpoint_id for kept in one.starts.prepare().retained] == [1] * (
        not claims_first
    )
    # The claim holds: what comes next is stored, and nobody speaks of another JobManager.
    files(store)
    assert isinstance(one.store(wanted(2)), c.CheckpointStored)


def test_a_checkpoint_that_was_given_up_on_before_its_call_began_is_never_stored() -> None:
    """It has been settled by then, its files are gone, and HEAD must not name them."""
    store = MemoryStore(100_000)
    one = runner(store)
    one.starts.prepare()
    files(store)
    one.give_up(1)
    assert isinstance(one.settle(1), c.CheckpointNotStored)
    store.delete("shared/a")
    with pytest.raises(HeadOutcomeUnknown, match="given up"):
        one.store(wanted(1))
    assert not one.starts.prepare().retained
    files(store)
    assert isinstance(one.store(wanted(2)), c.CheckpointStored)


@pytest.mark.parametrize(
    ("what", "told"),
    [("missing", "is gone: .*somebody has removed it"), ("damaged", "was damaged: .*junk")],
)
def test_head_that_is_not_there_or_cannot_be_read_is_said_to_be_so(
    tmp_path: Path, what: str, told: str
) -> None:
    store = LocalStore(tmp_path)
    one = runner(store)
    one.starts.prepare()
    files(store)
    one.store(wanted(1))
    if what == "missing":
        store.delete(HEAD_PATH)
    else:
        store.put(HEAD_PATH, [b"junk"])
    for call in (lambda: one.store(wanted(2)), one.starts.prepare):
        with pytest.raises(Unrecoverable, match=told) as caught:
            call()
        assert "another JobManager" not in str(caught.value)
        assert "taken" not in str(caught.value)


@pytest.mark.parametrize("what", ["directory", "content"])
def test_a_head_that_is_gone_with_all_that_it_names_is_storage_that_is_away(
    tmp_path: Path, what: str
) -> None:
    """As a mount that vanishes, or a bucket that is empty for a moment: nothing is made in its place, nothing is lost."""
    store = LocalStore(tmp_path / "mount" / JOB)
    one = runner(store)
    one.starts.prepare()
    files(store)
    assert isinstance(one.store(wanted(1)), c.CheckpointStored)
    hidden = store.root.rename(tmp_path / "away")
    if what == "content":
        store.root.mkdir()
    failed = one.store(wanted(2, retained=(1,)))
    assert isinstance(failed, c.CheckpointNotStored)
    assert "mounted" in failed.error
    for call in (
        one.starts.prepare,
        one.reserve_ids,
        one.verify,
        lambda: runner(store, 2).starts.prepare(must_exist=True),
    ):
        with pytest.raises(StoreTransient, match="mounted"):
            call()
    assert not [*tmp_path.glob("mount/*/*")]
    if what == "content":
        store.root.rmdir()
    hidden.rename(store.root)
    assert isinstance(one.settle(2), c.CheckpointNotStored)
    assert isinstance(one.store(wanted(3, retained=(1,))), c.CheckpointStored)
    newest = one.starts.prepare().newest
    assert newest is not None
    assert newest.checkpoint_id == 3


def test_head_that_is_a_directory_is_said_to_be_one(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    one = runner(store)
    one.starts.prepare()
    files(store)
    one.store(wanted(1))
    (tmp_path / HEAD_PATH).unlink()
    (tmp_path / HEAD_PATH).mkdir()
    for call in (
        lambda: one.store(wanted(2)),
        one.starts.prepare,
        lambda: runner(store, 2).starts.prepare(must_exist=True),
    ):
        with pytest.raises(Unrecoverable, match="HEAD is a directory"):
            call()


def test_memory_is_limited() -> None:
    one = runner(MemoryStore(500))
    one.starts.prepare()
    failed = one.store(wanted(1, path="shared/" + "x" * 230))
    assert isinstance(failed, c.CheckpointNotStored)
    assert failed.is_too_large
    assert "execution.checkpointing.jobmanager.max-size" in failed.error


def test_deletions_tell_what_is_left_and_discarding_leaves_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / JOB)
    one = runner(store)
    one.starts.prepare()
    one.store(wanted(1))
    store.put("shared/a", [b"x"])
    assert one.deletions.delete(("shared/a", "shared/gone")) == c.FilesDeleted((), 5_000)
    one.deletions.discard()
    assert not (tmp_path / JOB).exists()


def test_a_manifest_of_another_graph_is_refused() -> None:
    manifest = checkpoint_pb2.CheckpointManifest(
        checkpoint_id=3, subtasks=[checkpoint_pb2.SubtaskSnapshot(vertex="v9")]
    )
    with pytest.raises(Unrecoverable, match="no subtasks v9/0"):
        restored_tasks(manifest, graph())


def test_subtasks_that_had_not_begun_have_no_state() -> None:
    manifest = manifest_of(graph(), [checkpoint_pb2.SubtaskSnapshot(vertex="v0")])
    assert set(restored_tasks(manifest, graph())) == {SubtaskId("v0", 0)}


def test_what_had_finished_before_a_checkpoint_goes_on_where_its_consumers_had_read_to() -> None:
    """It took no part, so it could not say where it had stopped writing."""
    job = graph()
    edge = job.edges.add(id="e0", source_vertex="v0", target_vertex="v1")
    edge.partitioning = graph_pb2.PARTITIONING_HASH
    edge.partition_type = graph_pb2.RESULT_PARTITION_TYPE_CACHING
    reader = checkpoint_pb2.SubtaskSnapshot(vertex="v1", subtask_index=0)
    reader.inputs.add(edge_id="e0", index=0, rows=40, checksum=5, producer_attempt=2)
    reader.inputs.add(edge_id="e0", index=1, rows=7)
    finished = checkpoint_pb2.SubtaskSnapshot(vertex="v0", subtask_index=0, finished=True)
    running = checkpoint_pb2.SubtaskSnapshot(vertex="v0", subtask_index=1)
    running.outputs.add(edge_id="e0", index=0, rows=6)
    manifest = manifest_of(job, [reader, finished, running])
    tasks = restored_tasks(manifest, job)
    position = checkpoint_pb2.ChannelPosition(edge_id="e0", index=0, rows=40)
    assert list(tasks[SubtaskId("v0", 0)].outputs) == [position]
    assert list(tasks[SubtaskId("v0", 1)].outputs) == list(running.outputs)


def test_lists_of_the_finished_stay_where_who_goes_on_begins_from_nothing() -> None:
    """Whatever is dealt to it would be gone, and its rows others than before."""
    job = graph()
    job.vertices[0].operators.add(uid="keeps").process.SetInParent()
    uid = job.vertices[0].operators[-1].uid
    snapshots = []
    for index in range(2):
        snapshot = checkpoint_pb2.SubtaskSnapshot(
            vertex="v0", subtask_index=index, finished=index == 0
        )
        snapshot.operators.add(operator_uid=uid).lists.add(
            name="items",
            redistribution=checkpoint_pb2.REDISTRIBUTION_SPLIT,
            items=[f"of {index}".encode()],
        )
        snapshots.append(snapshot)
    manifest = manifest_of(job, snapshots)

    def items(rebuilt: tuple[str, ...]) -> list[list[bytes]]:
        tasks = restored_tasks(manifest, job, rebuilt=rebuilt)
        return [
            [
                item
                for held in tasks[SubtaskId("v0", index)].operators[0].lists
                for item in held.items
            ]
            for index in range(2)
        ]

    assert items(()) == [[], [b"of 1", b"of 0"]]
    assert items(("v0",)) == [[b"of 0"], [b"of 1"]]
