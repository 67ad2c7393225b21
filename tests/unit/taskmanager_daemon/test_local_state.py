"""Aim: copies of snapshots that nobody needs go, of dead TaskManagers too, and nothing else that lies next to them.

Method: the keeper looks at directories that are made to look old.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from common.clock import SystemClock
from penstock.config import Configuration
from taskmanager.daemon.local_state_runner import LocalStateKeeper, local_state_roots

RETENTION_S = 3600
COPY = "job/source%2F1-0/7-source%2F1-0-2-a1b2/128"
PART = "job/source%2F1-0/.part-8-source%2F1-0-2-a1b3/0"


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("precious")
    return path


def make_old(top: Path) -> None:
    then_s = SystemClock().now_ms() / 1000 - 2 * RETENTION_S
    for path in (top, *top.rglob("*")):
        os.utime(path, (then_s, then_s), follow_symlinks=False)


def keeper_of(roots: list[Path], held: frozenset[str] = frozenset()) -> LocalStateKeeper:
    return LocalStateKeeper(
        roots, SystemClock(), RETENTION_S * 1000, has_slots=lambda job: job in held
    )


def test_each_taskmanager_has_directories_of_its_own(tmp_path: Path) -> None:
    key = "execution.checkpointing.local-backup.dirs"
    config = Configuration.from_mapping({key: f" {tmp_path}/a, {tmp_path}/b,"})
    configured = local_state_roots(config.local_backup_directories, tmp_path, "tm-1")
    assert configured == [tmp_path / "a/local-state-tm-1", tmp_path / "b/local-state-tm-1"]
    assert local_state_roots([], tmp_path, "tm-1") == [tmp_path / "local-state/local-state-tm-1"]


@pytest.mark.parametrize("configured", ["", "shared"])
def test_old_copies_go_and_the_others_stay(tmp_path: Path, configured: str) -> None:
    parents = [tmp_path / configured] if configured else []
    own, dead = (local_state_roots(parents, tmp_path, id)[0] for id in ("tm-1", "tm-2"))
    for root in (own, dead):
        write(root / COPY)
        write(root / PART)
    make_old(own.parent)
    kept = write(own / "job/sink-3/9-sink-3-0-c0/0")
    asyncio.run(keeper_of([own]).look())
    assert kept.exists()
    assert not (own / "job/source%2F1-0").exists()
    assert not dead.exists()


@pytest.mark.parametrize(
    "path",
    [
        "projects/alice/results/data.txt",
        "projects/alice/results-1/data.txt",
        "checkpoints/oldjob/shared/1-v0-0-0-abc",
        "oldjob/shared/1-v0-0-0-abc",
        f"tm-1/{COPY}",
        "local-state-notes/alice/results/data.txt",
        "local-state-notes/alice/results-1/data.txt",
        "local-state-notes/alice/results-1/1-v0-0-0-abc",
        "local-state-notes/alice/results-1/1-v0-0-0-abc/data.txt",
        "local-state-notes/data.txt",
        "local-state-tm-1/job/source%2F1-0/notes.txt",
    ],
)
def test_what_is_not_ours_stays(tmp_path: Path, path: str) -> None:
    precious = write(tmp_path / path)
    (own,) = local_state_roots([tmp_path], tmp_path, "tm-1")
    copy = write(own / COPY)
    (tmp_path / "empty/directory").mkdir(parents=True)
    make_old(tmp_path)
    asyncio.run(keeper_of([own]).look())
    assert precious.exists()
    assert (tmp_path / "empty/directory").exists()
    assert not copy.exists()


def test_links_are_not_followed(tmp_path: Path) -> None:
    (own,) = local_state_roots([tmp_path / "copies"], tmp_path, "tm-1")
    elsewhere = write(tmp_path / "elsewhere" / COPY)
    for link, target in (
        (own.with_name("local-state-tm-2"), tmp_path / "elsewhere"),
        (own / "job", elsewhere.parents[2]),
        (own / "job2/source%2F1-0", elsewhere.parents[1]),
        (own / "job3/source%2F1-0/7-source%2F1-0-2-a1b2", elsewhere.parent),
    ):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    make_old(tmp_path)
    asyncio.run(keeper_of([own]).look())
    assert elsewhere.exists()


def test_copies_go_with_the_last_slot_of_their_job(tmp_path: Path) -> None:
    own, dead = (local_state_roots([], tmp_path, id)[0] for id in ("tm-1", "tm-2"))
    copies = [write(root / COPY) for root in (own, dead)]
    asyncio.run(keeper_of([own], held=frozenset({"job"})).slots_freed("job"))
    assert all(copy.exists() for copy in copies)
    asyncio.run(keeper_of([own]).slots_freed("job"))
    assert not (own / "job").exists()
    assert copies[1].exists()
