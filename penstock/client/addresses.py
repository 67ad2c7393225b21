"""Network addresses as text: ``host:port``, with brackets around IPv6 hosts."""

from __future__ import annotations

import ipaddress

from penstock.errors import ConfigurationError


def parse_address(text: str) -> tuple[str, int]:
    """Splits ``host:port`` or ``[v6]:port``.

    Raises:
        ConfigurationError: the text is no address.
    """
    host, separator, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""  # an IPv6 address without brackets is ambiguous
    if not separator or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigurationError(
            f"{text!r} is not an address: write HOST:PORT, for example jobmanager-1:6123 "
            "or [::1]:6123"
        )
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise ConfigurationError(
            f"{text!r} is not an address: {host!r} cannot be the name of a host (a part of it is empty, or "
            "longer than 63 characters)"
        ) from error
    return host, int(port)


def parse_addresses(text: str) -> tuple[str, ...]:
    """Splits a comma-separated list of addresses, each checked and written the same way.

    Raises:
        ConfigurationError: one of them is no address, or there is none.
    """
    if not isinstance(text, str):
        raise ConfigurationError(
            f"{text!r} is no address but {type(text).__name__}: write HOST:PORT"
        )
    parts = [part for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigurationError(f"{text!r} names no address: write HOST:PORT[,HOST:PORT]")
    return tuple(format_address(*parse_address(part)) for part in parts)


def format_address(host: str, port: int) -> str:
    """Inverse of ``parse_address``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine can reach; a name counts only as ``localhost``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
