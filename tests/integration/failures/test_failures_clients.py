"""Aim: a client that is interrupted, ended or killed leaves no job, process, thread or directory.

Method: ``penstock run`` and ``python job.py`` as real processes, signalled while their job works.
"""

from __future__ import annotations

import os
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client.client import Client
from penstock.pb import client_pb2
from tests.support.processes import Beacon, DaemonCluster, Program, Site, wait_ended

pytestmark = [pytest.mark.integration, pytest.mark.sampled(5)]

ENDLESS = """
    import os, sys
    import pyarrow as pa
    import penstock as ps

    def make(start, count):
        return pa.record_batch({"a": pa.array(range(start, start + count), pa.int64())})

    class Tell(ps.MapFunction):
        told = False
        def __call__(self, row):
            if not self.told:
                self.told = True
                with open(PATH, "w") as fifo:
                    fifo.write(f"{os.getpid()}\\n")
            return {"a": row.a}

    env = ps.Environment(parallelism=1)
    rows = env.generate(make, rate=1000, schema=pa.schema([("a", pa.int64())]))
    rows.map(Tell(), schema={"a": pa.int64()}).discard()
    env.execute("endless")
    print("after the job")
"""

AFTERWARDS = """
    import penstock as ps

    env = ps.Environment(parallelism=1)
    rows = env.from_rows([{"a": 1}]).collect()
    env.execute("short")
    with open(PATH, "w") as fifo:
        fifo.write("0\\n")
    import threading
    threading.Event().wait()
"""


def write_script(site: Site, text: str, beacon: Beacon) -> str:
    path = site.directory / "job.py"
    path.write_text(textwrap.dedent(text).replace("PATH", repr(beacon.path)))
    return str(path)


# ---------------------------------------------------------------- a client of a cluster


@pytest.fixture
def running(
    failure_cluster: DaemonCluster, own_site: Site, beacon: Beacon
) -> Iterator[tuple[Program, int]]:
    """``penstock run`` of an endless job, and its slot process."""
    script = write_script(own_site, ENDLESS, beacon)
    program = own_site.start_penstock("run", script, "--jobmanager", failure_cluster.jobmanager)
    slot = int(beacon.wait(program=program))
    yield program, slot
    own_site.assert_nothing_left()


def last_job(client: Client) -> client_pb2.JobSummary:
    return client.jobs()[-1]


def state(job: client_pb2.JobSummary) -> str:
    return client_pb2.JobState.Name(job.state).removeprefix("JOB_STATE_")


def test_ctrl_c_cancels_the_job_and_waits_for_its_end(
    running: tuple[Program, int], client: Client
) -> None:
    program, slot = running
    program.send_to_group(signal.SIGINT)
    ended = program.wait()
    assert state(last_job(client)) == "CANCELED", ended
    wait_ended(slot)
    assert "cancelling job" in ended.stderr
    assert "was cancelled" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "after the job" not in ended.stdout
    assert ended.status == 1


def test_sigterm_cancels_the_job(running: tuple[Program, int], client: Client) -> None:
    program, slot = running
    program.send(signal.SIGTERM)
    ended = program.wait()
    assert state(last_job(client)) == "CANCELED"
    wait_ended(slot)
    assert "Traceback" not in ended.stderr
    assert ended.status == 128 + signal.SIGTERM


def test_a_second_ctrl_c_leaves_the_job_to_the_cluster(
    failure_cluster: DaemonCluster, own_site: Site, beacon: Beacon, client: Client
) -> None:
    stuck = ENDLESS.replace('return {"a": row.a}', "import threading; threading.Event().wait()")
    script = write_script(own_site, stuck, beacon)
    program = own_site.start_penstock(
        "run", script, "--jobmanager", failure_cluster.jobmanager,
        "-D", "task.cancellation.timeout=2s",
    )  # fmt: skip
    slot = int(beacon.wait(program=program))
    program.send_to_group(signal.SIGINT)
    program.wait_for_line("cancelling job")
    program.send_to_group(signal.SIGINT)
    ended = program.wait()
    assert state(last_job(client)) == "CANCELLING"
    assert ended.status == 130
    assert "Traceback" not in ended.stderr
    wait_ended(slot)
    own_site.assert_nothing_left()


def test_a_client_that_is_killed_leaves_its_job_to_the_cluster(
    running: tuple[Program, int], client: Client
) -> None:
    program, slot = running
    program.send(signal.SIGKILL)
    program.wait()
    job = last_job(client)
    assert state(job) == "RUNNING"
    client.cancel(job.job_id)
    wait_ended(slot)


def test_ctrl_c_outside_of_a_job_ends_the_command(
    failure_cluster: DaemonCluster, own_site: Site, beacon: Beacon
) -> None:
    script = write_script(own_site, AFTERWARDS, beacon)
    program = own_site.start_penstock("run", script, "--jobmanager", failure_cluster.jobmanager)
    beacon.wait(program=program)
    program.send_to_group(signal.SIGINT)
    ended = program.wait()
    assert ended.status == 130
    assert "Traceback" not in ended.stderr


# ---------------------------------------------------------------- a client with a cluster of its own


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, "while its job runs"),
        (signal.SIGTERM, "while its job runs"),
        (signal.SIGKILL, "while its job runs"),
        (signal.SIGTERM, "after its job"),
    ],
)
def test_a_script_with_an_embedded_cluster_takes_it_with_it(
    own_site: Site, beacon: Beacon, number: signal.Signals, moment: str
) -> None:
    text = ENDLESS if moment.startswith("while") else AFTERWARDS
    program = own_site.start_python(write_script(own_site, text, beacon))
    beacon.wait(program=program)
    daemons = [
        process.pid
        for process in own_site.processes()
        if {"jobmanager", "taskmanager"} & set(process.command)
    ]
    assert len(daemons) == 2
    assert list(own_site.temporary.iterdir()) != []
    if number is signal.SIGINT:
        program.send_to_group(number)
    else:
        program.send(number)
    ended = program.wait()
    own_site.assert_nothing_left()
    if number is signal.SIGTERM:
        assert ended.status == 128 + number
    elif number is signal.SIGKILL:
        assert ended.status == -number
    else:
        assert ended.status in (1, 130, -signal.SIGINT)
    assert "after the job" not in ended.stdout


def test_a_script_that_raises_leaves_nothing(
    own_site: Site, beacon: Beacon, tmp_path: Path
) -> None:
    lines = AFTERWARDS.partition("import threading")[0]
    script = write_script(own_site, lines + "\n    raise RuntimeError('of the script')\n", beacon)
    # Paths of sockets are limited: below a directory like this one they go to /tmp.
    long = tmp_path / ("x" * 100)
    long.mkdir()
    program = own_site.start_python(script, environment={"TMPDIR": str(long)})
    beacon.wait(program=program)
    ended = program.wait()
    assert ended.status == 1
    assert "RuntimeError: of the script" in ended.stderr
    own_site.assert_nothing_left()
    assert list(long.iterdir()) == []


@pytest.mark.parametrize(
    ("role", "told"), [("taskmanager", "TaskManagerLost"), ("jobmanager", "JobManagerUnreachable")]
)
def test_a_daemon_of_an_embedded_cluster_that_is_killed_ends_the_script(
    own_site: Site, beacon: Beacon, role: str, told: str
) -> None:
    # Nobody starts another TaskManager there: a job that restarts would wait for one.
    text = ENDLESS.replace(
        "parallelism=1", "parallelism=1, config={'restart-strategy.type': 'none'}"
    )
    program = own_site.start_python(write_script(own_site, text, beacon))
    beacon.wait(program=program)
    for process in own_site.processes():
        if role in process.command:
            os.kill(process.pid, signal.SIGKILL)
    ended = program.wait()
    assert ended.status == 1
    assert told in ended.stderr
    own_site.assert_nothing_left()
