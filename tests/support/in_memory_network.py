"""A network in memory: deterministic, with seeded delays, driven by a simulated clock.

Order is kept within a direction of a link, as on a socket, and not between links. Bytes pass through
the same frame decoder as those of a socket. ``SimulatedLoop`` is the clock, the mailboxes and the
wires in one: ``run`` goes on until nothing is left to do.
"""

from __future__ import annotations

import functools
import heapq
import random
from collections.abc import Callable, Sequence

from typing_extensions import override

from taskmanager.network.frames import Buffer, FrameDecoder, FrameError
from taskmanager.network.transport import Address, Link, LinkHandler, Post, Transport
from tests.support.fed_frames import fed


class SimulatedLoop:
    """Simulated time and everything that is to happen in it."""

    def __init__(self) -> None:
        self._now_ns = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def now_ms(self) -> int:
        """Wall-clock time."""
        return self._now_ns // 1_000_000

    def monotonic_ns(self) -> int:
        """Monotonic time."""
        return self._now_ns

    def call_later(self, delay_ns: int, function: Callable[[], None]) -> None:
        """Runs the function at a time to come."""
        self._count += 1
        heapq.heappush(self._events, (self._now_ns + delay_ns, self._count, function))

    def post(self, function: Callable[[], None]) -> None:
        """Runs the function now, behind what is to happen now."""
        self.call_later(0, function)

    @property
    def next_at_ns(self) -> int | None:
        """When the next event is due."""
        return self._events[0][0] if self._events else None

    def run_one(self) -> bool:
        """Runs the next event; False when there is none."""
        if not self._events:
            return False
        self._now_ns, _, function = heapq.heappop(self._events)
        function()
        return True

    def run(self, steps_max: int = 1_000_000) -> None:
        """Runs until nothing is left."""
        for _ in range(steps_max):
            if not self.run_one():
                return
        raise AssertionError(f"still busy after {steps_max} events")

    def advance(self, delta_ns: int) -> None:
        """Moves time on, running what falls into it."""
        end_ns = self._now_ns + delta_ns
        while self._events and self._events[0][0] <= end_ns:
            self.run_one()
        self._now_ns = end_ns


CallLater = Callable[[int, Callable[[], None]], None]


class InMemoryNetwork:
    """All wires between the transports of one simulation."""

    def __init__(self, call_later: CallLater, monotonic_ns: Callable[[], int], seed: int) -> None:
        self.call_later = call_later
        self.monotonic_ns = monotonic_ns
        self.random = random.Random(seed)
        self.delay_max_ns = 2_000_000
        self.links: list[InMemoryLink] = []
        self.listeners: dict[str, InMemoryTransport] = {}
        self._next_port = 50_000

    def transport(self) -> InMemoryTransport:
        """The transport of one more slot process."""
        return InMemoryTransport(self)

    def take_port(self) -> int:
        """A port that is free."""
        self._next_port += 1
        return self._next_port

    def delay_ns(self) -> int:
        """How long the next bytes take."""
        return self.random.randrange(1_000, self.delay_max_ns)


class InMemoryTransport(Transport):
    """The links of one slot process."""

    def __init__(self, network: InMemoryNetwork) -> None:
        self._network = network
        self._post: Post | None = None
        self._accept: Callable[[Link], LinkHandler] | None = None
        self._names: list[str] = []
        self._links: list[InMemoryLink] = []
        self._is_closed = False

    @override
    def start(self, post: Post, accept: Callable[[Link], LinkHandler]) -> None:
        self._post, self._accept = post, accept

    @override
    def listen(self, unix_path: str, tcp_host: str, tcp_port: int) -> int:
        port = 0
        if unix_path:
            self._names.append(unix_path)
        if tcp_host:
            port = tcp_port or self._network.take_port()
            self._names.append(f"{tcp_host}:{port}")
        for name in self._names:
            self._network.listeners[name] = self
        return port

    @override
    def connect(self, address: Address, handler: LinkHandler, greeting: bytes) -> Link:
        link = self._new_link()
        link.handler = handler

        def arrive() -> None:
            if self._is_closed:
                return
            target = self._network.listeners.get(str(address))
            if target is None or target._accept is None:
                link.lose(f"{address} cannot be reached: nobody listens")
                return
            other = target._new_link()
            link.other, other.other = other, link
            other.handler = target._accept(other)
            link.open_limits()  # whoever answers may do so before the handler has heard of it
            link.run(link.opened)
            link.send((greeting,))

        self._network.call_later(self._network.delay_ns(), arrive)
        return link

    @override
    def close(self) -> None:
        self._is_closed = True
        for name in self._names:
            self._network.listeners.pop(name, None)
        for link in self._links:
            link.handler = None
            link.close("the process ends")

    def _new_link(self) -> InMemoryLink:
        assert self._post is not None, "the transport was not started"
        link = InMemoryLink(self._network, self._post)
        self._links.append(link)
        self._network.links.append(link)
        return link


class InMemoryLink(Link):
    """One end of a link."""

    def __init__(self, network: InMemoryNetwork, post: Post) -> None:
        self.handler: LinkHandler | None = None
        self.other: InMemoryLink | None = None
        self.run = post
        self.sent_bytes = 0
        self._network = network
        self._decoder = FrameDecoder()
        self._queue: list[bytes] = []
        self._is_sending = False
        self._is_closed = False

    @override
    def send(self, buffers: Sequence[Buffer]) -> None:
        if self._is_closed:
            return
        self._queue.append(b"".join(bytes(buffer) for buffer in buffers))
        self._transmit()

    @override
    def open_limits(self) -> None:
        self._decoder.open_limits()

    @override
    def close(self, reason: str, *, drain: bool = False) -> None:
        if self._is_closed:
            return
        if drain and (self._queue or self._is_sending):
            self._network.call_later(
                self._network.delay_ns(), lambda: self.close(reason, drain=True)
            )
            return
        other = self.other
        self.lose(reason)
        if other is not None:
            self._network.call_later(
                self._network.delay_max_ns, lambda: other.lose("it closed the connection")
            )

    @property
    def is_open(self) -> bool:
        """True while both ends are connected."""
        return not self._is_closed and self.other is not None and not self.other._is_closed

    def break_off(self) -> None:
        """The wire breaks: each end notices at its own time, and what is under way is lost."""
        for end in (self, self.other):
            if end is not None:
                self._network.call_later(
                    self._network.delay_ns(), functools.partial(end.lose, "the wire broke")
                )

    def lose(self, reason: str) -> None:
        """The link breaks at this end."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.clear()
            handler = self.handler
            if handler is not None:
                self.run(lambda: handler.link_closed(reason))

    def opened(self) -> None:
        """The other end has accepted."""
        if not self._is_closed and self.handler is not None:
            self.handler.link_opened()

    def _transmit(self) -> None:
        """Sends one frame after the other, each with its own delay."""
        if self._is_sending or not self._queue or self._is_closed:
            return
        self._is_sending = True
        data = self._queue.pop(0)
        self.sent_bytes += len(data)

        def arrive() -> None:
            self._is_sending = False
            if self.other is not None:
                self.other.received(data)
            self._transmit()

        self._network.call_later(self._network.delay_ns(), arrive)

    def received(self, data: bytes) -> None:
        """Bytes come in, cut at random."""
        if self._is_closed:
            return
        cut = self._network.random.randrange(len(data) + 1)
        for part in (data[:cut], data[cut:]):
            try:
                frames = fed(self._decoder, part)
            except FrameError as error:
                self.lose(f"it broke the protocol: {error}")
                return
            handler = self.handler
            if frames and handler is not None:
                self.run(functools.partial(handler.frames_arrived, frames))
