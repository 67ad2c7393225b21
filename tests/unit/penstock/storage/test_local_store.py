"""Aim: the local store survives crashes, full disks and missing permissions, and says what to do.

Method: files looked at from outside; a writer killed in the middle; limits of the system made small.
"""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import resource
import signal
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import StoreNotFound, StoreTransient
from penstock.storage.file_locks import LockedFile
from penstock.storage.local_store import LocalStore


def hidden(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob(".*"))


def test_one_file_is_synchronised_per_object_and_then_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    renamed: list[int] = []
    real, real_rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        kind = "directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        synced.append(kind)
        real(descriptor)

    def rename(self: Path, target: Path) -> Path:
        renamed.append(len(synced))
        return real_rename(self, target)

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    store = LocalStore(tmp_path / "root" / "job")
    store.put("shared/a", [b"1"] * 1000)
    assert synced.count("file") == 1
    # That of "shared", of the job, of the root and of what the root is in.
    assert synced == ["directory"] * 3 + ["file", "directory"]
    assert renamed == [4]
    synced.clear()
    store.put("shared/b", [b"1"])
    assert synced == ["file", "directory"]


def _write_and_hang(root: Path, begun: Any) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x" * 3_000_000
        begun.set()
        time.sleep(60)

    LocalStore(root).put("shared/f", chunks())


def test_a_killed_writer_leaves_no_object_and_is_swept(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    process = context.Process(target=_write_and_hang, args=(tmp_path, begun))
    process.start()
    assert begun.wait(60)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    store = LocalStore(tmp_path)
    assert store.list("") == []
    with pytest.raises(StoreNotFound):
        store.get("shared/f")
    (left,) = store.temporaries()
    assert left.size_bytes >= 2_000_000
    assert store.sweep_temporaries() == ()  # its writer could be alive
    store.put("shared/f", [b"new"])
    assert len(store.temporaries()) == 1
    # An hour later.
    long_ago = time.time_ns() - 3_700 * 10**9
    os.utime(tmp_path / left.path, ns=(long_ago, long_ago))
    LocalStore(tmp_path).put("shared/g", [b"new"])
    assert store.temporaries() == ()
    assert [info.path for info in store.list("")] == ["shared/f", "shared/g"]


def test_a_writer_that_was_swept_fails(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)

    def chunks() -> Iterator[bytes]:
        yield b"1"
        assert len(store.sweep_temporaries(age_min_ms=0)) == 1

    with pytest.raises(StoreTransient, match="shared/f cannot be written"):
        store.put("shared/f", chunks())
    assert list(tmp_path.iterdir()) == []


def test_empty_directories_of_the_dead_are_swept(tmp_path):
    store = LocalStore(tmp_path)
    store.put("chk-1/manifest", [b"m"])
    for left in ("chk-2", "a/b", ".hidden"):
        (tmp_path / left).mkdir(parents=True)
    assert store.sweep_temporaries() == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "chk-1"]
    store.put("a/b/c", [b"again"])
    assert store.get("a/b/c") == b"again"


def test_empty_directories_go_and_the_root_stays(tmp_path: Path) -> None:
    root = tmp_path / "job"
    store = LocalStore(root)
    store.put("chk-1/a/b", [b"1"])
    store.put("chk-1/c", [b"1"])
    store.delete("chk-1/a/b")
    assert list((root / "chk-1").iterdir()) == [root / "chk-1/c"]
    store.delete("chk-1/c")
    assert root.is_dir()
    assert list(root.iterdir()) == []
    assert store.compare_and_swap("x/HEAD", None, b"1")
    assert not store.compare_and_swap("x/HEAD", None, b"2")
    assert hidden(root) == [], "what is made once leaves no lock"
    assert store.compare_and_swap("x/HEAD", b"1", b"2")
    assert hidden(root) == ["x/.HEAD.lock"]
    store.delete("x/HEAD")
    assert list(root.iterdir()) == []


def test_a_directory_removed_behind_its_back_is_made_again(tmp_path: Path) -> None:
    store, other = LocalStore(tmp_path), LocalStore(tmp_path)
    store.put("d/a", [b"1"])
    other.delete("d/a")
    store.put("d/b", [b"1"])
    other.delete("d/b")
    assert store.compare_and_swap("d/c", None, b"1")
    assert [info.path for info in store.list("")] == ["d/c"]


def test_a_swap_waits_for_the_lock_but_not_for_ever(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, lock_wait_max_s=0.02)
    assert store.compare_and_swap("HEAD", None, b"1")
    with (tmp_path / ".HEAD.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StoreTransient, match="has been locked by another process"):
            store.compare_and_swap("HEAD", b"1", b"2")
    assert store.compare_and_swap("HEAD", b"1", b"2")


def test_who_stands_still_while_a_swap_is_written_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, begun, goes_on = os.fsync, threading.Event(), threading.Event()
    paused = LocalStore(tmp_path)
    assert paused.compare_and_swap("HEAD", None, b"1")

    def fsync(descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert goes_on.wait(90)
        real(descriptor)

    monkeypatch.setattr("os.fsync", fsync)
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(paused.compare_and_swap, "HEAD", b"1", b"late")
        try:
            assert begun.wait(90)
            store = LocalStore(tmp_path, lock_wait_max_s=0.02)
            assert store.compare_and_swap("HEAD", b"1", b"2")
        finally:
            goes_on.set()
        assert late.result() is False
    assert (store.get("HEAD"), store.temporaries()) == (b"2", ())


def test_a_lock_on_a_removed_file_is_no_lock(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with LockedFile(path):
        path.unlink()
        with LockedFile(path, wait_max_s=0):  # the name stands for a new lock now
            assert path.exists()
            with pytest.raises(TimeoutError), LockedFile(path, wait_max_s=0):
                raise AssertionError("locked twice")


def test_of_many_that_make_an_object_one_does(tmp_path: Path) -> None:
    stores = [LocalStore(tmp_path) for _ in range(4)]
    begin = threading.Barrier(len(stores), timeout=90)

    def make(index: int, path: str) -> bool:
        begin.wait()
        return stores[index].compare_and_swap(path, None, b"%d" % index)

    with ThreadPoolExecutor(len(stores)) as threads:
        for number in range(10):
            path = f"{number}/manifest"
            made = [*threads.map(make, range(len(stores)), [path] * len(stores))]
            assert made.count(True) == 1
            assert stores[0].get(path) == b"%d" % made.index(True)
    assert hidden(tmp_path) == []


def test_a_file_system_that_is_full(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("shared/old", [b"old"])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        for path in ("shared/old", "shared/new", "chk-1/manifest"):
            with pytest.raises(StoreTransient, match=r"cannot be written: File too large; raise"):
                store.put(path, iter([b"x" * 700_000] * 3))
        with pytest.raises(StoreTransient, match="cannot be replaced"):
            store.compare_and_swap("HEAD", None, b"x" * (2 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert [info.path for info in store.list("")] == ["shared/old"]
    assert store.get("shared/old") == b"old"
    assert store.temporaries() == ()
    assert not (tmp_path / "chk-1").exists()
    assert store.compare_and_swap("HEAD", None, b"x")


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EDQUOT, "free space"),
        (errno.EACCES, "give user"),
        (errno.EROFS, "writable"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EIO, "fault"),
    ],
)
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_errors_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str, call: str
) -> None:
    store = LocalStore(tmp_path)
    store.compare_and_swap("HEAD", None, b"1")

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    def chunks() -> Iterator[bytes]:
        yield b"1"
        if call == "write":
            fail()
        monkeypatch.setattr("os.fsync", fail)

    with pytest.raises(StoreTransient, match=rf"{tmp_path}/shared/f .*{advice}") as caught:
        store.put("shared/f", chunks())
    assert isinstance(caught.value.__cause__, OSError)
    if call == "fsync":
        with pytest.raises(StoreTransient, match=advice):
            store.compare_and_swap("HEAD", b"1", b"2")
        monkeypatch.undo()
    assert [info.path for info in store.list("")] == ["HEAD"]
    assert store.get("HEAD") == b"1"
    assert store.temporaries() == ()


def test_what_lies_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "shared").write_text("a file")
    (tmp_path / "HEAD").mkdir()
    store = LocalStore(tmp_path)
    with pytest.raises(StoreTransient, match="move it away"):
        store.put("shared/f", [b"1"])
    with pytest.raises(StoreTransient, match="move it away"):
        store.compare_and_swap("HEAD", None, b"1")
    with pytest.raises(StoreTransient, match="move it away"):
        store.put("HEAD", [b"1"])
    with pytest.raises(StoreNotFound):
        store.get("HEAD")
    store.delete("HEAD")
    assert (tmp_path / "HEAD").is_dir()


def test_hidden_files_are_not_listed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", [b"1"])
    (tmp_path / ".nfs0001").write_text("x")
    (tmp_path / ".snapshot").mkdir()
    (tmp_path / ".snapshot" / "b").write_text("x")
    assert [info.path for info in store.list("")] == ["a"]
    assert store.temporaries() == ()


@pytest.mark.parametrize(
    ("is_private", "modes"), [(True, (0o700, 0o600)), (False, (0o755, 0o644))], ids=str
)
def test_what_it_makes_is_for_its_user_alone_unless_it_is_said_to_be_for_others(
    tmp_path: Path, is_private: bool, modes: tuple[int, int]
) -> None:
    tmp_path.chmod(0o755)
    umask = os.umask(0o022)
    try:
        store = LocalStore(tmp_path / "above" / "root", is_private=is_private)
        store.put("chk-1/deeper/file", [b"state"])
        assert store.compare_and_swap("HEAD", None, b"1")
        assert store.compare_and_swap("HEAD", b"1", b"2")  # its lock stays
        other = LocalStore(tmp_path / "other", is_private=is_private)
        other.copy_from(store, {"chk-1/deeper/file": "copied/file"})
        LocalStore(tmp_path / "only" / "looked", is_private=is_private).check_writable()
    finally:
        os.umask(umask)
    made = list(tmp_path.rglob("*"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in made if path.is_dir()} == {modes[0]}
    assert {stat.S_IMODE(path.stat().st_mode) for path in made if path.is_file()} == {modes[1]}
    assert len(made) == 12
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755, "what is there keeps its mode"
