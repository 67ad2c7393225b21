"""Real servers of Spark, from the installed package: a standalone master with workers, and one of Spark Connect."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import psutil

from tests.support.servers import free_port, require, running, wait_for

SMALL_JVM = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xss1m -XX:ReservedCodeCacheSize=96m"
SECRET = "only-for-tests"
_START_S = 120.0
_MASTER = "org.apache.spark.deploy.master.Master"
_WORKER = "org.apache.spark.deploy.worker.Worker"
_CONNECT = "org.apache.spark.sql.connect.service.SparkConnectServer"
_EXECUTOR = "CoarseGrainedExecutorBackend"


@dataclass(frozen=True, slots=True)
class StandaloneSpark:
    """A master and its workers, which want the secret."""

    url: str
    worker_pids: tuple[int, ...]

    def executor_pids(self) -> list[int]:
        """The executors of all workers."""
        found = []
        for pid in self.worker_pids:
            for process in psutil.Process(pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if any(_EXECUTOR in argument for argument in process.cmdline()):
                        found.append(process.pid)
        return found


def _home() -> Path:
    import importlib.util

    found = importlib.util.find_spec("pyspark")
    assert found is not None, "a dependency"
    assert found.origin is not None, "it is a package"
    return Path(found.origin).parent


def _environment(root: Path) -> dict[str, str]:
    return {
        "SPARK_HOME": str(_home()),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_NO_DAEMONIZE": "1",
        "SPARK_LOG_DIR": str(root),
        "SPARK_PID_DIR": str(root),
        "SPARK_WORKER_DIR": str(root / "work"),
    }


@contextlib.contextmanager
def standalone(root: Path, workers: int) -> Iterator[StandaloneSpark]:
    """A master with so many workers of one core each, for the time of the block.

    Args:
        root: takes their logs and files.
    """
    require("java")
    keys = root / "spark.conf"
    keys.write_text(f"spark.authenticate true\nspark.authenticate.secret {SECRET}\n")
    environment = _environment(root) | {
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": SMALL_JVM,
    }
    start = [_home() / "bin" / "spark-class"]
    port, page = free_port(), free_port()
    host = ["--host", "127.0.0.1", "--properties-file", keys]
    with contextlib.ExitStack() as stack:

        def launch(name: str, *arguments: str | Path) -> tuple[int, Path]:
            log = root / f"{name}.log"
            process = stack.enter_context(running([*start, *arguments], log, environment))
            return process.pid, log

        url = f"spark://127.0.0.1:{port}"
        ports = ["--port", str(port), "--webui-port", str(page)]
        log = root / "master.log"
        master = stack.enter_context(running([*start, _MASTER, *host, *ports], log, environment))
        wait_for(master, log, lambda: True if _alive(page) is not None else None, _START_S)
        pids = []
        for number in range(workers):
            ports = ["--port", str(free_port()), "--webui-port", str(free_port())]
            pid, _ = launch(f"worker-{number}", _WORKER, *host, *ports, "-c", "1", "-m", "1g", url)
            pids.append(pid)
        wait_for(master, log, lambda: True if _alive(page) == workers else None, _START_S)
        yield StandaloneSpark(url, tuple(pids))


def _alive(page: int) -> int | None:
    """How many workers the master knows; None = it does not answer yet."""
    try:
        with urlopen(f"http://127.0.0.1:{page}/json/", timeout=5) as answer:
            return int(json.load(answer)["aliveworkers"])
    except (URLError, OSError, ValueError):
        return None


@contextlib.contextmanager
def connect_server(root: Path) -> Iterator[str]:
    """A server of Spark Connect in local mode, for the time of the block: its address."""
    require("java")
    port = free_port()
    settings = {
        "spark.ui.enabled": "false",
        "spark.connect.grpc.binding.port": port,
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": SMALL_JVM,
        "spark.sql.shuffle.partitions": "2",
        "spark.local.dir": root / "local",
        "spark.sql.warehouse.dir": root / "warehouse",
    }
    arguments: list[str | Path] = [_home() / "bin" / "spark-submit", "--class", _CONNECT]
    arguments += ["--master", "local[2]", "--driver-memory", "512m"]
    for key, value in settings.items():
        arguments += ["--conf", f"{key}={value}"]
    log = root / "connect.log"
    with running([*arguments, "spark-internal"], log, _environment(root)) as process:
        wait_for(process, log, lambda: True if _listens(port) else None, _START_S)
        yield f"sc://127.0.0.1:{port}"


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
