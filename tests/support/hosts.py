"""Hosts that are network namespaces on one bridge, so that the network between them can be cut.

Needs root, ``ip`` and ``nft`` (``make servers`` installs both). The caller is on the bridge itself and
reaches every host.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.servers import require

_NETWORK = "10.77.9"


class Hosts:
    """Some hosts that reach each other, numbered from 0."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._name = f"ps{os.getpid()}"

    def address(self, host: int) -> str:
        """The IPv4 address of a host."""
        return f"{_NETWORK}.{host + 1}"

    def command(self, host: int, *arguments: str) -> list[str]:
        """A command, run on a host."""
        return ["ip", "netns", "exec", self._namespace(host), *arguments]

    def cut(self, one: int, other: int) -> None:
        """Packets between two hosts vanish without a word."""
        for host, peer in ((one, other), (other, one)):
            self._nft(host, f"add rule ip cut input ip saddr {self.address(peer)} drop")

    @property
    def service(self) -> str:
        """An address of the caller's for a server, from which a host can be cut and still reach the caller."""
        return f"{_NETWORK}.253"

    def cut_from_service(self, host: int) -> None:
        """Packets between a host and that address vanish without a word."""
        self._nft(host, f"add rule ip cut input ip saddr {self.service} drop")
        self._nft(host, f"add rule ip cut output ip daddr {self.service} drop")

    def isolate(self, host: int) -> None:
        """Packets to and from a host vanish without a word."""
        self._nft(host, f"add rule ip cut input ip saddr {_NETWORK}.0/24 drop")
        self._nft(host, f"add rule ip cut output ip daddr {_NETWORK}.0/24 drop")

    def heal(self) -> None:
        """Every host reaches every other."""
        for host in range(self._count):
            self._nft(host, "flush table ip cut")

    @contextlib.contextmanager
    def up(self) -> Iterator[Hosts]:
        """The hosts for the time of the block; skips where the machine forbids them."""
        require("ip")
        require("nft")
        with contextlib.ExitStack() as stack:
            try:
                self._ip("link", "add", self._name, "type", "bridge")
            except subprocess.CalledProcessError as error:
                pytest.skip(f"needs the right to make network namespaces: {error.stderr.strip()}")
            stack.callback(self._ip, "link", "del", self._name)
            self._ip("addr", "add", f"{_NETWORK}.254/24", "dev", self._name)
            self._ip("addr", "add", f"{self.service}/24", "dev", self._name)
            self._ip("link", "set", self._name, "up")
            for host in range(self._count):
                self._add(host, stack)
            yield self

    def _add(self, host: int, stack: contextlib.ExitStack) -> None:
        namespace, port = self._namespace(host), f"{self._name}v{host}"
        try:
            self._ip("netns", "add", namespace)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs the right to make network namespaces: {error.stderr.strip()}")
        stack.callback(self._ip, "netns", "del", namespace)
        self._ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        self._ip("link", "set", port, "master", self._name, "up")
        self._ip("-n", namespace, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            self._ip("-n", namespace, "link", "set", device, "up")
        self._nft(host, "add table ip cut")
        for chain in ("input", "output"):
            hook = f"type filter hook {chain} priority 0 ;"
            self._nft(host, f"add chain ip cut {chain} {{ {hook} }}")

    def _namespace(self, host: int) -> str:
        return f"{self._name}-{host}"

    def _ip(self, *arguments: str) -> None:
        _run("ip", *arguments)

    def _nft(self, host: int, command: str) -> None:
        _run(*self.command(host, "nft", command))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
