"""Aim: a job whose checkpoints are on S3 has every effect once, whatever is killed, and asks little of the server.

Method: a ledger job on real daemons; SIGKILL of a TaskManager, of the JobManager and of the server; requests are
counted by a proxy between the daemons and the server.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from urllib.request import urlopen

import pytest

from jobmanager.checkpoint.checkpoint_ids import IDS_RESERVED_AT_ONCE
from penstock.client.client import Client
from penstock.errors import JobRejected
from penstock.storage.fsck import check_store
from penstock.storage.head import decode_head
from penstock.storage.restore_point import open_restore_point
from penstock.storage.s3.s3_store import S3Store
from tests.integration.s3.conftest import BUCKET, settings_of
from tests.support.ledger_job import DEADLINE_S, LedgerJob
from tests.support.processes import DaemonCluster, Deadline, wait_ended
from tests.support.radosgw import SECRET_KEY, RadosGateway
from tests.support.s3_proxy import S3Proxy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.sampled(2)]


def metrics_of(cluster: DaemonCluster, role: str) -> str:
    """What all daemons of a role show."""
    addresses = [daemon["metrics_address"] for daemon in cluster.daemons(role)]
    return "".join(
        urlopen(f"http://{address}/metrics", timeout=10).read().decode() for address in addresses
    )


@pytest.mark.parametrize("backend", ["rocksdb", "hashmap"])
def test_the_ledger_with_its_checkpoints_on_s3(
    cluster: DaemonCluster,
    proxy: S3Proxy,
    s3_server: RadosGateway,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
) -> None:
    with Client(cluster.jobmanager) as client:
        job = LedgerJob(cluster, client, tmp_path)
        job.submit("300ms", state__backend__type=backend)
        first = job.await_checkpoints(lambda one: one.status == "COMPLETED")
        store = S3Store(
            BUCKET, f"{tmp_path.name}/{job.handle.job_id}", settings_of(s3_server.endpoint)
        )
        assert decode_head(store.get("HEAD")).retained
        for role, operation in (("jobmanager", "GetObject"), ("taskmanager", "PutObject")):
            shown = f'penstock_s3_requests_total{{operation="{operation}",outcome="ok"}}'
            # A slot reports what it has asked within a second.
            job.await_that(lambda _, role=role, shown=shown: shown in metrics_of(cluster, role))
        proxy.forget()
        later = job.await_checkpoints(
            lambda one: one.status == "COMPLETED" and one.id >= first.id + 3
        )
        asked, count = proxy.kinds(), later.id - first.id + 1
        assert asked["LIST"] == 0
        assert asked["CAS"] <= count
        # Of a checkpoint: 3 by each subtask, 6 by the JobManager.
        assert asked.total() <= (3 * later.total_subtasks + 6) * count

        pid = cluster.pid("taskmanager")
        os.kill(pid, signal.SIGKILL)
        wait_ended(pid)
        cluster.start(taskmanagers=2)
        second = job.await_checkpoints(
            lambda one: one.status == "COMPLETED" and one.id > first.id and job.restored
        )

        s3_server.kill()
        job.kill_the_jobmanager()
        s3_server.start_gateway()
        cluster.start(taskmanagers=2)
    with Client(cluster.jobmanager) as client:
        job.attach(client)
        # The next JobManager's numbers begin behind those that the first had reserved.
        job.await_checkpoints(
            lambda one: one.status == "COMPLETED" and one.id > second.id + IDS_RESERVED_AT_ONCE
        )
        kept = job.handle.savepoint(f"s3://{BUCKET}/{tmp_path.name}-kept", timeout=DEADLINE_S)
        monkeypatch.setattr(
            "penstock.storage.open_store._s3", lambda: settings_of(s3_server.endpoint)
        )
        assert open_restore_point(kept).is_savepoint
        with pytest.raises(JobRejected, match="inside of the savepoint s3://"):
            job.handle.savepoint(f"{kept}/state/", timeout=DEADLINE_S)
        assert check_store(kept).is_healthy
        job.finish()
        deadline = Deadline("the deletion of the checkpoints of a job that has ended", DEADLINE_S)
        while store.list(""):
            deadline.left()
    logs = [path for path in cluster.directory.rglob("logs/**/*") if path.is_file()]
    assert logs
    assert not [path for path in logs if SECRET_KEY in path.read_text()]
    assert (cluster.directory / "penstock.yaml").stat().st_mode & 0o077 == 0
