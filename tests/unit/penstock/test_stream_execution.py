"""Aim: submit, wait, cancel, collect, progress and errors, seen from the client.

Method: a fake client stands for the cluster; its answers are scripted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock.client.artifacts import LocalArtifact
from penstock.client.job import JobHandle, wait_or_cancel
from penstock.client.submission import PlanCollected, SubmissionOverride, submission_override
from penstock.errors import (
    ConfigurationError,
    JobCanceled,
    JobFailed,
    JobNotFound,
    JobRejected,
    StreamError,
)
from penstock.pb import client_pb2, graph_pb2

RUNNING = client_pb2.JOB_STATE_RUNNING
FINISHED = client_pb2.JOB_STATE_FINISHED
FAILED = client_pb2.JOB_STATE_FAILED
CANCELED = client_pb2.JOB_STATE_CANCELED


def details(state: client_pb2.JobState.ValueType) -> client_pb2.JobDetails:
    found = client_pb2.JobDetails()
    found.summary.job_id, found.summary.name, found.summary.state = "1" * 32, "test", state
    found.summary.submitted_at_ms, found.summary.running_at_ms = 1_000, 1_500
    if state in (FINISHED, FAILED, CANCELED):
        found.summary.ended_at_ms = 4_000
    for index, (source, sink) in enumerate([(True, False), (False, True)]):
        vertex = found.vertices.add(id=f"v{index}", name="x", is_source=source, is_sink=sink)
        vertex.parallelism = 2
        for subtask in range(2):
            metrics = vertex.subtasks.add(subtask_index=subtask).metrics
            metrics.records_in, metrics.records_out = 10 + index, 5
            metrics.watermark_ms = -(2**63) if index and subtask else 7_000 + subtask
    return found


class FakeClient:
    """A cluster with one job."""

    def __init__(self) -> None:
        self.state = RUNNING
        self.submitted: list[graph_pb2.JobGraph] = []
        self.uploaded: list[LocalArtifact] = []
        self.cancelled: list[str] = []
        self.closed = 0
        self.on_watch: Callable[[], None] = self.finish
        self.failure = client_pb2.FailureCause()
        self.rows: dict[str, list[tuple[int, pa.RecordBatch]]] = {}
        self.rows_taken = threading.Event()

    def finish(self) -> None:
        self.state = FINISHED

    def upload_artifacts(self, artifacts: Any) -> int:
        self.uploaded += list(artifacts)
        return len(self.uploaded)

    def submit(self, job_id: str, graph: graph_pb2.JobGraph) -> str:
        assert len(job_id) == 32
        self.submitted.append(graph)
        return job_id

    def job(self, job_id: str) -> client_pb2.JobDetails:
        found = details(self.state)
        if self.state == FAILED:
            found.failure.CopyFrom(self.failure)
        return found

    def watch(self, job_id: str, interval_ms: int = 0) -> Iterator[client_pb2.JobDetails]:
        while True:
            yield self.job(job_id)
            if self.state != RUNNING:
                return
            self.on_watch()

    def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)
        self.state = CANCELED

    def fetch_results(self, job_id: str, collect_id: str) -> Iterator[tuple[int, pa.RecordBatch]]:
        yield from self.rows.get(collect_id, [])
        self.rows_taken.set()

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def env(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> ps.Environment:
    made = ps.Environment("nowhere:1")
    monkeypatch.setattr(made, "_client_for", lambda graph: client)
    return made


def numbers(env: ps.Environment) -> ps.Stream:
    return env.from_rows([{"n": 1}, {"n": 2}])


def batch(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(values, pa.int64())})


def test_execute_returns_the_result(env: ps.Environment, client: FakeClient) -> None:
    numbers(env).discard()
    result = env.execute("numbers")
    assert (result.status, result.duration.total_seconds()) == ("FINISHED", 2.5)
    totals = result.metrics["totals"]
    assert (totals["records_in"], totals["records_out"]) == (20, 10)
    assert totals["watermark_ms"] == 7_000
    assert result.metrics["vertices"]["v1"]["records_in"] == 22
    assert result.metrics["vertices"]["v1"]["watermark_ms"] is None
    (graph,) = client.submitted
    assert graph.name == "numbers"
    assert [artifact.id for artifact in graph.artifacts] == [a.id for a in client.uploaded]


def test_environment_builds_another_job_after_execute(
    env: ps.Environment, client: FakeClient
) -> None:
    stream = numbers(env).filter(ps.col("n") > 1).uid("kept")
    stream.discard().uid("end")
    env.execute()
    client.state = RUNNING
    stream.print().uid("end")
    env.execute()
    kinds = [graph.vertices[0].operators[-1].sink.WhichOneof("kind") for graph in client.submitted]
    assert kinds == ["discard", "print"]


def test_execute_without_a_sink_is_an_error(env: ps.Environment) -> None:
    numbers(env).filter(ps.col("n") > 1)
    with pytest.raises(JobRejected, match="no sink"):
        env.execute()


def test_failure_is_told_with_operator_row_and_traceback(
    env: ps.Environment, client: FakeClient
) -> None:
    client.on_watch = lambda: setattr(client, "state", FAILED)
    client.failure = client_pb2.FailureCause(
        error_class="TaskFailure",
        message="price is None",
        traceback='  File "job.py", line 3, in score\nTypeError: no',
        vertex="v1",
        subtask_index=1,
        operator="score",
        row="Row(price=None)",
    )
    numbers(env).discard()
    with pytest.raises(JobFailed) as caught:
        env.execute("numbers")
    error = caught.value
    assert (error.cause, error.vertex, error.subtask_index) == ("TaskFailure", "v1", 1)
    assert (error.operator, error.row) == ("score", "Row(price=None)")
    assert 'File "job.py", line 3' in error.user_traceback
    for part in ("'test'", "price is None", "'score'", "subtask 1", "Row(price=None)", "job.py"):
        assert part in str(error)


def test_cancelled_job_raises(env: ps.Environment, client: FakeClient) -> None:
    numbers(env).discard()
    handle = env.submit()
    assert handle.status() == "RUNNING"
    handle.cancel()
    with pytest.raises(JobCanceled, match="was cancelled"):
        handle.wait()


def test_ctrl_c_cancels_and_waits_for_the_end(
    env: ps.Environment, client: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    client.on_watch = interrupt
    numbers(env).discard()
    with pytest.raises(JobCanceled):
        env.execute()
    assert len(client.cancelled) == 1
    assert "cancelling job" in capsys.readouterr().err


def test_second_ctrl_c_leaves(env: ps.Environment, client: FakeClient) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    client.on_watch = interrupt
    client.cancel = client.cancelled.append  # type: ignore[method-assign, assignment]
    numbers(env).discard()
    handle = env.submit()
    with pytest.raises(KeyboardInterrupt):
        wait_or_cancel(handle)
    assert len(client.cancelled) == 1


def test_wait_has_a_deadline_and_reports_progress(client: FakeClient) -> None:
    client.on_watch = lambda: None
    seen: list[str] = []
    handle = JobHandle(client, "1" * 32)
    with pytest.raises(TimeoutError, match="still RUNNING"):
        handle.wait(0.01, on_progress=lambda found: seen.append(found.summary.name))
    assert seen
    assert set(seen) == {"test"}


def test_rows_taken_before_a_timeout_are_kept(env: ps.Environment, client: FakeClient) -> None:
    may_go_on = threading.Event()
    calls: list[str] = []

    def slowly(job_id: str, collect_id: str) -> Iterator[tuple[int, pa.RecordBatch]]:
        calls.append(collect_id)
        yield 0, batch(1)
        assert may_go_on.wait(5)
        yield 0, batch(2)

    client.fetch_results = slowly  # type: ignore[method-assign]
    client.on_watch = lambda: None
    rows = numbers(env).collect()
    handle = env.submit()
    with pytest.raises(TimeoutError):
        handle.wait(0.01)
    may_go_on.set()
    client.finish()
    handle.wait()
    assert [row.n for row in rows] == [1, 2]
    assert calls == ["collect-0"]
    assert client.closed == 0


def test_reading_one_collect_takes_the_rows_of_all(env: ps.Environment, client: FakeClient) -> None:
    second_was_taken = threading.Event()

    def fetch(job_id: str, collect_id: str) -> Iterator[tuple[int, pa.RecordBatch]]:
        if collect_id == "collect-1":
            second_was_taken.set()
        assert second_was_taken.wait(5)
        yield 0, batch(1)

    client.fetch_results = fetch  # type: ignore[method-assign]
    stream = numbers(env)
    first, _ = stream.collect(), stream.collect()
    env.submit()
    assert [row.n for row in first] == [1]


def test_watch_that_ends_early_is_an_error(client: FakeClient) -> None:
    client.watch = lambda job_id, interval_ms=0: iter([details(RUNNING)])  # type: ignore[method-assign]
    with pytest.raises(StreamError, match="stopped reporting"):
        JobHandle(client, "1" * 32).wait()


def test_collect_runs_the_job_when_it_is_read(env: ps.Environment, client: FakeClient) -> None:
    client.rows["collect-0"] = [(1, batch(3)), (0, batch(1)), (0, batch(2))]
    rows = numbers(env).collect()
    assert len(rows) == 3
    assert [row.n for row in rows] == [1, 2, 3]
    assert rows[-1] == {"n": 3}
    assert rows[0:2] == [{"n": 1}, {"n": 2}]
    assert rows.to_arrow().column_names == ["n"]
    assert len(client.submitted) == 1
    with pytest.raises(AttributeError, match="no column 'm'; it has n"):
        _ = rows[0].m


def test_rows_are_drained_while_execute_waits(env: ps.Environment, client: FakeClient) -> None:
    client.rows["collect-0"] = [(0, batch(1))]
    client.rows["collect-1"] = [(0, batch(2))]

    def finish_when_drained() -> None:
        assert client.rows_taken.wait(5)
        client.state = FINISHED

    client.on_watch = finish_when_drained
    stream = numbers(env)
    first, second = stream.collect(), stream.collect(limit=1)
    env.execute()
    assert not any(thread.name.startswith("drain") for thread in threading.enumerate())
    assert [list(first), list(second)] == [[{"n": 1}], [{"n": 2}]]
    assert len(client.submitted) == 1


def test_limit_holds_over_all_subtasks(env: ps.Environment, client: FakeClient) -> None:
    client.rows["collect-0"] = [(0, batch(1, 2)), (1, batch(3, 4))]
    rows = numbers(env).collect(limit=3)
    env.execute()
    assert [row["n"] for row in rows] == [1, 2, 3]


def test_rows_up_to_the_limit_are_there_before_the_job_ends_and_after_it_is_cancelled(
    env: ps.Environment, client: FakeClient
) -> None:
    def endless(job_id: str, collect_id: str) -> Iterator[tuple[int, pa.RecordBatch]]:
        yield 1, batch(1, 2)
        yield 0, batch(3)
        raise AssertionError("more was asked for than the limit")

    client.fetch_results = endless  # type: ignore[method-assign]
    rows = numbers(env).collect(limit=3)
    handle = env.submit()
    assert [row.n for row in rows] == [1, 2, 3], "as they come"
    handle.cancel()
    assert [row.n for row in rows] == [3, 1, 2]
    assert len(rows) == rows.to_arrow().num_rows == 3
    with pytest.raises(JobCanceled):
        handle.wait()


def test_rows_below_the_limit_of_a_cancelled_job_are_refused(
    env: ps.Environment, client: FakeClient
) -> None:
    client.rows["collect-0"] = [(0, batch(1, 2))]
    rows = numbers(env).collect(limit=3)
    env.submit().cancel()
    with pytest.raises(JobCanceled):
        list(rows)


def test_empty_collect_has_the_schema(env: ps.Environment) -> None:
    rows = numbers(env).collect()
    env.execute()
    assert len(rows) == 0
    assert rows.to_arrow().schema == pa.schema([("n", pa.int64())])


def test_rows_of_a_failed_job_raise(env: ps.Environment, client: FakeClient) -> None:
    client.on_watch = lambda: setattr(client, "state", FAILED)
    rows = numbers(env).collect()
    handle = env.submit()
    with pytest.raises(JobFailed):
        handle.wait()
    with pytest.raises(JobFailed):
        list(rows)


def test_error_while_fetching_is_raised(env: ps.Environment, client: FakeClient) -> None:
    def broken(job_id: str, collect_id: str) -> Iterator[tuple[int, pa.RecordBatch]]:
        raise StreamError("the connection broke")
        yield

    client.fetch_results = broken  # type: ignore[method-assign]
    numbers(env).collect()
    with pytest.raises(StreamError, match="connection broke"):
        env.execute()


def test_rows_whose_fetch_broke_off_are_not_fetched_again(
    env: ps.Environment, client: FakeClient
) -> None:
    calls: list[str] = []

    def broken(job_id: str, collect_id: str) -> Iterator[tuple[int, pa.RecordBatch]]:
        calls.append(collect_id)
        yield 0, batch(1)
        raise StreamError("the connection broke")

    client.fetch_results = broken  # type: ignore[method-assign]
    rows = numbers(env).collect()
    handle = env.submit()
    for read in (handle.wait, rows.to_arrow, lambda: list(rows)):
        with pytest.raises(StreamError, match="connection broke"):
            read()
    assert calls == ["collect-0"]


def test_what_was_said_at_the_end_is_kept(client: FakeClient) -> None:
    handle = JobHandle(client, "1" * 32)
    assert handle.status() == "RUNNING"
    result = handle.wait()

    def forgotten(job_id: str) -> client_pb2.JobDetails:
        raise JobNotFound("only the last ended jobs are kept")

    client.job = forgotten  # type: ignore[method-assign]
    assert handle.status() == "FINISHED"
    assert handle.metrics() == result.metrics


def test_override_of_the_command_wins(monkeypatch: pytest.MonkeyPatch, client: FakeClient) -> None:
    addresses: list[str] = []

    def connect(address: str, token: str, *, leader_timeout_s: float, tls: object) -> FakeClient:
        addresses.append(address)
        return client

    monkeypatch.setattr("penstock.client.client.Client", connect)
    env = ps.Environment("script:1", parallelism=2, config={"execution.batch-rows": 10})
    override = SubmissionOverride(
        address="command:2", config={"parallelism.default": "5"}, requirements=["numpy>=1"]
    )
    with submission_override(override):
        numbers(env).discard()
        env.execute()
    (graph,) = client.submitted
    assert addresses == ["command:2"]
    assert dict(graph.config) == {"parallelism.default": "5", "execution.batch-rows": "10"}
    assert list(graph.requirements) == ["numpy>=1"]
    assert [result.status for result in override.results] == ["FINISHED"]
    client.state = RUNNING
    numbers(env).discard()
    env.execute()
    assert addresses == ["command:2", "script:1"]
    env.close()
    numbers(env).discard()
    with pytest.raises(ps.JobRejected, match="this environment has been closed"):
        env.execute()
    assert len(client.submitted) == 2
    env.close()


def test_detached_execute_returns_at_once(env: ps.Environment, client: FakeClient) -> None:
    override = SubmissionOverride(detach=True)
    with submission_override(override):
        numbers(env).discard()
        result = env.execute()
    assert result.status == "RUNNING"
    assert [handle.job_id for handle in override.handles] == [override.handles[0].job_id]


def test_plan_only_ends_the_script(env: ps.Environment, client: FakeClient) -> None:
    numbers(env).discard()
    with (
        submission_override(SubmissionOverride(plan_only=True)),
        pytest.raises(PlanCollected) as got,
    ):
        env.execute("numbers")
    assert got.value.graph.name == "numbers"
    assert client.submitted == []


def test_wrong_configuration_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"did you mean parallelism\.default"):
        ps.Environment(config={"parallelism.defualt": 2})
    with pytest.raises(ConfigurationError, match="parallelism"):
        ps.Environment(parallelism=0)
    env = ps.Environment()
    numbers(env).discard()
    with pytest.raises(JobRejected, match="name"):
        env.execute("")
