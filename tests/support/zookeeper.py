"""Real ZooKeeper servers, alone or three together, as plain processes on loopback addresses."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.servers import free_port, require, require_file, wait_for

_CLASS_PATH = ("/usr/share/java/zookeeper.jar", "/usr/share/java/slf4j-simple.jar")
_JVM = (
    "-Xms32m", "-Xmx96m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData",
    "-Dzookeeper.admin.enableServer=false", "-Dzookeeper.jmx.log4j.disable=true",
    "-Dzookeeper.4lw.commands.whitelist=srvr", "-Dzookeeper.forceSync=no",
)  # fmt: skip
_TICK_MS = 200
_SYNC_LIMIT = 50
"""Ticks. Followers of a leader that is stopped for longer leave it, and come back to it once it goes on: it may then wait for ever
for what they had not acknowledged (seen with 3.8), and the servers take every write but confirm none."""
_START_TIMEOUT_S = 90.0


class ZookeeperServer:
    """One server.

    Args:
        root: for its data and its log.
        number: among its peers.
        peers: number -> its ports for the others; empty = it is alone.
        host: where clients reach it.
    """

    def __init__(
        self, root: Path, number: int, peers: dict[int, tuple[int, int]], host: str = "127.0.0.1"
    ) -> None:
        require("java")
        for jar in _CLASS_PATH:
            require_file(jar)
        self.port = free_port()
        self._host = host
        self._directory = root / f"zookeeper-{number}"
        (self._directory / "data").mkdir(parents=True)
        (self._directory / "data" / "myid").write_text(str(number))
        lines = [
            f"dataDir={self._directory}/data",
            f"clientPort={self.port}",
            f"clientPortAddress={host}",
            f"tickTime={_TICK_MS}",
            "initLimit=50",
            f"syncLimit={_SYNC_LIMIT}",
            "maxClientCnxns=0",
            "maxSessionTimeout=60000",
            *(f"server.{n}=127.0.0.1:{a}:{b}" for n, (a, b) in peers.items()),
        ]
        (self._directory / "zoo.cfg").write_text("\n".join(lines) + "\n")
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where clients reach it."""
        return f"{self._host}:{self.port}"

    def start(self) -> None:
        """Starts it, also again on its data."""
        command = [
            "java", *_JVM, "-cp", ":".join(_CLASS_PATH),
            "org.apache.zookeeper.server.quorum.QuorumPeerMain", str(self._directory / "zoo.cfg"),
        ]  # fmt: skip
        with self._log.open("ab") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    def await_serving(self) -> None:
        """Returns when it answers clients."""
        assert self.process is not None, "it was started"
        wait_for(self.process, self._log, lambda: self.mode, _START_TIMEOUT_S)

    @property
    def mode(self) -> str | None:
        """leader, follower, standalone; None while it serves nobody."""
        with (
            contextlib.suppress(OSError),
            socket.create_connection((self._host, self.port), 1.0) as connection,
        ):
            connection.sendall(b"srvr")
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
            for line in answer.decode().splitlines():
                if line.startswith("Mode: "):
                    return line.removeprefix("Mode: ")
        return None

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def empty(self) -> None:
        """Removes all that it has stored, while it does not run."""
        shutil.rmtree(self._directory / "data" / "version-2")

    def signal(self, number: int) -> None:
        """Pauses it, or lets it go on."""
        assert self.process is not None, "it was started"
        os.kill(self.process.pid, number)

    @property
    def _log(self) -> Path:
        return self._directory / "server.log"


@contextlib.contextmanager
def ensemble(
    root: Path, count: int = 1, host: str = "127.0.0.1"
) -> Iterator[list[ZookeeperServer]]:
    """Servers for the time of the block."""
    peers = {n: (free_port(), free_port()) for n in range(1, count + 1)} if count > 1 else {}
    servers = [ZookeeperServer(root, number, peers, host) for number in range(1, count + 1)]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.await_serving()
        yield servers
    finally:
        for server in servers:
            server.kill()


def quorum(servers: list[ZookeeperServer]) -> str:
    """The value of ``high-availability.zookeeper.quorum``."""
    return ",".join(server.address for server in servers)
