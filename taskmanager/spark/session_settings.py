"""What a session of Spark is started with: the user's keys over what is right for a slot.

Spark listens on loopback (or where the TaskManager does, with executors elsewhere), shows no page, and keeps its files
in the slot's directory, temporary ones of its JVM too. Times are UTC, and Parquet has them in microseconds.
"""

from __future__ import annotations

from pathlib import Path

from penstock.config import Configuration
from penstock.config.spark_keys import is_local_master

_REMOTE = "spark.remote"
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_FOR_ALL = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
_OVERHEAD_BYTES = 384 << 20
"""What a JVM takes beside its heap, at least; Spark reckons with as much."""


def session_settings(
    config: Configuration, job_name: str, cores: int, directory: Path
) -> dict[str, str]:
    """Keys and values of the session.

    Args:
        config: of the job, over that of the daemons.
        cores: of Spark in local mode.
        directory: of the slot.
    """
    own = config.spark_keys
    if own.get(_REMOTE):
        return _FOR_ALL | own
    master = own.get("spark.master", f"local[{cores}]")
    is_local = is_local_master(master)
    return {
        "spark.master": master,
        "spark.app.name": job_name,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1" if is_local else config.taskmanager_host,
        "spark.driver.bindAddress": "127.0.0.1" if is_local else config.taskmanager_bind_host,
        "spark.driver.memory": f"{config.execution_spark_driver_memory_bytes >> 20}m",
        "spark.local.dir": str(directory / "local"),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.sql.execution.arrow.localRelationThreshold": "0",
        **_FOR_ALL,
        **own,
        _JAVA_OPTIONS: f"{_temporary_files(directory)} {own.get(_JAVA_OPTIONS, '')}".rstrip(),
    }


def _temporary_files(directory: Path) -> str:
    """The option that has the JVM keep them there, quoted as Spark reads it; one of the user's that comes later wins."""
    quoted = str(directory).replace("\\", "\\\\").replace('"', '\\"')
    return f'"-Djava.io.tmpdir={quoted}"'


def memory_problem(config: Configuration, limit_bytes: int | None) -> str:
    """Why a JVM cannot be started beside the slot, "" = it can.

    Args:
        limit_bytes: of the container, None = there is none.
    """
    if limit_bytes is None or config.spark_keys.get(_REMOTE):
        return ""
    heap_bytes = config.execution_spark_driver_memory_bytes
    needed_bytes = heap_bytes + max(_OVERHEAD_BYTES, heap_bytes // 10)
    if needed_bytes <= limit_bytes:
        return ""
    return (
        f"Spark's driver needs {needed_bytes >> 20} MB (execution.spark.driver-memory is {heap_bytes >> 20} MB, and the "
        f"JVM takes more beside its heap), and this container may use {limit_bytes >> 20} MB in all: lower the one or "
        "raise the other"
    )


def memory_limit_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the container of this process may use; None = as much as there is."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (root / name).read_text().strip()
        except OSError:
            continue
        if text.isdecimal() and int(text) < 1 << 60:
            return int(text)
    return None
