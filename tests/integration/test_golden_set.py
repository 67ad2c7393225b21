"""Aim: what a version before wrote can still be started from.

Method: checkpoints and savepoints of every format lie in ``tests/golden`` (``python -m tests.golden`` adds those of a new
format). A job goes on from each at another parallelism; a canonical one with either backend. Its result is that of a job
that ran through.
"""

from __future__ import annotations

import tarfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from taskmanager.state.rocksdb.restore_store import FORMAT_VERSION as ROCKSDB_VERSION
from taskmanager.state.run_format import FORMAT_VERSION as RUN_VERSION
from tests.integration.conftest import NewEnvironment
from tests.support.golden_job import build, result
from tests.support.jobs import DEADLINE_S

pytestmark = [pytest.mark.integration, pytest.mark.sampled(5)]

GOLDEN = Path(__file__).parents[1] / "golden"
SETS = sorted(GOLDEN.glob("runs-*/*.tar.gz"))


def cases() -> list[Any]:
    """Each with the backends that can be started from it: the run format is read by both."""
    found = []
    for path in SETS:
        backend, kind = path.name.removesuffix(".tar.gz").split("-")
        in_runs = backend == "hashmap" or kind == "canonical"
        for after in ["hashmap", "rocksdb"] if in_runs else ["rocksdb"]:
            found.append(pytest.param(path, after, id=f"{path.parent.name}/{path.name}-{after}"))
    return found


@cache
def wanted(new_env: NewEnvironment, output: Path) -> Counter[Any]:
    build(env := new_env(2), output)
    assert env.submit("golden").wait(DEADLINE_S).status == "FINISHED"
    return result(output)


def test_there_is_a_set_of_the_present_formats() -> None:
    names = {path.parent.name for path in SETS}
    assert f"runs-{RUN_VERSION}-rocksdb-{ROCKSDB_VERSION}" in names, "run python -m tests.golden"


@pytest.mark.parametrize(("path", "backend"), cases())
def test_goes_on_from_what_was_written(
    new_env: NewEnvironment, tmp_path: Path, path: Path, backend: str
) -> None:
    kept = tmp_path / "kept"
    with tarfile.open(path) as archive:
        archive.extractall(kept, filter="data")
    config = {
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "state.backend.type": backend,
    }
    env = new_env(3, config)
    build(env, tmp_path / "out")
    handle = env.submit("again", from_savepoint=kept)
    assert handle.wait(DEADLINE_S).status == "FINISHED"
    assert result(tmp_path / "out") == wanted(new_env, tmp_path / "wanted")
