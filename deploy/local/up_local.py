"""Starts what docker-compose.yml describes as plain processes of this host, from the same files.

    python deploy/local/up_local.py up DIR        starts what does not run, returns when all of it serves
    python deploy/local/up_local.py down DIR      ends it; DIR keeps jobs, checkpoints and logs

What containers have and a host has not is replaced: names and ports of services by ports of loopback, paths by
directories below DIR. ZooKeeper is Debian's (or that of the installed pyspark), on Java; Prometheus runs where it is
installed, Grafana and S3 are left out. Nobody starts again what has died: ``up`` does, when it is called again.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.error import URLError
from urllib.request import urlopen

import yaml

from penstock.local.daemon_processes import start_ticks
from penstock.local.started_processes import (
    START_DEADLINE_S,
    end_all,
    free_port,
    kernel_cache,
    tail_of,
)

ROOT: Final = Path(__file__).resolve().parents[2]
COMPOSE: Final = ROOT / "docker-compose.yml"
_CONFIG: Final = "/var/lib/penstock/penstock.yaml"
_DEBIAN_JARS: Final = ("/usr/share/java/zookeeper.jar", "/usr/share/java/slf4j-simple.jar")
_JVM: Final = ("-Xmx128m", "-XX:+UseSerialGC", "-Dzookeeper.admin.enableServer=false",
               "-Dzookeeper.jmx.log4j.disable=true")  # fmt: skip
_STOPPED_TOGETHER: Final = ("jobmanager-", "taskmanager-", "prometheus", "zookeeper-")
"""In this order: JobManagers leave their jobs to the next ``up``."""


@dataclass
class State:
    """What ``DIR/local.json`` keeps.

    Attributes:
        ports: "service:port in its container" -> port of loopback.
        processes: service -> pid and when it began.
    """

    ports: dict[str, int] = field(default_factory=dict)
    processes: dict[str, tuple[int, int]] = field(default_factory=dict)


class LocalTopology:
    """The services of one compose file in one directory.

    Args:
        directory: for all files; made where it is missing.
    """

    def __init__(self, directory: Path, compose: Path = COMPOSE) -> None:
        self.directory = directory.resolve()
        self._compose = compose
        self._services: dict[str, dict[str, Any]] = yaml.safe_load(compose.read_text())["services"]
        self._file = self.directory / "local.json"
        self._state = State()
        with suppress(FileNotFoundError):
            self._state = State(**json.loads(self._file.read_text()))

    # ------------------------------------------------------------ what it is

    def named(self, beginning: str) -> list[str]:
        """The services whose names begin so, in the order of the file."""
        return [name for name in self._services if name.startswith(beginning)]

    def address(self, service: str, port: int) -> str:
        """Where a port of a service is on this host."""
        key = f"{service}:{port}"
        if key not in self._state.ports:
            self._state.ports[key] = free_port()
        return f"127.0.0.1:{self._state.ports[key]}"

    @property
    def jobmanagers(self) -> str:
        """For ``--jobmanager``."""
        return ",".join(self.address(name, 6123) for name in self.named("jobmanager-"))

    @property
    def token_file(self) -> Path:
        """The secret of the cluster."""
        return self.directory / "penstock-token"

    def pid(self, service: str) -> int | None:
        """The process of a service; None = it does not run."""
        pid, began = self._state.processes.get(service, (0, 0))
        return pid if pid and start_ticks(pid) == began else None

    # ------------------------------------------------------------ up and down

    def up(self) -> None:
        """Starts what does not run; returns when all of it serves."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if not self.token_file.exists():
            with os.fdopen(
                os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w"
            ) as file:
                file.write(secrets.token_hex(32) + "\n")
        (self.directory / "storage").mkdir(mode=0o700, exist_ok=True)
        zookeepers = self.named("zookeeper-")
        for service in zookeepers:
            for port in (2181, 2888, 3888):
                self.address(service, port)
        for service in zookeepers:
            self._start(service, self._zookeeper(service))
        for service in zookeepers:
            self._await(service, partial(self._listens, self.address(service, 2181)))
        for role in ("jobmanager-", "taskmanager-"):
            for service in self.named(role):
                self._start(service, self._daemon(service))
            for service in self.named(role):
                self._await(service, partial(self._serves, service, 9249, "/health"))
        if shutil.which("prometheus") is not None:
            self._start("prometheus", self._prometheus())
            self._await("prometheus", partial(self._serves, "prometheus", 9090, "/-/ready"))

    def down(self) -> None:
        """Ends all of it."""
        for beginning in _STOPPED_TOGETHER:
            pids = [pid for name in self.named(beginning) if (pid := self.pid(name)) is not None]
            end_all(pids)
        self._state.processes.clear()
        self._save()

    def _start(self, service: str, command: list[str]) -> None:
        if self.pid(service) is not None:
            return
        with self._log(service).open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory / service,
                env={**kernel_cache(), **os.environ},
                start_new_session=True,
            )
        self._state.processes[service] = process.pid, start_ticks(process.pid) or 0
        self._save()

    def _await(self, service: str, serves: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_DEADLINE_S
        while not serves():
            has_ended = self.pid(service) is None
            if has_ended or time.monotonic() > deadline:
                what = "has ended" if has_ended else f"did not serve in {START_DEADLINE_S:.0f} s"
                raise SystemExit(f"{service} {what}:\n{tail_of(self._log(service), 0)}")
            time.sleep(0.05)

    def _listens(self, address: str) -> bool:
        host, _, port = address.rpartition(":")
        with suppress(OSError), socket.create_connection((host, int(port)), 1.0):
            return True
        return False

    def _serves(self, service: str, port: int, path: str) -> bool:
        with suppress(URLError, OSError), urlopen(f"http://{self.address(service, port)}{path}"):
            return True
        return False

    def _save(self) -> None:
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self._state), indent=1))
        temporary.replace(self._file)

    def _log(self, service: str) -> Path:
        return self._own(service) / "output.log"

    def _own(self, service: str) -> Path:
        own = self.directory / service
        own.mkdir(mode=0o700, exist_ok=True)
        return own

    # ------------------------------------------------------------ commands

    def local(self, service: str, text: str) -> str:
        """What a file or command of a container says, as it is true on this host."""
        for name in self._services:
            for port in (2181, 6123, 9249):
                if f"{name}:{port}" in text:
                    text = text.replace(f"{name}:{port}", self.address(name, port))
        for inside, outside in (
            ("/run/secrets/penstock-token", str(self.token_file)),
            ("/var/lib/penstock-storage", str(self.directory / "storage")),
            ("/var/lib/penstock", str(self._own(service))),
            (f"rpc.address={service}", "rpc.address=127.0.0.1"),
            (f"taskmanager.host={service}", "taskmanager.host=127.0.0.1"),
            ("0.0.0.0", "127.0.0.1"),
        ):
            text = text.replace(inside, outside)
        return text

    def _mounted(self, service: str, inside: str) -> Path:
        """The file or directory of the repository that a container sees at a path."""
        for volume in self._services[service]["volumes"]:
            source, target, *_ = volume.split(":")
            if target == inside:
                return self._compose.parent / source
        raise SystemExit(f"{self._compose} mounts nothing at {inside} in {service}")

    def _daemon(self, service: str) -> list[str]:
        role = service.rpartition("-")[0]
        config = self.local(service, self._mounted(service, _CONFIG).read_text())
        metrics = self.address(service, 9249).rpartition(":")[2]
        config = config.replace(f"{role}.metrics.port: 9249", f"{role}.metrics.port: {metrics}")
        if role == "jobmanager":
            config += f"\njobmanager.rpc.port: {self.address(service, 6123).rpartition(':')[2]}\n"
        (self._own(service) / "penstock.yaml").write_text(config)
        command = [self.local(service, word) for word in self._services[service]["command"]]
        return [sys.executable, "-P", "-m", *command]

    def _zookeeper(self, service: str) -> list[str]:
        own, names = self._own(service), self.named("zookeeper-")
        (own / "data").mkdir(exist_ok=True)
        environment = self._services[service]["environment"]
        (own / "data" / "myid").write_text(str(environment["ZOO_MY_ID"]))
        port = {name: [self.address(name, p).rpartition(":")[2] for p in (2888, 3888, 2181)] for name in names}  # fmt: skip
        servers = [
            f"server.{self._services[name]['environment']['ZOO_MY_ID']}=127.0.0.1:{a}:{b}"
            for name, (a, b, _) in port.items()
        ]
        lines = [f"dataDir={own}/data", f"clientPort={port[service][2]}", "tickTime=1000",
                 "clientPortAddress=127.0.0.1", "initLimit=10", "syncLimit=5", *servers]  # fmt: skip
        (own / "zoo.cfg").write_text("\n".join(lines) + "\n")
        java = shutil.which("java")
        if java is None:
            raise SystemExit("ZooKeeper needs Java: `make servers` installs both")
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        return [java, *_JVM, "-cp", _zookeeper_jars(), main, str(own / "zoo.cfg")]

    def _prometheus(self) -> list[str]:
        own = self._own("prometheus")
        for file in self._mounted("prometheus", "/etc/prometheus").iterdir():
            (own / file.name).write_text(self.local("prometheus", file.read_text()))
        return [
            "prometheus",
            f"--config.file={own}/prometheus.yml",
            f"--storage.tsdb.path={own}/data",
            f"--web.listen-address={self.address('prometheus', 9090)}",
        ]


def _zookeeper_jars() -> str:
    if all(Path(jar).exists() for jar in _DEBIAN_JARS):
        return ":".join(_DEBIAN_JARS)
    pyspark = importlib.util.find_spec("pyspark")
    if pyspark is None or pyspark.origin is None:
        raise SystemExit("there is no ZooKeeper: `make servers` installs Debian's")
    return f"{Path(pyspark.origin).parent}/jars/*"


def main(arguments: list[str]) -> None:
    """The command line."""
    match arguments:
        case ["up", directory]:
            topology = LocalTopology(Path(directory))
            topology.up()
            print(f"export PENSTOCK_TOKEN=$(cat {topology.token_file})")
            print(f"penstock list --jobmanager {topology.jobmanagers}")
            if topology.pid("prometheus") is not None:
                print(f"# Prometheus: http://{topology.address('prometheus', 9090)}/alerts")
        case ["down", directory]:
            LocalTopology(Path(directory)).down()
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
