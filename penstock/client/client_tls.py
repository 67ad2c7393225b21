"""TLS of a client: whom it believes, how it connects, and why it could not.

Clients show no certificate: they have the token. gRPC says little of a handshake that failed, so one that did is made
again by OpenSSL, which says why.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import grpc

from penstock.client.addresses import parse_address
from penstock.client.tls_failures import SPEAKS_NO_TLS, why_failed
from penstock.config import Configuration
from penstock.errors import ConfigurationError

_RECEIVED_MAX: Final = 16_384
_ROUNDS_MAX: Final = 64
_LOOK_TIMEOUT_S: Final = 2.0
_CA_SETTING: Final = "security.ssl.client.ca"


@dataclass(frozen=True, slots=True)
class ClientTls:
    """How a client speaks TLS.

    Attributes:
        ca: PEM file with the CAs that it accepts.
        verify_hostname: the JobManager's certificate must be for the host that was asked for.
    """

    ca: Path
    verify_hostname: bool = True

    @classmethod
    def of(cls, config: Configuration) -> Self | None:
        """As it is configured; None = the client speaks plain.

        Raises:
            ConfigurationError: TLS is on, and no CA is named.
        """
        if not config.security_ssl_client_enabled:
            return None
        ca = config.security_ssl_client_ca or config.security_ssl_internal_ca
        if not ca:
            raise ConfigurationError(
                f"security.ssl.client.enabled needs {_CA_SETTING}: name the PEM file with the CA of the "
                "JobManager's certificate"
            )
        return cls(Path(ca), config.security_ssl_verify_hostname)

    def context(self) -> ssl.SSLContext:
        """For a handshake.

        Raises:
            ConfigurationError: the CAs cannot be read.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = self.verify_hostname
        context.set_alpn_protocols(["h2"])
        try:
            context.load_verify_locations(self.ca)
        except OSError as error:
            told = "no PEM file" if isinstance(error, ssl.SSLError) else error.strerror
            raise ConfigurationError(
                f"the CAs in {self.ca} ({_CA_SETTING}) cannot be used: {told}"
            ) from error
        return context


def open_channel(
    address: str, options: Sequence[tuple[str, int]], tls: ClientTls | None
) -> grpc.Channel:
    """A channel to a JobManager.

    Raises:
        ConfigurationError: the CAs cannot be read.
    """
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    tls.context()
    credentials = grpc.ssl_channel_credentials(tls.ca.read_bytes())
    own: list[tuple[str, int | str]] = [*options]
    if not tls.verify_hostname and (name := _name_of(address, tls)):
        # gRPC always checks the name: it is told the one that the certificate has.
        own.append(("grpc.ssl_target_name_override", name))
    return grpc.secure_channel(address, credentials, options=own)


def trusted_bytes(tls: ClientTls | None) -> bytes:
    """The CAs as they are now; b"" = there are none, or they cannot be read."""
    try:
        return b"" if tls is None else tls.ca.read_bytes()
    except OSError:
        return b""


def speaks_tls(address: str) -> bool:
    """Whether somebody at an address speaks TLS; False where nobody is there."""
    host, port = parse_address(address)
    try:
        with socket.create_connection((host, port), _LOOK_TIMEOUT_S) as sock:
            _shake_hands(_curious(), sock, host)
            return True
    except OSError:
        return False


def why_no_channel(address: str, tls: ClientTls | None) -> str:
    """What TLS has to do with it that a JobManager could not be reached, "" = nothing."""
    if tls is None:
        told = f"it speaks TLS only: set security.ssl.client.enabled: true and {_CA_SETTING}"
        return told if speaks_tls(address) else ""
    host, port = parse_address(address)
    context = tls.context()
    try:
        with socket.create_connection((host, port), _LOOK_TIMEOUT_S) as sock:
            try:
                _shake_hands(context, sock, host)
                return ""
            except OSError as error:
                reason = why_failed(error, host, _CA_SETTING)
    except OSError:
        return ""  # nobody is there at all
    return reason.replace(SPEAKS_NO_TLS, "it speaks no TLS: leave out security.ssl.client.enabled")


def _shake_hands(context: ssl.SSLContext, sock: socket.socket, host: str) -> ssl.SSLObject:
    """What ``wrap_socket`` does, which leaves its socket open where the other end has gone just before.

    Raises:
        OSError: the two did not come to terms.
    """
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    connection = context.wrap_bio(incoming, outgoing, server_hostname=host)
    for _ in range(_ROUNDS_MAX):
        try:
            connection.do_handshake()
        except ssl.SSLWantReadError:
            sock.sendall(outgoing.read())
        else:
            sock.sendall(outgoing.read())
            return connection
        if received := sock.recv(_RECEIVED_MAX):
            incoming.write(received)
        else:
            incoming.write_eof()
    raise TimeoutError(f"{host} comes to no end of its handshake")


def _curious() -> ssl.SSLContext:
    """Finds out whether TLS is spoken, and believes nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _name_of(address: str, tls: ClientTls) -> str:
    """A name that the certificate is for; its CA has been checked. "" where nobody answers."""
    host, port = parse_address(address)
    try:
        with socket.create_connection((host, port), _LOOK_TIMEOUT_S) as sock:
            told = _shake_hands(tls.context(), sock, host).getpeercert() or {}
    except OSError:
        return ""
    alternatives: Sequence[tuple[str, str]] = told.get("subjectAltName", ())  # type: ignore[assignment]
    for kind, name in alternatives:
        if kind in ("DNS", "IP Address"):
            return name.replace("*", "any")
    subject: Sequence[Sequence[tuple[str, str]]] = told.get("subject", ())  # type: ignore[assignment]
    return next((value for part in subject for key, value in part if key == "commonName"), "")
