"""Aim: what a submission claims is its job's, or given back, also where the same one comes twice, its client goes away,
or the job cannot be stored.

Method: a JobManager and a savepoint on disk; a submission is held in front of a step that is named, and goes on with the
real one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jobmanager.dispatcher import (
    claimed_starts_runner,
    dispatcher_runner,
    submission_checks_runner,
)
from jobmanager.dispatcher.job_start_runner import JobStart
from jobmanager.stores.job_store import JobStore
from jobmanager.stores.record_store import RECORD_NAME
from jobmanager.stores.starts_store import START_NAME
from jobmanager.stores.stored_job import is_unstored
from penstock.errors import JobRejected, StoreTransient, StreamError
from penstock.graph.output_in_doubt import IN_DOUBT_KEY
from penstock.pb import checkpoint_pb2, graph_pb2
from penstock.storage.local_store import LocalStore
from penstock.storage.manifest import encode_manifest
from penstock.storage.object_store import SwapUnanswered
from penstock.storage.output_claim import OutputClaim, OutputUse, read_claim
from penstock.storage.prepared_output import COMMITTABLES
from penstock.storage.restore_point import open_restore_point
from penstock.storage.savepoint import MANIFEST_PATH, OUTPUT_PATH
from tests.support.examples import RUNS_ALL
from tests.support.job_records import JobRecords
from tests.unit.jobmanager.test_jobmanager_checkpoints import run

JOB, OTHER = "1" * 32, "2" * 32


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A savepoint whose output is in doubt."""
    manifest = checkpoint_pb2.CheckpointManifest(job_id="0" * 32, checkpoint_id=7)
    manifest.properties.kind = checkpoint_pb2.CHECKPOINT_KIND_SAVEPOINT
    for vertex, uid, kind in (("v0", "src", "source"), ("v1", "snk", "sink")):
        stored = manifest.vertices.add(id=vertex, parallelism=2, max_parallelism=128)
        stored.operators.add(uid=uid, kind=kind)
    held = manifest.subtasks.add(vertex="v1").operators.add(operator_uid="snk").lists.add()
    held.name, held.items[:] = COMMITTABLES, [b"a file"]
    LocalStore(tmp_path / "saved").put(MANIFEST_PATH, [encode_manifest(manifest)])
    return tmp_path / "saved"


def claiming(graph: graph_pb2.JobGraph, saved: Path) -> graph_pb2.JobGraph:
    graph.config["execution.checkpointing.dir"] = str(saved.parent / "checkpoints")
    graph.config["execution.checkpointing.interval"] = "1h"
    graph.config["execution.state-recovery.path"] = str(saved)
    graph.config["execution.state-recovery.claim-mode"] = "claim"
    graph.config[IN_DOUBT_KEY] = "commit"
    return graph


def claimants(saved: Path) -> tuple[str, OutputClaim | None]:
    """Whose the savepoint is, and who publishes its output."""
    return open_restore_point(str(saved)).owner, read_claim(LocalStore(saved))


OWN = (JOB, OutputClaim(OutputUse.COMMITS, JOB))


class Held:
    """Holds the first call of a step until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, step: str) -> None:
        self.is_reached, self._may_go = asyncio.Event(), threading.Event()
        self.has_returned = asyncio.Event()
        self._loop, self._was_reached = asyncio.get_running_loop(), False
        self._call: Callable[..., Any] = getattr(owner, step)
        monkeypatch.setattr(owner, step, lambda *call: self._hold(*call))  # noqa: PLW0108 - a method

    def _hold(self, *arguments: Any) -> Any:
        if not self._was_reached:
            self._was_reached = True
            self._loop.call_soon_threadsafe(self.is_reached.set)
            assert self._may_go.wait(30)
        try:
            return self._call(*arguments)
        finally:
            self._loop.call_soon_threadsafe(self.has_returned.set)

    def let_go(self) -> None:
        self._may_go.set()


async def left_by_its_client(submission: Coroutine[Any, Any, None], held: Held) -> None:
    """A submission whose client goes away in front of the step that is held."""
    submitted = asyncio.ensure_future(submission)
    await held.is_reached.wait()
    submitted.cancel()
    with suppress(asyncio.CancelledError):
        await submitted
    held.let_go()


def test_one_that_comes_twice_claims_once_whatever_fails_meanwhile(
    cluster_of: Any, make_graph: Any, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster, asyncio.TaskGroup() as tasks:
            dispatcher, graph = cluster.jobmanager.dispatcher, claiming(make_graph(), saved)
            held = Held(monkeypatch, JobStore, "save")
            first = tasks.create_task(dispatcher.submit(JOB, graph))
            await held.is_reached.wait()
            assert claimants(saved) == OWN
            said = (saved / OUTPUT_PATH).rename(saved.parent / "said")
            (saved / OUTPUT_PATH).mkdir()  # so it can be neither read nor replaced
            again = asyncio.ensure_future(dispatcher.submit(JOB, graph))
            # It may not get on before the first one is done, however long it has.
            await asyncio.wait({again}, timeout=0.3)
            (saved / OUTPUT_PATH).rmdir()
            said.rename(saved / OUTPUT_PATH)
            held.let_go()
            await first
            await again
            assert JOB in dispatcher.jobs
            assert claimants(saved) == OWN

    run(scenario)


@pytest.mark.parametrize(
    ("owner", "step"), [(JobStart, "claim"), (JobStart, "claim_output"), (JobStore, "save")]
)
def test_where_its_client_goes_away_the_job_has_what_was_claimed(
    cluster_of: Any,
    make_graph: Any,
    saved: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    step: str,
) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            dispatcher, graph = cluster.jobmanager.dispatcher, claiming(make_graph(), saved)
            held = Held(monkeypatch, owner, step)
            await left_by_its_client(dispatcher.submit(JOB, graph), held)
            while JOB not in dispatcher.jobs:  # noqa: ASYNC110 - nobody asks for it again
                await asyncio.sleep(0.01)
            assert claimants(saved) == OWN

    run(scenario)


def test_where_its_client_has_gone_before_nothing_is_claimed(
    cluster_of: Any, make_graph: Any, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            dispatcher, graph = cluster.jobmanager.dispatcher, claiming(make_graph(), saved)
            held = Held(monkeypatch, JobStore, "check_leads")
            await left_by_its_client(dispatcher.submit(JOB, graph), held)
            await dispatcher.submit(OTHER, graph)
            assert claimants(saved) == (OTHER, OutputClaim(OutputUse.COMMITS, OTHER))
            assert JOB not in dispatcher.jobs

    run(scenario)


@pytest.mark.parametrize("in_the_way_of", [START_NAME, RECORD_NAME])
def test_where_it_cannot_be_stored_all_is_given_back(
    cluster_of: Any, make_graph: Any, saved: Path, tmp_path: Path, in_the_way_of: str
) -> None:
    async def scenario() -> None:
        async with cluster_of() as cluster:
            dispatcher, graph = cluster.jobmanager.dispatcher, claiming(make_graph(), saved)
            in_its_way = tmp_path / "jobmanager" / "jobs" / JOB / in_the_way_of
            in_its_way.mkdir(parents=True)
            with pytest.raises(StoreTransient):
                await dispatcher.submit(JOB, graph)
            while claimants(saved) != ("", None):  # noqa: ASYNC110 - nobody asks for it
                await asyncio.sleep(0.01)
            in_its_way.rmdir()
            await dispatcher.submit(JOB, graph)
            assert claimants(saved) == OWN

    run(scenario)


def test_where_it_may_be_stored_yet_the_job_keeps_what_it_has_claimed_at_first(
    cluster_of: Any, make_graph: Any, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A swap that S3 has not answered: once it is made, the next leader finds the job, and runs it."""

    def unanswered(store: JobStore, *_: object) -> int:
        raise SwapUnanswered("no answer yet")

    async def scenario() -> None:
        async with cluster_of() as cluster:
            dispatcher, graph = cluster.jobmanager.dispatcher, claiming(make_graph(), saved)
            with monkeypatch.context() as patch:
                patch.setattr(JobStore, "save", unanswered)
                with pytest.raises(SwapUnanswered):
                    await dispatcher.submit(JOB, graph)
            assert claimants(saved) == OWN
            await dispatcher.submit(JOB, graph)
            assert claimants(saved) == OWN

    run(scenario)


@pytest.mark.parametrize("claims", [False, True])
def test_a_job_that_is_stored_when_its_client_was_told_that_it_is_not_is_run_by_nobody(
    cluster_of: Any,
    make_graph: Any,
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    claims: bool,
) -> None:
    """S3 makes the swap when all was given back."""
    swap, late = LocalStore.compare_and_swap, list[Callable[[], bool]]()

    def slow(store: LocalStore, path: str, expected: bytes | None, new: bytes) -> bool:
        if path == f"{JOB}/{RECORD_NAME}" and not late:
            late.append(partial(swap, store, path, expected, new))
            raise SwapUnanswered("no answer yet")
        return swap(store, path, expected, new)

    monkeypatch.setattr(LocalStore, "compare_and_swap", slow)
    monkeypatch.setattr(claimed_starts_runner, "FIRST_PAUSE_S", 0.01)
    records = JobRecords(tmp_path)

    async def scenario() -> None:
        async with cluster_of() as cluster:
            dispatcher, graph = cluster.jobmanager.dispatcher, make_graph()
            graph = claiming(graph, saved) if claims else graph
            with pytest.raises(SwapUnanswered):
                await dispatcher.submit(JOB, graph)
            while not records.all() or claimants(saved) != ("", None):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert not late[0]()
            [record] = records.all().values()
            assert is_unstored(record)
            if not claims:
                await dispatcher.submit(JOB, graph)
                assert JOB in dispatcher.jobs
        async with cluster_of() as cluster:
            assert (JOB in cluster.jobmanager.dispatcher.jobs) is not claims

    run(scenario)


def test_a_job_whose_graph_is_written_when_its_client_was_told_that_it_is_not_stored_is_run_by_nobody(
    cluster_of: Any,
    make_graph: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The storage hangs at the first of what is written of it, and goes on."""
    put, may_go = LocalStore.put, threading.Event()

    def slow(store: LocalStore, path: str, chunks: Any) -> int:
        if path.startswith(f"{JOB}/graph-"):
            assert may_go.wait(30)
        return put(store, path, chunks)

    monkeypatch.setattr(LocalStore, "put", slow)
    monkeypatch.setattr(dispatcher_runner, "_RECORD_TIMEOUT_MS", 50)
    monkeypatch.setattr(claimed_starts_runner, "FIRST_PAUSE_S", 0.05)
    records = JobRecords(tmp_path)

    async def scenario() -> None:
        async with cluster_of() as cluster:
            with pytest.raises(StreamError):
                await cluster.jobmanager.dispatcher.submit(JOB, make_graph())
            may_go.set()
            while not any(is_unstored(one) for one in records.all().values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with cluster_of() as cluster:
            assert JOB not in cluster.jobmanager.dispatcher.jobs

    run(scenario)


@pytest.mark.skipif(not RUNS_ALL, reason="waits for deadlines; PENSTOCK_TESTS=all")
@pytest.mark.parametrize(
    ("owner", "step"), [(JobStart, "claim"), (JobStart, "claim_output"), (JobStore, "save")]
)
def test_what_a_call_claims_that_was_given_up_on_is_given_back(
    cluster_of: Any,
    make_graph: Any,
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    step: str,
) -> None:
    monkeypatch.setattr(submission_checks_runner, "CHECK_TIMEOUT_MS", 2_000)
    monkeypatch.setattr(dispatcher_runner, "_RECORD_TIMEOUT_MS", 2_000)
    note = tmp_path / "jobmanager" / "jobs" / JOB / START_NAME

    async def scenario() -> None:
        async with cluster_of() as cluster:
            dispatcher, graph = cluster.jobmanager.dispatcher, claiming(make_graph(), saved)
            held = Held(monkeypatch, owner, step)
            with pytest.raises((JobRejected, StoreTransient), match="answered"):
                await dispatcher.submit(JOB, graph)
            held.let_go()
            await held.has_returned.wait()
            while note.exists() or claimants(saved) != ("", None):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert all(is_unstored(record) for record in JobRecords(tmp_path).all().values())
            await dispatcher.submit(OTHER, graph)
            assert claimants(saved) == (OTHER, OutputClaim(OutputUse.COMMITS, OTHER))

    run(scenario)
