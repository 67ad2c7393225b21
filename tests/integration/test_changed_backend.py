"""Aim: a canonical savepoint takes a job from one state backend to the other, at another parallelism, whatever kind of
state it has.

Method: a job on real daemons takes a canonical savepoint and is cancelled; it is started from it on the other backend. What
the second job writes comes once each, and with what the first one had written it is the result of a job that ran through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.storage.kept_state import list_savepoints
from tests.integration.conftest import NewEnvironment
from tests.integration.test_nexmark_rescaled import golden, rows_in
from tests.support.jobs import DEADLINE_S, await_details, cancel, canonical
from tests.support.nexmark_queries import QUERIES, RATE

pytestmark = [pytest.mark.integration, pytest.mark.sampled(7)]

WAYS = [("hashmap", "rocksdb", 3), ("rocksdb", "hashmap", 3), ("rocksdb", "rocksdb", 1)]


def counted(rows: list[dict[str, Any]]) -> Counter[Any]:
    return Counter(map(canonical, rows))


@pytest.mark.parametrize(("before", "after", "parallelism"), WAYS)
@pytest.mark.parametrize("query", [name for name in QUERIES if name != "q1"])
def test_goes_on_with_another_backend(
    new_env: NewEnvironment, tmp_path: Path, query: str, before: str, after: str, parallelism: int
) -> None:
    config = {
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "execution.checkpointing.interval": "100ms",
    }
    build: Callable[..., ps.Stream] = QUERIES[query]
    wanted = counted(golden(new_env, tmp_path / "golden", query))
    assert wanted
    env = new_env(2, {**config, "state.backend.type": before})
    build(env, RATE).write_parquet(tmp_path / "first").uid("files")
    handle = env.submit("first")
    await_details(handle, lambda _m, _s: handle.details().last_checkpoint_id > 2)
    path = handle.savepoint(tmp_path / "kept", "canonical", timeout=DEADLINE_S)
    cancel(handle)
    env = new_env(parallelism, {**config, "state.backend.type": after})
    build(env, None).write_parquet(tmp_path / "second").uid("files")
    assert env.submit("second", from_savepoint=path).wait(DEADLINE_S).status == "FINISHED"
    first, second = counted(rows_in(tmp_path / "first")), counted(rows_in(tmp_path / "second"))
    assert second, "the first job had not read everything"
    # Behind the savepoint the first job wrote on, so rows may be in both; a query gives equal rows, of which one may lie
    # on either side.
    assert first <= wanted
    assert second <= wanted
    assert wanted <= first + second


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize(("before", "after", "parallelism"), WAYS)
def test_a_job_that_was_stopped_goes_on_with_another_backend(
    new_env: NewEnvironment,
    tmp_path: Path,
    before: str,
    after: str,
    parallelism: int,
    drain: bool,
) -> None:
    """A stop makes the job's last checkpoint and a savepoint of the same content, in the format that was asked for."""
    config = {
        "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
        "execution.checkpointing.interval": "100ms",
    }
    query = "q7"
    wanted = counted(golden(new_env, tmp_path / "golden", query))
    env = new_env(2, {**config, "state.backend.type": before})
    QUERIES[query](env, RATE).write_parquet(tmp_path / "first").uid("files")
    handle = env.submit("first")
    await_details(handle, lambda _m, _s: handle.details().last_checkpoint_id > 2)
    with pytest.raises(ValueError, match="native"):
        handle.stop(tmp_path / "kept", format="run")  # type: ignore[arg-type]
    path = handle.stop(tmp_path / "kept", drain, format="canonical", timeout=DEADLINE_S)
    assert [one.format for one in list_savepoints(str(tmp_path / "kept"))] == ["canonical"]
    env = new_env(parallelism, {**config, "state.backend.type": after})
    QUERIES[query](env, None).write_parquet(tmp_path / "second").uid("files")
    assert env.submit("second", from_savepoint=path).wait(DEADLINE_S).status == "FINISHED"
    first, second = counted(rows_in(tmp_path / "first")), counted(rows_in(tmp_path / "second"))
    if not drain:  # behind a drained one event time is over: whatever comes is late
        assert second, "the first job had not read everything"
        assert first + second == wanted
