"""Aim: a job that loses a process goes on from its newest checkpoint, and every row counts exactly once.

Method: a stateful job numbers the rows of each key; signals to real daemons once a checkpoint is complete;
what its sinks have committed at its end is compared with what follows from the input. A row that was lost,
or counted again, or numbered by state that was lost, shows.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

import penstock as ps
from common.clock import SystemClock
from jobmanager.graph.execution_attempt import AttemptState
from penstock.client.job_result import state_name
from penstock.errors import StreamError
from penstock.pb import client_pb2
from tests.support.committed_files import Table
from tests.support.paced_numbers import PacedNumbers
from tests.support.processes import DEADLINE_S, DaemonCluster, own_cluster, wait_ended

pytestmark = [pytest.mark.integration, pytest.mark.sampled(9)]

ROWS, KEYS, WINDOW_MS = 8_000, 7, 100
ROWS_AT_ONCE = 2 * WINDOW_MS
"""Of each of two splits: windows fire in front of the first checkpoint, and behind each."""
NUMBERED = pa.schema([("key", pa.int64()), ("n", pa.int64()), ("number", pa.int64())])
ORDERS = [
    pytest.param([["tm-1", "tm-2"], ["1"]], id="dependents-first"),
    pytest.param([["1"], ["tm-1", "tm-2"]], id="jobmanager-first"),
    pytest.param([["tm-1"], ["1"], ["tm-2"]], id="jobmanager-between"),
    pytest.param([["tm-1", "1", "tm-2"]], id="all-at-once"),
]
"""Who is told to end, and who only when these have ended."""
OFTEN = {
    "execution.checkpointing.interval": "200ms",
    "restart-strategy.exponential-delay.initial-backoff": "100ms",
}
NO_CHECKPOINTS = {"execution.checkpointing.interval": "none"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonCluster]:
    """Two TaskManagers with one slot each, quick to notice; nothing may be left of them."""
    with own_cluster(
        tmp_path_factory.mktemp("restarts"),
        taskmanagers=2,
        slots=1,
        heartbeat_interval="200ms",
        heartbeat_timeout="3s",
    ) as cluster:
        yield cluster


class Number(ps.KeyedProcessFunction):
    """Numbers the rows of each key."""

    last = ps.ValueState("last", pa.int64(), default=0)

    def process(self, row: Any, ctx: Any, out: Any) -> None:
        number = self.last.value() + 1
        self.last.update(number)
        out.emit(key=row.key, n=row.n, number=number)


class Job:
    """The job, and what must come out of it."""

    def __init__(
        self, handle: ps.JobHandle, directory: Path, windows: Any, *, takes_checkpoints: bool
    ) -> None:
        self.handle = handle
        self._directory = directory
        self._takes_checkpoints = takes_checkpoints
        self._numbered = Table(str(directory / "numbered"), lambda row: row["n"])
        self._windows = Table(str(directory / "windows"), lambda row: (row["key"], row["first"]))
        self._collected = windows

    def await_that(self, condition: Callable[[client_pb2.JobDetails], bool]) -> None:
        """Waits until this is so of the job, which must not have ended before."""

        class Held(Exception):  # noqa: N818 - not an error
            pass

        def look(details: client_pb2.JobDetails) -> None:
            if condition(details):
                raise Held

        with contextlib.suppress(Held):
            self.handle.wait(DEADLINE_S, on_progress=look)
            raise AssertionError(f"the job ended {self.handle.status()} before")

    def await_checkpoint(self) -> int:
        """Waits until a checkpoint is complete; its id."""
        self.await_that(lambda details: details.last_checkpoint_id > 0)
        return self.handle.details().last_checkpoint_id

    def finish(self) -> None:
        """Lets it read all that is left, waits for its end and compares."""
        (self._directory / "gate").touch()
        assert self.handle.wait(DEADLINE_S).status == "FINISHED"
        self._numbered.look()
        self._windows.look()
        by_key: dict[int, list[dict[str, Any]]] = {key: [] for key in range(KEYS)}
        for row in self._numbered.rows():
            by_key[row["key"]].append(row)
        for key, rows in by_key.items():
            wanted = list(range(key, ROWS, KEYS))
            assert sorted(row["n"] for row in rows) == wanted
            assert sorted(row["number"] for row in rows) == list(range(1, len(wanted) + 1))
        wanted_windows = expected_windows()
        keys = ("key", "rows", "first", "last", "total")
        assert sorted(tuple(row[key] for key in keys) for row in self._windows.rows()) == (
            wanted_windows
        )
        if self._collected is not None:
            rows = [tuple(row[key] for key in keys) for row in map(dict, self._collected)]
            # Without checkpoints what was handed out before comes again.
            assert (sorted(rows) if self._takes_checkpoints else sorted({*rows})) == wanted_windows

    @property
    def restarts(self) -> int:
        return self.handle.details().summary.restarts

    def restored_checkpoint_id(self, cluster: DaemonCluster) -> int | None:
        """The checkpoint that its newest attempts began with."""
        ended = cluster.site.penstock(
            "checkpoints", self.handle.job_id, "--json", "--jobmanager", cluster.jobmanager
        )
        restored: int | None = ended.json["restored_checkpoint_id"]
        return restored


def expected_windows() -> list[tuple[int, int, int, int, int]]:
    """(key, rows, first, last, total) of each window of each key, sorted."""
    found = []
    for start in range(0, ROWS, WINDOW_MS):
        for key in range(KEYS):
            of_key = [n for n in range(start, min(ROWS, start + WINDOW_MS)) if n % KEYS == key]
            found.append((key, len(of_key), of_key[0], of_key[-1], sum(of_key)))
    return sorted(found)


def numbers(env: ps.Environment, directory: Path) -> ps.Stream:
    """What the jobs read."""
    source = PacedNumbers(ROWS, directory / "gate", splits=2, rows_at_once=ROWS_AT_ONCE)
    return env.source(source).uid("numbers")


Submit = Callable[..., Job]


@pytest.fixture
def submit(cluster: DaemonCluster, tmp_path: Path) -> Iterator[Submit]:
    """Submits the job: ``submit(config, collect=)``; two subtasks, one on each TaskManager."""
    handles: list[ps.JobHandle] = []
    with contextlib.ExitStack() as stack:

        def run(config: Mapping[str, object] = OFTEN, *, collect: bool = False) -> Job:
            takes_checkpoints = config.get("execution.checkpointing.interval") != "none"
            env = stack.enter_context(
                ps.Environment(cluster.jobmanager, parallelism=2, config=config)
            )
            rows = numbers(env, tmp_path).with_event_time(
                "n", out_of_orderness="1s" if takes_checkpoints else "0ms"
            )
            rows = rows.with_columns(key=ps.col("n") % KEYS)
            rows.key_by("key").process(Number(), schema=NUMBERED).uid("number").write_json(
                str(tmp_path / "numbered")
            )
            windows = (
                rows.key_by("key")
                .window(ps.tumbling(f"{WINDOW_MS}ms"))
                .aggregate(rows=ps.count(), first=ps.min("n"), last=ps.max("n"), total=ps.sum("n"))
                .uid("windows")
                .select("key", "rows", "first", "last", "total")
            )
            windows.write_parquet(str(tmp_path / "windows"))
            collected = windows.collect() if collect else None
            handle = env.submit("numbers")
            handles.append(handle)
            return Job(handle, tmp_path, collected, takes_checkpoints=takes_checkpoints)

        yield run
        for handle in handles:
            # What a failed test leaves running must not take the next one's slots.
            with contextlib.suppress(StreamError):
                handle.cancel()


def slots_of(cluster: DaemonCluster) -> list[int]:
    return [
        pid for daemon in cluster.daemons("taskmanager") for pid in cluster.slot_pids(daemon["pid"])
    ]


def test_a_slot_process_that_is_killed(cluster: DaemonCluster, submit: Submit) -> None:
    job = submit(collect=True)
    at_least = job.await_checkpoint()
    os.kill(slots_of(cluster)[0], signal.SIGKILL)
    job.finish()
    assert job.restarts == 1
    restored = job.restored_checkpoint_id(cluster)
    assert restored is not None
    assert restored >= at_least


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_taskmanager_that_ends_and_is_replaced(
    cluster: DaemonCluster, submit: Submit, number: signal.Signals
) -> None:
    job = submit(collect=True)
    at_least = job.await_checkpoint()
    victim = cluster.daemons("taskmanager")[0]
    os.kill(victim["pid"], number)
    wait_ended(victim["pid"])
    job.await_that(lambda details: state_name(details) == "RESTARTING")
    failure = job.handle.details().failure
    assert failure.error_class == "TaskManagerLost"
    assert victim["id"] in failure.message
    cluster.start(taskmanagers=2)
    job.finish()
    assert job.restarts == 1
    assert (job.restored_checkpoint_id(cluster) or 0) >= at_least


def has_output(details: client_pb2.JobDetails) -> bool:
    """Whether each of its sinks has been given rows by the attempts of now."""
    return all(
        any(subtask.metrics.records_out for subtask in vertex.subtasks)
        for vertex in details.vertices
        if vertex.is_sink
    )


def test_of_two_regions_that_fail_at_once_the_one_that_has_its_slot_runs_again_meanwhile(
    cluster: DaemonCluster, tmp_path: Path
) -> None:
    """Nothing is exchanged: each subtask is a region. One loses its process, the other its TaskManager."""
    config = {
        "execution.checkpointing.interval": "200ms",
        "restart-strategy.exponential-delay.initial-backoff": "2s",
    }
    with ps.Environment(cluster.jobmanager, parallelism=2, config=config) as env:
        numbers(env, tmp_path).write_json(str(tmp_path / "rows"))
        handle = env.submit("apart")
        job = Job(handle, tmp_path, None, takes_checkpoints=True)
        job.await_checkpoint()
        subtasks = handle.details().vertices[0].subtasks
        daemons = {daemon["id"]: daemon["pid"] for daemon in cluster.daemons("taskmanager")}
        stays, goes = (subtask.taskmanager_id for subtask in subtasks)
        [process] = cluster.slot_pids(daemons[stays])
        os.kill(process, signal.SIGKILL)
        os.kill(daemons[goes], signal.SIGKILL)
        wait_ended(daemons[goes])

        def is_apart(details: client_pb2.JobDetails) -> bool:
            back, waits = details.vertices[0].subtasks
            has_its_own = back.attempt > 0 and AttemptState(back.state) is AttemptState.RUNNING
            lacks_one = AttemptState(waits.state) is AttemptState.SCHEDULED
            return has_its_own and lacks_one and details.slot_wait.needed == 1

        job.await_that(is_apart)
        assert handle.status() == "RUNNING"
        checkpoint_id = handle.details().last_checkpoint_id
        cluster.start(taskmanagers=2)
        (tmp_path / "gate").touch()
        assert handle.wait(DEADLINE_S).status == "FINISHED"
        assert handle.details().last_checkpoint_id >= checkpoint_id
        assert job.restarts == 1, "what fails while the delay runs counts once"
    written = Table(str(tmp_path / "rows"), lambda row: row["n"])
    written.look()
    assert sorted(row["n"] for row in written.rows()) == list(range(ROWS))


def stop(cluster: DaemonCluster, ids: Sequence[str]) -> None:
    """Tells daemons to end, as whoever watches over them does, and waits until they have."""
    pids = [daemon["pid"] for daemon in cluster.daemons() if daemon["id"] in ids]
    assert len(pids) == len(ids)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    for pid in pids:
        wait_ended(pid)


@pytest.mark.parametrize("order", ORDERS)
def test_daemons_that_are_told_to_end_in_any_order_are_no_failure(
    cluster: DaemonCluster, submit: Submit, order: list[list[str]]
) -> None:
    # The first failure would end it.
    job = submit({**OFTEN, "restart-strategy.type": "none"})
    at_least = job.await_checkpoint()
    for ids in order:
        stop(cluster, ids)
    cluster.start(taskmanagers=2)
    job.finish()
    assert (job.restored_checkpoint_id(cluster) or 0) >= at_least


@pytest.mark.parametrize("config", [OFTEN, NO_CHECKPOINTS], ids=["checkpoints", "from-nothing"])
def test_a_job_without_restarts_goes_on_when_taskmanagers_are_told_to_end(
    cluster: DaemonCluster, submit: Submit, config: Mapping[str, object]
) -> None:
    job = submit({**config, "restart-strategy.type": "none"}, collect=True)
    for restarts, id in enumerate(("tm-1", "tm-2", "tm-1")):
        if config is OFTEN:
            job.await_checkpoint()
        job.await_that(
            lambda details, restarts=restarts: (  # type: ignore[misc]
                state_name(details) == "RUNNING"
                and details.summary.restarts == restarts
                and len(slots_of(cluster)) == 2
                and (config is OFTEN or has_output(details))
            )
        )
        stop(cluster, [id])
        job.await_that(lambda details: state_name(details) == "RESTARTING")
        cluster.start(taskmanagers=2)
    job.finish()
    told = [exception.root_cause.message for exception in job.handle.exceptions()]
    assert len(told) == 3
    assert all("was told to end" in message for message in told)


def test_a_taskmanager_that_is_paused_and_comes_back(
    cluster: DaemonCluster, submit: Submit
) -> None:
    job = submit(collect=True)
    at_least = job.await_checkpoint()
    paused = cluster.daemons("taskmanager")[0]["pid"]
    os.kill(paused, signal.SIGSTOP)
    try:
        job.await_that(lambda details: state_name(details) == "RESTARTING")
    finally:
        os.kill(paused, signal.SIGCONT)
    job.finish()
    assert job.restarts >= 1
    assert (job.restored_checkpoint_id(cluster) or 0) >= at_least


def test_a_forkserver_that_is_killed(cluster: DaemonCluster, submit: Submit) -> None:
    job = submit()
    at_least = job.await_checkpoint()
    taskmanager = cluster.daemons("taskmanager")[0]["pid"]
    (forkserver,) = [process.pid for process in psutil.Process(taskmanager).children()]
    os.kill(forkserver, signal.SIGKILL)
    job.finish()
    assert job.restarts == 1
    assert (job.restored_checkpoint_id(cluster) or 0) >= at_least


def test_a_jobmanager_that_is_paused_finds_everything_as_it_was(
    cluster: DaemonCluster, submit: Submit
) -> None:
    job = submit(collect=True)
    job.await_checkpoint()
    slots = slots_of(cluster)
    pid, since = cluster.pid("jobmanager"), SystemClock().now_ms() / 1000
    os.kill(pid, signal.SIGSTOP)
    try:
        # Longer than heartbeat.timeout, shorter than the grace.
        cluster.wait_for_log("taskmanager", "jobmanager.silent", since=since)
    finally:
        os.kill(pid, signal.SIGCONT)
    cluster.wait_for_log("taskmanager", "jobmanager.returned", since=since)
    assert slots_of(cluster) == slots
    job.finish()
    assert job.restarts == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_jobmanager_whose_successor_goes_on(
    cluster: DaemonCluster, submit: Submit, number: signal.Signals
) -> None:
    job = submit()
    at_least = job.await_checkpoint()
    taskmanagers = [daemon["pid"] for daemon in cluster.daemons("taskmanager")]
    address, pid = cluster.jobmanager, cluster.pid("jobmanager")
    os.kill(pid, number)
    wait_ended(pid)
    cluster.start(taskmanagers=2)
    assert cluster.jobmanager == address
    assert [daemon["pid"] for daemon in cluster.daemons("taskmanager")] == taskmanagers
    job.finish()
    assert (job.restored_checkpoint_id(cluster) or 0) >= at_least


def test_a_job_that_waits_is_told_that_its_jobmanager_suspends_it(
    cluster: DaemonCluster, submit: Submit
) -> None:
    job = submit()
    job.await_checkpoint()
    pid = cluster.pid("jobmanager")

    def end(details: client_pb2.JobDetails) -> None:
        if state_name(details) == "RUNNING":
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    with pytest.raises(StreamError) as raised:
        job.handle.wait(DEADLINE_S, on_progress=end)
    assert not isinstance(raised.value, ps.JobFailed), raised.value
    wait_ended(pid)
    cluster.start(taskmanagers=2)
    job.finish()


def test_all_daemons_are_killed_and_the_job_goes_on(cluster: DaemonCluster, submit: Submit) -> None:
    job = submit()
    at_least = job.await_checkpoint()
    for daemon in cluster.daemons():
        os.kill(daemon["pid"], signal.SIGKILL)
    cluster.site.wait_for_no_process()
    cluster.start(taskmanagers=2)
    job.finish()
    assert (job.restored_checkpoint_id(cluster) or 0) >= at_least


def test_with_pure_defaults_a_lost_slot_restarts_the_job_from_its_beginning(
    cluster: DaemonCluster, submit: Submit
) -> None:
    # The first checkpoint would come after ten seconds.
    job = submit({}, collect=True)
    job.await_that(lambda details: state_name(details) == "RUNNING" and len(slots_of(cluster)) == 2)
    os.kill(slots_of(cluster)[0], signal.SIGKILL)
    job.finish()
    assert job.restarts == 1
    assert job.restored_checkpoint_id(cluster) is None


def test_a_job_that_fails_again_and_again_ends_when_its_restarts_are_used_up(
    cluster: DaemonCluster, submit: Submit
) -> None:
    job = submit(
        {
            **OFTEN,
            "restart-strategy.type": "fixed-delay",
            "restart-strategy.fixed-delay.attempts": 1,
            "restart-strategy.fixed-delay.delay": "100ms",
        }
    )
    for restarts in (0, 1):
        job.await_that(
            lambda details, restarts=restarts: (  # type: ignore[misc]
                details.summary.restarts == restarts
                and state_name(details) == "RUNNING"
                and len(slots_of(cluster)) == 2
            )
        )
        os.kill(slots_of(cluster)[0], signal.SIGKILL)
    with pytest.raises(ps.JobFailed, match="restarted once"):
        job.handle.wait(DEADLINE_S)
