"""What the daemon and its forkserver say to each other.

One message is one datagram on a ``SOCK_SEQPACKET`` socket pair, so that a message and the file
descriptors sent with it stay together; its end is the end of the forkserver. Messages are small JSON
objects. This module is imported by the forkserver before anything else: it stays light.
"""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass

MESSAGE_SIZE_MAX_BYTES = 64 * 1024
DESCRIPTORS_MAX = 3
PARTITION_SERVER_NAME = "partition-serve"
GATEWAY_NAME = "tls-gateway"
"""What ``ps`` and the like call them; the kernel keeps 15 characters."""


class ProcessKind(enum.StrEnum):
    """What a forked process is to be."""

    SLOT = "slot process"
    PARTITION_SERVER = "partition server"
    GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class Fork:
    """Fork a process. Sent with its descriptors: control socket, log file[, terminal].

    Attributes:
        request_id: numbers requests.
        process: a ``ProcessKind``.
        preload: a module that is imported first, here and so once; "" = none.
    """

    request_id: int
    process: str
    preload: str = ""


@dataclass(frozen=True, slots=True)
class Kill:
    """Send SIGKILL to a forked process, unless it has ended already."""

    pid: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The imports are done; processes can be forked."""

    import_ms: int


@dataclass(frozen=True, slots=True)
class Forked:
    """Answer to ``Fork``: the process runs."""

    request_id: int
    pid: int


@dataclass(frozen=True, slots=True)
class ForkFailed:
    """Answer to ``Fork``: there is no process, and why."""

    request_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A forked process has ended.

    Attributes:
        status: exit status, or minus the number of the signal that killed it.
    """

    pid: int
    status: int


Request = Fork | Kill
Report = Ready | Forked | ForkFailed | Exited

_CLASSES: dict[str, type[Request | Report]] = {
    cls.__name__: cls for cls in (Fork, Kill, Ready, Forked, ForkFailed, Exited)
}


def encode(message: Request | Report) -> bytes:
    """The message as a datagram."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode()


def decode(datagram: bytes) -> Request | Report:
    """Inverse of ``encode``.

    Raises:
        ValueError: the datagram is no message of this protocol.
    """
    try:
        fields = json.loads(datagram)
        return _CLASSES[fields.pop("kind")](**fields)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"not a message of the forkserver: {datagram[:200]!r}") from error
