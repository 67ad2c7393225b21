"""What a job can be started from, and what is said of paths that name nothing of the kind."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from penstock.errors import Fenced, JobRejected, StoreCorrupt, StoreNotFound, StoreTransient
from penstock.pb import checkpoint_pb2
from penstock.storage.head import HEAD_PATH, HeadStore
from penstock.storage.kept_state import dispose, list_savepoints
from penstock.storage.local_store import LocalStore
from penstock.storage.manifest import encode_manifest, manifest_path
from penstock.storage.object_store import SwapUnanswered
from penstock.storage.restore_point import (
    claim_savepoint,
    give_savepoint_back,
    open_restore_point,
    remove_savepoint,
)
from penstock.storage.snapshot_files import StoreSnapshotReader

JOB = "0" * 32


def handle(path: str, content: bytes) -> checkpoint_pb2.StateHandle:
    return checkpoint_pb2.StateHandle(
        path=path, size_bytes=len(content), checksum=zlib.crc32(content)
    )


def manifest_of(
    checkpoint_id: int, path: str, *, kind: checkpoint_pb2.CheckpointKind.ValueType = 0
) -> checkpoint_pb2.CheckpointManifest:
    manifest = checkpoint_pb2.CheckpointManifest(job_id=JOB, checkpoint_id=checkpoint_id)
    manifest.properties.kind = kind
    subtask = manifest.subtasks.add(vertex="v0")
    operator = subtask.operators.add(operator_uid="a")
    operator.keyed.files.add(name="f", shared=True, handle=handle(path, b"state"))
    return manifest


def write_job(directory: Path, *checkpoint_ids: int) -> None:
    """A job's directory with these checkpoints, each with a file of its own."""
    store = LocalStore(directory)
    heads = HeadStore(store)
    head = heads.claim(JOB, 1)
    for checkpoint_id in checkpoint_ids:
        store.put(f"shared/f{checkpoint_id}", [b"state"])
        path = manifest_path(checkpoint_id, 1)
        store.put(path, [encode_manifest(manifest_of(checkpoint_id, f"shared/f{checkpoint_id}"))])
        head.retained.add(checkpoint_id=checkpoint_id, manifest_path=path)
    heads.swap(head)


def write_savepoint(directory: Path) -> None:
    store = LocalStore(directory)
    store.put("state/f", [b"state"])
    manifest = manifest_of(9, "state/f", kind=checkpoint_pb2.CHECKPOINT_KIND_SAVEPOINT)
    store.put("manifest", [encode_manifest(manifest)])


def refusal(path: Path | str) -> str:
    with pytest.raises(JobRejected) as refused:
        open_restore_point(str(path))
    return str(refused.value)


def test_a_jobs_directory_means_its_newest_checkpoint(tmp_path: Path) -> None:
    write_job(tmp_path, 3, 7)
    point = open_restore_point(f"{tmp_path}/")
    assert (point.uri, point.store_uri) == (f"{tmp_path}/chk-7", str(tmp_path))
    assert point.manifest.checkpoint_id == 7
    assert not point.is_savepoint


def test_one_checkpoint_is_named(tmp_path: Path) -> None:
    write_job(tmp_path, 3, 7)
    assert open_restore_point(f"file://{tmp_path}/chk-3").manifest.checkpoint_id == 3


def test_a_manifest_stands_for_its_directory(tmp_path: Path) -> None:
    write_job(tmp_path / "job", 3, 7)
    write_savepoint(tmp_path / "savepoint")
    (manifest,) = (tmp_path / "job/chk-3").iterdir()
    for path in (str(manifest), f"file://{manifest}", f"{tmp_path}/savepoint/manifest/"):
        assert open_restore_point(path).uri == path.rpartition("/manifest")[0]
    assert "does not name it" in refusal(tmp_path / "job/chk-4/manifest-1")


def test_a_savepoint_stays_valid_where_it_is_moved(tmp_path: Path) -> None:
    write_savepoint(tmp_path / "before")
    (tmp_path / "before").rename(tmp_path / "chk-5")  # whatever it is called
    point = open_restore_point(str(tmp_path / "chk-5"))
    assert point.is_savepoint
    assert point.store_uri == str(tmp_path / "chk-5")


def test_files_of_another_store_are_read_there_and_shared_by_nobody(tmp_path: Path) -> None:
    write_savepoint(tmp_path)
    located = open_restore_point(str(tmp_path)).located()
    [file] = located.subtasks[0].operators[0].keyed.files
    assert (file.handle.store, file.shared) == (str(tmp_path), False)
    assert StoreSnapshotReader(None).read(file.handle) == b"state"
    (tmp_path / "state/f").unlink()
    with pytest.raises(StoreNotFound, match=str(tmp_path)):
        StoreSnapshotReader(None).read(file.handle)


def test_a_missing_path_is_said_to_be_missing(tmp_path: Path) -> None:
    assert "no directory that exists" in refusal(tmp_path / "nothing")
    assert "no directory that exists" in refusal(tmp_path / "nothing/chk-4")


def test_an_empty_directory_a_file_and_an_empty_path(tmp_path: Path) -> None:
    assert "it is empty" in refusal(tmp_path)
    (tmp_path / "file").write_text("text")
    assert "is a file, and no directory" in refusal(tmp_path / "file")
    assert "is empty" in refusal("")
    assert "neither a manifest nor a HEAD" in refusal("/")


def test_a_directory_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "part-0.parquet").write_text("rows")
    assert "part-0.parquet" in refusal(tmp_path)


def test_a_directory_with_savepoints_or_jobs_in_it_names_them(tmp_path: Path) -> None:
    write_savepoint(tmp_path / "one")
    write_job(tmp_path / "two ü", 7)
    (tmp_path / "three").mkdir()
    assert "it has some in it, but is none itself: name one of them (one, two ü)" in refusal(
        tmp_path
    )


def test_savepoints_that_were_copied_in_part_are_listed_as_damaged(tmp_path: Path) -> None:
    for name in ("whole", "cut", "bare", "begun"):
        write_savepoint(tmp_path / name)
    (tmp_path / "cut/state/f").write_bytes(b"stat")
    (tmp_path / "bare/state/f").unlink()
    (tmp_path / "begun/manifest").unlink()
    found = {Path(one.path).name: one for one in list_savepoints(str(tmp_path))}
    assert {name: one.status for name, one in found.items()} == {
        "whole": "COMPLETE", "cut": "DAMAGED", "bare": "DAMAGED", "begun": "INCOMPLETE",
    }  # fmt: skip
    told = "state/f, which it needs, is missing or was copied in part"
    assert found["cut"].problem == found["bare"].problem == told
    assert found["cut"].job_id == JOB


def test_who_disposes_of_one_checkpoint_is_told_what_goes_with_it(tmp_path: Path) -> None:
    """Lists of what jobs have left name one checkpoint of each."""
    write_job(tmp_path / JOB, 7)
    with pytest.raises(JobRejected, match=rf"chk-7 is no savepoint.*: name {tmp_path / JOB}$"):
        dispose(str(tmp_path / JOB / "chk-7"), lambda job_id: None, lambda: None)
    (tmp_path / "chk-7").mkdir()
    with pytest.raises(JobRejected, match=r"nothing has been removed$"):
        dispose(str(tmp_path / "chk-7"), lambda job_id: None, lambda: None)


def test_a_savepoint_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    """As one of another user; links that go round in a circle stand for it, since root may read everything."""
    write_savepoint(tmp_path / "whole")
    (tmp_path / "circle").symlink_to("circle")
    write_savepoint(tmp_path / "others")
    (tmp_path / "others/manifest").unlink()
    (tmp_path / "others/manifest").symlink_to("manifest")
    found = {Path(one.path).name: one for one in list_savepoints(str(tmp_path))}
    assert {name: one.status for name, one in found.items()} == {
        "whole": "COMPLETE", "circle": "UNREADABLE", "others": "UNREADABLE",
    }  # fmt: skip
    assert f"{tmp_path}/circle cannot be listed" in found["circle"].problem
    assert f"{tmp_path}/others/manifest cannot be " in found["others"].problem
    with pytest.raises(StoreTransient, match="circle cannot be listed"):
        list_savepoints(str(tmp_path / "circle"))


def test_a_savepoint_that_goes_while_it_is_read_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("going", "whole"):
        write_savepoint(tmp_path / name)
    get = LocalStore.get

    def disposed_of(store: LocalStore, path: str) -> bytes:
        if store.root.name == "going":
            shutil.rmtree(tmp_path / "going", ignore_errors=True)
        return get(store, path)

    monkeypatch.setattr(LocalStore, "get", disposed_of)
    assert [Path(one.path).name for one in list_savepoints(str(tmp_path))] == ["whole"]


def test_a_checkpoint_that_is_not_kept_any_more(tmp_path: Path) -> None:
    write_job(tmp_path, 7)
    assert "there is chk-7" in refusal(tmp_path / "chk-3")


def test_a_job_without_a_checkpoint(tmp_path: Path) -> None:
    write_job(tmp_path)
    assert "completed no checkpoint" in refusal(tmp_path)


def test_a_file_that_was_not_copied_or_only_in_part(tmp_path: Path) -> None:
    write_job(tmp_path, 7)
    (tmp_path / "shared/f7").write_bytes(b"sta")
    assert "shared/f7, which it needs, is missing or was copied in part" in refusal(tmp_path)
    (tmp_path / "shared/f7").unlink()
    assert "shared/f7" in refusal(tmp_path)


def test_a_manifest_that_was_not_copied(tmp_path: Path) -> None:
    write_job(tmp_path, 7)
    (tmp_path / "chk-7/manifest-1").unlink()
    assert "chk-7/manifest-1 is missing" in refusal(tmp_path)


def test_a_directory_without_head_is_copied_in_part_but_one_checkpoint_may_be_named(
    tmp_path: Path,
) -> None:
    write_job(tmp_path, 3, 7)
    (tmp_path / HEAD_PATH).unlink()
    assert "copied in part" in refusal(tmp_path)
    assert open_restore_point(str(tmp_path / "chk-3")).manifest.checkpoint_id == 3


def test_a_damaged_head_names_what_can_be_named(tmp_path: Path) -> None:
    write_job(tmp_path, 3)
    (tmp_path / HEAD_PATH).write_bytes(b"nothing of the kind")
    assert f"name one of {tmp_path}/chk-3" in refusal(tmp_path)
    assert open_restore_point(str(tmp_path / "chk-3")).manifest.checkpoint_id == 3


def test_a_damaged_manifest(tmp_path: Path) -> None:
    write_savepoint(tmp_path)
    content = (tmp_path / "manifest").read_bytes()
    (tmp_path / "manifest").write_bytes(content[:-3])
    assert "cannot be started from" in refusal(tmp_path)


def test_one_of_two_jobs_takes_head_over_and_the_old_one_is_fenced(tmp_path: Path) -> None:
    write_job(tmp_path, 3, 7)
    store = LocalStore(tmp_path)
    old = HeadStore(store)
    old.claim(JOB, 5)
    started = checkpoint_pb2.StartedFrom(path=str(tmp_path), checkpoint_id=3, claimed=True)
    HeadStore(store).take_over("a" * 32, JOB, 3, started)
    HeadStore(store).take_over("a" * 32, JOB, 3, started)  # asked again
    with pytest.raises(Fenced, match=r"job a{32} has claimed it"):
        HeadStore(store).take_over("b" * 32, JOB, 3, started)
    with pytest.raises(Fenced):
        old.verify()
    head = HeadStore(store).claim("a" * 32, 2, reserved_ids=16)
    assert [one.checkpoint_id for one in head.retained] == [3]
    assert head.started_from.claimed
    with pytest.raises(StoreCorrupt):
        old.claim(JOB, 6)


def test_a_checkpoint_that_is_not_kept_cannot_be_taken_over(tmp_path: Path) -> None:
    write_job(tmp_path, 7)
    started = checkpoint_pb2.StartedFrom(path=str(tmp_path), checkpoint_id=3, claimed=True)
    with pytest.raises(Fenced, match="does not name it"):
        HeadStore(LocalStore(tmp_path)).take_over("a" * 32, JOB, 3, started)


def test_a_head_that_is_claimed_as_it_is_given_back_is_not_taken_for_given_back(
    tmp_path: Path,
) -> None:
    write_job(tmp_path, 7)
    heads, found = HeadStore(LocalStore(tmp_path)), (tmp_path / HEAD_PATH).read_bytes()
    started = checkpoint_pb2.StartedFrom(path=str(tmp_path), checkpoint_id=7, claimed=True)

    def claim() -> None:
        heads.take_over("a" * 32, JOB, 7, started)

    with pytest.raises(StoreTransient, match="changed meanwhile"):
        heads.give_back("a" * 32, found, claim)
    heads.give_back("a" * 32, found, lambda: None)
    assert open_restore_point(str(tmp_path)).owner == JOB


def test_of_two_that_claim_a_savepoint_one_does(tmp_path: Path) -> None:
    write_savepoint(tmp_path)
    first, second = (open_restore_point(str(tmp_path)) for _ in range(2))
    claim_savepoint(first, "a")
    claim_savepoint(first, "a")  # asked again
    with pytest.raises(Fenced, match="job a has claimed it"):
        claim_savepoint(second, "b")
    after = open_restore_point(str(tmp_path))
    assert after.owner == "a"
    claim_savepoint(after, "c")  # job a is known to have ended
    assert open_restore_point(str(tmp_path)).owner == "c"


@pytest.mark.parametrize("before", ["", "z"])
def test_a_claim_that_is_made_when_it_was_given_back_claims_nothing(
    tmp_path: Path, before: str
) -> None:
    write_savepoint(tmp_path)
    if before:
        claim_savepoint(open_restore_point(str(tmp_path)), before)
    late = list[Callable[[], bool]]()
    swap = LocalStore.compare_and_swap

    def slow(store: LocalStore, path: str, expected: bytes | None, new: bytes) -> bool:
        late.append(partial(swap, store, path, expected, new))
        raise SwapUnanswered("no answer yet")

    for _ in range(2):
        point = open_restore_point(str(tmp_path))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalStore, "compare_and_swap", slow)
            with pytest.raises(SwapUnanswered):
                claim_savepoint(point, "a")
            give_savepoint_back(point, "a", may_come=False)  # it had been answered
            with pytest.raises(SwapUnanswered):
                give_savepoint_back(point, "a")
        give_savepoint_back(point, "a")
        assert not any(call() for call in late)
        assert open_restore_point(str(tmp_path)).owner == before
    claim_savepoint(open_restore_point(str(tmp_path)), "b")
    give_savepoint_back(open_restore_point(str(tmp_path)), "a")
    assert not any(call() for call in late)
    assert open_restore_point(str(tmp_path)).owner == "b"


def test_what_is_given_back_while_its_claim_is_noted_is_not_claimed(tmp_path: Path) -> None:
    """By the next leader, as one that leads no more sleeps."""
    write_savepoint(tmp_path)
    point = open_restore_point(str(tmp_path))
    with pytest.raises(Fenced):
        claim_savepoint(point, "a", lambda: give_savepoint_back(point, "a"))
    assert open_restore_point(str(tmp_path)).owner == ""
    dispose(str(tmp_path), lambda _: None, lambda: None)
    give_savepoint_back(point, "a")
    assert not (tmp_path / "OWNER").exists()


@pytest.mark.parametrize("may_come", [False, True])
def test_who_sleeps_before_it_gives_back_takes_it_from_nobody(
    tmp_path: Path, may_come: bool
) -> None:
    write_savepoint(tmp_path)
    point = open_restore_point(str(tmp_path))
    claim_savepoint(point, "a")

    def asleep() -> None:
        give_savepoint_back(point, "a")
        claim_savepoint(open_restore_point(str(tmp_path)), "b")

    with pytest.raises(StoreTransient, match="has changed meanwhile"):
        give_savepoint_back(point, "a", asleep, may_come=may_come)
    give_savepoint_back(point, "a", may_come=may_come)
    assert open_restore_point(str(tmp_path)).owner == "b"


def test_a_savepoint_is_removed_with_all_that_lies_beside_it(tmp_path: Path) -> None:
    write_savepoint(tmp_path / "one")
    claim_savepoint(open_restore_point(str(tmp_path / "one")), "a")
    remove_savepoint(LocalStore(tmp_path / "one"))
    assert not (tmp_path / "one").exists()


def test_what_is_no_part_of_a_savepoint_stays_when_that_is_removed(tmp_path: Path) -> None:
    write_savepoint(tmp_path / "one")
    write_savepoint(tmp_path / "one" / "inner")
    (tmp_path / "one" / "notes.txt").write_text("why it was taken")
    remove_savepoint(LocalStore(tmp_path / "one"))
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["inner", "notes.txt"]
    assert open_restore_point(str(tmp_path / "one" / "inner")).is_savepoint
