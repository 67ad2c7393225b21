"""Aim: slots of a running TaskManager do what the JobManager asks, and their ends are told.

Method: the real daemon in this process, real slot processes that run ``fake_slot``, a fake
JobManager over real gRPC.
"""

# ruff: noqa: PTH208, ASYNC240 - small files and a local page do not hold these tests up

from __future__ import annotations

import ast
import asyncio
import hashlib
import io
import os
import signal
import zipfile
from pathlib import Path
from typing import Any

import pytest
import structlog

from common.pb import internal_pb2
from penstock.errors import (
    Fenced,
    JobRejected,
    NoResourceAvailable,
    ProtocolMismatch,
    StoreCorrupt,
    StreamError,
    TaskFailure,
)
from penstock.pb import client_pb2, graph_pb2
from taskmanager.processes.fork_protocol import PARTITION_SERVER_NAME
from tests.support.jobs import DEADLINE_S

RUNNING = client_pb2.ATTEMPT_STATE_RUNNING
FINISHED = client_pb2.ATTEMPT_STATE_FINISHED
CANCELED = client_pb2.ATTEMPT_STATE_CANCELED
FAILED = client_pb2.ATTEMPT_STATE_FAILED


def slot_pids(parent: int) -> list[int]:
    """Children of a process."""
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def processes_below() -> list[int]:
    """Slot processes of this process's forkservers."""
    return [
        slot
        for child in slot_pids(os.getpid())
        if b"taskmanager.processes.forkserver" in Path(f"/proc/{child}/cmdline").read_bytes()
        for slot in slot_pids(child)
        if Path(f"/proc/{slot}/comm").read_text().strip() != PARTITION_SERVER_NAME
    ]


def test_a_job_runs_and_its_slot_ends(tmp_path: Path, cluster: Any, go: Any) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            registered = c.jobmanager.registrations[0]
            assert registered.slots == 2
            assert registered.pid == os.getpid()
            assert any(package.startswith("numpy==") for package in registered.packages)

            (endpoint,) = await c.allocate()
            (again,) = await c.allocate()
            assert endpoint == again
            assert Path(endpoint.unix_path).is_socket()
            assert len(endpoint.unix_path.encode()) < 100
            assert len(processes_below()) == 1

            attempt = await c.deploy("finish")
            await c.deploy("finish")  # a repeated call
            await c.jobmanager.until_state(attempt, FINISHED)
            assert c.jobmanager.states(attempt) == [RUNNING, FINISHED]
            await c.jobmanager.until(
                lambda: any(
                    entry.metrics.records_in == 41
                    for heartbeat in c.jobmanager.heartbeats
                    for entry in heartbeat.metrics
                )
            )
            assert c.jobmanager.heartbeats[-1].held_slots[0].slot_id == "s0"

            await c.free()
            assert processes_below() == []
            assert not Path(endpoint.unix_path).exists()
            await c.free()  # harmless

    go(work)


def test_rows_that_finished_attempts_kept_end_with_their_process(
    tmp_path: Path, cluster: Any, go: Any
) -> None:
    """Nothing else would tell: their consumers wait for a process that is gone."""

    async def work() -> None:
        async with cluster(tmp_path) as c:
            await c.allocate()
            attempt = await c.deploy("finish-and-die")
            await c.jobmanager.until(
                lambda: any(event.HasField("kept_rows_lost") for event in c.jobmanager.events)
            )
            (lost,) = [e for e in c.jobmanager.events if e.HasField("kept_rows_lost")]
            assert lost.attempt == attempt
            assert "was killed by SIGKILL" in lost.kept_rows_lost.reason
            assert c.jobmanager.states(attempt) == [RUNNING, FINISHED]

    go(work)


def test_what_a_killed_process_leaves_in_its_work_directory_is_removed(
    tmp_path: Path, cluster: Any, go: Any
) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            await c.allocate()
            failure = await c.jobmanager.until_state(await c.deploy("litter"), FAILED)
            left = Path(failure.message.partition("left ")[2].strip())
            await c.allocate()  # the next process of the slot need not wait for it
            await c.jobmanager.until(lambda: not left.parent.parent.exists())

    go(work)


def test_metrics_arrive_ahead_of_the_last_state(tmp_path: Path, cluster: Any, go: Any) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            await c.allocate()
            attempt = await c.deploy("finish")
            await c.jobmanager.until_state(attempt, FINISHED)
            last_events = len(c.jobmanager.log) - 1 - c.jobmanager.log[::-1].index("events")
            before = c.jobmanager.log[:last_events].count("heartbeat")
            assert any(heartbeat.metrics for heartbeat in c.jobmanager.heartbeats[:before])

    go(work)


def test_metrics_are_those_of_the_newest_attempts(tmp_path: Path, cluster: Any, go: Any) -> None:
    """A slot process lives through many restarts: what a heartbeat carries must not grow with them."""

    async def work() -> None:
        async with cluster(tmp_path) as c:
            await c.allocate()
            other = await c.deploy("finish", vertex="v1")
            for number in range(5):
                attempt = await c.deploy("finish", number=number)
                await c.jobmanager.until_state(attempt, FINISHED)
            await c.jobmanager.until_state(other, FINISHED)
            count = len(c.jobmanager.heartbeats)
            await c.jobmanager.until(lambda: len(c.jobmanager.heartbeats) > count + 1)
            newest = c.jobmanager.heartbeats[-1]
            assert [entry.attempt for entry in newest.metrics] == [other, attempt]

    go(work)


@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        ("kill", ["was killed by SIGKILL", "last words"]),
        ("exit:3", ["exited with status 3"]),
        ("raise:oh no", ["exited with status 1", "RuntimeError: oh no"]),
        ("garbage", ["sent what is no report"]),
        ("leave-child", ["was killed by SIGKILL"]),
    ],
)
def test_the_end_of_a_slot_process_is_told(
    tmp_path: Path, cluster: Any, go: Any, behaviour: str, told: list[str]
) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            await c.allocate()
            bystander = await c.deploy("run", vertex="v1")
            attempt = await c.deploy(behaviour)
            for one in (attempt, bystander):
                failure = await c.jobmanager.until_state(one, FAILED)
                assert failure.error_class == "TaskFailure"
                assert failure.vertex == one.vertex
                assert failure.taskmanager_id == "tm"
                for text in told:
                    assert text in failure.message
            late = await c.deploy("run", vertex="v2")
            failure = await c.jobmanager.until_state(late, FAILED)
            assert "could not be started" in failure.message
            # The slot can be had again.
            assert len(await c.allocate("other")) == 1

    go(work)


def test_what_a_slot_said_before_it_died_counts(tmp_path: Path, cluster: Any, go: Any) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            await c.allocate()
            bystander = await c.deploy("run", vertex="v1")
            attempt = await c.deploy("finish-and-die")
            await c.jobmanager.until_state(bystander, FAILED)
            assert c.jobmanager.states(attempt) == [RUNNING, FINISHED]

    go(work)


def test_slots_are_isolated(tmp_path: Path, cluster: Any, go: Any) -> None:
    async def work() -> None:
        read, write = os.pipe()
        environment = None
        async with cluster(
            tmp_path, environment, **{"taskmanager.print-to-terminal": "false"}
        ) as c:
            await c.allocate("other", ("s1",))
            await c.allocate(config={"execution.batch-rows": "77"})
            attempt = await c.deploy("facts")
            failure = await c.jobmanager.until_state(attempt, FAILED)
            facts = ast.literal_eval(failure.message)
            # null, log, log, control, listening socket and the listing itself: nothing inherited.
            assert facts["fds"].count("socket") == 2
            assert len(facts["fds"]) <= 6
            assert facts["switch"] == pytest.approx(0.0005)
            assert facts["sigint"]
            assert facts["sigterm"]
            assert facts["terminal"] is None
            assert facts["config"]["execution.batch-rows"] == "77"
            assert facts["log_directory"] == str(tmp_path / "logs" / "jobs" / "job")
        os.close(read)
        os.close(write)

    go(work)


def test_the_terminal_is_passed_on(tmp_path: Path, cluster: Any, go: Any, environment: Any) -> None:
    async def work() -> None:
        read, write = os.pipe()
        async with cluster(
            tmp_path,
            environment(PENSTOCK_TERMINAL_FD=str(write)),
            **{"taskmanager.print-to-terminal": "true"},
        ) as c:
            await c.allocate()
            attempt = await c.deploy("facts")
            failure = await c.jobmanager.until_state(attempt, FAILED)
            assert ast.literal_eval(failure.message)["terminal"] is not None
            assert os.read(read, 100) == b"hello terminal\n"
        os.close(read)
        os.close(write)

    go(work)


def test_cancellation(tmp_path: Path, cluster: Any, go: Any) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            await c.allocate()
            (pid,) = processes_below()
            obeys = await c.deploy("run")
            await c.cancel(obeys)
            await c.cancel(obeys)
            await c.jobmanager.until_state(obeys, CANCELED)
            assert processes_below() == [pid]

            stubborn = await c.deploy("run", vertex="stubborn")
            other = await c.deploy("run", vertex="other")
            await c.cancel(stubborn)
            await c.jobmanager.until_state(stubborn, CANCELED)
            failure = await c.jobmanager.until_state(other, FAILED)
            assert "stubborn/0 (attempt 0) did not react to its cancellation" in failure.message
            assert processes_below() == []

    go(work)


@pytest.mark.parametrize("is_final", [False, True])
def test_a_slot_hears_whether_a_cancellation_is_final(
    tmp_path: Path, cluster: Any, go: Any, is_final: bool
) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            await c.allocate()
            attempt = await c.deploy("run", vertex="tells")
            await c.jobmanager.until_state(attempt, RUNNING)
            await c.cancel(attempt, is_final=is_final)
            failure = await c.jobmanager.until_state(attempt, FAILED)
            assert failure.message == f"is final: {is_final}"

    go(work)


def test_a_slot_that_hangs_is_killed_when_cancelled(tmp_path: Path, cluster: Any, go: Any) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            await c.allocate()
            attempt = await c.deploy("hang")
            await c.jobmanager.until_state(attempt, RUNNING)
            await c.cancel(attempt)
            await c.jobmanager.until_state(attempt, CANCELED)
            assert c.jobmanager.states(attempt) == [RUNNING, CANCELED]

    go(work)


def test_an_attempt_that_never_came_is_cancelled_for_good(
    tmp_path: Path, cluster: Any, go: Any
) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            await c.allocate()
            early = internal_pb2.AttemptId(job_id="job", vertex="v0", subtask_index=0, attempt=0)
            await c.cancel(early)
            await c.jobmanager.until_state(early, CANCELED)
            await c.deploy("finish")  # overtaken by its cancellation
            other = await c.deploy("finish", vertex="v1")
            await c.jobmanager.until_state(other, FINISHED)
            assert c.jobmanager.states(early) == [CANCELED]

    go(work)


def test_commands_reach_attempts(tmp_path: Path, cluster: Any, go: Any) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            await c.allocate()
            attempt = await c.deploy("run")
            command = internal_pb2.TaskCommand(
                attempt=attempt, commit_output=internal_pb2.CommitOutput()
            )
            stale = internal_pb2.TaskCommand(
                attempt=internal_pb2.AttemptId(job_id="job", vertex="gone"),
                commit_output=internal_pb2.CommitOutput(),
            )
            request = internal_pb2.SendTaskCommandsRequest(
                leader_epoch=1, commands=[stale, command]
            )
            await c.call("SendTaskCommands", request)
            await c.jobmanager.until_state(attempt, FINISHED)

    go(work)


def test_slots_that_are_not_to_be_had(tmp_path: Path, cluster: Any, go: Any) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            await c.allocate("one", ("s0", "s1"))
            with pytest.raises(NoResourceAvailable, match="held by job one"):
                await c.allocate("two", ("s0",))
            with pytest.raises(NoResourceAvailable, match="0 of 2"):
                await c.allocate("two", ("s2",))
            with pytest.raises(JobRejected, match="slot id"):
                await c.allocate("two", ("../s",))
            with pytest.raises(JobRejected, match=r"nowhere \(not installed\)"):
                await c.allocate("two", ("s3",), requirements=["nowhere"])
            # A slot whose process is being ended is waited for.
            freed, allocated = await asyncio.gather(
                c.free("one", ("s0",)), c.allocate("two", ("s0",)), return_exceptions=True
            )
            assert freed is None
            if isinstance(allocated, NoResourceAvailable):  # it came before the slot was freed
                allocated = await c.allocate("two", ("s0",))
            assert len(allocated) == 1

    go(work)


@pytest.mark.parametrize("behaviour", ["dies"])
def test_a_slot_that_does_not_start(
    tmp_path: Path, cluster: Any, go: Any, environment: Any, behaviour: str
) -> None:
    async def work() -> None:
        async with cluster(tmp_path, environment(FAKE_SLOT=behaviour)) as c:
            with pytest.raises(TaskFailure, match="exited with status 7") as caught:
                await c.allocate()
            assert "the end is near" in str(caught.value)
            with pytest.raises(TaskFailure):
                await c.allocate()

    go(work)


def test_a_slot_is_freed_while_it_starts(
    tmp_path: Path, cluster: Any, go: Any, environment: Any
) -> None:
    async def work() -> None:
        async with cluster(tmp_path, environment(FAKE_SLOT="silent")) as c:
            allocating = asyncio.ensure_future(c.allocate())
            await c.jobmanager.until(
                lambda: any(heartbeat.held_slots for heartbeat in c.jobmanager.heartbeats)
            )
            await c.free()
            with pytest.raises(TaskFailure):
                await allocating
            assert processes_below() == []

    go(work)


def test_results_flow_with_back_pressure(tmp_path: Path, cluster: Any, go: Any) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            c.jobmanager.room.clear()
            await c.allocate()
            attempt = await c.deploy("results:3")
            other = await c.deploy("results:3", vertex="v1")
            # Both collects have one chunk under way; neither waits for the other.
            await c.jobmanager.until(lambda: len(c.jobmanager.results) == 2)
            assert c.jobmanager.states(attempt) in ([], [RUNNING])
            c.jobmanager.room.set()
            for one in (attempt, other):
                await c.jobmanager.until_state(one, FINISHED)
            assert len(c.jobmanager.results) == 6
            assert {result.job_id for result in c.jobmanager.results} == {"job"}
            assert {result.leader_epoch for result in c.jobmanager.results} == {1}

            c.jobmanager.satisfied_at = 1
            limited = await c.deploy("results:100", vertex="v2")
            await c.jobmanager.until_state(limited, FINISHED)
            assert len(c.jobmanager.results) == 8

    go(work)


def code_archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("mine.py", "x = 1\n")
    return buffer.getvalue()


def test_artifacts_are_fetched_once_and_verified(tmp_path: Path, cluster: Any, go: Any) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            code, data = code_archive(), b"0123456789" * 10
            artifacts = [
                graph_pb2.Artifact(id=hashlib.sha256(content).hexdigest(), name=name, kind=kind)
                for content, name, kind in ((code, "code.zip", "code"), (data, "t.arrow", "data"))
            ]
            for artifact, content in zip(artifacts, (code, data), strict=True):
                c.jobmanager.artifacts[artifact.id] = content
            await c.allocate(slots=("s0", "s1"), artifacts=artifacts)
            assert sorted(c.jobmanager.downloads) == sorted(one.id for one in artifacts)
            attempt = await c.deploy("facts")
            facts = ast.literal_eval((await c.jobmanager.until_state(attempt, FAILED)).message)
            (code_path,) = facts["code_paths"]
            assert (Path(code_path) / "mine.py").read_text() == "x = 1\n"
            assert Path(facts["artifacts"][artifacts[1].id]).read_bytes() == data
            await c.free()
            assert not Path(code_path).exists()
            await c.allocate("again", artifacts=artifacts)
            assert len(c.jobmanager.downloads) == 2

            wrong = graph_pb2.Artifact(id="0" * 64, name="w.zip", kind="code")
            c.jobmanager.artifacts[wrong.id] = b"something else"
            with pytest.raises(StoreCorrupt, match=r"w\.zip"):
                await c.allocate("wrong", ("s1",), artifacts=[wrong])
            no_zip = graph_pb2.Artifact(
                id=hashlib.sha256(b"x").hexdigest(), name="x.zip", kind="code"
            )
            c.jobmanager.artifacts[no_zip.id] = b"x"
            with pytest.raises(JobRejected, match="no zip archive"):
                await c.allocate("wrong", ("s1",), artifacts=[no_zip])
            with pytest.raises(JobRejected, match="no sha256"):
                await c.allocate("wrong", ("s1",), artifacts=[graph_pb2.Artifact(id="../x")])
            assert len(await c.allocate("right", ("s1",))) == 1

    go(work)


def test_fencing(tmp_path: Path, cluster: Any, go: Any) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            await c.allocate()
            attempt = await c.deploy("run")
            await c.jobmanager.until_state(attempt, RUNNING)
            with pytest.raises(Fenced, match="epoch 0 is over"):
                await c.allocate("job", ("s1",), epoch=0)
            with pytest.raises(Fenced, match="has not registered with epoch 2"):
                await c.allocate("job", ("s1",), epoch=2)
            (old,) = processes_below()
            c.jobmanager.epoch = 2
            await c.jobmanager.until_registered_again()
            await c.allocate("new", ("s1",))
            assert old not in processes_below()
            with pytest.raises(Fenced):
                await c.allocate("job", ("s0",), epoch=1)
            assert c.jobmanager.states(attempt) == [RUNNING]

    go(work)


def test_a_cluster_that_begins_anew_is_followed_an_earlier_leader_is_not(
    tmp_path: Path, cluster: Any, go: Any
) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            c.jobmanager.epoch = 7
            await c.jobmanager.until_registered_again()
            # Its directory was wiped: another cluster, whose epochs begin at 1.
            c.jobmanager.cluster_id, c.jobmanager.epoch = "wiped", 1
            await c.jobmanager.until_registered_again()
            await c.allocate()
            c.jobmanager.epoch = 0
            c.jobmanager.is_known = False
            count = len(c.jobmanager.registrations)
            with structlog.testing.capture_logs() as logs:
                await c.jobmanager.until(lambda: len(c.jobmanager.registrations) > count + 1)
            (refused,) = {
                (entry["log_level"], entry["event"])
                for entry in logs
                if "leader epoch" in str(entry)
            }
            assert refused == ("error", "leader.refused")

    go(work)


def test_an_id_that_another_daemon_has_is_told_and_ends_this_one(
    tmp_path: Path, cluster: Any, go: Any
) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            c.jobmanager.refuse_registration = JobRejected("taskmanager.id tm is in use by h:1")
            c.jobmanager.is_known = False
            await asyncio.wait([c.daemon])

    with pytest.raises(BaseExceptionGroup) as caught:
        go(work)
    assert caught.group_contains(JobRejected, match="in use by h:1")


def test_rows_that_are_refused_fail_their_attempt(tmp_path: Path, cluster: Any, go: Any) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            c.jobmanager.refuse_results = StreamError("PushResults failed inside the server")
            await c.allocate()
            failure = await c.jobmanager.until_state(await c.deploy("results:2"), FAILED)
            assert "did not take rows of collect" in failure.message
            assert "failed inside the server" in failure.message
            # Rows that nobody wants any more do no harm.
            c.jobmanager.refuse_results = Fenced("no such collect")
            await c.allocate("next")
            attempt = await c.deploy("results:2", job="next")
            await c.jobmanager.until_state(attempt, FINISHED)

    go(work)


@pytest.mark.parametrize("how", ["silent", "unknown"])
def test_losing_the_jobmanager_ends_what_ran_for_it(
    tmp_path: Path, cluster: Any, go: Any, how: str
) -> None:
    async def work() -> None:
        options = {"taskmanager.jobmanager-grace": "200ms"}
        async with cluster(tmp_path, **options) as c:
            c.jobmanager.heartbeat_timeout_ms = 300
            c.jobmanager.is_known = False  # registers again, with the short timeout
            await c.jobmanager.until(lambda: len(c.jobmanager.registrations) > 1)
            c.jobmanager.is_known = True
            await c.jobmanager.until(lambda: c.jobmanager.heartbeats[-1].incarnation)
            await c.allocate()
            await c.deploy("run")
            count = len(c.jobmanager.registrations)
            if how == "silent":
                c.jobmanager.is_silent = True
            else:
                c.jobmanager.is_known = False
            await c.jobmanager.until(lambda: len(c.jobmanager.registrations) > count)
            c.jobmanager.is_silent, c.jobmanager.is_known = False, True
            assert processes_below() == []
            incarnations = [one.incarnation for one in c.jobmanager.registrations]
            assert len(set(incarnations)) == len(incarnations)
            c.jobmanager.heartbeats.clear()
            await c.jobmanager.until(lambda: len(c.jobmanager.heartbeats) > 1)
            assert len(await c.allocate("next")) == 1

    go(work)


def test_what_runs_outlives_a_jobmanager_that_was_away(
    tmp_path: Path, cluster: Any, go: Any
) -> None:
    """It is away for longer than the heartbeat timeout, and nothing is lost: also not the last words."""

    async def work() -> None:
        async with cluster(tmp_path, rpc_timeout="500ms") as c:
            c.jobmanager.heartbeat_timeout_ms = 300
            await c.jobmanager.until_registered_again()
            await c.allocate(slots=("s0", "s1"))
            attempt = await c.deploy("run")
            await c.jobmanager.until_state(attempt, RUNNING)
            before = processes_below()
            count = len(c.jobmanager.registrations)
            c.jobmanager.is_silent = True
            finished = await c.deploy("finish", slot="s1", vertex="v1")
            await c.jobmanager.until_silent_for(2 * 0.3)
            c.jobmanager.is_silent = False
            await c.jobmanager.until_state(finished, FINISHED)
            assert c.jobmanager.states(finished) == [RUNNING, FINISHED]
            assert processes_below() == before
            assert len(c.jobmanager.registrations) == count

    go(work)


def test_a_jobmanager_that_returns_as_another_gets_nothing_of_the_old(
    tmp_path: Path, cluster: Any, go: Any
) -> None:
    async def work() -> None:
        async with cluster(tmp_path, rpc_timeout="500ms") as c:
            c.jobmanager.heartbeat_timeout_ms = 300
            await c.jobmanager.until_registered_again()
            await c.allocate()
            attempt = await c.deploy("run")
            await c.jobmanager.until_state(attempt, RUNNING)
            c.jobmanager.is_silent = True
            finished = await c.deploy("finish", vertex="v1")
            await c.jobmanager.until_silent_for(2 * 0.3)
            c.jobmanager.epoch += 1
            c.jobmanager.is_known = False
            c.jobmanager.is_silent = False
            await c.jobmanager.until_registered_again()
            assert processes_below() == []
            assert c.jobmanager.states(finished) == []
            assert len(await c.allocate("next")) == 1

    go(work)


def test_events_are_sent_again_until_they_arrive(tmp_path: Path, cluster: Any, go: Any) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            await c.allocate()
            c.jobmanager.fail_reports = 2
            attempt = await c.deploy("finish")
            await c.jobmanager.until_state(attempt, FINISHED)
            assert c.jobmanager.states(attempt) == [RUNNING, FINISHED]

    go(work)


def test_the_forkserver_dies(tmp_path: Path, cluster: Any, go: Any) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            await c.allocate()
            attempt = await c.deploy("run")
            await c.jobmanager.until_state(attempt, RUNNING)
            (slot,) = processes_below()
            forkserver = int(Path(f"/proc/{slot}/stat").read_text().rsplit(")")[1].split()[1])
            os.kill(forkserver, signal.SIGKILL)
            failure = await c.jobmanager.until_state(attempt, FAILED)
            assert "the forkserver" in failure.message
            assert "SIGKILL" in failure.message
            assert len(await c.allocate("next")) == 1

    go(work)


def test_logs_are_read_back_in_order(tmp_path: Path, cluster: Any, go: Any) -> None:
    async def work() -> None:
        async with cluster(tmp_path) as c:
            logs = tmp_path / "logs" / "jobs" / "job"
            logs.mkdir(parents=True)
            for name in ("v0-0-0", "v0-0-1", "v0-1-0", "v10-0-0", "v2-0-0", "slot-v0-0-0"):
                (logs / f"{name}.log").write_text(name)
            (logs / "v2-0-0.log").write_bytes(b"x" * 3_000_000)

            async def read(vertex: str, subtask: int) -> list[tuple[str, int, int, int]]:
                request = internal_pb2.ReadTaskLogsRequest(
                    job_id="job",
                    vertex=vertex,
                    subtask_index=subtask,
                    leader_epoch=1,
                    incarnation=c.incarnation,
                )
                sizes: dict[tuple[str, int, int], int] = {}
                async for chunk in c.stub.ReadTaskLogs(request, timeout=DEADLINE_S):
                    key = (chunk.vertex, chunk.subtask_index, chunk.attempt)
                    sizes[key] = sizes.get(key, 0) + len(chunk.data)
                return [(*key, size) for key, size in sizes.items()]

            assert await read("v0", 0) == [("v0", 0, 0, 6), ("v0", 0, 1, 6)]
            assert await read("", -1) == [
                ("v0", 0, 0, 6),
                ("v0", 0, 1, 6),
                ("v0", 1, 0, 6),
                ("v2", 0, 0, 3_000_000),
                ("v10", 0, 0, 7),
            ]
            assert await read("v9", 0) == []

    go(work)


def test_an_orderly_end_leaves_nothing(tmp_path: Path, cluster: Any, go: Any) -> None:
    sockets: list[Path] = []

    async def work() -> None:
        before = len(os.listdir("/proc/self/fd"))
        children_before = slot_pids(os.getpid())  # those of other tests of this run
        async with cluster(tmp_path) as c:
            endpoints = await c.allocate(slots=("s0", "s1"))
            sockets.extend(Path(endpoint.unix_path) for endpoint in endpoints)
            await c.deploy("hang")
            await c.deploy("run", slot="s1", vertex="v1")
            assert (tmp_path / "run" / "taskmanager-tm.json").is_file()
        assert [goodbye.taskmanager_id for goodbye in c.jobmanager.goodbyes] == ["tm"]
        assert slot_pids(os.getpid()) == children_before
        assert len(os.listdir("/proc/self/fd")) <= before + 8  # gRPC keeps a poller's own

    go(work)
    assert not any(path.parent.exists() for path in sockets)
    assert not (tmp_path / "taskmanager-tm").exists()
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_jobmanager_that_does_not_take_it(
    tmp_path: Path, cluster: Any, go: Any, is_refused: bool
) -> None:
    """One that refuses, and one from before there was anything to refuse by, which takes everybody."""

    async def work() -> None:
        async with cluster(tmp_path) as c:
            c.jobmanager.protocol_version = 0
            if is_refused:
                c.jobmanager.refuse_registration = ProtocolMismatch("another version")
            c.jobmanager.is_known = False
            await asyncio.wait([c.daemon])

    with pytest.raises(BaseExceptionGroup) as caught:
        go(work)
    told = "another version" if is_refused else r"\(penstock 0\.0\.9\) speaks an earlier protocol"
    assert caught.group_contains(ProtocolMismatch, match=told)
    assert not (tmp_path / "taskmanager-tm").exists()
