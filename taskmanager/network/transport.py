"""The interface between the exchange and whatever carries its frames.

A link is a connection to another slot process. Its methods are called on the mailbox thread and
never wait; its handler is called on the mailbox thread too. Implementations: sockets
(``connection_runner``) and an in-memory network for tests and the simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from taskmanager.network.frames import Buffer, Frame

Post = Callable[[Callable[[], None]], None]
"""Adds mail to the slot's mailbox; callable from any thread."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a slot process listens: a Unix socket, or host and port when the path is empty.

    Attributes:
        said_first: what is sent ahead of the greeting: the Unix socket is a gateway's.
    """

    unix_path: str
    tcp_host: str
    tcp_port: int
    said_first: bytes = b""

    @override
    def __str__(self) -> str:
        return self.unix_path or f"{self.tcp_host}:{self.tcp_port}"


class LinkHandler(Protocol):
    """What happens on a link."""

    def link_opened(self) -> None:
        """The link that was asked for with ``connect`` is there, and the greeting is on its way."""

    def frames_arrived(self, frames: Sequence[Frame]) -> None:
        """Frames in the order they were sent."""

    def link_closed(self, reason: str) -> None:
        """The last call: the link is gone, or could not be opened."""


class Link(Protocol):
    """One connection; order is kept."""

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Sends one frame, given in parts."""

    def open_limits(self) -> None:
        """The peer has identified itself: it is read on, and large frames are allowed."""

    def close(self, reason: str, *, drain: bool = False) -> None:
        """Ends the link, with ``drain`` once what is queued has gone; the handler hears of it."""


class Transport(Protocol):
    """Opens links and accepts them.

    Who connects says who it is at once, however long its mailbox thread is busy; who accepts reads nothing behind
    that greeting before it has let the peer in, and need not wait long for it.
    """

    def start(self, post: Post, accept: Callable[[Link], LinkHandler]) -> None:
        """Called once before all else; ``accept`` names the handler of an accepted link."""

    def listen(self, unix_path: str, tcp_host: str, tcp_port: int) -> int:
        """Begins to accept; "" leaves one of the two out. Returns the TCP port, 0 for none."""

    def connect(self, address: Address, handler: LinkHandler, greeting: bytes) -> Link:
        """Begins to open a link, whose first frame is the greeting; the handler hears how it ends."""

    def close(self) -> None:
        """Ends all links and listeners and every thread; handlers hear nothing any more."""
