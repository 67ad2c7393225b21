"""The network I/O thread of a slot process: listeners, connects, and the sockets' readiness.

It decides nothing: it moves bytes between sockets and links, and posts mail. All requests of the
mailbox thread reach it through a queue and an eventfd, so that only this thread touches the selector.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from typing_extensions import override

from penstock.errors import InvariantViolation
from taskmanager.network.name_resolver_runner import NameResolver, Target
from taskmanager.network.socket_link_runner import LinkRunner, SocketLink
from taskmanager.network.transport import Address, Link, LinkHandler, Post, Transport

UNIX_PATH_MAX = 100
PORT_TRIES = 256
"""A configured data port is the first one tried: each slot process of a host takes its own."""
_UNIX_BUFFER_BYTES = 4 << 20
_BACKLOG = 1024
_RETRY_S = 0.005
GREETING_TIMEOUT_S = 10.0
"""Who has connected says who it is before that: the I/O thread of a peer does it, whatever its other threads do."""
_ACCEPT_PAUSE_S = 0.5
"""Without descriptors nothing is accepted for so long: a listener that has somebody waiting is always readable."""
_STRANGERS_SHARE = 2
"""Of the process's descriptors, at most every second one is for peers that have not been let in."""
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_OF_CONNECTION = frozenset(
    {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENONET}
    | {errno.EPROTO, errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EPERM, errno.ETIMEDOUT}
)
"""What ``accept`` says of one that has been lost, or that a firewall forbids: accept(2)."""
_JOIN_TIMEOUT_S = 10.0


class SocketTransport(Transport):
    """Links over Unix sockets and TCP, served by one thread.

    Args:
        greeting_timeout_s: for the first frame of whoever connects.
        strangers_max: connections whose peers have not been let in; those that came first are closed for new ones.
            None = a share of the process's descriptors.
    """

    def __init__(
        self, greeting_timeout_s: float = GREETING_TIMEOUT_S, strangers_max: int | None = None
    ) -> None:
        self._post: Post | None = None
        self._accept: Callable[[Link], LinkHandler] | None = None
        self._thread: threading.Thread | None = None
        self._unix_path: Path | None = None
        self._listeners: list[socket.socket] = []
        if strangers_max is None:
            strangers_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _STRANGERS_SHARE
        self._loop = _Loop(greeting_timeout_s, strangers_max)
        self._names: NameResolver | None = None

    @override
    def start(self, post: Post, accept: Callable[[Link], LinkHandler]) -> None:
        self._post = post
        self._names = NameResolver(post)
        self._accept = accept
        self._thread = threading.Thread(target=self._run, name="network-io", daemon=True)
        self._thread.start()

    @override
    def listen(self, unix_path: str, tcp_host: str, tcp_port: int) -> int:
        port = 0
        if unix_path:
            self._listen_on(unix_listener(unix_path))
            self._unix_path = Path(unix_path)
        if tcp_host:
            listener = tcp_listener(tcp_host, tcp_port)
            port = listener.getsockname()[1]
            self._listen_on(listener)
        return port

    @override
    def connect(self, address: Address, handler: LinkHandler, greeting: bytes) -> Link:
        link = SocketLink(self._loop, self._post_of_start())
        link.handler = handler

        def begin(target: Target) -> None:
            self._loop.submit(lambda: self._loop.connect(link, address, target, greeting))

        def fail(reason: str) -> None:
            self._loop.submit(lambda: link.fail(f"{address} cannot be reached: {reason}"))

        assert self._names is not None, "it was started"
        if address.unix_path:
            begin((socket.AF_UNIX, address.unix_path))
        else:
            self._names.resolve(address.tcp_host, address.tcp_port, begin, fail)
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
        """A connection has come in (I/O thread): the mailbox thread names its handler before frames come."""
        link = SocketLink(self._loop, self._post_of_start(), is_accepted=True)
        _prepare(sock)
        link.socket = sock

        def introduce() -> None:
            if self._accept is not None:
                link.handler = self._accept(link)

        self._post_of_start()(introduce)
        self._loop.admit(link)


class _Loop(LinkRunner):
    """The selector and what runs on its thread.

    Invariants: a stranger (accepted, not let in yet) is read until its first frame is whole, which must be before its
    deadline; there are at most ``strangers_max``.
    """

    def __init__(self, greeting_timeout_s: float, strangers_max: int) -> None:
        self._greeting_timeout_s = greeting_timeout_s
        self._strangers_max = strangers_max
        self._strangers: dict[SocketLink, None] = {}
        self._silent: dict[SocketLink, float] = {}
        """Strangers that have not greeted, and until when they may, the first one first."""
        self._paused: list[tuple[float, Callable[[], None]]] = []
        """When listeners accept again, and what has them do it, the first one first."""
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
            for key, events in self._selector.select(self._patience_s()):
                if isinstance(key.data, SocketLink):
                    self._serve(key.data, events)
                else:
                    key.data()
            retries, self._retries = self._retries, []
            for retry in retries:
                retry()
            # What has come was read first: whoever was held up itself blames nobody.
            self._end_waits(time.monotonic())
        for link in list(self._links):
            self.discard(link)

    def _patience_s(self) -> float | None:
        """How long nothing has to be done unless something comes."""
        due = [*itertools.islice(self._silent.values(), 1), *(at for at, _ in self._paused[:1])]
        if due:
            patience_s = max(0.0, min(due) - time.monotonic())
            return min(patience_s, _RETRY_S) if self._retries else patience_s
        return _RETRY_S if self._retries else None

    def _end_waits(self, now_s: float) -> None:
        for link, deadline_s in list(self._silent.items()):
            if now_s < deadline_s:
                break
            link.fail("it did not say who it is in time")
        while self._paused and self._paused[0][0] <= now_s:
            self._paused.pop(0)[1]()

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
                if error.errno in _OF_CONNECTION:
                    return
                if error.errno not in _NO_DESCRIPTORS:
                    raise
                # The connection waits in the backlog; its peer has a deadline.
                self._selector.unregister(listener)
                self._paused.append((time.monotonic() + _ACCEPT_PAUSE_S, watch))
                return
            accepted(sock)

        def watch() -> None:
            self._selector.register(listener, selectors.EVENT_READ, accept)

        watch()

    def admit(self, link: SocketLink) -> None:
        """Waits for the greeting of an accepted link."""
        if len(self._strangers) >= self._strangers_max:
            next(iter(self._strangers)).fail("too many have not said who they are")
        self._links.add(link)
        self._strangers[link] = None
        self._silent[link] = time.monotonic() + self._greeting_timeout_s
        self._watch(link, selectors.EVENT_READ)

    @override
    def pause(self, link: SocketLink) -> None:
        self._silent.pop(link, None)
        if link.socket is not None:
            self._selector.unregister(link.socket)

    @override
    def resume(self, link: SocketLink) -> None:
        self._strangers.pop(link, None)
        self._watch(link, selectors.EVENT_READ)

    def connect(self, link: SocketLink, address: Address, to: Target, greeting: bytes) -> None:
        """Begins to connect, unless it is not wanted any more."""
        if link.is_gone:
            return
        family, target = to
        try:
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
            self._retries.append(lambda: self.connect(link, address, to, greeting))
        elif code == errno.EINPROGRESS:
            self._selector.register(
                sock, selectors.EVENT_WRITE, lambda: self._connected(link, address, greeting)
            )
        elif code:
            link.fail(f"{address} cannot be reached: {os.strerror(code)}")
        else:
            link.connected(greeting)

    def _connected(self, link: SocketLink, address: Address, greeting: bytes) -> None:
        sock = link.socket
        assert sock is not None, "a link without a socket became writable"
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        # One that was there, and was reset before this thread came to it, finds that out as it greets.
        if code not in (0, errno.ECONNRESET):
            link.fail(f"{address} cannot be reached: {os.strerror(code)}")
            return
        link.connected(greeting)

    @override
    def watch_writable(self, link: SocketLink) -> None:
        self._watch(link, selectors.EVENT_READ | selectors.EVENT_WRITE)

    @override
    def unwatch_writable(self, link: SocketLink) -> None:
        self._watch(link, selectors.EVENT_READ)

    @override
    def discard(self, link: SocketLink) -> None:
        self._links.discard(link)
        self._strangers.pop(link, None)
        self._silent.pop(link, None)
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
        if link.socket is None or link.is_gone:
            return
        try:
            self._selector.modify(link.socket, events, link)
        except KeyError:  # nothing was waited for
            self._selector.register(link.socket, events, link)

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


def unix_listener(path: str) -> socket.socket:
    """A Unix socket that listens, for this user only.

    Raises:
        OSError: it cannot be had.
    """
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


def tcp_listener(host: str, port: int) -> socket.socket:
    """A TCP socket that listens, at the port or one of the next; 0 = at a free one.

    Raises:
        OSError: it cannot be had.
    """
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
