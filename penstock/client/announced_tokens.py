"""Where clients of the same user find the token of a cluster of which they know only the address.

Each JobManager of this user on this host has a file in a private directory of the user's that names its
addresses and its token's file. It is locked as long as the JobManager lives: an address whose JobManager
has died may be anybody's by now, and nobody but the cluster may be told its token.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.client.addresses import format_address, parse_address
from penstock.client.credentials import load_token
from penstock.client.keyring import Keyring
from penstock.storage.private_directories import is_private, make_private

_LOCALHOST: Final = "127.0.0.1"
_WILDCARDS: Final = ("0.0.0.0", "::", "")


@dataclass(frozen=True, slots=True)
class FoundToken:
    """A cluster of this user's.

    Attributes:
        address: where to connect to, never a name that others might answer to.
    """

    address: str
    token: Keyring


class Announcement:
    """Tells clients of this user where a JobManager's token is, until it is removed.

    Args:
        host: under which the JobManager is reached.
        bind_host: on which it listens.
        port: on which it listens.
        token_file: holds its token.

    Raises:
        OSError: the user's directory cannot be written.
    """

    def __init__(self, host: str, bind_host: str, port: int, token_file: Path) -> None:
        directory = announcements_directory()
        make_private(directory)
        _sweep(directory)
        hosts = {host.lower(), _LOCALHOST if bind_host in _WILDCARDS else _plain_host(bind_host)}
        content = {
            "addresses": sorted(format_address(name, port) for name in hosts),
            "pid": os.getpid(),
            "token_file": str(token_file),
        }
        self._path = directory / f"{port}-{os.getpid()}-{secrets.token_hex(4)}.json"
        temporary = self._path.with_suffix(".tmp")
        self._lock = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._lock, json.dumps(content).encode())
        temporary.rename(self._path)

    def remove(self) -> None:
        """Takes it back."""
        self._path.unlink(missing_ok=True)
        os.close(self._lock)


def announcements_directory() -> Path:
    """The user's directory for this host: homes may be shared between hosts, loopback is not."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "penstock" / "clusters" / socket.gethostname()


def find_token(address: str) -> FoundToken | None:
    """The token of a living cluster of this user's on this host, None where there is no such.

    Args:
        address: "host:port" of its JobManager.

    Raises:
        ConfigurationError: its token's file cannot be used.
    """
    host, port = parse_address(address)
    wanted = format_address(_plain_host(host), port)
    try:
        directory = announcements_directory()
    except RuntimeError:  # no home, hence no announcements
        return None
    if not is_private(directory):
        return None
    for path in _of_port(directory, port):
        told = _read_living(path)
        if told is not None and not {wanted, address}.isdisjoint(told["addresses"]):
            token = load_token(str(told["token_file"]))
            return FoundToken(wanted if wanted in told["addresses"] else address, token)
    return None


def _plain_host(host: str) -> str:
    """As it is compared; what ``localhost`` is besides this address may be somebody else's."""
    if host.lower() == "localhost":
        return _LOCALHOST
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower()


def _of_port(directory: Path, port: int) -> Iterable[Path]:
    return sorted(directory.glob(f"{port}-*.json"))


def _read_living(path: Path) -> dict[str, list[str]] | None:
    """What a file says whose owner lives; its lock says that."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        content: dict[str, list[str]] = json.loads(os.read(descriptor, 1 << 16))
        return content
    finally:
        os.close(descriptor)
    return None


def _sweep(directory: Path) -> None:
    """Removes what JobManagers that were killed have left."""
    for path in directory.glob("*.json"):
        if _read_living(path) is None:
            path.unlink(missing_ok=True)
