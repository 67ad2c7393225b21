"""One socket of a relay, plain or TLS, that never waits.

Readiness is told once (edge-triggered) and kept here until the socket says that it would have to wait.
"""

from __future__ import annotations

import select
import socket
import ssl

_RECORD_BYTES = 16 * 1024
"""TLS hands over what it has deciphered in pieces of at most this size."""


class Leg:
    """See the module.

    Args:
        sock: connected, or connecting; becomes non-blocking.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.can_read = False
        self.can_write = False
        self.has_received = False
        self._read_waits_to_write = False
        self._write_waits_to_read = False

    def wrap(self, context: ssl.SSLContext, name: str | None) -> None:
        """Speaks TLS from now on.

        Args:
            name: of the server, where this side is the client; None = this side is the server.
        """
        self.sock = context.wrap_socket(
            self.sock,
            server_side=name is None,
            server_hostname=name,
            do_handshake_on_connect=False,
        )

    @property
    def is_tls(self) -> bool:
        """Whether it has been wrapped."""
        return isinstance(self.sock, ssl.SSLSocket)

    def ready(self, events: int) -> None:
        """The kernel has said something of the socket."""
        broken = events & (select.EPOLLHUP | select.EPOLLERR)
        if events & (select.EPOLLIN | select.EPOLLRDHUP) or broken:
            self.can_read = True
            self.can_write = self.can_write or self._write_waits_to_read
        if events & select.EPOLLOUT or broken:
            self.can_write = True
            self.can_read = self.can_read or self._read_waits_to_write

    def shakes_hands(self) -> bool:
        """Goes on with the handshake; True when it is over.

        Raises:
            OSError: it failed.
        """
        assert isinstance(self.sock, ssl.SSLSocket), "a plain socket has no handshake"
        try:
            self.sock.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        # What the kernel told meanwhile may have been for the handshake: both are tried.
        self.can_read = self.can_write = True
        return True

    def fill(self, view: memoryview) -> tuple[int, bool]:
        """Reads what has come, as far as there is room; the count, and whether it was the last.

        Raises:
            OSError: the connection is broken.
        """
        total = 0
        while total == 0 or (self.is_tls and len(view) - total >= _RECORD_BYTES):
            try:
                count = self.sock.recv_into(view[total:])
            except (BlockingIOError, InterruptedError, ssl.SSLWantReadError):
                self.can_read, self._read_waits_to_write = False, False
                break
            except ssl.SSLWantWriteError:
                self.can_read, self._read_waits_to_write = False, True
                break
            if count == 0:
                return total, True
            self.has_received = True
            total += count
        return total, False

    def drain(self, view: memoryview) -> int:
        """Writes what the socket takes; the count.

        Raises:
            OSError: the connection is broken.
        """
        total = 0
        while total < len(view):
            try:
                total += self.sock.send(view[total:])
            except (BlockingIOError, InterruptedError, ssl.SSLWantWriteError):
                self.can_write, self._write_waits_to_read = False, False
                break
            except ssl.SSLWantReadError:
                self.can_write, self._write_waits_to_read = False, True
                break
        return total
