"""What a relay does with who comes to it: those who come from other hosts, and those of this one who want to leave.

A line of text comes ahead of the bytes where the one who connects says what he wants: "host port name" on the way out, the
name alone between two relays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from penstock.errors import StreamError

LINE_MAX_BYTES: Final = 512


class TurnedAway(StreamError):  # noqa: N818 - named after what happened
    """Who has come is not let through, and why."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who has come from another host.

    Attributes:
        is_plain: he speaks no TLS.
        has_certificate: of a CA whose certificates are peers.
        name: what he has asked for.
    """

    is_plain: bool
    has_certificate: bool
    name: str = ""


@dataclass(frozen=True, slots=True)
class Entrance:
    """For those who come by TCP.

    Attributes:
        backend: the Unix socket for a visitor; raises ``TurnedAway``.
        requires_certificate: nobody is spoken to who has none.
        takes_plain: who speaks no TLS is a visitor too.
        reads_name: each says what he wants.
    """

    backend: Callable[[Visitor], str]
    requires_certificate: bool
    takes_plain: bool = False
    reads_name: bool = False


@dataclass(frozen=True, slots=True)
class Destination:
    """A relay of another host.

    Attributes:
        name: what to ask for there, "" = nothing.
    """

    host: str
    port: int
    name: str = ""


def _silence(_reason: str) -> bytes:
    """Nothing is said."""
    return b""


@dataclass(frozen=True, slots=True)
class Exit:
    """For those of this host who want to reach another.

    Attributes:
        destination: where all go; None = each says where.
        apology: what one is sent who cannot be let through, with why.
    """

    destination: Destination | None = None
    apology: Callable[[str], bytes] = _silence


def request_line(destination: Destination) -> bytes:
    """What one says who wants to leave.

    Example:
        >>> request_line(Destination("tm-2", 7000, "3.sock"))
        b'tm-2 7000 3.sock\\n'
    """
    return f"{destination.host} {destination.port} {destination.name}\n".encode()


def destination_of(line: bytes) -> Destination:
    """Inverse of ``request_line``, without the end of the line.

    Raises:
        TurnedAway: it is no such line.
    """
    try:
        host, port, name = line.decode().split(" ")
        return Destination(host, int(port), name)
    except ValueError as error:
        raise TurnedAway(f"{line!r} names no destination") from error
