"""Aim: Spark reads state from S3 as the program of its session does, and what it gives is written there.

Method: a real server and a real session; a savepoint of the golden set is put into a bucket. Only this process is told where
S3 is, as ``ps.Environment(config=...)`` would: neither the JVM's environment nor that of its Python says so.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql import SparkSession

import penstock as ps
from penstock.state_tables import spark_state_client
from penstock.storage.open_store import open_store
from penstock.storage.s3.settings import S3Settings
from tests.integration.s3.conftest import BUCKET, s3_server, settings_of  # noqa: F401
from tests.integration.spark.conftest import IN_ALL
from tests.support.golden_state import ARCHIVES, unpacked
from tests.support.radosgw import RadosGateway

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

UID, STATES = "states", ("sums", "texts", "timers.event")


def told(monkeypatch: pytest.MonkeyPatch, settings: S3Settings) -> None:
    monkeypatch.setattr("penstock.storage.open_store._s3", lambda: settings)


def test_secrets_go_to_no_executor_elsewhere(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(type(spark.dataSource), "register", lambda _, source: sent.append(source))
    told(monkeypatch, S3Settings("http://here", access_key="name", secret_key="planted"))
    for is_local in (True, False):
        monkeypatch.setattr(spark_state_client, "is_local_session", lambda _, is_it=is_local: is_it)
        ps.register(spark)
        pickled = CloudPickleSerializer().dumps(sent[-1])
        assert b"http://here" in pickled
        assert (b"planted" in pickled) == is_local
    spark_state_client._SESSIONS.pop(spark)


@IN_ALL
def test_a_savepoint_goes_through_spark_from_s3_to_s3(
    spark: SparkSession,
    s3_server: RadosGateway,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told(monkeypatch, settings_of(s3_server.endpoint))
    uri = f"s3://{BUCKET}/{tmp_path.name}"
    store = open_store(uri)
    directory = unpacked(ARCHIVES[-1].parent / "hashmap-canonical.tar.gz", tmp_path / "kept")
    for file in directory.rglob("*"):
        if file.is_file() and not file.name.endswith(".lock"):
            store.put(str(file.relative_to(directory)), [file.read_bytes()])
    frames = {name: ps.read_state(spark, uri, UID, name) for name in STATES}
    written = ps.write_savepoint(f"{uri}-written", {UID: frames}, base=uri)
    on_disk, again = ps.open_state(directory), ps.open_state(written)
    for name in STATES:
        rows = [Counter(map(str, state.read(UID, name).to_pylist())) for state in (on_disk, again)]
        assert rows[0] == rows[1] != Counter(), name
    reader = spark.read.format("penstock-state").option("uid", UID).option("state", "sums")
    assert reader.load(str(written)).count() == on_disk.read(UID, "sums").num_rows
