"""Tools and servers of other projects that tests use, and how tests behave where they are missing.

They come from Debian packages (``tests/support/install_servers.sh``) and from the development extra.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import pytest
import yaml

_POLL_S = 0.05
_END_TIMEOUT_S = 10.0
_FIRST_PORT = 10_000
_PORTS_OF_ANY = Path("/proc/sys/net/ipv4/ip_local_port_range")

T = TypeVar("T")


def require(command: str) -> str:
    """The path of a command; a test that needs one that is missing skips, and in CI fails."""
    own = Path(sys.executable).parent
    found = shutil.which(command, path=os.pathsep.join([str(own), os.environ.get("PATH", "")]))
    if found is None:
        message = f"{command} is missing: `make servers` installs it (with root or sudo)"
        if os.environ.get("CI"):
            pytest.fail(message, pytrace=False)
        pytest.skip(message)
    return found


def require_file(path: str) -> None:
    """As ``require``, for a file of a package that has no command."""
    if not Path(path).exists():
        message = f"{path} is missing: `make servers` installs it (with root or sudo)"
        if os.environ.get("CI"):
            pytest.fail(message, pytrace=False)
        pytest.skip(message)


def run_tool(
    arguments: Sequence[str | Path], *, stdin: str = "", cwd: Path | None = None
) -> tuple[int, str]:
    """Runs a command to its end; returns its exit status and what it wrote."""
    done = subprocess.run(
        [str(argument) for argument in arguments],
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        cwd=cwd,
        check=False,
    )
    return done.returncode, done.stdout


def free_port() -> int:
    """A TCP port that nobody listens on, and that nobody is given who asks for any: it may be bound much later."""
    first_of_any = max(int(_PORTS_OF_ANY.read_text().split()[0]), 2 * _FIRST_PORT)
    while True:
        port = _FIRST_PORT + secrets.randbelow(first_of_any - _FIRST_PORT)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_for(
    process: subprocess.Popen[bytes], log: Path, ready: Callable[[], T | None], timeout_s: float
) -> T:
    """Asks until ``ready`` answers; fails with the log when the process ends or the time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = ready()
        if answer is not None:
            return answer
        has_ended = False
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
            has_ended = True
        if has_ended or time.monotonic() > deadline:
            what = "ended" if has_ended else f"was not ready within {timeout_s:.0f} s"
            pytest.fail(f"{process.args} {what}; its log:\n{log.read_text()[-4000:]}")


@contextlib.contextmanager
def running(
    arguments: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process for the time of the block; it is asked to end, and killed when it does not."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(argument) for argument in arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Prometheus:
    """A real Prometheus that scrapes some endpoints every second.

    Args:
        directory: for its configuration, its data and its log.
        targets: job name -> addresses, "host:port".
    """

    def __init__(self, directory: Path, targets: Mapping[str, Sequence[str]]) -> None:
        self._directory = directory
        self._targets = targets
        self._address = f"127.0.0.1:{free_port()}"
        self._log = directory / "prometheus.log"

    @contextlib.contextmanager
    def running(self) -> Iterator[Prometheus]:
        """Prometheus for the time of the block."""
        config = self._directory / "prometheus.yml"
        config.write_text(
            yaml.safe_dump(
                {
                    "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
                    "scrape_configs": [
                        {"job_name": name, "static_configs": [{"targets": list(addresses)}]}
                        for name, addresses in self._targets.items()
                    ],
                }
            )
        )
        arguments = [
            require("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={self._directory / 'data'}",
            f"--web.listen-address={self._address}",
        ]
        with running(arguments, self._log) as process:
            self._process = process
            yield self

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples that an expression gives now, [] while Prometheus starts."""
        url = f"http://{self._address}/api/v1/query?query={quote(expression)}"
        try:
            with urlopen(url, timeout=5) as response:
                content = json.load(response)
        except (URLError, OSError):
            return []
        samples: list[dict[str, Any]] = content["data"]["result"]
        return samples

    def wait_for_samples(
        self, expression: str, count: int, timeout_s: float = 40
    ) -> list[dict[str, Any]]:
        """The samples of an expression once there are at least ``count`` of them."""

        def ready() -> list[dict[str, Any]] | None:
            samples = self.query(expression)
            return samples if len(samples) >= count else None

        return wait_for(self._process, self._log, ready, timeout_s)
