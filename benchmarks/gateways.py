"""The process that speaks TLS for a TaskManager's slots, for a measurement without daemons."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import trustme

from common.pb import internal_pb2
from taskmanager.network import gateway_process
from taskmanager.network.gateway import GATEWAY_SOCKET, Gateway

_LENGTH = struct.Struct("<I")
_NAME = "127.0.0.1"


class GatewayProcess:
    """A gateway of its own process, as the forkserver makes it; ends with the block.

    Args:
        directory: of the sockets of its slots.
        root: where all of a measurement find the certificates, which the first one makes.
    """

    def __init__(self, directory: str, root: str) -> None:
        ours, theirs = socket.socketpair()
        config = _certificates(Path(root))
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            gateway_process.run(theirs)
            os._exit(0)
        theirs.close()
        self._line = ours
        configuration = internal_pb2.SlotConfiguration(
            slot_id="gateway",
            host_id=directory,
            config=config,
            unix_socket_path=f"{directory}/{GATEWAY_SOCKET}",
            tcp_bind_host=_NAME,
            tcp_advertised_host=_NAME,
        )
        body = internal_pb2.SlotCommand(configure=configuration).SerializeToString()
        ours.sendall(_LENGTH.pack(len(body)) + body)
        size = _LENGTH.unpack(ours.recv(_LENGTH.size, socket.MSG_WAITALL))[0]
        report = internal_pb2.SlotReport.FromString(ours.recv(size, socket.MSG_WAITALL))
        self.gateway = Gateway(report.ready.unix_path, report.ready.tcp_port)

    def cpu_s(self) -> float:
        """What it has used, handshakes included."""
        times = psutil.Process(self._pid).cpu_times()
        return float(times.user + times.system)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._line.close()
        os.waitpid(self._pid, 0)


def _certificates(root: Path) -> dict[str, str]:
    """Settings of mTLS with a CA that is made for it."""
    cert, key, ca = (root / name for name in ("cert.pem", "key.pem", "ca.pem"))
    if not ca.exists():
        authority = trustme.CA()
        issued = authority.issue_cert(_NAME)
        key.touch(mode=0o600)
        key.write_bytes(issued.private_key_pem.bytes())
        cert.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        ca.write_bytes(authority.cert_pem.bytes())
    prefix = "security.ssl.internal"
    return {
        f"{prefix}.enabled": "true",
        f"{prefix}.cert": str(cert),
        f"{prefix}.key": str(key),
        f"{prefix}.ca": str(ca),
    }
