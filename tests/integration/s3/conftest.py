"""One S3 server for all tests of a process that need it."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.storage.s3.s3_store import S3Store
from penstock.storage.s3.settings import S3Settings
from tests.support.processes import DaemonCluster, site
from tests.support.radosgw import ACCESS_KEY, SECRET_KEY, RadosGateway, s3_options
from tests.support.s3_proxy import S3Proxy

BUCKET = "tests"
_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[RadosGateway]:
    with (
        tempfile.TemporaryDirectory(prefix="rgw-") as root,
        RadosGateway(Path(root)).running() as server,
    ):
        server.client().create_bucket(Bucket=BUCKET)
        yield server


@pytest.fixture
def proxy(s3_server: RadosGateway) -> Iterator[S3Proxy]:
    with S3Proxy(s3_server.port).running() as running:
        yield running


def settings_of(endpoint: str, **others: object) -> S3Settings:
    own = S3Settings(
        endpoint,
        "us-east-1",
        True,
        ACCESS_KEY,
        SECRET_KEY,
        part_bytes=5 << 20,
        retry_timeout_ms=20_000,
    )
    return replace(own, **others)  # type: ignore[arg-type]


@pytest.fixture
def make_store(s3_server: RadosGateway) -> Callable[[], S3Store]:
    settings = settings_of(s3_server.endpoint)
    return lambda: S3Store(BUCKET, f"contract-{next(_numbers)}/job", settings)


@pytest.fixture
def store(make_store: Callable[[], S3Store]) -> S3Store:
    return make_store()


@pytest.fixture
def cluster(tmp_path: Path, proxy: S3Proxy) -> Iterator[DaemonCluster]:
    with site(tmp_path) as place:
        cluster = DaemonCluster(place)
        options = {
            **s3_options(proxy.endpoint),
            "execution.checkpointing.dir": f"s3://{BUCKET}/{tmp_path.name}",
        }
        arguments = [part for key, value in options.items() for part in ("-D", f"{key}={value}")]
        cluster.start(*arguments, taskmanagers=2, slots=2)
        yield cluster
        cluster.stop()
        place.assert_nothing_left()
