"""Aim: whatever user code does ends its own job only, and the user is shown where it did it.

Method: functions that raise, exit, crash, hang and print, in every kind of operator, on real slots.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

import penstock as ps
from penstock.client.client import Client
from penstock.pb import client_pb2
from tests.support.processes import DEADLINE_S, Beacon, DaemonCluster, tell, wait_ended

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]

MakeEnvironment = Callable[..., ps.Environment]
OUT = {"b": pa.int64()}
NO_RESTARTS = {"restart-strategy.type": "none"}
QUICK_RESTARTS = {"restart-strategy.exponential-delay.initial-backoff": "50ms"}


def failure_of(env: ps.Environment) -> ps.JobFailed:
    with pytest.raises(ps.JobFailed) as raised:
        env.execute("user-code")
    return raised.value


def rows(env: ps.Environment) -> ps.Stream:
    return env.from_rows([{"a": a} for a in range(10)])


# ---------------------------------------------------------------- what raises


def boom(row: Any) -> Any:
    if row.a == 7:
        raise ValueError("seven is not allowed")
    return {"b": row.a}


class BoomInOpen(ps.MapFunction):
    def open(self, ctx: ps.FunctionContext) -> None:
        raise ValueError("seven is not allowed")

    def __call__(self, row: Any) -> Any:
        return {"b": row.a}


class BoomInClose(BoomInOpen):
    def open(self, ctx: ps.FunctionContext) -> None:
        pass

    def close(self) -> None:
        raise ValueError("seven is not allowed")


class BoomInWindow(ps.WindowFunction):
    def process(self, *arguments: Any) -> None:
        raise ValueError("seven is not allowed")


class BoomAggregate(ps.AggregateFunction):
    def create_accumulator(self) -> int:
        return 0

    def add(self, accumulator: int, value: Any) -> int:
        raise ValueError("seven is not allowed")

    def merge(self, one: int, other: int) -> int:
        return one + other

    def result(self, accumulator: int) -> int:
        return accumulator


class BoomSink(ps.Sink):
    def write(self, batch: pa.RecordBatch) -> None:
        raise ValueError("seven is not allowed")

    def flush(self) -> None:
        pass


def flat_boom(row: Any) -> Iterator[Any]:
    yield {"b": 1}
    yield boom(row)


def filter_boom(row: Any) -> bool:
    return bool(boom(row))


def batch_boom(batch: pa.RecordBatch) -> pa.RecordBatch:
    raise ValueError("seven is not allowed")


def generate_boom(start: int, count: int) -> pa.RecordBatch:
    raise ValueError("seven is not allowed")


RAISING: dict[str, tuple[Callable[[ps.Stream], Any], str, str]] = {
    # how the operator is built, name of the function, pattern of the row
    "map": (lambda s: s.map(boom, schema=OUT), "boom", r"^Row\(a=7\)$"),
    "flat_map": (lambda s: s.flat_map(flat_boom, schema=OUT), "flat_boom", r"^Row\(a=7\)$"),
    "filter": (lambda s: s.filter(filter_boom), "filter_boom", r"^Row\(a=7\)$"),
    "map_batches": (lambda s: s.map_batches(batch_boom, schema=OUT), "batch_boom", ""),
    "open": (lambda s: s.map(BoomInOpen(), schema=OUT), "BoomInOpen.open", ""),
    "close": (lambda s: s.map(BoomInClose(), schema=OUT), "BoomInClose.close", ""),
    "window": (
        lambda s: s.key_by("a").window(ps.count_window(1)).process(BoomInWindow(), schema=OUT),
        "BoomInWindow.process",
        "key=",
    ),
    "aggregate": (
        lambda s: s.key_by("a").aggregate(n=ps.aggregate(BoomAggregate(), "a", type=pa.int64())),
        "BoomAggregate",
        r"^\d$",
    ),
}


@pytest.mark.parametrize("kind", RAISING)
def test_a_function_that_raises(environment: MakeEnvironment, kind: str) -> None:
    build, function, row = RAISING[kind]
    env = environment(parallelism=2)
    build(rows(env).rebalance()).name("mine").uid("mine").discard()
    error = failure_of(env)
    message = str(error)
    assert error.cause == "TaskFailure"
    assert error.operator == "mine"
    assert error.subtask_index in (0, 1)
    assert function in message
    assert "ValueError: seven is not allowed" in message
    assert re.search(row, error.row)
    assert (error.row == "") == (row == "")
    assert 'raise ValueError("seven is not allowed")' in error.user_traceback
    assert Path(__file__).name in error.user_traceback
    assert error.user_traceback in message.rstrip() + "\n"
    assert "operator_chain.py" not in error.user_traceback, "frames of ours say nothing to the user"
    assert f"vertex {error.vertex} (" in message
    assert f"subtask {error.subtask_index}" in message
    assert error.job_id in message


def test_a_generator_and_a_sink_that_raise(environment: MakeEnvironment) -> None:
    env = environment()
    env.generate(generate_boom, rows=10, schema=pa.schema([("a", pa.int64())])).discard()
    error = failure_of(env)
    assert error.operator == "generate"
    assert error.user_traceback.count("File") == 1
    assert "generate_boom" in error.user_traceback

    env = environment()
    rows(env).sink(BoomSink()).name("my-sink")
    error = failure_of(env)
    assert error.operator == "my-sink"
    assert "seven is not allowed" in error.user_traceback


def test_what_the_row_function_returns_does_not_fit(environment: MakeEnvironment) -> None:
    env = environment()
    rows(env).map(lambda row: {"b": "text"}, schema=OUT).name("mine").discard()
    error = failure_of(env)
    assert "column 'b' has type int64, got 'text' (str)" in str(error)
    assert (error.operator, error.row) == ("mine", "Row(a=0)")


@pytest.mark.parametrize("on_error", ["skip", "bad"])
def test_a_row_that_a_function_raises_for_goes_where_it_was_told(
    environment: MakeEnvironment, on_error: str
) -> None:
    env = environment()
    stream = rows(env).map(boom, schema=OUT).on_error(on_error)
    good = stream.collect()
    bad = stream.side_output("bad").collect() if on_error == "bad" else None
    result = env.execute("on-error")
    assert [row["b"] for row in good] == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    assert result.metrics["totals"]["bad_records"] == 1
    if bad is not None:
        (record,) = bad.to_pylist()
        assert record["a"] == 7
        assert "ValueError: seven is not allowed" in record["error"]


# ---------------------------------------------------------------- what ends the process


def leave(row: Any) -> Any:
    sys.exit("enough")


def interrupt(row: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["sys.exit", "KeyboardInterrupt"])
def test_a_function_that_wants_to_end_the_process(environment: MakeEnvironment, kind: str) -> None:
    env = environment()
    function = leave if kind == "sys.exit" else interrupt
    rows(env).map(function, schema=OUT).name("mine").on_error("skip").discard()
    error = failure_of(env)
    assert error.operator == "mine"
    assert function.__name__ in error.user_traceback
    assert "operator_chain.py" not in error.user_traceback
    if kind == "sys.exit":
        assert "raised SystemExit: enough" in str(error)
        assert error.row == "Row(a=0)"


def exit_now(row: Any) -> Any:
    print("my last words", flush=True)
    os._exit(3)


def kill_itself(row: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def read_null(row: Any) -> Any:
    return ctypes.string_at(0)


DEATHS = {
    "exit": (exit_now, "exited with status 3", "os._exit"),
    "kill": (kill_itself, "was killed by SIGKILL", "memory ran out"),
    "segfault": (read_null, "was killed by SIGSEGV", "in read_null"),
}


@pytest.mark.parametrize("kind", DEATHS)
def test_a_function_that_ends_its_slot_process(
    environment: MakeEnvironment,
    client: Client,
    assert_slots_are_free: Callable[[], None],
    kind: str,
) -> None:
    function, ending, hint = DEATHS[kind]
    env = environment(parallelism=2, config=NO_RESTARTS)
    rows(env).rebalance().map(function, schema=OUT).discard()
    error = failure_of(env)
    assert error.cause == "TaskFailure"
    assert ending in str(error)
    assert hint in str(error)
    assert error.vertex
    assert error.subtask_index in (0, 1)
    if kind == "exit":
        text = b"".join(chunk.data for chunk in client.logs(error.job_id))
        assert b"my last words" in text
    assert_slots_are_free()


@pytest.mark.parametrize("kind", DEATHS)
def test_a_function_that_ends_its_slot_process_once_is_restarted(
    environment: MakeEnvironment, failure_cluster: DaemonCluster, tmp_path: Path, kind: str
) -> None:
    # By default: whatever ends a process may be no fault of the function.
    function, _, _ = DEATHS[kind]
    died = tmp_path / "died"

    def once(row: Any) -> Any:
        if row.a == 7 and not died.exists():
            died.touch()
            function(row)
        return {"b": row.a}

    env = environment(parallelism=2, config=QUICK_RESTARTS)
    found = rows(env).rebalance().map(once, schema=OUT).collect()
    handle = env.submit("restarted")
    handle.wait(DEADLINE_S)
    assert died.exists()
    assert sorted(row["b"] for row in found) == list(range(10))
    assert handle.details().summary.restarts == 1


def test_a_function_that_always_ends_its_slot_process_uses_its_restarts_up(
    environment: MakeEnvironment, assert_slots_are_free: Callable[[], None]
) -> None:
    limit = {"restart-strategy.exponential-delay.attempts-before-reset-backoff": 2}
    env = environment(parallelism=2, config={**QUICK_RESTARTS, **limit})
    rows(env).rebalance().map(exit_now, schema=OUT).discard()
    handle = env.submit("restarted")
    with pytest.raises(ps.JobFailed, match="exited with status 3") as raised:
        handle.wait(DEADLINE_S)
    assert "restarted 2 times without" in str(raised.value)
    assert handle.details().summary.restarts == 2
    assert_slots_are_free()


@pytest.mark.parametrize(
    "asked", [{"execution.checkpointing.interval": "1s"}, {"restart-strategy.type": "fixed-delay"}]
)
def test_a_function_that_raises_is_restarted_where_that_was_asked_for(
    environment: MakeEnvironment, tmp_path: Path, asked: dict[str, str]
) -> None:
    raised = tmp_path / "raised"

    def once(row: Any) -> Any:
        if not raised.exists():
            raised.touch()
            raise ValueError("not today")
        return {"b": row.a}

    env = environment(parallelism=2, config={**QUICK_RESTARTS, **asked})
    found = rows(env).rebalance().map(once, schema=OUT).collect()
    handle = env.submit("restarted")
    handle.wait(DEADLINE_S)
    assert sorted(row["b"] for row in found) == list(range(10))
    assert handle.details().summary.restarts >= 1


def test_a_slot_process_that_is_killed_from_outside(
    environment: MakeEnvironment, failure_cluster: DaemonCluster
) -> None:
    env = environment(parallelism=2, config=NO_RESTARTS)
    endless(env).rebalance().discard()
    handle = env.submit("killed")
    wait_for_state(handle, "RUNNING")
    victims = [
        pid
        for daemon in failure_cluster.daemons("taskmanager")
        for pid in failure_cluster.slot_pids(daemon["pid"])
    ]
    assert len(victims) == 2
    os.kill(victims[0], signal.SIGKILL)
    with pytest.raises(ps.JobFailed, match="was killed by SIGKILL") as raised:
        handle.wait(DEADLINE_S)
    assert f"slot process {victims[0]}" in str(raised.value)
    for pid in victims:
        wait_ended(pid)


# ---------------------------------------------------------------- what hangs


def endless(env: ps.Environment) -> ps.Stream:
    def make(start: int, count: int) -> pa.RecordBatch:
        return pa.record_batch({"a": pa.array(range(start, start + count), pa.int64())})

    return env.generate(make, rate=1000, schema=pa.schema([("a", pa.int64())]))


def wait_for_state(handle: ps.JobHandle, state: str) -> None:
    def watch(details: client_pb2.JobDetails) -> None:
        if client_pb2.JobState.Name(details.summary.state).endswith(state):
            raise ReachedError

    with pytest.raises(ReachedError):
        handle.wait(DEADLINE_S, on_progress=watch)


class ReachedError(Exception):
    pass


@pytest.mark.parametrize("kind", ["asleep", "busy"])
def test_a_function_that_blocks_forever_is_killed_when_its_job_is_cancelled(
    environment: MakeEnvironment,
    beacon: Beacon,
    assert_slots_are_free: Callable[[], None],
    kind: str,
) -> None:
    path = beacon.path

    def block(row: Any) -> Any:
        tell(path, os.getpid())
        while kind == "busy":
            pass
        threading.Event().wait()

    env = environment(config={"task.cancellation.timeout": "300ms"})
    rows(env).map(block, schema=OUT).discard()
    handle = env.submit("blocked")
    pid = int(beacon.wait())
    handle.cancel()
    with pytest.raises(ps.JobCanceled):
        handle.wait(DEADLINE_S)
    wait_ended(pid)
    assert_slots_are_free()


def test_a_source_that_blocks_does_not_keep_a_failed_job(
    environment: MakeEnvironment, beacon: Beacon, tmp_path: Path
) -> None:
    path, blocked = beacon.path, tmp_path / "blocked"

    def block(start: int, count: int) -> pa.RecordBatch:
        tell(path, os.getpid())
        blocked.touch()
        threading.Event().wait()
        raise AssertionError

    def boom_when_blocked(row: Any) -> Any:
        while not blocked.exists():
            time.sleep(0.01)
        return boom(row)

    env = environment(config={"task.cancellation.timeout": "300ms"})
    env.generate(block, rows=10, schema=pa.schema([("a", pa.int64())])).discard()
    rows(env).slot_group("other").map(boom_when_blocked, schema=OUT).discard()
    handle = env.submit("half-blocked")
    with pytest.raises(ps.JobFailed, match="seven is not allowed"):
        handle.wait(DEADLINE_S)
    wait_ended(int(beacon.wait()), 10)


def test_threads_and_children_of_user_code_end_with_the_slot(
    environment: MakeEnvironment, beacon: Beacon
) -> None:
    path = beacon.path

    def busy_elsewhere(row: Any) -> Any:
        if row.a == 0:
            threading.Thread(target=threading.Event().wait).start()
            child = subprocess.Popen(["sleep", "1000"])
            tell(path, f"{os.getpid()} {child.pid}")
        return {"b": row.a}

    env = environment()
    rows(env).map(busy_elsewhere, schema=OUT).discard()
    env.execute("threads")
    for pid in beacon.wait().split():
        wait_ended(int(pid))


def test_jobs_that_fail_and_are_cancelled_leak_nothing(
    environment: MakeEnvironment, failure_cluster: DaemonCluster
) -> None:
    daemons = [psutil.Process(daemon["pid"]) for daemon in failure_cluster.daemons()]
    own = psutil.Process()

    def round_of_jobs() -> None:
        env = ps.Environment(failure_cluster.jobmanager, parallelism=2)
        rows(env).rebalance().map(boom, schema=OUT).discard()
        failure_of(env)
        endless(env).rebalance().discard()
        handle = env.submit("cancelled")
        handle.cancel()
        with pytest.raises(ps.JobCanceled):
            handle.wait(DEADLINE_S)
        found = rows(env).rebalance().collect()
        env.execute("finished")
        assert len(found) == 10
        env.close()
        failure_cluster.assert_slots_ended()

    def held() -> list[tuple[int, int]]:
        return [(process.num_fds(), process.num_threads()) for process in (*daemons, own)]

    for _ in range(3):
        round_of_jobs()
    before = held()
    for _ in range(5):
        round_of_jobs()
    for (descriptors, threads), (before_descriptors, before_threads) in zip(
        held(), before, strict=True
    ):
        assert descriptors <= before_descriptors + 3, "connections may be about to close"
        assert threads <= before_threads + 2, "a pool of threads may not be full yet"


# ---------------------------------------------------------------- what is printed


def test_a_lot_of_output_reaches_the_log_and_holds_nothing_up(
    environment: MakeEnvironment, client: Client
) -> None:
    def chatter(row: Any) -> Any:
        print(f"line {row.a} " + "x" * 1000)
        sys.stderr.write("\udcff not UTF-8\n")
        return {"b": row.a}

    env = environment()
    env.from_arrow(pa.table({"a": range(20_000)})).map(chatter, schema=OUT).discard()
    result = env.execute("chatter")
    text = b"".join(chunk.data for chunk in client.logs(result.job_id))
    assert len(text) > 20_000_000
    assert b"line 0 xxx" in text
    assert b"line 19999 xxx" in text
