"""Moves bytes between plain sockets of this host and TLS connections to others: one thread, one selector.

It decides nothing but when to read: what has been read from one side is written to the other before more is read, so a
side that does not take anything holds up the other, and memory is bounded by one buffer per direction that is held up.
Whoever has set a connection up within ``SETUP_TIMEOUT_S`` stays for as long as both sides do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from common.log import get_logger
from common.refusal_log import RefusalLog
from common.tls.doors import Entrance, Exit
from common.tls.leg import Leg
from common.tls.passage_runner import EnteringPassage, LeavingPassage, Passage
from common.tls.tls_files_store import TlsFiles
from penstock.errors import InvariantViolation

SETUP_TIMEOUT_S: Final = 10.0
_ACCEPT_PAUSE_S: Final = 0.5
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_GONE_AGAIN: Final = (
    errno.ECONNABORTED,
    errno.EPERM,
    errno.EPROTO,
    errno.ENETDOWN,
    errno.ENOPROTOOPT,
    errno.EHOSTDOWN,
    errno.ENONET,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
)
"""What Linux says of the one who has come, and not of the socket that he came to."""
_ACCEPTED_PER_TURN: Final = 64
_JOIN_TIMEOUT_S: Final = 5.0
_EXIT_FAILED: Final = 1
_LEG_EVENTS: Final = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
_RESOLVERS: Final = 2
_BUFFERS_KEPT_MAX: Final = 4
_STRANGERS_SHARE: Final = 4
"""Of the process's descriptors, at most every fourth one is for those who have not got through; the first go first."""


_Opener = Callable[[socket.socket], Passage]


class RelayRunner:
    """See the module. Its methods may be called from any thread.

    Args:
        files: for the handshakes.
        buffer_bytes: of each direction that is held up.
    """

    def __init__(self, files: TlsFiles, buffer_bytes: int) -> None:
        self.files = files
        self.buffer_bytes = buffer_bytes
        self.resolvers = ThreadPoolExecutor(_RESOLVERS, "tls-names")
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._requests: deque[Callable[[], None]] = deque()
        self._listeners: dict[int, tuple[socket.socket, _Opener]] = {}
        self._paused: dict[int, float] = {}
        self._owners: dict[int, tuple[Passage, Leg]] = {}
        self._passages: dict[Passage, None] = {}
        self._deadlines: dict[Passage, float] = {}
        """The first one first: all have the same time."""
        self._busy: dict[Passage, None] = {}
        self._buffers: list[bytearray] = []
        self._strangers_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _STRANGERS_SHARE
        self._is_stopping = False
        self._lock = threading.Lock()
        """Guards the way to the thread."""
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._log = get_logger(__name__)
        self.refusals = RefusalLog(self._log)
        """Who was not let through; the thread tells it."""

    # ------------------------------------------------------------ any thread

    def start(self) -> None:
        """Serves in a thread of its own."""
        self._thread = threading.Thread(target=self._run_or_end, name="tls-relay", daemon=True)
        self._thread.start()

    def let_in(self, listener: socket.socket, entrance: Entrance) -> None:
        """Takes who connects to a TCP socket, which is the relay's from now on."""
        self._listen(listener, lambda sock: EnteringPassage(self, sock, entrance))

    def let_out(self, listener: socket.socket, way: Exit) -> None:
        """Takes who connects to a Unix socket, which is the relay's from now on."""
        self._listen(listener, lambda sock: LeavingPassage(self, sock, way))

    def dismiss(self, listener: socket.socket) -> None:
        """Takes nobody any more there; who is on the way stays."""
        self.submit(lambda: self._dismiss(listener))

    def submit(self, request: Callable[[], None]) -> None:
        """Runs a request on the relay's thread soon."""
        with self._lock:
            if not self._is_closed:
                self._requests.append(request)
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Ends every connection and the thread."""
        if self._thread is not None:
            self.submit(self.stop)
            self._thread.join(_JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                raise InvariantViolation("the thread of the TLS relay does not end")
            self._thread = None

    # ------------------------------------------------------------ the relay's thread

    def run(self) -> None:
        """Serves until ``stop``; then everything is closed."""
        try:
            while not self._is_stopping:
                self._turn()
        finally:
            with self._lock:
                self._is_closed = True
                os.close(self._wake_fd)
            self._run_requests()  # listeners that have only just been handed over
            for passage in list(self._passages):
                passage.close()
            for listener, _ in self._listeners.values():
                listener.close()
            self._listeners.clear()
            self.resolvers.shutdown(wait=False, cancel_futures=True)
            self._epoll.close()

    def _run_or_end(self) -> None:
        """Serves; without it the process would reach nobody and be reached by nobody: it ends where that fails."""
        try:
            self.run()
        except BaseException as error:  # noqa: BLE001 - nothing else would end the process
            self._log.critical("tls.relay_crashed", exc_info=error)
            os._exit(_EXIT_FAILED)

    def stop(self) -> None:
        """Ends ``run``."""
        self._is_stopping = True

    def _turn(self) -> None:
        for descriptor, events in self._epoll.poll(self._patience_s()):
            if descriptor == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
                self._run_requests()
            elif descriptor in self._listeners:
                self._accept(descriptor)
            elif descriptor in self._owners:
                passage, leg = self._owners[descriptor]
                leg.ready(events)
                self._busy[passage] = None
        busy, self._busy = self._busy, {}
        for passage in busy:
            if passage in self._passages and self._guarded(passage, passage.goes_on):
                self._busy[passage] = None
        self._end_waits(time.monotonic())

    def _guarded(self, passage: Passage, step: Callable[[], bool | None]) -> bool:
        """What a passage answers; one that fails in a way that nobody thought of is ended, and the others go on."""
        try:
            return bool(step())
        except Exception as error:  # noqa: BLE001 - the connection's, and the thread is everybody's
            self._log.error("tls.connection_crashed", exc_info=error)
            passage.close()
            return False

    def _patience_s(self) -> float | None:
        if self._busy:
            return 0.0
        due = [*self._paused.values()]
        if self._deadlines:
            due.append(next(iter(self._deadlines.values())))
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _end_waits(self, now_s: float) -> None:
        for passage, deadline_s in list(self._deadlines.items()):
            if now_s < deadline_s:
                break
            self._guarded(passage, passage.is_late)
        for descriptor, at_s in list(self._paused.items()):
            if at_s <= now_s:
                del self._paused[descriptor]
                self._epoll.register(descriptor, select.EPOLLIN)

    def _run_requests(self) -> None:
        while self._requests:
            self._requests.popleft()()

    # ------------------------------------------------------------ listeners

    def _listen(self, listener: socket.socket, open_passage: _Opener) -> None:
        listener.setblocking(False)

        def add() -> None:
            self._listeners[listener.fileno()] = (listener, open_passage)
            self._epoll.register(listener, select.EPOLLIN)

        self.submit(add)

    def _dismiss(self, listener: socket.socket) -> None:
        descriptor = listener.fileno()
        if self._listeners.pop(descriptor, None) is not None:
            if self._paused.pop(descriptor, None) is None:
                self._epoll.unregister(descriptor)
            listener.close()

    def _accept(self, descriptor: int) -> None:
        listener, open_passage = self._listeners[descriptor]
        for _ in range(_ACCEPTED_PER_TURN):
            try:
                sock, _address = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _GONE_AGAIN:
                    continue
                if error.errno not in _NO_DESCRIPTORS:
                    raise
                # Who has come waits in the backlog.
                self._epoll.unregister(descriptor)
                self._paused[descriptor] = time.monotonic() + _ACCEPT_PAUSE_S
                return
            if len(self._deadlines) >= self._strangers_max:
                next(iter(self._deadlines)).close()
            passage = open_passage(sock)
            self._passages[passage] = None
            self.begin_wait(passage)
            self._busy[passage] = None

    # ------------------------------------------------------------ what passages ask for

    def begin_wait(self, passage: Passage) -> None:
        """The passage has so long from now on."""
        self._deadlines.pop(passage, None)
        self._deadlines[passage] = time.monotonic() + SETUP_TIMEOUT_S

    def end_wait(self, passage: Passage) -> None:
        """The passage may stay."""
        self._deadlines.pop(passage, None)

    def watch(self, passage: Passage, leg: Leg) -> None:
        """Tells the leg what becomes possible, and has the passage go on."""
        self._epoll.register(leg.sock.fileno(), _LEG_EVENTS)
        self._owners[leg.sock.fileno()] = (passage, leg)

    def wake(self, passage: Passage) -> None:
        """Has the passage go on soon; any thread may ask."""
        self.submit(lambda: self._busy.__setitem__(passage, None))

    def forget(self, passage: Passage, legs: list[Leg]) -> None:
        """The passage is over: closes its sockets."""
        self._passages.pop(passage, None)
        self._busy.pop(passage, None)
        self._deadlines.pop(passage, None)
        for leg in legs:
            descriptor = leg.sock.fileno()
            if self._owners.pop(descriptor, None) is not None:
                self._epoll.unregister(descriptor)
            leg.sock.close()

    def take_buffer(self) -> bytearray:
        """For what is held up on its way."""
        return self._buffers.pop() if self._buffers else bytearray(self.buffer_bytes)

    def give_back(self, buffer: bytearray) -> None:
        """It is empty again; a few are kept."""
        if len(self._buffers) < _BUFFERS_KEPT_MAX:
            self._buffers.append(buffer)
