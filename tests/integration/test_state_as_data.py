"""Aim: a job goes on from a savepoint that was written from tables as if it had never stopped.

Method: what the golden set holds (every kind of state, of either backend) is read as tables and written again, all of it
given, and a job goes on from that: with either backend, another parallelism, another number of key-groups. Its result is
that of a job that ran through.
"""

from __future__ import annotations

import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from tests.integration.conftest import NewEnvironment
from tests.support.golden_job import build, result
from tests.support.jobs import DEADLINE_S

pytestmark = [pytest.mark.integration, pytest.mark.sampled(2)]

GOLDEN = Path(__file__).parents[1] / "golden"


WANTED: list[Counter[Any]] = []
"""Of a job that ran through, once it has."""


def wanted(new_env: NewEnvironment, output: Path) -> Counter[Any]:
    if not WANTED:
        build(env := new_env(2), output)
        assert env.submit("golden").wait(DEADLINE_S).status == "FINISHED"
        WANTED.append(result(output))
    return WANTED[0]


def rewritten(source: Path, target: Path, max_parallelism: int | None = None) -> str:
    """The same state, through tables."""
    state = ps.open_state(source)
    tables = {
        operator.uid: {
            one.name: state.read(operator.uid, one.name)
            for one in operator.states
            if "splits" not in one.name
        }
        for operator in state.operators
    }
    return ps.write_savepoint(target, tables, base=source, max_parallelism=max_parallelism)


@pytest.mark.parametrize(
    ("name", "backend", "parallelism", "max_parallelism"),
    [
        ("hashmap-canonical", "rocksdb", 3, None),
        ("rocksdb-native", "hashmap", 1, 100),
        ("hashmap-checkpoint", "hashmap", 3, 96),
        ("rocksdb-checkpoint", "rocksdb", 2, None),
    ],
)
def test_a_job_goes_on_from_its_own_tables(
    new_env: NewEnvironment,
    tmp_path: Path,
    name: str,
    backend: str,
    parallelism: int,
    max_parallelism: int | None,
) -> None:
    with tarfile.open(max(GOLDEN.glob(f"runs-*/{name}.tar.gz"))) as archive:
        archive.extractall(tmp_path / "kept", filter="data")
    written = rewritten(tmp_path / "kept", tmp_path / "written", max_parallelism)
    config = {
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "state.backend.type": backend,
    }
    build(env := new_env(parallelism, config), tmp_path / "out")
    handle = env.submit("again", from_savepoint=Path(written))
    assert handle.wait(DEADLINE_S).status == "FINISHED"
    assert result(tmp_path / "out") == wanted(new_env, tmp_path / "wanted")
