"""Aim: a job can be looked at from outside: its progress, its load, what it has written; a wrong file is named.

Method: jobs on a cluster, the command line beside them.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import penstock as ps
from tests.support.processes import DaemonCluster, Site, site

pytestmark = [pytest.mark.integration, pytest.mark.sampled(3)]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as place:
        yield place
        place.assert_nothing_left()


@pytest.fixture
def cluster(place: Site) -> Iterator[DaemonCluster]:
    cluster = DaemonCluster(place)
    cluster.start()
    yield cluster
    cluster.stop()


def numbers(start: int, count: int) -> pa.RecordBatch:
    times = pa.array(range(start, start + count), pa.timestamp("ms"))
    return pa.record_batch({"n": pa.array(range(start, start + count), pa.int64()), "at": times})


def test_a_job_is_watched_to_its_end(cluster: DaemonCluster, place: Site) -> None:
    at = ("--jobmanager", cluster.jobmanager)

    def say(row: ps.Row) -> dict[str, int]:
        print("said", row.n)
        return {"n": row.n}

    with ps.Environment(cluster.jobmanager) as env:
        rows = env.generate(numbers, rate=200).with_event_time("at")
        rows.map(say, schema={"n": "int64"}).discard()
        handle = env.submit("endless")
        attached = place.start_penstock("attach", handle.job_id[:8], *at)
        attached.wait_for_line("endless")
        left = place.start_penstock("attach", handle.job_id, *at)
        left.wait_for_line("endless")
        left.send(signal.SIGINT)
        assert left.wait().status == 130
        assert "runs on" in left.stderr

        logs = []
        while not any("said 1\n" in log.text for log in logs):
            logs = handle.logs()
        assert {(log.vertex, log.subtask_index, log.attempt) for log in logs} == {("v0", 0, 0)}
        assert handle.logs("v0", 0)
        with pytest.raises(ps.JobNotFound):
            handle.logs("v7")

        info = place.penstock("info", handle.job_id, *at).stdout
        while "%" not in info or "1970-01-01" not in info:
            info = place.penstock("info", handle.job_id, *at).stdout
        headers = [line.split() for line in info.splitlines() if "WATERMARK" in line]
        load = ["BUSY", "BACK-PRESSURED", "WATERMARK"]
        assert [headers[0][-3:], headers[1][:3]] == [load, load]
        handle.cancel()
        ended = attached.wait()
        assert ended.status == 1
        assert "was cancelled" in ended.stderr

        env.from_rows([{"n": 1}]).discard()
        done = env.submit("short")
        done.wait()
        shown = place.penstock("attach", done.job_id, "--json", *at)
        assert shown.status == 0
        assert json.loads(shown.stdout)["status"] == "FINISHED"


def test_taskmanagers_are_shown_with_what_runs_in_them(cluster: DaemonCluster, place: Site) -> None:
    at = ("--jobmanager", cluster.jobmanager)
    (daemon,) = cluster.daemons("taskmanager")
    with ps.Environment(cluster.jobmanager) as env:
        env.generate(numbers, rate=200).discard()
        handle = env.submit("endless")
        slots: list[dict[str, object]] = []
        while not slots or slots[0]["pid"] is None:
            (shown,) = place.penstock("taskmanagers", "--json", *at).json["taskmanagers"]
            slots = shown["slots"]
        assert [slot["pid"] for slot in slots] == cluster.slot_pids(daemon["pid"])
        assert slots[0]["job_id"] == handle.job_id
        assert (shown["pid"], shown["address"]) == (daemon["pid"], daemon["address"])
        assert (shown["slots_total"], shown["slots_free"], shown["spill_bytes"]) == (2, 1, 0)
        assert min(shown["memory_bytes"], slots[0]["memory_bytes"]) > 1_000_000
        table = place.penstock("taskmanagers", *at).stdout
        assert "tm-1" in table
        assert handle.job_id in table
        handle.cancel()


def test_a_wrong_value_is_said_with_its_file(place: Site) -> None:
    directory = place.directory / "wrong"
    directory.mkdir()
    file = directory / "penstock.yaml"
    for text in (
        "heartbeat.intervall: 1s\n",
        "heartbeat:\n  interval: soon\n",
        "restart-strategy: {type: exponential-delay, exponential-delay.max-backoff: 1ms}\n",
    ):
        file.write_text(text)
        daemon = place.start_python("-P", "-m", "jobmanager", "--dir", str(directory)).wait()
        assert daemon.status == 2
        assert str(file) in daemon.stderr
    file.write_text("heartbeat.intervall: 1s\n")
    for command in (("cluster", "start"), ("cluster", "status")):
        ended = place.penstock(*command, "--dir", str(directory))
        assert ended.status == 2
        assert str(file) in ended.stderr
    ended = place.penstock("list", directory=directory)
    assert ended.status == 2
    assert "penstock.yaml" in ended.stderr
    file.write_text("")
    daemon = place.start_python(
        "-P", "-m", "jobmanager", "--dir", str(directory), "-D", "heartbeat.interval=soon"
    ).wait()
    assert daemon.status == 2
    assert "penstock.yaml" not in daemon.stderr, "it is not the file that is wrong"
