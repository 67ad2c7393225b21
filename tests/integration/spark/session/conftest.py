"""What the tests in this folder share: one JVM, which ends with the last of them that a worker runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from penstock.config import Configuration
from penstock.config.spark_keys import PINNED
from taskmanager.spark.session_settings import session_settings
from tests.integration.spark.conftest import SMALL

_STATE = {
    "spark.sql.session.timeZone": "America/New_York",
    "spark.sql.caseSensitive": "false",
}
"""What makes a session of anybody's out of that of compiled parts."""


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> SparkSession:
    """A session in this process, with the settings of one that compiled parts run in."""
    one_core = {"spark.master": "local[1]", "spark.sql.shuffle.partitions": "1"}
    config = Configuration.from_mapping(SMALL | PINNED | one_core)
    settings = session_settings(config, "engines", 1, tmp_path_factory.mktemp("session"))
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    made = builder.getOrCreate()
    made.sparkContext.setLogLevel("OFF")
    return made


@pytest.fixture(scope="module")
def spark(session: SparkSession) -> SparkSession:
    """A session that knows nothing of Penstock, in another time zone."""
    made = session.newSession()
    for key, value in _STATE.items():
        made.conf.set(key, value)
    return made


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends the JVM behind the last test of the folder; the tests behind them want the memory."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        _end_session()


def _end_session() -> None:
    active: Any = SparkContext._active_spark_context
    if active is None:
        return
    gateway: Any = SparkContext._gateway
    active.stop()
    SparkSession._instantiatedSession = None
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(timeout=20)
    SparkContext._gateway = SparkContext._jvm = None
    os.environ.pop("PYSPARK_PYTHON")
