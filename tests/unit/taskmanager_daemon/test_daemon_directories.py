"""Aim: directories go with their process, or with the next sweep, and never before.

Method: locks held by this process stand for living owners, released ones for dead owners.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Configuration
from penstock.errors import ConfigurationError, JobRejected
from penstock.local import owned_directories as directories
from penstock.local.owned_directories import OwnedDirectory, sweep_work_directories
from penstock.pb import graph_pb2
from taskmanager.daemon.identity import new_taskmanager_id
from taskmanager.daemon.slot_environment import slot_variables
from taskmanager.slots.requirements import check_requirements, installed_packages


def abandon(directory: OwnedDirectory) -> None:
    """What the kernel does when the owner is killed."""
    os.close(directory._lock)


def test_a_living_owner_keeps_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "taskmanager-a"
    owned = OwnedDirectory.create(path)
    (path / "file").touch()
    assert path.stat().st_mode & 0o777 == 0o700
    assert sweep_work_directories(tmp_path) == []
    with pytest.raises(ConfigurationError, match="belongs to a running process"):
        OwnedDirectory.create(path)
    owned.remove()
    assert not path.exists()


def test_what_a_dead_owner_left_is_swept_or_replaced(tmp_path: Path) -> None:
    for name in ("a", "b"):
        abandon(OwnedDirectory.create(tmp_path / f"taskmanager-{name}"))
        (tmp_path / f"taskmanager-{name}" / "file").touch()
    (tmp_path / "taskmanager-of-the-user").mkdir()
    again = OwnedDirectory.create(tmp_path / "taskmanager-a")
    assert not (tmp_path / "taskmanager-a" / "file").exists()
    seen: list[str] = []
    swept = sweep_work_directories(
        tmp_path, lambda path: seen.extend(one.name for one in path.iterdir())
    )
    assert swept == [tmp_path / "taskmanager-b"]
    assert "file" in seen  # before it went
    assert (tmp_path / "taskmanager-of-the-user").exists()
    again.remove()


def test_the_event_loop_sweeps_and_removes_no_directory(
    tmp_path: Path, cluster: Any, go: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "taskmanager-killed"
    abandon(OwnedDirectory.create(left))
    removed: list[str] = []
    made: list[str] = []
    on_the_loop: list[str] = []

    def noted(function: Callable[..., None], names: list[str]) -> Callable[..., None]:
        def call(path: Any, *arguments: Any, **options: Any) -> None:
            names.append(Path(path).name)
            if asyncio._get_running_loop() is not None:
                on_the_loop.append(Path(path).name)
            function(path, *arguments, **options)

        return call

    monkeypatch.setattr(shutil, "rmtree", noted(shutil.rmtree, removed))

    async def work() -> None:
        async with cluster(tmp_path) as c:
            assert not left.exists()
            monkeypatch.setattr(Path, "mkdir", noted(Path.mkdir, made))
            artifact = graph_pb2.Artifact(
                id=hashlib.sha256(b"data").hexdigest(), name="data", size_bytes=4, kind="file"
            )
            c.jobmanager.artifacts[artifact.id] = b"data"
            await c.allocate(artifacts=[artifact])

    go(work)
    assert "taskmanager-tm" in removed
    assert any(name.startswith(directories._DEAD_PREFIX) for name in removed), removed
    assert "artifacts" in made
    assert on_the_loop == []


def test_runtime_directories_are_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(directories.tempfile, "gettempdir", lambda: str(long))
    runtime = directories.create_runtime_directory("test-of-directories")
    assert runtime.path.parent == Path("/tmp")
    abandon(runtime)
    assert runtime.path in directories.sweep_runtime_directories()
    with pytest.raises(ConfigurationError, match="short enough"):
        directories.create_runtime_directory("x" * 100)


def test_slots_do_not_inherit_what_is_for_the_daemon(tmp_path: Path) -> None:
    inherited = {"PENSTOCK_PARENT_DEATH": "1", "OPENBLAS_NUM_THREADS": "8", "MINE": "x"}
    variables = slot_variables(inherited, tmp_path)
    assert "PENSTOCK_PARENT_DEATH" not in variables
    assert (variables["MINE"], variables["OPENBLAS_NUM_THREADS"]) == ("x", "1")


def test_taskmanager_ids() -> None:
    one, two = (new_taskmanager_id(Configuration()) for _ in range(2))
    assert one != two
    assert str(os.getpid()) in one
    assert new_taskmanager_id(Configuration.from_mapping({"taskmanager.id": "tm-1"})) == "tm-1"
    with pytest.raises(ConfigurationError, match="longer"):
        new_taskmanager_id(Configuration.from_mapping({"taskmanager.id": "x" * 41}))


def test_requirements() -> None:
    installed = {"a-b": "1.5", "c": "2.0rc1"}
    check_requirements(["A_b>=1", "a.b", "c>=1.9", "d; python_version < '3'"], installed, "tm")
    with pytest.raises(JobRejected, match=r"a-b>=2 \(has 1\.5\), d \(not installed\)"):
        check_requirements(["a-b>=2", "d", "c"], installed, "tm")
    with pytest.raises(JobRejected, match="malformed"):
        check_requirements(["a b c"], installed, "tm")
    assert "pyarrow" in installed_packages()


def test_daemons_that_start_together_neither_stop_nor_remove_each_other(tmp_path: Path) -> None:
    names = [f"taskmanager-{name}" for name in "abcd"]

    def start(name: str) -> OwnedDirectory:
        sweep_work_directories(tmp_path)
        return OwnedDirectory.create(tmp_path / name)

    with ThreadPoolExecutor(len(names)) as threads:
        for _ in range(25):
            started = list(threads.map(start, names))
            for owned in started:
                assert (owned.path / ".lock").exists()
                (owned.path / "file").touch()
            assert sorted(path.name for path in tmp_path.iterdir()) == names
            for owned in started:
                abandon(owned)
