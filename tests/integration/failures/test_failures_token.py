"""Aim: the cluster's token is exchanged while a job runs, and a mistake in doing so costs no job.

Method: real daemons that share a file with it, and slots without Unix sockets between them; the
ledger says whether each row had its effect once.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from penstock.client.client import Client
from penstock.client.credentials import own_token_file
from penstock.client.keyring import Keyring
from penstock.errors import Unauthenticated
from tests.support.jobs import DEADLINE_S
from tests.support.ledger_job import LedgerJob
from tests.support.processes import DaemonCluster, Deadline, Site, wait_ended

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

NEW = "the-new-token-of-all"


def write(path: Path, *tokens: str) -> None:
    """As the documentation says: beside it, and renamed."""
    beside = path.with_suffix(".new")
    beside.touch(mode=0o600)
    beside.write_text("\n".join(tokens) + "\n")
    beside.rename(path)


def await_changed(cluster: DaemonCluster, count: int) -> None:
    """Waits until each daemon has said so often that it has other tokens."""
    logs = [
        Path(cluster.directory / "logs" / f"{one['role']}-{one['id']}.log")
        for one in cluster.daemons()
    ]
    deadline = Deadline("each process to read its tokens", DEADLINE_S)
    while any(path.read_text().count('"token.changed"') < count for path in logs):
        deadline.left()
        time.sleep(0.05)


def test_a_token_is_exchanged_while_a_job_runs(own_site: Site, tmp_path: Path) -> None:
    cluster = DaemonCluster(own_site)
    local = {"taskmanager_network_local__sockets": "false"}
    cluster.start(taskmanagers=2, slots=2, **local)
    file = own_token_file(cluster.directory)
    old = Keyring.read(file).shown
    with Client(cluster.jobmanager) as client:
        job = LedgerJob(cluster, client, tmp_path)
        job.submit("200ms")
        for count, tokens in enumerate([(old, NEW), (NEW, old), (NEW,)], 1):
            write(file, *tokens)
            await_changed(cluster, count)
            done = job.await_checkpoints(lambda _one: True).id
            job.await_checkpoints(lambda one, done=done: one.id > done + 1)
        assert client.job(job.handle.job_id).summary.restarts == 0
        with Client(cluster.jobmanager, old) as late, pytest.raises(Unauthenticated):
            late.jobs()
        # What begins now shows the new one alone, to slots that have begun with the old one.
        killed = cluster.pid("taskmanager")
        os.kill(killed, signal.SIGKILL)
        wait_ended(killed)
        cluster.start()
        job.await_that(lambda details: details.summary.restarts > 0)
        job.finish()
    for log in cluster.directory.rglob("*.log"):
        assert old not in log.read_text()
        assert NEW not in log.read_text()
    cluster.stop()
    cluster.assert_nothing_left()
