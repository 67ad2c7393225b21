"""Aim: from files on S3 to files on S3 with checkpoints on S3 every effect is there once, whatever is killed.

Method: a ledger job on real daemons that reads a part of its transfers from objects of three formats; SIGKILL of a
TaskManager, of a slot, of the JobManager and of the server. What readers have seen stays as it was.
"""

from __future__ import annotations

import gzip
import io
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from typing_extensions import override

import penstock as ps
from penstock.client.client import Client
from tests.integration.s3.conftest import BUCKET
from tests.support.examples import RUNS_ALL
from tests.support.ledger import TRANSFER, Ledger, make_transfers
from tests.support.ledger_job import DEADLINE_S, LedgerJob, check_tables
from tests.support.processes import DaemonCluster, wait_ended
from tests.support.radosgw import RadosGateway, s3_options

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

FORMATS = ("parquet", "csv", "json")
FILE_ROWS = 500


@dataclass(frozen=True)
class S3Ledger(Ledger):
    """A ledger job whose transfers are read from S3, and whose outputs are there.

    Attributes:
        place: ``s3://bucket/prefix``.
    """

    place: str = ""

    @property
    @override
    def bookings(self) -> str:
        return f"{self.place}/out/bookings"

    @property
    @override
    def transfers(self) -> str:
        return f"{self.place}/out/transfers"

    @property
    @override
    def totals(self) -> str:
        return f"{self.place}/out/totals"

    @override
    def even_transfers(self, env: ps.Environment) -> ps.Stream:
        rate = self.rate / len(FORMATS) / 2

        def paced(batch: pa.RecordBatch) -> pa.RecordBatch:
            time.sleep(batch.num_rows / rate)  # so that kills find the job in the middle of files
            return batch

        read = [
            getattr(env, f"read_{form}")(f"{self.place}/in/{form}", schema=TRANSFER)
            .uid(f"read-{form}")
            .map_batches(paced, schema=TRANSFER)
            .uid(f"paced-{form}")
            .with_event_time("at_ms")
            .uid(f"time-{form}")
            for form in FORMATS
        ]
        return read[0].union(*read[1:])

    def write_input(self, client: Any) -> None:
        """Puts the files there."""
        for start in range(0, self.even, FILE_ROWS):
            form = FORMATS[start // FILE_ROWS % len(FORMATS)]
            name, content = encoded(form, make_transfers(start, FILE_ROWS))
            key = f"{self.place.removeprefix(f's3://{BUCKET}/')}/in/{form}/{start:06d}.{name}"
            client.put_object(Bucket=BUCKET, Key=key, Body=content)


def encoded(form: str, batch: pa.RecordBatch) -> tuple[str, bytes]:
    """The end of a file's name, and its content."""
    table, out = pa.Table.from_batches([batch]), io.BytesIO()
    if form == "parquet":
        pq.write_table(table, out, row_group_size=FILE_ROWS // 2)
        return form, out.getvalue()
    if form == "csv":
        pyarrow.csv.write_csv(table, out)
        return "csv.gz", gzip.compress(out.getvalue())
    rows = table.to_pandas().to_json(orient="records", lines=True)
    return form, rows.encode()


class Mirror:
    """What readers of a prefix have seen, kept as files here."""

    def __init__(self, client: Any, prefix: str, directory: Path) -> None:
        self._client = client
        self._prefix = prefix
        self._directory = directory
        self._seen: dict[str, str] = {}

    def look(self) -> int:
        """Takes in what is new; how many files there are."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=BUCKET, Prefix=self._prefix
        )
        names = [(one["Key"], one["ETag"]) for page in pages for one in page.get("Contents", ())]
        now = {key: etag for key, etag in names if "/_" not in key}
        for key, etag in self._seen.items():
            assert now.get(key) == etag, f"{key} was visible and has changed or vanished"
        for key in now.keys() - self._seen.keys():
            path = self._directory / key[len(self._prefix) :]
            path.parent.mkdir(parents=True, exist_ok=True)
            answer = self._client.get_object(Bucket=BUCKET, Key=key)
            path.write_bytes(answer["Body"].read())
        self._seen = now
        return len(now)


def completed_behind(job: LedgerJob, checkpoint_id: int) -> int:
    """Waits for a checkpoint of attempts that have been restored."""
    found = job.await_checkpoints(
        lambda one: one.status == "COMPLETED" and one.id > checkpoint_id and job.restored
    )
    return found.id


@pytest.mark.skipif(not RUNS_ALL, reason="it takes long: make test-all runs it")
@pytest.mark.parametrize(("backend", "rounds"), [("hashmap", 1), ("rocksdb", 3)])
def test_the_ledger_from_files_to_files_on_s3(
    cluster: DaemonCluster,
    s3_server: RadosGateway,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    rounds: int,
) -> None:
    place = f"s3://{BUCKET}/{tmp_path.name}-files"
    ledger = S3Ledger(6_000 * rounds, 2_000, tmp_path / "out", str(tmp_path / "gate"), place)
    client = s3_server.client()
    ledger.write_input(client)
    monkeypatch.setattr("penstock.storage.open_store._s3", None)  # as the script says it
    mirror = Mirror(client, f"{tmp_path.name}-files/out/", tmp_path / "out")
    # With schema= the script still lists its input itself.
    reached = {
        key.replace(".", "__"): value for key, value in s3_options(s3_server.endpoint).items()
    }

    def killed(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        wait_ended(pid)

    with Client(cluster.jobmanager) as jobmanager:
        job = LedgerJob(cluster, jobmanager, tmp_path)
        job.ledger = ledger
        job.submit("300ms", state__backend__type=backend, execution__batch_rows=40, **reached)
        newest = job.await_checkpoints(lambda one: one.status == "COMPLETED" and one.id > 1).id
    for _ in range(rounds):
        with Client(cluster.jobmanager) as jobmanager:
            job.attach(jobmanager)
            job.kill_a_slot()
            newest = completed_behind(job, newest + 1)
            mirror.look()
            killed(cluster.pid("taskmanager"))
            cluster.start(taskmanagers=2)
            newest = completed_behind(job, newest + 1)
            mirror.look()
            s3_server.kill()
            job.kill_the_jobmanager()
            s3_server.start_gateway()
            cluster.start(taskmanagers=2)
        with Client(cluster.jobmanager) as jobmanager:
            job.attach(jobmanager)
            newest = completed_behind(job, newest)
            assert mirror.look()
    with Client(cluster.jobmanager) as jobmanager:
        job.attach(jobmanager)
        Path(ledger.gate).touch()
        assert job.handle.wait(DEADLINE_S).status == "FINISHED"
    mirror.look()
    check_tables(ledger, tmp_path / "out")
    left = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{tmp_path.name}-files/out/")
    assert not [one["Key"] for one in left["Contents"] if "/_" in one["Key"]]
