"""Aim: whoever reads a directory while its small files are merged reads each row once, whatever is killed when.

Method: directories that sinks have written; readers at every change that a compaction makes, compactions killed at each
of them and repeated, jobs that had begun before; histories drawn at random.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from penstock.cli.main import main
from penstock.connectors import compaction, file_sink
from penstock.connectors.compacted import MANIFEST, CompactionManifest, replaced_place
from penstock.connectors.compaction import CompactionSupersededError, uncommitted_names
from penstock.connectors.files import file_source
from penstock.errors import JobRejected, StoreCorrupt, TaskFailure
from penstock.storage.local_store import LocalStore
from tests.support.compactions import (
    NOW_MS,
    SCHEMA,
    Killed,
    ReadingJob,
    fresh_ids,
    killing_at,
    merged,
    stepping,
    write_files,
)
from tests.support.examples import examples
from tests.support.file_sinks import batch, opened, prepare, visible

FORMATS = ("parquet", "csv", "json")
FILES = [(0, 5), (5, 1), (6, 7), (13, 2)]
IDS = list(range(15))


def small_files(directory: Path, form: str, partition_by: Any = None) -> str:
    write_files(str(directory), form, FILES, partition_by=partition_by)
    return str(directory)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("partition_by", [None, "k"])
def test_many_become_one_with_the_same_rows(
    tmp_path: Path, form: str, partition_by: str | None
) -> None:
    path = small_files(tmp_path / "all" / "out", form, partition_by)
    before = len(visible(tmp_path))
    done = merged(path)
    assert sum(one.merged for one in done) == before
    files = visible(tmp_path)
    assert [file.name[:15] for file in files] == ["part-compacted-"] * (2 if partition_by else 1)
    assert fresh_ids(form, path) == IDS
    if not partition_by:
        assert fresh_ids(form, f"{tmp_path}/*") == IDS
        assert fresh_ids(form, f"{tmp_path}/**/*.{form}") == IDS
        assert fresh_ids(form, f"{tmp_path}/a*/*/part-*") == IDS
    if form != "json":  # as others read it
        assert ds.dataset(path, format=form).count_rows() == len(IDS)
    assert merged(path) == []
    write_files(path, form, [(15, 3)], partition_by=partition_by)
    assert fresh_ids(form, path) == list(range(18))


def test_merged_files_are_for_whom_the_small_ones_were_for(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        path = small_files(tmp_path / "out", "parquet")
        assert merged(path)
    finally:
        os.umask(umask)
    (file,) = visible(tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


@pytest.mark.parametrize("form", FORMATS)
def test_at_every_moment_of_it_each_row_is_read_once(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small_files(tmp_path, form)
    jobs = []

    def look(number: int) -> None:
        assert fresh_ids(form, path) == IDS
        job = ReadingJob(form, path)
        job.discover()
        job.read(random.Random(number), reads=1)
        job.checkpoint()
        jobs.append(job)
        if len(jobs) % 2:
            job.restart()

    with stepping(monkeypatch, look) as steps:
        merged(path)
    assert steps.number > 10
    for job in jobs:
        assert job.finish() == IDS
        job.restart()
        assert job.finish() == IDS


@pytest.mark.parametrize("form", FORMATS)
def test_killed_at_any_moment_it_is_repeated(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = small_files(tmp_path / "original", form, "k")
    for step in range(0, 100, 1 if form == "json" else 5):
        path = str(tmp_path / f"killed-{step}")
        shutil.copytree(original, path)
        job, late = ReadingJob(form, path), ReadingJob(form, path)
        job.discover()
        with stepping(monkeypatch, killing_at(step)) as steps:
            try:
                merged(path)
            except Killed:
                pass
            else:
                break
        late.discover()
        assert fresh_ids(form, path) == IDS
        with stepping(monkeypatch, killing_at(steps.number // 2 + 1)):
            try:
                merged(path)
            except Killed:
                assert fresh_ids(form, path) == IDS
        merged(path)
        assert fresh_ids(form, path) == IDS
        assert len(visible(Path(path))) == 2
        assert not list(Path(path).rglob("*.new"))
        assert merged(path) == []
        assert job.finish() == IDS
        assert late.finish() == IDS
    assert step > 20


def test_of_two_at_once_the_first_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small_files(tmp_path, "csv")

    def other(number: int) -> None:
        if number == 2:
            merged(path)

    with (
        stepping(monkeypatch, other),
        pytest.raises(CompactionSupersededError, match="another compaction has begun since"),
    ):
        merged(path)
    assert fresh_ids("csv", path) == IDS
    assert len(visible(tmp_path)) == 1
    assert not list(tmp_path.rglob("*.new"))


@pytest.mark.parametrize("form", FORMATS)
def test_a_job_that_has_read_some_of_the_files_goes_on_with_the_others(
    tmp_path: Path, form: str
) -> None:
    path = small_files(tmp_path, form)
    chance = random.Random(1)
    job = ReadingJob(form, path)
    job.discover()
    job.read(chance)
    job.read(chance, reads=1, max_rows=2)
    job.checkpoint()
    job.read(chance)
    merged(path)
    write_files(path, form, [(15, 4)])
    merged(path, now_ms=NOW_MS + 1)
    job.restart()
    assert job.finish() == list(range(19))


def test_a_watching_job_reads_what_comes_and_nothing_twice(tmp_path: Path) -> None:
    path = small_files(tmp_path, "json")
    job = ReadingJob("json", path, watches=True)
    job.discover()
    job.read(random.Random(1))
    write_files(path, "json", [(15, 4)])
    merged(path)
    assert job.finish() == list(range(19))
    write_files(path, "json", [(19, 4)])
    assert job.finish() == list(range(23))
    job.checkpoint()
    merged(path)
    job.restart()
    assert job.finish() == list(range(23))


def test_only_what_sinks_have_written_and_is_small_is_touched(tmp_path: Path) -> None:
    path = small_files(tmp_path, "csv")
    (tmp_path / "own.csv").write_text("id,k\n100,x\n")
    (tmp_path / "_other").mkdir()
    (tmp_path / "_other" / "part-0-0-0-aaaaaaaa-aaaaaa.csv").write_text("id,k\n")
    write_files(path, "csv", [(1_000, 500)])
    others = {p.name for p in visible(tmp_path)}
    [done] = merged(path, target_bytes=2_000)
    assert done.merged == 4
    left = {p.name for p in visible(tmp_path)}
    assert len(left & others) == 2  # the large one, and the one of somebody else's
    assert (tmp_path / "_other" / "part-0-0-0-aaaaaaaa-aaaaaa.csv").exists()


def test_files_of_other_columns_are_not_merged(tmp_path: Path) -> None:
    path = small_files(tmp_path, "parquet")
    writer = opened(file_sink("parquet", path), attempt=77)
    for start in (0, 10):
        writer.write(batch(start, 10))
        writer.commit(prepare(writer))
    [done] = merged(path)
    assert (done.merged, done.into) == (6, 2)
    assert sorted(pq.read_metadata(p).num_rows for p in visible(tmp_path)) == [15, 20]


@pytest.mark.parametrize("form", FORMATS)
def test_what_may_still_be_committed_is_not_touched(tmp_path: Path, form: str) -> None:
    writer = opened(file_sink(form, tmp_path))
    writer.write(batch())
    held = writer.hold(7, committables := prepare(writer))
    writer.keep_held(7, committables)
    writer.commit(committables)
    writer.write(batch(100))
    writer.commit(prepare(writer))
    [name] = uncommitted_names(str(tmp_path))
    assert (tmp_path / name).exists()
    assert merged(str(tmp_path)) == []
    writer.let_go(7, committables)
    assert merged(str(tmp_path))
    # What was committed is not committed again, nor missing, by whatever name it is known.
    other = opened(file_sink(form, tmp_path), job="b" * 32)
    other.recover(held)
    own = opened(file_sink(form, tmp_path), attempt=1)
    own.recover(committables)
    own.commit(committables)
    assert len(visible(tmp_path)) == 1


def test_a_savepoint_that_comes_late_names_what_was_merged(tmp_path: Path) -> None:
    writer = opened(file_sink("json", tmp_path))
    for start in (0, 100):
        writer.write(batch(start))
        committables = prepare(writer)
        held = writer.hold(7, committables)
        writer.commit(committables)
    merged(str(tmp_path))
    writer.keep_held(7, committables)
    assert list(tmp_path.glob(".held-*"))
    opened(file_sink("json", tmp_path), job="b" * 32).recover(held)
    assert not list(tmp_path.glob(".held-*"))
    assert len(visible(tmp_path)) == 1


def test_replaced_files_go_after_a_while(tmp_path: Path) -> None:
    path = small_files(tmp_path, "csv")
    spec = file_source("csv", path, schema=SCHEMA)
    late = ReadingJob("csv", path)
    late.discover()
    late.read(random.Random(0))
    late.checkpoint()
    merged(path, keep_ms=1_000)
    first = CompactionManifest.decode((tmp_path / MANIFEST).read_bytes(), "").files[0].replaces[0]
    kept = Path(replaced_place(f"{path}/{first.name}"))
    assert kept.exists()
    assert merged(path, now_ms=NOW_MS + 999, keep_ms=1_000) == []
    [done] = merged(path, now_ms=NOW_MS + 1_000, keep_ms=1_000)
    assert done.removed == len(FILES)
    assert not kept.exists()
    assert fresh_ids("csv", path) == IDS
    late.restart()
    with pytest.raises(TaskFailure, match="cannot be read"):
        late.finish()
    assert spec[0].files.path == path


def test_with_nothing_kept_they_go_at_once(tmp_path: Path) -> None:
    path = small_files(tmp_path, "csv")
    merged(path, keep_ms=0)
    assert not list(tmp_path.rglob("*.replaced"))
    assert fresh_ids("csv", path) == IDS


def test_a_merged_file_that_was_removed_is_no_more(tmp_path: Path) -> None:
    path = small_files(tmp_path, "csv")
    merged(path)
    visible(tmp_path)[0].unlink()
    write_files(path, "csv", [(20, 2), (22, 2)])
    assert fresh_ids("csv", path) == [20, 21, 22, 23]
    merged(path)
    assert fresh_ids("csv", path) == [20, 21, 22, 23]
    assert len(CompactionManifest.decode((tmp_path / MANIFEST).read_bytes(), "").files) == 1


def manifest_of(directory: Path) -> CompactionManifest:
    """As it is stored: without what is in archives."""
    return CompactionManifest.decode((directory / MANIFEST).read_bytes(), "")


def grown(path: str, rounds: range, **options: Any) -> None:
    """In each round some small files come and are merged; those of the round before are removed for good."""
    for number in rounds:
        write_files(path, "csv", [(10 * number + place, 1) for place in range(10)])
        merged(path, now_ms=NOW_MS + number, keep_ms=1, archived_names_min=10, **options)


def test_the_manifest_grows_with_what_is_there(tmp_path: Path) -> None:
    path = str(tmp_path)
    grown(path, range(4))
    sizes = []
    for first in (4, 12):
        grown(path, range(first, first + 8), target_bytes=1 << 10)
        files = manifest_of(tmp_path).files
        in_manifest = [len(one.replaces) for one in files if not one.archive]
        assert sum(in_manifest) <= 20  # of the last rounds
        assert len(files) == first + 8
        archives = list((tmp_path / MANIFEST).parent.glob("*.names"))
        assert len(archives) <= 4
        assert {one.name for one in archives} == manifest_of(tmp_path).archives
        sizes.append((tmp_path / MANIFEST).stat().st_size)
    assert sizes[1] - sizes[0] < 8 * 200  # one line for each merged file
    assert fresh_ids("csv", path) == list(range(200))
    # A merged file that the user removes takes its line along.
    for file in sorted(visible(tmp_path), key=lambda one: one.stat().st_mtime_ns)[:5]:
        file.unlink()
    left = fresh_ids("csv", path)
    grown(path, range(20, 23))
    assert len(manifest_of(tmp_path).files) == 18
    assert fresh_ids("csv", path) == [*left, *range(200, 230)]


def test_who_comes_late_reads_nothing_twice_whose_names_were_archived(tmp_path: Path) -> None:
    path = str(tmp_path)
    write_files(path, "csv", [(place, 1) for place in range(10)])
    job, half = (ReadingJob("csv", path, watches=True) for _ in range(2))
    for one in (job, half):
        one.discover()
    for _ in range(10):
        job.read(random.Random(1))
    for _ in range(5):
        half.read(random.Random(1))
    for one in (job, half):
        one.checkpoint()
    merged(path, keep_ms=1)
    grown(path, range(1, 7))
    assert manifest_of(tmp_path).files[0].archive
    for one in (job, half):
        one.restart()
    assert job.finish() == list(range(70))
    with pytest.raises(TaskFailure, match="cannot be read"):  # as before: its files are removed
        half.finish()


def test_at_every_moment_at_which_names_are_archived_each_row_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path)
    job = ReadingJob("csv", path, watches=True)
    grown(path, range(3))
    looks = []

    def look(number: int) -> None:
        looks.append(number)
        assert fresh_ids("csv", path) == list(range(40))
        assert job.finish() == list(range(40))
        job.checkpoint()
        job.restart()

    write_files(path, "csv", [(30 + place, 1) for place in range(10)])
    with stepping(monkeypatch, look):
        merged(path, now_ms=NOW_MS + 10, keep_ms=1, archived_names_min=10)
    assert any(one.archive for one in manifest_of(tmp_path).files)
    assert len(looks) > 10


def test_killed_while_it_archives_it_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tmp_path / "original"
    grown(str(original), range(3))
    grown(str(original), range(3, 5))
    write_files(str(original), "csv", [(50, 1)])
    options = {"now_ms": NOW_MS + 100, "keep_ms": 1, "archived_names_min": 10}
    for step in range(100):
        place = tmp_path / f"killed-{step}"
        shutil.copytree(original, place)
        job = ReadingJob("csv", str(place), watches=True)
        with stepping(monkeypatch, killing_at(step)):
            try:
                merged(str(place), **options)
            except Killed:
                assert fresh_ids("csv", str(place)) == list(range(51))
                job.finish()
            else:
                break
        merged(str(place), **options)
        write_files(str(place), "csv", [(51, 1), (52, 1)])
        merged(str(place), **options | {"now_ms": NOW_MS + 200})
        assert fresh_ids("csv", str(place)) == list(range(53))
        assert job.finish() == list(range(53))
        manifest = manifest_of(place)
        assert {one.name for one in place.rglob("*.names")} == manifest.archives
        assert len({one.archive for one in manifest.files}) <= 3
    assert step > 10


def test_of_two_that_archive_at_once_the_first_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path)
    grown(path, range(3))
    options: dict[str, Any] = {"keep_ms": 1, "archived_names_min": 10}
    for number in range(8):
        write_files(path, "csv", [(30 + 10 * number + place, 1) for place in range(10)])
        now_ms = NOW_MS + 100 * (number + 1)

        def other(step: int, at: int = number, now_ms: int = now_ms) -> None:
            if step == at:
                merged(path, now_ms=now_ms + 50, **options)

        with stepping(monkeypatch, other), contextlib.suppress(CompactionSupersededError):
            merged(path, now_ms=now_ms, **options)
        assert fresh_ids("csv", path) == list(range(40 + 10 * number))
    merged(path, now_ms=NOW_MS + 10_000, **options)
    assert {one.name for one in tmp_path.rglob("*.names")} == manifest_of(tmp_path).archives


def test_what_was_archived_is_not_committed_again_nor_missing(tmp_path: Path) -> None:
    writer = opened(file_sink("csv", tmp_path))
    writer.write(batch())
    committables = prepare(writer)
    writer.commit(committables)
    path = str(tmp_path)
    write_files(path, "csv", [(100 + place, 1) for place in range(9)])
    merged(path, keep_ms=1)
    grown(path, range(20, 24))
    assert manifest_of(tmp_path).files[0].archive
    before = fresh_ids("csv", path)
    own = opened(file_sink("csv", tmp_path), attempt=1)
    own.recover(committables)
    own.commit(committables)
    assert fresh_ids("csv", path) == before


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    path = str(tmp_path)
    grown(path, range(4))
    for archive in tmp_path.rglob("*.names"):
        archive.write_bytes(b"no archive")
    with pytest.raises(JobRejected, match=r"\.names: is damaged"):
        file_source("csv", path, schema=SCHEMA)
    with pytest.raises(StoreCorrupt, match=r"\.names: is damaged"):
        merged(path)


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    path = small_files(tmp_path, "csv")
    merged(path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(JobRejected, match=f"{MANIFEST}: is damaged"):
        file_source("csv", path, schema=SCHEMA)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    path = small_files(tmp_path, "parquet")
    (tmp_path / "part-0-0-0-aaaaaaaa-aaaaaa.parquet").write_text("no Parquet")
    with pytest.raises(JobRejected, match=r"part-0-0-0-.*: not a readable Parquet file"):
        merged(path)


def test_the_command_says_what_it_has_done(tmp_path: Path) -> None:
    path = small_files(tmp_path, "json", "k")
    result = CliRunner().invoke(main, ["compact", path, "--json"])
    assert result.exit_code == 0, result.output
    shown = json.loads(result.output)
    assert [one["directory"] for one in shown["directories"]] == ["k=k%200", "k=k%201"]
    assert {one["into"] for one in shown["directories"]} == {1}
    assert "nothing to merge" in CliRunner().invoke(main, ["compact", path]).output
    write_files(path, "json", FILES, partition_by="k")
    result = CliRunner().invoke(main, ["compact", path, "--keep", "0s", "--target-size", "1kb"])
    assert "k=k%200" in result.output
    for arguments, status in (([f"{path}/none"], 1), ([path, "--target-size", "0"], 2)):
        assert CliRunner().invoke(main, ["compact", *arguments]).exit_code == status


@examples(100)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                ["discover", "read", "read some", "checkpoint", "restart", "compact", "begin"]
            ),
            st.integers(1, 6),  # a file with so many rows comes
            st.tuples(st.just("kill"), st.integers(0, 25)),
        ),
        max_size=25,
    ),
    st.randoms(use_true_random=False),
    st.sampled_from(FORMATS),
)
def test_any_history_reads_every_row_once(
    history: list[Any], chance: random.Random, form: str
) -> None:
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        jobs = [ReadingJob(form, place, watches=True)]
        rows = 0
        for step in history:
            job = chance.choice(jobs)
            match step:
                case int():
                    write_files(place, form, [(rows, step)])
                    rows += step
                case "begin":
                    jobs.append(ReadingJob(form, place, watches=True))
                case "discover" | "checkpoint" | "restart":
                    getattr(job, step)()
                case "read":
                    job.read(chance)
                case "read some":
                    job.read(chance, reads=1, max_rows=2)
                case "compact":
                    merged(place)
                case (_, number):
                    with stepping(patch, killing_at(number)), contextlib.suppress(Killed):
                        merged(place)
        for job in jobs:
            assert job.finish() == list(range(rows))
        if rows:
            assert fresh_ids(form, place) == list(range(rows))


class Denying(LocalStore):
    """A store that was asked again by its own client: what it has just written is not what was expected."""

    @override
    def compare_and_swap(self, path: str, expected: bytes | None, new: bytes) -> bool:
        return super().compare_and_swap(path, expected, new) and expected == new


def test_rows_stay_though_a_swap_is_told_to_have_failed_that_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small_files(tmp_path, "parquet")
    merged(path)
    write_files(path, "parquet", [(15, 2), (17, 3)])
    (manifest,) = tmp_path.rglob(MANIFEST)
    claimed = CompactionManifest.decode(manifest.read_bytes(), MANIFEST)
    monkeypatch.setattr(
        compaction._DirectoryCompaction, "_claim", lambda _: (manifest.read_bytes(), claimed)
    )
    monkeypatch.setattr(compaction, "open_store", lambda uri, **_: Denying(Path(uri)))
    merged(path)
    assert fresh_ids("parquet", path) == [*IDS, *range(15, 20)]
