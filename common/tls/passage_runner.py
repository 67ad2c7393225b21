"""One connection through a relay: how it is set up, then what moves in its two directions.

Setting up is written as a generator that yields wherever it has to wait for the sockets. A side that ends has what it
sent delivered first; what the other side says to it is of no use any more.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from common.tls.doors import (
    LINE_MAX_BYTES,
    Destination,
    Entrance,
    Exit,
    TurnedAway,
    Visitor,
    destination_of,
)
from common.tls.leg import Leg
from common.tls.tls_files_store import CA_SETTING
from penstock.client.addresses import format_address
from penstock.client.tls_failures import SPEAKS_NO_TLS, why_failed

if TYPE_CHECKING:
    from common.tls.relay_runner import RelayRunner

_TURN_BYTES: Final = 1 << 20
_DISCARDED_BYTES: Final = 16 * 1024
_TLS_FIRST_BYTE: Final = b"\x16"
_UNIX_BUFFER_BYTES: Final = 4 << 20
_FOUND = tuple[socket.AddressFamily, tuple[object, ...]]
Waits = Generator[None, None, None]


class _Flow:
    """One direction: what has been read and not written yet."""

    __slots__ = (
        "_buffer",
        "_relay",
        "_view",
        "end",
        "has_ended",
        "is_dead",
        "source",
        "start",
        "target",
    )

    def __init__(self, relay: RelayRunner, source: Leg, target: Leg) -> None:
        self._relay = relay
        self.source = source
        self.target = target
        self._buffer: bytearray | None = None
        self._view: memoryview | None = None
        self.start = self.end = 0
        self.has_ended = False
        """Its source sends nothing more."""
        self.is_dead = False
        """Its target takes nothing more."""

    @property
    def pending(self) -> int:
        return self.end - self.start

    def put(self, data: bytes) -> None:
        """What goes ahead of all that is read."""
        view = self._opened()
        view[: len(data)] = data
        self.start, self.end = 0, len(data)

    def move(self) -> bool:
        """Moves what can be moved; True where there may be more at once."""
        moved = 0
        while moved < _TURN_BYTES:
            if self.is_dead or (not self.pending and not self._fill()):
                return False
            if not self.target.can_write:
                return False
            try:
                count = self.target.drain(self._opened()[self.start : self.end])
            except OSError:
                self.die()
                return False
            self.start += count
            moved += count
        return True

    def die(self) -> None:
        """Nobody takes what has been read."""
        self.is_dead = True
        self.start = self.end = 0
        self.release()

    def _fill(self) -> bool:
        """Reads; False where there is nothing."""
        if not self.has_ended and self.source.can_read:
            self.start, self.end = 0, 0
            try:
                self.end, self.has_ended = self.source.fill(self._opened())
            except ssl.SSLError:
                raise
            except OSError:
                self.has_ended = True  # what had come before has been moved on
        if self.pending:
            return True
        self.release()
        return False

    def _opened(self) -> memoryview:
        if self._view is None:
            self._buffer = self._relay.take_buffer()
            self._view = memoryview(self._buffer)
        return self._view

    def release(self) -> None:
        """Has no buffer any more."""
        if self._view is not None and self._buffer is not None:
            self._view.release()
            self._relay.give_back(self._buffer)
            self._view = self._buffer = None


class Passage:
    """See the module."""

    def __init__(self, relay: RelayRunner, sock: socket.socket) -> None:
        self._relay = relay
        self._near = Leg(sock)
        """Who has come."""
        self._legs = [self._near]
        self._flows: list[_Flow] = []
        self._is_over = False
        self._lingers = False
        self._setup: Waits | None = None

    def goes_on(self) -> bool:
        """Something has become possible; True where there may be more at once."""
        if self._is_over:
            return False
        try:
            if self._setup is not None:
                try:
                    next(self._setup)
                except StopIteration:
                    self._setup = None
                    self._relay.end_wait(self)
                else:
                    return False
            return self._move()
        except (OSError, TurnedAway) as error:
            if self._lingers:
                self.close()
            else:
                self._fail(error)
        return False

    def is_late(self) -> None:
        """It has not come about in time, or the last bytes have not been taken."""
        if self._setup is not None and not self._lingers:
            self._turn_away("it has not finished the handshake in time")
        self.close()

    def close(self) -> None:
        """Ends it."""
        if not self._is_over:
            self._is_over = True
            for flow in self._flows:
                flow.release()
            self._relay.forget(self, self._legs)
            self._setup = None

    def _fail(self, error: OSError | TurnedAway) -> None:
        raise NotImplementedError

    def _turn_away(self, reason: str) -> None:
        raise NotImplementedError

    def _move(self) -> bool:
        more = False
        for flow, reverse in zip(self._flows, reversed(self._flows), strict=True):
            more = flow.move() or more
            if flow.has_ended or flow.is_dead:
                if not flow.pending and (flow.has_ended or reverse.is_dead):
                    self._end(flow.target)
                    return False
                if flow.has_ended and not reverse.is_dead:
                    reverse.die()
                    self._relay.begin_wait(self)
        return more

    def _end(self, left: Leg) -> None:
        """A side has left, and all that it sent has been written to the other."""
        self._say_goodbye(left)

    def _say_goodbye(self, leg: Leg) -> None:
        """Lets a side read what was written to it last.

        What it still sends is read, though nobody takes it: a socket that is closed before that breaks the connection,
        and what is on its way in the other direction is lost.
        """
        for flow in self._flows:
            flow.release()
        self._flows = []
        self._lingers = True
        self._setup = self._linger(leg)
        self._relay.begin_wait(self)
        self._relay.wake(self)

    def _linger(self, leg: Leg) -> Waits:
        with contextlib.suppress(OSError):
            leg.sock.shutdown(socket.SHUT_WR)
        leg.can_read = True
        room = memoryview(bytearray(_DISCARDED_BYTES))
        has_ended = False
        while not has_ended:
            if leg.can_read:
                _, has_ended = leg.fill(room)
            else:
                yield
        self.close()

    def _join(self, far: Leg, begin: bytes) -> None:
        """Both sides are there.

        Args:
            begin: goes to the far side first.
        """
        there, back = _Flow(self._relay, self._near, far), _Flow(self._relay, far, self._near)
        self._flows = [there, back]
        if begin:
            there.put(begin)

    def _open_leg(self, sock: socket.socket) -> Leg:
        leg = Leg(sock)
        self._legs.append(leg)
        return leg

    def _read_line(self, leg: Leg) -> Generator[None, None, tuple[bytes, bytes]]:
        """The first line of a side, and what came behind it."""
        data = b""
        room = memoryview(bytearray(LINE_MAX_BYTES))
        while b"\n" not in data:
            if not leg.can_read:
                yield
                continue
            count, has_ended = leg.fill(room)
            data += bytes(room[:count])
            if has_ended:
                raise TurnedAway("it closed the connection before it said what it wants")
            if len(data) > LINE_MAX_BYTES and b"\n" not in data[:LINE_MAX_BYTES]:
                raise TurnedAway("it does not say what it wants")
        line, _, rest = data.partition(b"\n")
        return line, rest


class EnteringPassage(Passage):
    """Somebody from another host wants to reach a process of this one."""

    def __init__(self, relay: RelayRunner, sock: socket.socket, entrance: Entrance) -> None:
        self._entrance = entrance
        self._peer = _peer_of(sock)
        super().__init__(relay, sock)
        self._setup = self._enter()

    @override
    def _fail(self, error: OSError | TurnedAway) -> None:
        is_setting_up = self._setup is not None and not self._lingers
        if isinstance(error, TurnedAway):
            self._turn_away(str(error))
        elif isinstance(error, ssl.SSLError) or is_setting_up:
            self._turn_away(why_failed(error, "", CA_SETTING))
        if is_setting_up:
            self._say_goodbye(self._near)
        else:
            self.close()

    @override
    def _turn_away(self, reason: str) -> None:
        self._relay.refusals.tell("tls.turned_away", self._peer, reason)

    def _enter(self) -> Waits:
        entrance, near = self._entrance, self._near
        _prepare_tcp(near.sock)
        self._relay.watch(self, near)
        while (first := _peek(near)) is None:
            yield
        if not first:
            self.close()  # somebody has looked whether there is a port
            return
        is_plain = first != _TLS_FIRST_BYTE
        if is_plain and not entrance.takes_plain:
            raise TurnedAway(SPEAKS_NO_TLS)
        if not is_plain:
            context = self._relay.files.server_context(
                requires_certificate=entrance.requires_certificate
            )
            near.wrap(context, None)
            while not near.shakes_hands():
                yield
        has_certificate = isinstance(near.sock, ssl.SSLSocket) and bool(near.sock.getpeercert(True))
        line, rest = (yield from self._read_line(near)) if entrance.reads_name else (b"", b"")
        name = line.decode(errors="replace")
        path = entrance.backend(Visitor(is_plain, has_certificate, name))
        far = self._open_leg(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        _widen(far.sock)
        with contextlib.suppress(OSError):  # taken: then the backend does not learn who it is
            far.sock.bind(f"\0{self._peer}")
        code = far.sock.connect_ex(path)
        if code:
            raise TurnedAway(f"{name or 'what it wants'} does not listen here: {os.strerror(code)}")
        self._relay.watch(self, far)
        self._join(far, rest)


class LeavingPassage(Passage):
    """A process of this host wants to reach one of another."""

    def __init__(self, relay: RelayRunner, sock: socket.socket, way: Exit) -> None:
        self._way = way
        self._to = way.destination
        super().__init__(relay, sock)
        self._setup = self._leave()
        self._far: Leg | None = None

    @override
    def _fail(self, error: OSError | TurnedAway) -> None:
        far = self._far
        if isinstance(error, TurnedAway):
            self._turn_away(str(error))
        elif isinstance(error, ssl.SSLError) or (
            far is not None and far.is_tls and not far.has_received
        ):
            self._turn_away(why_failed(error, self._to.host if self._to else "", CA_SETTING))
        self.close()

    @override
    def _turn_away(self, reason: str) -> None:
        place = format_address(self._to.host, self._to.port) if self._to else "a peer"
        self._relay.refusals.tell("tls.refused", place, reason)
        if self._far is None or not self._far.has_received:
            said = self._way.apology(f"there is no TLS connection to {place}: {reason}")
            with contextlib.suppress(OSError):  # who has left does not hear it
                self._near.drain(memoryview(said))

    @override
    def _end(self, left: Leg) -> None:
        if left is self._near and self._far is not None and not self._far.has_received:
            self._turn_away("it let nobody through: its log says why")
        super()._end(left)

    def _leave(self) -> Waits:
        relay, near = self._relay, self._near
        _widen(near.sock)
        relay.watch(self, near)
        rest = b""
        if self._to is None:
            line, rest = yield from self._read_line(near)
            self._to = destination_of(line)
        to = self._to
        far = yield from self._connect(to)
        far.wrap(relay.files.client_context(), to.host)
        self._far = far
        while not far.shakes_hands():
            yield
        self._join(far, (f"{to.name}\n".encode() if to.name else b"") + rest)

    def _connect(self, to: Destination) -> Generator[None, None, Leg]:
        """A TCP connection."""
        found: Future[list[_FOUND]] = self._relay.resolvers.submit(_resolve, to)
        found.add_done_callback(lambda _: self._relay.wake(self))
        while not found.done():
            yield
        refused: OSError | None = None
        for family, address in found.result():
            leg = self._open_leg(socket.socket(family, socket.SOCK_STREAM))
            _prepare_tcp(leg.sock)
            code = leg.sock.connect_ex(address)
            self._relay.watch(self, leg)
            if code == errno.EINPROGRESS:
                while not leg.can_write:
                    yield
                code = leg.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if not code:
                return leg
            refused = OSError(code, os.strerror(code))
        raise TurnedAway(f"it cannot be reached: {refused.strerror if refused else 'no address'}")


def _resolve(to: Destination) -> list[_FOUND]:
    try:
        found = socket.getaddrinfo(to.host, to.port, type=socket.SOCK_STREAM)
    except (OSError, ValueError, OverflowError) as error:
        raise TurnedAway(f"{to.host} is unknown: {error}") from error
    return [(family, address) for family, _, _, _, address in found]


def _peek(leg: Leg) -> bytes | None:
    """The first byte, which stays; None = none has come, b"" = none will."""
    try:
        return leg.sock.recv(1, socket.MSG_PEEK)
    except (BlockingIOError, InterruptedError):
        return None
    except ConnectionResetError:
        return b""


def _peer_of(sock: socket.socket) -> str:
    try:
        host, port, *_ = sock.getpeername()
    except OSError:
        return "one who has gone"
    return format_address(host, port)


def _widen(sock: socket.socket) -> None:
    """Large buffers keep a sender busy while its peer computes; the kernel caps them."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _UNIX_BUFFER_BYTES)


def _prepare_tcp(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
