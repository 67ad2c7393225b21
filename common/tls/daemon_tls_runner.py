"""The TLS of one daemon: gRPC speaks plain with it over private Unix sockets, and it speaks TLS with other hosts.

gRPC itself cannot do what is needed here (Python's binding): it either demands a certificate of everybody or looks at none,
cannot leave the host's name unchecked, keeps a client's certificate for the life of a channel, and says little of why a
handshake failed.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from common.tls.doors import Destination, Entrance, Exit
from common.tls.relay_runner import RelayRunner
from common.tls.tls_files_store import TlsFiles
from penstock.client.addresses import parse_address
from penstock.config import Configuration
from penstock.local.owned_directories import create_runtime_directory

_BUFFER_BYTES: Final = 64 * 1024
_BACKLOG: Final = 1024
_RECENT_S: Final = 10.0


class WayOut:
    """A Unix socket of which each connection leads to one address of another daemon.

    Attributes:
        target: as gRPC calls it.
    """

    def __init__(self, path: Path) -> None:
        self.target = f"unix:{path}"
        self._path = path
        self._refused = (0.0, "")
        self.dismiss: Callable[[], None] = lambda: None
        """Nobody leaves any more."""

    @property
    def refusal(self) -> str:
        """Why it has just led nowhere, which gRPC does not see; "" = nothing is known of that."""
        at_s, reason = self._refused
        return reason if time.monotonic() < at_s + _RECENT_S else ""

    def note_refusal(self, reason: str) -> bytes:
        """It has led nowhere; who wanted to leave is sent nothing."""
        self._refused = (time.monotonic(), reason)
        return b""

    def close(self) -> None:
        """Nobody leaves any more; who is on the way stays."""
        self.dismiss()
        self._path.unlink(missing_ok=True)


class DaemonTls:
    """See the module.

    Args:
        files: the daemon's certificate and whom it believes.
        directory: private, with a short path.
    """

    def __init__(self, files: TlsFiles, directory: Path) -> None:
        self._relay = RelayRunner(files, _BUFFER_BYTES)
        self._directory = directory
        self._numbers = itertools.count()

    @classmethod
    @contextmanager
    def running(cls, config: Configuration) -> Iterator[DaemonTls | None]:
        """For the time of the block; None where daemons speak plain.

        Raises:
            ConfigurationError: the files cannot be used.
        """
        files = TlsFiles.of(config)
        if files is None:
            yield None
            return
        own = create_runtime_directory(f"{os.getpid()}-{secrets.token_hex(4)}")
        tls = cls(files, own.path)
        try:
            tls._relay.start()
            yield tls
        finally:
            tls._relay.close()
            own.remove()

    def new_path(self) -> Path:
        """Of a Unix socket that nobody else has."""
        return self._directory / f"{next(self._numbers)}.sock"

    def way_to(self, address: str) -> WayOut:
        """A way to the TLS port of another daemon.

        Args:
            address: host:port.

        Raises:
            ConfigurationError: that is no address.
        """
        host, port = parse_address(address)
        path = self.new_path()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen(_BACKLOG)
        way = WayOut(path)
        way.dismiss = lambda: self._relay.dismiss(listener)
        self._relay.let_out(listener, Exit(Destination(host, port), way.note_refusal))
        return way

    def listen(self, host: str, port: int) -> socket.socket:
        """A TCP socket to let others in by; the port is taken, and nobody is answered yet.

        Raises:
            OSError: it cannot be had.
        """
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener

    def let_in(self, listener: socket.socket, entrance: Entrance) -> None:
        """Answers those who connect to such a socket."""
        self._relay.let_in(listener, entrance)

    def dismiss(self, listener: socket.socket) -> None:
        """Takes nobody any more there."""
        self._relay.dismiss(listener)
