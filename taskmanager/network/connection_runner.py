"""The network I/O thread of a slot process: listeners, connects, and the sockets' readiness.

It decides nothing: it moves bytes between sockets and links, and posts mail. All requests of the
mailbox thread reach it through a queue and an eventfd, so that only this thread touches the selector.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from typing_extensions import override

from penstock.errors import InvariantViolation
from taskmanager.network.socket_link_runner import LinkRunner, SocketLink
from taskmanager.network.transport import Address, Link, LinkHandler, Post, Transport

UNIX_PATH_MAX = 100
PORT_TRIES = 256
"""A configured data port is the first one tried: each slot process of a host takes its own."""
_UNIX_BUFFER_BYTES = 4 << 20
_BACKLOG = 1024
_RETRY_S = 0.005
_JOIN_TIMEOUT_S = 10.0


class SocketTransport(Transport):
    """Links over Unix sockets and TCP, served by one thread."""

    def __init__(self) -> None:
        self._post: Post | None = None
        self._accept: Callable[[Link], LinkHandler] | None = None
        self._thread: threading.Thread | None = None
        self._unix_path: Path | None = None
        self._listeners: list[socket.socket] = []
        self._loop = _Loop()

    @override
    def start(self, post: Post, accept: Callable[[Link], LinkHandler]) -> None:
        self._post = post
        self._accept = accept
        self._thread = threading.Thread(target=self._run, name="network-io", daemon=True)
        self._thread.start()

    @override
    def listen(self, unix_path: str, tcp_host: str, tcp_port: int) -> int:
        port = 0
        if unix_path:
            self._listen_on(_unix_listener(unix_path))
            self._unix_path = Path(unix_path)
        if tcp_host:
            listener = _tcp_listener(tcp_host, tcp_port)
            port = listener.getsockname()[1]
            self._listen_on(listener)
        return port

    @override
    def connect(self, address: Address, handler: LinkHandler) -> Link:
        link = SocketLink(self._loop, self._post_of_start())
        link.handler = handler
        self._loop.submit(lambda: self._loop.connect(link, address))
        return link

    @override
    def close(self) -> None:
        if self._thread is not None:
            self._loop.submit(self._loop.stop)
            self._thread.join(_JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                raise InvariantViolation("the network I/O thread does not end")
            self._thread = None
        self._loop.close()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        if self._unix_path is not None:
            self._unix_path.unlink(missing_ok=True)
            self._unix_path = None

    def _run(self) -> None:
        try:
            self._loop.run()
        except Exception as error:  # noqa: BLE001 - a thread's boundary: the mailbox thread hears of it
            failure = InvariantViolation(f"the network I/O thread died: {error!r}")
            failure.__cause__ = error

            def report() -> None:
                raise failure

            self._post_of_start()(report)

    def _post_of_start(self) -> Post:
        if self._post is None:
            raise InvariantViolation("the transport is used before it was started")
        return self._post

    def _listen_on(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listeners.append(listener)
        self._loop.submit(lambda: self._loop.watch_listener(listener, self._accepted))

    def _accepted(self, sock: socket.socket) -> None:
        """A connection has come in (I/O thread): the mailbox thread names its handler first."""
        link = SocketLink(self._loop, self._post_of_start())
        _prepare(sock)
        link.socket = sock
        self._loop.adopt(link)

        def introduce() -> None:
            if self._accept is not None:
                link.handler = self._accept(link)
                self._loop.submit(lambda: self._loop.watch(link))

        self._post_of_start()(introduce)


class _Loop(LinkRunner):
    """The selector and what runs on its thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._requests: deque[Callable[[], None]] = deque()
        self._retries: list[Callable[[], None]] = []
        self._links: set[SocketLink] = set()
        self._shut_down: list[socket.socket] = []  # closed by mail, or with the loop
        self._is_stopping = False
        self._is_closed = False
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._run_requests)

    @override
    def submit(self, request: Callable[[], None]) -> None:
        if not self._is_closed:
            self._requests.append(request)
            os.eventfd_write(self._wake_fd, 1)

    def run(self) -> None:
        """Serves until ``stop``."""
        while not self._is_stopping:
            for key, events in self._selector.select(_RETRY_S if self._retries else None):
                if isinstance(key.data, SocketLink):
                    self._serve(key.data, events)
                else:
                    key.data()
            retries, self._retries = self._retries, []
            for retry in retries:
                retry()
        for link in list(self._links):
            self.discard(link)

    def stop(self) -> None:
        """Ends ``run``."""
        self._is_stopping = True

    def close(self) -> None:
        """Frees the selector and every socket; the thread has ended."""
        if not self._is_closed:
            self._is_closed = True
            for sock in self._shut_down:
                sock.close()
            self._selector.close()
            os.close(self._wake_fd)

    def watch_listener(
        self, listener: socket.socket, accepted: Callable[[socket.socket], None]
    ) -> None:
        """Accepts what comes in."""

        def accept() -> None:
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                # Out of descriptors: the connection waits in the backlog; its peer has a deadline.
                return
            accepted(sock)

        self._selector.register(listener, selectors.EVENT_READ, accept)

    def adopt(self, link: SocketLink) -> None:
        """Takes care of an accepted link, which is not read from yet."""
        self._links.add(link)

    def watch(self, link: SocketLink) -> None:
        """Reads from a link from now on."""
        if link.socket is not None and not link.is_gone:
            self._selector.register(link.socket, selectors.EVENT_READ, link)
            link.read()

    def connect(self, link: SocketLink, address: Address) -> None:
        """Begins to connect."""
        try:
            family, target = _target_of(address)
            sock = socket.socket(family, socket.SOCK_STREAM)
            _prepare(sock)
            link.socket = sock
            self._links.add(link)
            code = sock.connect_ex(target)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            link.fail(f"{address} cannot be reached: {why}")
            return
        if code == errno.EAGAIN and family == socket.AF_UNIX:
            # The listener's backlog is full.
            link.socket = None
            sock.close()
            self._retries.append(lambda: self._connect_again(link, address))
        elif code == errno.EINPROGRESS:
            self._selector.register(
                sock, selectors.EVENT_WRITE, lambda: self._connected(link, address)
            )
        elif code:
            link.fail(f"{address} cannot be reached: {os.strerror(code)}")
        else:
            self._selector.register(sock, selectors.EVENT_READ, link)
            link.connected()

    def _connect_again(self, link: SocketLink, address: Address) -> None:
        if not link.is_gone:
            self.connect(link, address)

    def _connected(self, link: SocketLink, address: Address) -> None:
        sock = link.socket
        assert sock is not None, "a link without a socket became writable"
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            link.fail(f"{address} cannot be reached: {os.strerror(code)}")
            return
        self._selector.modify(sock, selectors.EVENT_READ, link)
        link.connected()

    @override
    def watch_writable(self, link: SocketLink) -> None:
        self._watch(link, selectors.EVENT_READ | selectors.EVENT_WRITE)

    @override
    def unwatch_writable(self, link: SocketLink) -> None:
        self._watch(link, selectors.EVENT_READ)

    @override
    def discard(self, link: SocketLink) -> None:
        self._links.discard(link)
        sock = link.socket
        if sock is None:
            return
        with contextlib.suppress(KeyError):  # not registered yet
            self._selector.unregister(sock)
        with contextlib.suppress(OSError):  # not connected
            sock.shutdown(socket.SHUT_RDWR)
        self._shut_down = [known for known in self._shut_down if known.fileno() >= 0]
        self._shut_down.append(sock)

    def _watch(self, link: SocketLink, events: int) -> None:
        if link.socket is not None and not link.is_gone:
            self._selector.modify(link.socket, events, link)

    def _serve(self, link: SocketLink, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            link.write_queued()
        if events & selectors.EVENT_READ:
            link.read()

    def _run_requests(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        while self._requests:
            self._requests.popleft()()


def _prepare(sock: socket.socket) -> None:
    """Options that fit the kind of socket."""
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        # Large buffers keep a sender busy while its peer computes; the kernel caps them.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _UNIX_BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


def _target_of(address: Address) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    if address.unix_path:
        return socket.AF_UNIX, address.unix_path
    found = socket.getaddrinfo(address.tcp_host, address.tcp_port, type=socket.SOCK_STREAM)
    family, _, _, _, target = found[0]
    return family, (str(target[0]), int(target[1]))


def _unix_listener(path: str) -> socket.socket:
    if len(os.fsencode(path)) >= UNIX_PATH_MAX:
        raise OSError(
            errno.ENAMETOOLONG,
            f"the path of a Unix socket must be under {UNIX_PATH_MAX} bytes; use a shorter TMPDIR",
            path,
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        Path(path).chmod(0o600)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _tcp_listener(host: str, port: int) -> socket.socket:
    ports = range(port, min(port + PORT_TRIES, 1 << 16)) if port else range(1)
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    for candidate in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, candidate))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE or candidate == ports[-1]:
                raise
        else:
            return listener
    raise InvariantViolation(f"no port was tried on {host}")
