"""Aim: whatever kind of state a job has, it goes from one subtask to several and back to one as if it had never stopped.

Method: a job with every kind of state is stopped twice and started at another parallelism: from what an incremental
checkpoint has left, from a native or a canonical savepoint, with either backend, also with another one than before. All
three together have written what plain Python tells.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from penstock.client.job import JobHandle
from tests.integration.conftest import NewEnvironment
from tests.support.every_state import DEALT, PER_PHASE, PHASES, SPLITS, EveryState, now_ms
from tests.support.jobs import DEADLINE_S, await_details, cancel

pytestmark = [pytest.mark.integration, pytest.mark.sampled(100)]

BACKENDS = [(one,) * PHASES for one in ("rocksdb", "hashmap")]
CHANGES = [("hashmap", "rocksdb", "hashmap"), ("rocksdb", "hashmap", "rocksdb")]
KINDS = ("checkpoint", "native", "canonical")


def cases() -> list[Any]:
    found = []
    for backends, kinds in product(BACKENDS + CHANGES, product(KINDS, repeat=2)):
        hops = zip(backends, backends[1:], kinds, strict=False)
        if all(
            after == before or before == "hashmap" or kind == "canonical"
            for before, after, kind in hops
        ):
            found.append(pytest.param(backends, kinds, id="-".join([*backends, *kinds])))
    return found


def left(handle: JobHandle, kind: str, directory: Path) -> Path:
    """What a job is ended with, such that nothing of what comes behind it is written."""
    if kind == "canonical":  # behind a savepoint of this kind a checkpoint commits more than that
        path = Path(handle.stop(directory / "kept", format=kind, timeout=DEADLINE_S))
        assert handle.wait(DEADLINE_S).status == "FINISHED"
        return path
    if kind == "native":
        path = Path(handle.savepoint(directory / "kept", kind, timeout=DEADLINE_S))
    else:
        handle.checkpoint(DEADLINE_S)
        path = directory / "checkpoints" / handle.job_id
    cancel(handle)
    return path


@pytest.mark.parametrize(("backends", "kinds"), cases())
def test_one_to_three_to_one(
    new_env: NewEnvironment, tmp_path: Path, backends: tuple[str, ...], kinds: tuple[str, ...]
) -> None:
    gates = tmp_path / "gates"
    gates.mkdir()
    timer_ms = now_ms() + 3_000
    job = EveryState(gates, tmp_path / "files", tmp_path / "out", timer_ms)
    job.write_files()
    path: Path | None = None
    for phase, backend, parallelism in zip(range(PHASES), backends, (1, 3, 1), strict=True):
        config = {
            "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
            "execution.checkpointing.interval": "1h",
            "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
            "state.backend.type": backend,
        }
        env = new_env(parallelism, config)
        job.build(env)
        handle = env.submit(f"phase {phase}", from_savepoint=path)
        if phase:  # the next one builds upon it
            await_details(handle, lambda _m, state: state == "RUNNING")
            handle.checkpoint(DEADLINE_S)
        job.open_phase(phase)
        if phase < PHASES - 1:
            await_details(handle, _has_read(phase))
            path = left(handle, kinds[phase], tmp_path)
    assert handle.wait(DEADLINE_S).status == "FINISHED"
    job.check()


def _has_read(phase: int) -> Callable[[dict[str, Any], str], bool]:
    """Whether the sources have given all of the phase."""
    before = sum(DEALT[phase - 1]) if phase else 0
    wanted = SPLITS * PER_PHASE + sum(DEALT[phase]) - before

    def held(metrics: dict[str, Any], _state: str) -> bool:
        vertices = metrics["vertices"].values()
        return wanted == sum(
            one["records_in"] for one in vertices if one["name"].startswith("Phases")
        )

    return held
