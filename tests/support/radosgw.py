"""A real S3 server: Ceph's object gateway with one monitor and one store, as plain processes.

It checks signatures, honours the conditions of PutObject, and what it has answered survives SIGKILL of its
processes, which can be started again on the same data. ``python -m tests.support.radosgw BUCKET COMMAND ...`` runs a command
beside one, whose environment says how it is reached.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from penstock.client.termination import terminates_as_exception
from tests.support.servers import free_port, require, wait_for

ACCESS_KEY = "test"
SECRET_KEY = "testtest"
_START_TIMEOUT_S = 60.0
_COMMAND_TIMEOUT_S = 60.0


class RadosGateway:
    """The server.

    Args:
        root: for its data, its configuration and its logs; short, since sockets lie in it.
        store_bytes: that it may hold.
    """

    def __init__(self, root: Path, store_bytes: int = 2 << 30) -> None:
        for command in ("radosgw", "ceph-mon", "ceph-osd", "ceph", "radosgw-admin"):
            require(command)
        self._root = root
        self.store_bytes = store_bytes
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.port = free_port()
        self._fsid = str(uuid.uuid4())
        self._monitor = f"v2:127.0.0.1:{free_port()}"
        (root / "ceph.conf").write_text(_CONFIGURATION.format(self=self, root=root))

    @property
    def endpoint(self) -> str:
        """Where it serves."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, str]:
        """Configuration keys with which it is reached."""
        return s3_options(self.endpoint)

    @contextlib.contextmanager
    def running(self) -> Iterator[RadosGateway]:
        """The server for the time of the block."""
        try:
            self._make()
            self.start_gateway()
            self.make_user("test", ACCESS_KEY, SECRET_KEY)
            yield self
        finally:
            for name in list(self._processes):
                self.kill(name)

    def make_user(self, name: str, access_key: str, secret_key: str) -> None:
        """One more who may make buckets."""
        self._run(
            *self._of("radosgw-admin"), "-n", "client.rgw", "user", "create", f"--uid={name}",
            f"--display-name={name}", f"--access-key={access_key}", f"--secret-key={secret_key}",
        )  # fmt: skip

    def client(self, access_key: str = ACCESS_KEY, secret_key: str = SECRET_KEY) -> Any:
        """A client of the library's own, for what tests look at."""
        return s3_client(self.endpoint, access_key, secret_key)

    def kill(self, name: str = "gateway") -> None:
        """SIGKILL for one of its processes."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def start_gateway(self) -> None:
        """Starts what serves S3, the first time or again; returns when it answers."""
        process = self._spawn("gateway", *self._of("radosgw"), "-n", "client.rgw", "-f")
        wait_for(process, self._log("gateway"), self._answers, _START_TIMEOUT_S)

    def _answers(self) -> bool | None:
        with contextlib.suppress(URLError, OSError):
            urlopen(self.endpoint, timeout=5).close()
            return True
        return None

    def _make(self) -> None:
        root = self._root
        for directory in ("mon", "osd", "rgw"):
            (root / directory).mkdir()
        keyring = root / "keyring"
        self._key(keyring, "mon.", "mon", create=True)
        self._key(keyring, "client.admin", "mon", "osd", "mgr", "mds")
        self._key(keyring, "client.rgw", "mon", "osd", "mgr")
        self._key(keyring, "osd.0", "mon", "osd", "mgr")
        self._run(
            "monmaptool", "--create", "--fsid", self._fsid, "--addv", "a", f"[{self._monitor}]",
            f"{root}/monmap",
        )  # fmt: skip
        self._run(
            *self._of("ceph-mon"), "--mkfs", "-i", "a", "--monmap", f"{root}/monmap",
            "--keyring", f"{keyring}",
        )  # fmt: skip
        self._spawn("monitor", *self._of("ceph-mon"), "-i", "a", "-f")
        store = str(uuid.uuid4())
        self._run(*self._of("ceph"), "osd", "create", store)
        self._run(*self._of("ceph-osd"), "-i", "0", "--mkfs", "--osd-uuid", store)
        self._spawn("store", *self._of("ceph-osd"), "-i", "0", "-f")

    def _key(self, keyring: Path, name: str, *services: str, create: bool = False) -> None:
        capabilities = [part for one in services for part in ("--cap", one, "allow *")]
        new = ["--create-keyring"] if create else []
        self._run("ceph-authtool", *new, str(keyring), "--gen-key", "-n", name, *capabilities)

    def _of(self, command: str) -> list[str]:
        return [command, "-c", f"{self._root}/ceph.conf"]

    def _log(self, name: str) -> Path:
        return self._root / f"{name}.out"

    def _run(self, *arguments: str) -> None:
        done = subprocess.run(
            arguments,
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            cwd=self._root,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stderr[-2000:]}"

    def _spawn(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with self._log(name).open("ab") as log:
            self._processes[name] = process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._root,
                start_new_session=True,
                env={**os.environ, "TCMALLOC_MAX_TOTAL_THREAD_CACHE_BYTES": "33554432"},
            )
        return process


def s3_options(endpoint: str) -> dict[str, str]:
    """Configuration keys for a server of the tests."""
    return {
        "s3.endpoint": endpoint,
        "s3.region": "us-east-1",
        "s3.path-style-access": "true",
        "s3.access-key": ACCESS_KEY,
        "s3.secret-key": SECRET_KEY,
    }


def s3_client(endpoint: str, access_key: str = ACCESS_KEY, secret_key: str = SECRET_KEY) -> Any:
    """A client of a server of the tests."""
    import boto3
    from botocore.config import Config

    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        config=Config(s3={"addressing_style": "path"}),
    )


_CONFIGURATION = """[global]
fsid = {self._fsid}
mon host = {self._monitor}
ms bind msgr1 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth allow insecure global id reclaim = true
mon warn on insecure global id reclaim allowed = false
osd pool default size = 1
osd pool default min size = 1
mon allow pool size one = true
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon osd full ratio = .97
mon osd nearfull ratio = .90
mon data avail crit = 1
mon data avail warn = 2
run dir = {root}
admin socket = {root}/$name.asok
log file = {root}/$name.log
pid file = {root}/$name.pid
keyring = {root}/keyring
[mon.a]
mon data = {root}/mon
[osd]
osd data = {root}/osd
osd objectstore = bluestore
bluestore block size = {self.store_bytes}
bluestore block create = true
osd memory target = 939524096
osd op num shards = 2
osd op num threads per shard = 1
[client.rgw]
keyring = {root}/keyring
rgw data = {root}/rgw
rgw frontends = beast endpoint=127.0.0.1:{self.port}
rgw enable usage log = false
rgw enable ops log = false
rgw thread pool size = 64
rgw run sync thread = false
rgw enable apis = s3, admin
rgw dns name = localhost
"""


def main(bucket: str, command: list[str]) -> int:
    """Runs a command beside a server with a bucket; returns its status. SIGTERM ends both."""
    with (
        terminates_as_exception(),
        tempfile.TemporaryDirectory(prefix="rgw-") as root,
        RadosGateway(Path(root), 16 << 30).running() as server,
    ):
        server.client().create_bucket(Bucket=bucket)
        access = {
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        }
        with subprocess.Popen(command, env={**os.environ, **access}) as process:
            try:
                return process.wait()
            finally:
                process.terminate()  # nothing where it has ended


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
