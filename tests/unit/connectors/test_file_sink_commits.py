"""Aim: a file sink shows the rows that completed checkpoints cover, whatever fails when, and nothing else.

Method: real directories; writers that are dropped where they stand, as by a kill; every call into the
system as the last one; random histories against a model that knows what checkpoints cover.
"""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors import file_sink
from penstock.errors import StreamError, TaskFailure, Unrecoverable
from taskmanager.connectors import file_sink as file_sink_module
from taskmanager.connectors import local_output
from taskmanager.connectors.hidden_files import output_tag, sweep_hidden_files
from tests.support.examples import examples
from tests.support.file_sinks import (
    batch,
    everything,
    files_of,
    finish,
    opened,
    prepare,
    read,
    release_killed,
    visible,
)


@pytest.fixture(autouse=True)
def _killed_writers() -> Iterator[None]:
    yield
    release_killed()


@pytest.mark.parametrize("format", ["parquet", "csv", "json"])
@pytest.mark.parametrize("is_prepared", [False, True])
def test_close_leaves_nothing_that_no_checkpoint_can_cover(
    tmp_path: Path, is_prepared: bool, format: str
) -> None:
    writer = opened(file_sink(format, tmp_path, "k", roll=300))
    for start in range(0, 100, 10):
        writer.write(batch(start, 10))
    work = None
    if is_prepared:
        writer.prepare_commit(1)
        work = writer.finish_prepared()
    writer.close()
    assert everything(tmp_path) == []
    if work is not None:
        with pytest.raises(StreamError, match="the attempt has ended"):
            work()
        assert everything(tmp_path) == []


def test_close_leaves_what_a_checkpoint_may_cover(tmp_path: Path) -> None:
    writer = opened(file_sink("json", tmp_path))
    writer.write(batch(0, 10))
    committables = prepare(writer)
    writer.write(batch(10, 10))
    writer.close()
    opened(file_sink("json", tmp_path), attempt=1).recover(committables)
    assert [row["id"] for row in read("json", tmp_path)] == list(range(10))
    assert everything(tmp_path) == visible(tmp_path)


def test_abort_removes_what_was_prepared_and_keeps_the_rest(tmp_path: Path) -> None:
    writer = opened(file_sink("json", tmp_path))
    writer.write(batch(0, 10))
    first = prepare(writer)
    writer.write(batch(10, 10))
    second = prepare(writer)
    writer.abort(first)
    writer.abort(first)
    other = opened(file_sink("json", tmp_path))
    other.commit(second)
    writer.close()
    assert [row["id"] for row in read("json", tmp_path)] == list(range(10, 20))
    with pytest.raises(TaskFailure, match="neither it nor"):
        other.commit(first)


def test_abort_takes_files_back_from_work_that_is_on_its_way(tmp_path: Path) -> None:
    writer = opened(file_sink("json", tmp_path))
    writer.write(batch(0, 10))
    aborted = writer.prepare_commit(1)
    writer.write(batch(10, 10))
    kept = writer.prepare_commit(2)
    work = writer.finish_prepared()
    assert work is not None
    writer.abort(aborted)
    work()
    assert files_of(writer, tmp_path) == (0, 1)
    writer.commit(kept)
    assert [row["id"] for row in read("json", tmp_path)] == list(range(10, 20))
    assert everything(tmp_path) == visible(tmp_path)


def test_no_two_writers_share_a_name(tmp_path: Path) -> None:
    places: list[dict[str, Any]] = [
        {"job": job, "subtask": subtask, "attempt": attempt, "uid": uid}
        for job in ("a" * 32, "b" * 32)
        for subtask in (0, 1)
        for attempt in (0, 1)
        for uid in ("x", "y")
    ]
    for place in places:
        writer = opened(file_sink("json", tmp_path), **place)
        writer.write(batch(0, 1))
        writer.commit(prepare(writer))
        writer.close()
    assert len(visible(tmp_path)) == len(places)


def test_a_new_attempt_removes_what_killed_ones_left(tmp_path: Path) -> None:
    """Of this job and sink only: hidden files of its own subtask and of those that are no more."""
    places: list[dict[str, Any]] = [
        {},
        {"subtask": 1},
        {"subtask": 2},
        {"subtask": 5},
        {"job": "c" * 32},
        {"uid": "other"},
        {"attempt": 3},
    ]
    for place in places:
        killed = opened(file_sink("json", tmp_path, "k"), **place)
        killed.write(batch(0, 2))
        prepare(killed)
        killed.write(batch(2, 2))
    (tmp_path / ".part-something.else").touch()
    (tmp_path / "k=empty").mkdir()

    def left() -> set[str]:
        return {p.name.rsplit("-", 1)[0] for p in everything(tmp_path) if p.is_file()}

    before = left()
    assert len(before) == len(places) + 1
    gone = {name for name in before if name.endswith(("-0-0", "-2-0"))}
    gone = {name for name in gone if "cccccccc" not in name}
    others = opened(file_sink("json", tmp_path), uid="other")
    gone = {name for name in gone if name != others._place._hidden_stem}  # type: ignore[attr-defined]
    opened(file_sink("json", tmp_path, "k"), attempt=3).recover([])
    assert left() == before - gone
    assert len(gone) == 2
    opened(file_sink("json", tmp_path, "k"), attempt=3, subtask=1).recover([])
    assert len(left()) == len(before) - 4
    assert (tmp_path / "k=empty").is_dir()


@pytest.mark.parametrize("is_first_faster", [True, False])
def test_of_two_attempts_side_by_side_one_is_committed(
    tmp_path: Path, is_first_faster: bool
) -> None:
    """The second leaves alone what the first writes, until it is the one that counts: then the first may
    have been killed, and nobody else will clean up after it."""
    first = opened(file_sink("json", tmp_path, "k", roll=300))
    first.recover([])
    first.write(batch(0, 6))
    second = opened(file_sink("json", tmp_path, "k", roll=300), attempt=1)
    second.recover([], is_speculative=True)
    second.write(batch(0, 20))
    first.write(batch(6, 14))
    winner = first if is_first_faster else second
    winner.commit(prepare(winner))
    assert sorted(row["id"] for row in read("json", tmp_path)) == list(range(20))
    if not is_first_faster:
        files = [path for path in everything(tmp_path) if path.is_file()]
        assert files == visible(tmp_path)


def test_partition_directories_that_recovery_empties_go(tmp_path: Path) -> None:
    killed = opened(file_sink("json", tmp_path, ["k", "id"]))
    killed.write(batch(0, 6))
    committables = prepare(killed)
    killed.write(batch(6, 6))
    opened(file_sink("json", tmp_path, ["k", "id"]), attempt=1).recover(committables[:1])
    assert len(visible(tmp_path)) == 1
    assert len(everything(tmp_path)) == 3


def test_a_directory_that_another_writer_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = opened(file_sink("json", tmp_path, "k"))
    make, removals = Path.mkdir, [1, 2, 3]

    def mkdir(path: Path, **options: Any) -> None:
        make(path, **options)
        if removals and path != tmp_path:
            removals.pop()
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", mkdir)
    writer.write(batch(0, 6))
    writer.commit(prepare(writer))
    assert len(read("json", tmp_path)) == 6
    assert not removals


def test_committed_files_that_were_taken_away_do_not_stop_a_restore(tmp_path: Path) -> None:
    writer = opened(file_sink("json", tmp_path))
    writer.write(batch(0, 3))
    committables = prepare(writer)
    writer.commit(committables)
    for path in visible(tmp_path):
        path.unlink()
    opened(file_sink("json", tmp_path), attempt=1).recover(committables)
    with pytest.raises(TaskFailure, match="did something clean up the output directory"):
        writer.commit(committables)


# ---------------------------------------------------------------- rolling by time


@pytest.mark.parametrize("format_", ["json", "csv", "parquet"])
@pytest.mark.parametrize("damage", ["cut", "longer", "empty", "altered", "zeros"])
@pytest.mark.parametrize("is_held", [False, True])
def test_a_prepared_file_that_is_not_what_was_prepared_is_never_shown(
    tmp_path: Path, damage: str, is_held: bool, format_: str
) -> None:
    writer = opened(file_sink(format_, tmp_path))
    writer.write(batch())
    named = prepare(writer)
    if is_held:
        bare = writer.hold(7, named)
        writer.keep_held(7, named)
        named = writer.described(bare)
    path = Path(json.loads(named[0])["pending"])
    content = path.read_bytes()
    middle = len(content) // 2
    damaged = {
        "cut": content[:-1],
        "longer": content + b"\n",
        "empty": b"",
        "altered": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "zeros": bytes(len(content)),
    }
    path.write_bytes(damaged[damage])
    second = opened(file_sink(format_, tmp_path), attempt=1)
    with pytest.raises(Unrecoverable, match=f"{re.escape(str(path))}: {len(content)} bytes"):
        second.recover(named)
    assert visible(tmp_path) == []
    path.write_bytes(content)
    second.recover(named)
    assert len(visible(tmp_path)) == 1
    second.recover(named)  # it has its final name


def test_sizes_are_known_of_what_is_to_be_committed_only(tmp_path: Path) -> None:
    writer = opened(file_sink("csv", tmp_path, "k"))
    for checkpoint_id in (1, 2):
        writer.write(batch())
        committables = prepare(writer, checkpoint_id)
        assert all(json.loads(one)["size_bytes"] > 0 for one in committables)
        (writer.commit if checkpoint_id == 1 else writer.abort)(committables)
        assert not any(
            "size_bytes" in json.loads(one) for one in writer.described(bare(committables))
        )


def bare(committables: list[bytes]) -> list[bytes]:
    """As ``prepare_commit`` returns them."""
    fields = map(json.loads, committables)
    return [json.dumps({key: one[key] for key in ("pending", "final")}).encode() for one in fields]


def test_files_roll_by_age(tmp_path: Path) -> None:
    writer = opened(file_sink("parquet", tmp_path, "k", roll_interval_ms=1000))
    writer.write(batch(0, 1))
    assert writer.roll(0) == 1000
    writer.write(batch(1, 1))
    assert writer.roll(400) == 1000
    assert writer.roll(999) == 1000
    assert writer.roll(1000) == 1400
    finish(writer)
    assert files_of(writer, tmp_path) == (0, 1)
    assert writer.roll(1400) is None
    finish(writer)
    assert files_of(writer, tmp_path) == (0, 2)
    assert writer.has_unprepared
    writer.commit(prepare(writer))
    assert not writer.has_unprepared
    assert len(read("parquet", tmp_path)) == 2


def test_files_roll_by_inactivity(tmp_path: Path) -> None:
    writer = opened(file_sink("json", tmp_path, inactivity_ms=100, roll_interval_ms=250))
    for now_ms in range(0, 300, 50):
        writer.write(batch(now_ms, 1))
        deadline_ms = writer.roll(now_ms)
        assert deadline_ms == (min(now_ms + 100, 250) if now_ms < 250 else None)
    finish(writer)
    assert files_of(writer, tmp_path) == (0, 1)
    writer.write(batch(300, 1))
    assert writer.roll(300) == 400
    assert writer.roll(350) == 400
    assert writer.roll(400) is None
    finish(writer)
    assert files_of(writer, tmp_path) == (0, 2)


def test_a_checkpoint_ends_the_files(tmp_path: Path) -> None:
    writer = opened(file_sink("csv", tmp_path))
    for checkpoint_id in range(1, 4):
        writer.write(batch(checkpoint_id * 10, 10))
        assert len(prepare(writer, checkpoint_id)) == 1
        assert prepare(writer, checkpoint_id) == []
    assert files_of(writer, tmp_path) == (0, 3)
    assert visible(tmp_path) == []


def test_a_writer_keeps_no_directory_in_mind_once_it_has_committed_there(tmp_path: Path) -> None:
    """A job that writes by the hour makes a directory an hour, for ever."""
    writer = opened(file_sink("json", tmp_path, "k"))
    made = []
    for start in range(0, 100, 10):
        writer.write(batch(start, 10))
        writer.commit(prepare(writer))
        made.append(len(writer._place._made))
    assert made == [0] * 10
    writer.close()
    assert len({path.parent for path in visible(tmp_path)}) > 1


def test_many_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_sink_module, "OPEN_FILES_MAX", 10)
    writer = opened(file_sink("parquet", tmp_path, "id"))
    committables: list[bytes] = []
    for start in range(0, 90, 30):
        writer.write(batch(start, 40))
        assert files_of(writer, tmp_path)[0] <= 10
        committables += prepare(writer)
    writer.commit(committables)
    found = ds.dataset(tmp_path, partitioning="hive").to_table()
    expected = sorted(i for start in range(0, 90, 30) for i in range(start, start + 40))
    assert sorted(found["id"].to_pylist()) == expected


def test_ending_files_is_left_to_the_io_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By size, by time, and because too many are open: nothing is synced or renamed while rows are taken."""
    monkeypatch.setattr(file_sink_module, "OPEN_FILES_MAX", 5)
    monkeypatch.setattr(file_sink_module, "BUFFERED_BYTES_MAX", 60_000)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    writer = opened(file_sink("parquet", tmp_path, "id", roll=3000, roll_interval_ms=10))
    synced.clear()
    for start in range(0, 200, 20):
        for _ in range(3):
            writer.write(batch(start, 40))
        writer.roll(start)
    assert synced == []
    assert files_of(writer, tmp_path)[1] == 0
    committables = prepare(writer)
    assert len(synced) > len(committables) >= 200
    assert files_of(writer, tmp_path) == (0, len(committables))
    writer.commit(committables)
    expected = sorted([i for start in range(0, 200, 20) for i in range(start, start + 40)] * 3)
    found = ds.dataset(tmp_path, partitioning="hive").to_table(columns=["id"])
    assert sorted(found["id"].to_pylist()) == expected


@pytest.mark.parametrize("limit", ["WAITING_FILES_MAX", "WAITING_BYTES_MAX"])
def test_no_more_than_so_many_ended_files_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(file_sink_module, limit, 3 if limit == "WAITING_FILES_MAX" else 7000)
    writer = opened(file_sink("json", tmp_path, roll=1))
    for start in range(20):
        writer.write(batch(start, 1))
        ended = start + 1
        waiting = 3 if limit == "WAITING_FILES_MAX" else 6
        assert files_of(writer, tmp_path) == (min(ended, waiting), max(ended - waiting, 0))
    assert writer.has_unprepared
    writer.commit(prepare(writer))
    assert sorted(row["id"] for row in read("json", tmp_path)) == list(range(20))


def test_few_rows_of_many_partitions_are_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file each, however many batches there were; batches that rows were cut out of are let go."""
    writer = opened(file_sink("json", tmp_path, "id"))
    for _ in range(5):
        writer.write(batch(0, 300))
    assert everything(tmp_path) == []
    assert len(prepare(writer)) == 300
    monkeypatch.setattr(file_sink_module, "BUFFERED_BYTES_MAX", 10_000)
    for _ in range(5):
        writer.write(batch(0, 300))
        assert not writer._held  # type: ignore[attr-defined]


def test_few_rows_of_each_batch_do_not_keep_all_batches_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a started file are parts of what each batch was sorted into."""
    monkeypatch.setattr(file_sink_module, "BUFFERED_BYTES_MAX", 1 << 20)
    writer = opened(file_sink("parquet", tmp_path, "k"))
    is_rare, numbers = pa.array(row == 5_000 for row in range(8192)), pa.array(range(8192 + 100))
    before = pa.total_allocated_bytes()
    for number in range(100):
        writer.write(pa.record_batch({"n": numbers.slice(number, 8192), "k": is_rare}))
        assert pa.total_allocated_bytes() - before < 5 << 20, f"{number} batches are in memory"
    writer.commit(prepare(writer))
    read_again = pq.read_table(tmp_path / "k=true", partitioning=None).column("n").to_pylist()
    assert sorted(read_again) == list(range(5_000, 5_100))


def test_what_ended_at_once_and_is_in_no_checkpoint_goes_at_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_sink_module, "WAITING_FILES_MAX", 1)
    writer = opened(file_sink("csv", tmp_path, roll=1))
    for start in range(4):
        writer.write(batch(start, 1))
    assert files_of(writer, tmp_path) == (1, 3)
    writer.close()
    assert everything(tmp_path) == []


# ---------------------------------------------------------------- the two parts of a prepare


def test_a_later_checkpoint_makes_safe_what_an_earlier_one_did_not(tmp_path: Path) -> None:
    """Its work was dropped, or comes later: what the later one covers must not depend on it."""
    writer = opened(file_sink("json", tmp_path))
    writer.write(batch(0, 10))
    first = writer.prepare_commit(1)
    late = writer.finish_prepared()
    writer.write(batch(10, 10))
    second = writer.prepare_commit(2)
    work = writer.finish_prepared()
    assert late is not None
    assert work is not None
    writer.write(batch(20, 10))
    third = writer.prepare_commit(3)
    work()
    assert files_of(writer, tmp_path) == (1, 2)
    late()
    assert files_of(writer, tmp_path) == (1, 2)
    writer.commit(first + second)
    assert sorted(row["id"] for row in read("json", tmp_path)) == list(range(20))
    last = writer.finish_prepared()
    assert last is not None
    last()
    assert writer.finish_prepared() is None
    writer.commit(third)
    assert len(read("json", tmp_path)) == 30


def test_content_is_safe_before_a_file_counts_as_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash of the machine, a name must not stand for less than what was written."""
    story: list[tuple[str, str]] = []
    sync, rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        story.append(("sync", path.suffix or "directory"))
        sync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        story.append(("rename", path.suffix))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    writer = opened(file_sink("parquet", tmp_path))
    writer.write(batch())
    committables = prepare(writer)
    complete = [("sync", ".inprogress"), ("rename", ".inprogress"), ("sync", "directory")]
    assert story == complete
    writer.commit(committables)
    assert story == [*complete, ("rename", ".pending"), ("sync", "directory")]


def test_rolled_files_are_synced_before_a_checkpoint_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(local_output, "sync_directory", synced.append)
    writer = opened(file_sink("json", tmp_path / "a" / "out", ["k", "name"], roll=1))
    assert synced == [tmp_path / "a", tmp_path]
    synced.clear()
    writer.write(batch(1, 1))
    assert synced == []
    prepare(writer)
    out = tmp_path / "a" / "out"
    assert set(synced) == {out, out / "k=__HIVE_DEFAULT_PARTITION__", visible_parent(out)}


def visible_parent(directory: Path) -> Path:
    (file,) = [p for p in everything(directory) if p.is_file()]
    return file.parent


def test_work_of_several_checkpoints_at_once(tmp_path: Path) -> None:
    """Threads race with each other and with the mailbox; each file is completed once, and before its
    checkpoint counts."""
    writer = opened(file_sink("parquet", tmp_path, "k", roll=3000))
    failures: list[BaseException] = []

    def run(work: Any, committables: list[bytes]) -> None:
        try:
            work()
            pending = [Path(json.loads(one)["pending"]) for one in committables]
            assert all(path.exists() for path in pending)
        except BaseException as error:
            failures.append(error)

    threads, prepared = [], []
    for checkpoint_id in range(1, 9):
        writer.write(batch(checkpoint_id * 100))
        prepared += writer.prepare_commit(checkpoint_id)
        work = writer.finish_prepared()
        if work is not None:
            threads.append(threading.Thread(target=run, args=(work, list(prepared))))
            threads[-1].start()
    for thread in threads:
        thread.join()
    assert failures == []
    writer.commit(prepared)
    assert sorted(row["id"] for row in read("parquet", tmp_path)) == list(range(100, 900))


@pytest.mark.parametrize("what", ["fsync", "sync_directory"])
def test_after_a_failed_finish_no_later_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    writer = opened(file_sink("parquet", tmp_path))
    writer.write(batch(0, 10))
    committed = prepare(writer)
    writer.write(batch(10, 10))
    writer.prepare_commit(2)

    def full(_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if what == "fsync":
            patch.setattr(os, "fsync", full)
        else:
            patch.setattr(local_output, "sync_directory", full)
        work = writer.finish_prepared()
        assert work is not None
        with pytest.raises(TaskFailure, match="cannot be written: No space left on device"):
            work()
    writer.write(batch(20, 10))
    writer.prepare_commit(3)
    again = writer.finish_prepared()
    assert again is not None
    with pytest.raises(TaskFailure, match="No space left on device"):
        again()
    writer.close()
    opened(file_sink("parquet", tmp_path), attempt=1).recover(committed)
    assert [row["id"] for row in read("parquet", tmp_path)] == list(range(10))
    assert everything(tmp_path) == visible(tmp_path)


# ---------------------------------------------------------------- crashes


class Job:
    """A file sink of two subtasks under a coordinator that may fail at every step.

    ``expected`` follows a model of its own: what checkpoints cover, of the rows of the attempts that count.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.attempt = 0
        self.next_id = 0
        self.checkpoint_id = 0
        self.start([[], []], [[], []])

    def start(self, restored: list[list[bytes]], covered: list[list[int]]) -> None:
        self.completed = restored, covered
        spec = file_sink("json", self.directory, "k", roll=400)
        self.writers = [opened(spec, subtask=i, attempt=self.attempt) for i in (0, 1)]
        for writer, committables in zip(self.writers, restored, strict=True):
            writer.recover(committables)
        self.prepared: list[dict[int, list[bytes]]] = [{}, {}]
        self.written = [list(rows) for rows in covered]
        self.pending: list[tuple[int, Any, Any, list[Any]]] = []
        self.to_notify: list[tuple[int, int]] = []

    def write(self, subtask: int, rows: int) -> None:
        self.writers[subtask].write(batch(self.next_id, rows))
        self.written[subtask] += range(self.next_id, self.next_id + rows)
        self.next_id += rows

    def prepare(self) -> None:
        self.checkpoint_id += 1
        lists, covered, works = [], [], []
        for subtask, writer in enumerate(self.writers):
            committables = writer.prepare_commit(self.checkpoint_id)
            self.prepared[subtask][self.checkpoint_id] = committables
            lists.append([c for own in self.prepared[subtask].values() for c in own])
            covered.append(list(self.written[subtask]))
            works.append(writer.finish_prepared())
        self.pending.append((self.checkpoint_id, lists, covered, works))

    def complete(self, index: int, *, abort: bool) -> None:
        """A checkpoint ends: all has been acknowledged, or it is given up."""
        if not self.pending:
            return
        checkpoint_id, lists, covered, works = self.pending.pop(index % len(self.pending))
        if abort:
            return
        for work in works:
            if work is not None:
                work()
        self.completed = lists, covered
        self.pending = [one for one in self.pending if one[0] > checkpoint_id]
        self.to_notify += [(0, checkpoint_id), (1, checkpoint_id)]

    def notify(self, index: int) -> None:
        """One subtask hears of a completed checkpoint."""
        if not self.to_notify:
            return
        subtask, checkpoint_id = self.to_notify.pop(index % len(self.to_notify))
        for prepared in [id for id in self.prepared[subtask] if id <= checkpoint_id]:
            self.writers[subtask].commit(self.prepared[subtask].pop(prepared))

    def restart(self, *, killed: bool) -> None:
        if not killed:
            for writer in self.writers:
                writer.close()
        self.attempt += 1
        self.start(*self.completed)

    def shown(self) -> list[int]:
        return sorted(row["id"] for row in read("json", self.directory))

    def covered(self) -> list[int]:
        return sorted(row for rows in self.completed[1] for row in rows)


STEPS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 1), st.integers(1, 8)),
    st.tuples(st.just("prepare")),
    st.tuples(st.just("complete"), st.integers(0, 2), st.booleans()),
    st.tuples(st.just("notify"), st.integers(0, 3)),
    st.tuples(st.just("restart"), st.booleans()),
)


@examples(60)
@given(st.lists(STEPS, max_size=40))
def test_what_shows_is_what_completed_checkpoints_cover(steps: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        job = Job(Path(directory))
        for kind, *values in steps:
            if kind == "write":
                job.write(*values)
            elif kind == "prepare":
                job.prepare()
            elif kind == "complete":
                job.complete(values[0], abort=values[1])
            elif kind == "notify":
                job.notify(*values)
            else:
                job.restart(killed=values[0])
                assert job.shown() == job.covered()
                hidden = [p for p in everything(Path(directory)) if p.name.startswith(".")]
                assert hidden == []
            shown = job.shown()
            assert len(set(shown)) == len(shown)
            assert set(shown) <= set(job.covered())
        job.restart(killed=True)
        assert job.shown() == job.covered()
        release_killed()


class Killed(BaseException):
    """The process has ended here."""


@pytest.mark.parametrize("rename_first", [True, False])
@pytest.mark.parametrize("format", ["parquet", "json"])
def test_a_kill_at_every_call_into_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, rename_first: bool
) -> None:
    """Two checkpoints; the process ends before or after each rename, sync and removal there is."""
    calls = 0
    kill_at: int | None = None

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == kill_at and not rename_first:
                raise Killed
            result = function(*args, **kwargs)
            if calls == kill_at:
                raise Killed
            return result

        return call

    def run(directory: Path) -> tuple[list[bytes], list[int]]:
        """Runs to the end or to the kill; returns the newest complete checkpoint."""
        nonlocal calls
        calls = 0
        complete: tuple[list[bytes], list[int]] = [], []
        try:
            writer = opened(file_sink(format, directory, "k", roll=900))
            for checkpoint_id in (1, 2):
                writer.write(batch(checkpoint_id * 100, 20))
                committables = prepare(writer, checkpoint_id)
                complete = (
                    committables,
                    [*complete[1], *range(checkpoint_id * 100, checkpoint_id * 100 + 20)],
                )
                writer.commit(committables)
        except Killed:
            pass
        return complete

    def recover(directory: Path, attempt: int, committables: list[bytes]) -> None:
        opened(file_sink(format, directory, "k"), attempt=attempt).recover(committables)

    with monkeypatch.context() as patch:
        for owner, name in ((Path, "rename"), (Path, "unlink"), (Path, "mkdir"), (os, "fsync")):
            patch.setattr(owner, name, counted(getattr(owner, name)))
        run(tmp_path / "whole")
        total = calls
        for kill in range(1, total + 1):
            directory = tmp_path / str(kill)
            kill_at = kill
            committables, rows = run(directory)
            # The next attempt is killed on its way, too: half way through its recovery.
            calls, kill_at = 0, 6
            with suppress(Killed):
                recover(directory, 1, committables)
            calls, kill_at = 0, None
            recover(directory, 2, committables)
            assert sorted(row["id"] for row in read(format, directory)) == rows, kill
            hidden = [p for p in everything(directory) if p.name.startswith(".")]
            assert hidden == [], kill
            release_killed()
    assert total > 20


def test_a_sweep_takes_what_one_sink_of_one_job_has_hidden_and_nothing_else(tmp_path: Path) -> None:
    tag = output_tag("ab" * 16, "sink")
    swept = [
        tmp_path / "a=1" / "b=2" / f".part-{tag}-0-3-0.pending",
        tmp_path / f".part-{tag}-1-0.probe",
    ]
    kept = [
        tmp_path / "a=2" / f"part-0-0-0-{tag}.json",
        tmp_path / f".part-{output_tag('cd' * 16, 'sink')}-0-0-0.pending",
        tmp_path / f".part-{output_tag('ab' * 16, 'other')}-0-0-0.inprogress",
    ]
    beside = tmp_path / "a=2" / f".part-{tag}-0-4-1.inprogress"
    for path in (*swept, *kept, beside):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert sweep_hidden_files(tmp_path, tag) == 3
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)
    assert not (tmp_path / "a=1").exists()
    assert sweep_hidden_files(tmp_path / "gone", tag) == 0
