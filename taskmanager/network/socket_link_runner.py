"""One socket of the exchange, shared by two threads without either waiting for the other.

The mailbox thread writes straight to the socket as long as the socket takes everything. What it does
not take is queued and belongs to the I/O thread, which is the only writer until the queue is empty
again. ``_io_writes`` says whose turn it is: only the mailbox thread sets it, only the I/O thread
clears it, under a lock that is never held during a system call. The queue is bounded by the credit
of the channels.

A socket is shut down by the I/O thread and closed by the mail behind it: while one thread may be in a
system call on it, its descriptor is not given to another socket.

The I/O thread is the only reader; frames wait in ``_inbox`` until the mailbox thread takes them, one
mail for as many as have come.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from typing_extensions import override

from taskmanager.network.frames import Buffer, Frame, FrameDecoder, FrameError
from taskmanager.network.transport import Link, LinkHandler, Post

_IOVEC_MAX = 1024
_READS_PER_TURN = 16


class LinkRunner(Protocol):
    """What a link asks of the I/O thread."""

    def submit(self, request: Callable[[], None]) -> None:
        """Runs the request on the I/O thread soon."""

    def watch_writable(self, link: SocketLink) -> None:
        """Calls ``write_queued`` when the socket takes bytes (I/O thread)."""

    def unwatch_writable(self, link: SocketLink) -> None:
        """Ends it (I/O thread)."""

    def pause(self, link: SocketLink) -> None:
        """An accepted link has greeted: it is read on from ``resume`` (I/O thread)."""

    def resume(self, link: SocketLink) -> None:
        """Reads on from an accepted link, whose peer has been let in (I/O thread)."""

    def discard(self, link: SocketLink) -> None:
        """Forgets the link and shuts its socket down (I/O thread)."""


class SocketLink(Link):
    """A connected stream socket, or one that is being connected.

    Args:
        is_accepted: the other side has connected: nothing behind its first frames is read before it is let in.
    """

    def __init__(self, runner: LinkRunner, post: Post, *, is_accepted: bool = False) -> None:
        self.handler: LinkHandler | None = None
        self.socket: socket.socket | None = None
        self._runner = runner
        self._post = post
        self._is_stranger = is_accepted
        self._decoder = FrameDecoder()
        self._lock = threading.Lock()
        self._io_writes = False
        self._queue: deque[Sequence[Buffer]] = deque()
        self._unfinished: list[memoryview] = []  # rest of a frame that has begun to go out
        self._close_when_drained: str | None = None
        self._inbox: deque[list[Frame]] = deque()
        self._has_mail = False
        self._is_closed = False  # for the mailbox thread: nothing is sent or delivered any more
        self._is_gone = False  # for the I/O thread: the socket is shut down

    # ------------------------------------------------------------ mailbox thread

    @override
    def send(self, buffers: Sequence[Buffer]) -> None:
        if self._is_closed or self._close_when_drained is not None:
            return
        if self._io_writes:
            with self._lock:
                if self._io_writes:
                    self._queue.append(buffers)
                    return
        rest = self._write_now(buffers)
        if rest:
            self._unfinished = rest
            self._io_writes = True
            self._runner.submit(self._begin_writing)

    @override
    def open_limits(self) -> None:
        self._decoder.open_limits()
        if self._is_stranger:
            self._is_stranger = False
            self._runner.submit(lambda: self._runner.resume(self))

    @override
    def close(self, reason: str, *, drain: bool = False) -> None:
        if self._is_closed or self._close_when_drained is not None:
            return
        if drain:
            with self._lock:
                if self._io_writes:
                    self._close_when_drained = reason
                    return
        self._runner.submit(lambda: self.fail(reason))
        self._close_now(reason)

    def _write_now(self, buffers: Sequence[Buffer]) -> list[memoryview]:
        """Writes what the socket takes; returns the rest."""
        assert self.socket is not None, "a frame is sent before the link has opened"
        try:
            written = self.socket.sendmsg(buffers)
        except (BlockingIOError, InterruptedError):
            written = 0
        except OSError as error:
            reason = f"{error.strerror or error}"
            self._runner.submit(lambda: self.fail(reason))
            return []
        return _rest_of(buffers, written)

    def _deliver(self) -> None:
        """The mail that hands over the frames that have come."""
        self._has_mail = False
        while self._inbox and not self._is_closed and self.handler is not None:
            self.handler.frames_arrived(self._inbox.popleft())

    def _close_now(self, reason: str) -> None:
        """The link is gone; the handler hears of it once."""
        if not self._is_closed:
            self._is_closed = True
            self._inbox.clear()
            if self.handler is not None:
                self.handler.link_closed(reason)

    def _shut_down(self, reason: str) -> None:
        """The I/O thread has done with the socket."""
        if self.socket is not None:
            self.socket.close()
        self._close_now(reason)

    def _opened(self) -> None:
        if not self._is_closed and self.handler is not None:
            self.handler.link_opened()

    # ------------------------------------------------------------ I/O thread

    @property
    def is_gone(self) -> bool:
        """True once the socket is shut down for good."""
        return self._is_gone

    def connected(self, greeting: bytes) -> None:
        """The socket is connected: greets, before anybody else writes, and the handler hears of it.

        Whoever answers at the address asked for may send any frames. He may do so before the handler has heard of
        the connection: the mailbox thread may be busy.
        """
        self._decoder.open_limits()
        self._queue.append((greeting,))
        self._io_writes = True
        self._post(self._opened)
        self._begin_writing()

    def read(self) -> None:
        """The socket has bytes: cuts them into frames and posts these."""
        sock = self.socket
        for _ in range(_READS_PER_TURN):
            if self._is_gone or sock is None:
                return
            targets = self._decoder.targets()
            try:
                count = sock.recvmsg_into(targets)[0]
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.fail(f"{error.strerror or error}")
                return
            if count == 0:
                whole = self._decoder.is_between_frames
                self.fail("it closed the connection" + ("" if whole else " within a frame"))
                return
            try:
                frames = self._decoder.received(count)
            except FrameError as error:
                self.fail(f"it broke the protocol: {error}")
                return
            if frames:
                is_stranger = self._is_stranger
                if is_stranger:
                    # Before the mail: whoever takes it may let the peer in at once.
                    self._runner.pause(self)
                self._inbox.append(frames)
                if not self._has_mail:
                    self._has_mail = True
                    self._post(self._deliver)
                if is_stranger:
                    return

    def write_queued(self) -> None:
        """The socket takes bytes: writes what is queued."""
        sock = self.socket
        while not self._is_gone and sock is not None:
            if not self._unfinished and not self._next_frame():
                return
            try:
                written = sock.sendmsg(self._unfinished[:_IOVEC_MAX])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.fail(f"{error.strerror or error}")
                return
            self._unfinished = _rest_of(self._unfinished, written)

    def fail(self, reason: str) -> None:
        """The socket is of no use any more: closes it and lets the mailbox thread know."""
        if self._is_gone:
            return
        self._is_gone = True
        self._decoder.clear()
        self._runner.discard(self)
        # Behind the mail of the frames that came before.
        self._post(lambda: self._shut_down(reason))

    def _begin_writing(self) -> None:
        if not self._is_gone and self.socket is not None:
            self._runner.watch_writable(self)
            self.write_queued()

    def _next_frame(self) -> bool:
        """Begins the next queued frame; with none left the mailbox thread writes again."""
        with self._lock:
            if self._queue:
                self._unfinished = [memoryview(buffer) for buffer in self._queue.popleft()]
                return True
            self._io_writes = False
            reason = self._close_when_drained
        self._runner.unwatch_writable(self)
        if reason is not None:
            self.fail(reason)
        return False


def _rest_of(buffers: Sequence[Buffer], written: int) -> list[memoryview]:
    """What is left of the buffers after ``written`` bytes of them."""
    rest: list[memoryview] = []
    for buffer in buffers:
        size = len(buffer)
        if written >= size:
            written -= size
        else:
            rest.append(memoryview(buffer)[written:])
            written = 0
    return rest
