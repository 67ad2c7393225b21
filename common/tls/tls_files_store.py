"""A daemon's certificate, its key and the CAs that it accepts: PEM files, read again when they have changed.

Each handshake begins with what the files hold then, so a certificate is renewed, and a CA exchanged, by writing the
files. What cannot be used (half of the files written, a key of another certificate) leaves what was read before in force.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from common.log import get_logger
from common.tls.own_certificate import why_refused_by_itself
from penstock.client.secret_files import read_secret
from penstock.config import Configuration
from penstock.errors import ConfigurationError

CA_SETTING: Final = "security.ssl.internal.ca"
_OLDEST: Final = ssl.TLSVersion.TLSv1_2
_State = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TlsPaths:
    """Where the files are.

    Attributes:
        cert: the certificate, and what lies between it and its CA.
        key: its key.
        ca: certificates of the CAs whose certificates are peers.
    """

    cert: Path
    key: Path
    ca: Path


@dataclass(frozen=True, slots=True)
class _Contexts:
    """For one state of the files."""

    of_server: ssl.SSLContext
    of_open_server: ssl.SSLContext
    of_client: ssl.SSLContext


class TlsFiles:
    """See the module. One thread uses it.

    Args:
        verify_hostname: whether certificates must be for the host that was asked for.

    Raises:
        ConfigurationError: they cannot be used.
    """

    def __init__(self, paths: TlsPaths, *, verify_hostname: bool) -> None:
        self._paths = paths
        self._verify_hostname = verify_hostname
        self._log = get_logger(__name__)
        self._state = self._look()
        self._contexts = self._load()

    @classmethod
    def of(cls, config: Configuration) -> Self | None:
        """As it is configured; None = daemons speak plain.

        Raises:
            ConfigurationError: the files cannot be used.
        """
        if not config.security_ssl_internal_enabled:
            return None
        paths = TlsPaths(
            Path(config.security_ssl_internal_cert),
            Path(config.security_ssl_internal_key),
            Path(config.security_ssl_internal_ca),
        )
        return cls(paths, verify_hostname=config.security_ssl_verify_hostname)

    def server_context(self, *, requires_certificate: bool) -> ssl.SSLContext:
        """For who has connected; one that comes with a certificate must come with one of the CAs."""
        self._refresh()
        return self._contexts.of_server if requires_certificate else self._contexts.of_open_server

    def client_context(self) -> ssl.SSLContext:
        """For who is connected to."""
        self._refresh()
        return self._contexts.of_client

    def _refresh(self) -> None:
        state = self._look()
        if state == self._state:
            return
        self._state = state
        try:
            self._contexts = self._load()
        except ConfigurationError as error:
            self._log.error("tls.files_unusable", reason=f"{error}; what was read before is used")
        else:
            self._log.info("tls.files_read", cert=str(self._paths.cert), ca=str(self._paths.ca))

    def _look(self) -> _State:
        """Tells two states of the files apart."""
        found: list[tuple[int, int, int]] = []
        for path in (self._paths.cert, self._paths.key, self._paths.ca):
            try:
                status = path.stat()
            except OSError:
                found.append((0, 0, 0))
            else:
                found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return tuple(found)

    def _load(self) -> _Contexts:
        read_secret(self._paths.key, f"the key {self._paths.key} (security.ssl.internal.key)")
        of_server = self._context(ssl.PROTOCOL_TLS_SERVER)
        of_server.verify_mode = ssl.CERT_REQUIRED
        of_open_server = self._context(ssl.PROTOCOL_TLS_SERVER)
        of_open_server.verify_mode = ssl.CERT_OPTIONAL
        for context in (of_server, of_open_server):
            context.num_tickets = 0  # connections last; nobody resumes one
            context.set_alpn_protocols(["h2"])  # what clients of gRPC insist on
        of_client = self._context(ssl.PROTOCOL_TLS_CLIENT)
        of_client.check_hostname = False
        if reason := why_refused_by_itself(of_client, of_server):
            # It may be renewed before anybody comes, and others may trust other CAs: no reason to end.
            told = f"{self._paths.cert} (security.ssl.internal.cert): {reason}"
            self._log.error("tls.own_certificate_refused", reason=told)
        of_client.check_hostname = self._verify_hostname
        return _Contexts(of_server, of_open_server, of_client)

    def _context(self, protocol: ssl._SSLMethod) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = _OLDEST
        paths = self._paths
        try:
            # An encrypted key is none that a daemon can use: it has nobody to ask.
            context.load_cert_chain(paths.cert, paths.key, password=lambda: b"\0")
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
                # The key has just been read.
                raise ConfigurationError(
                    f"the certificate {paths.cert} (security.ssl.internal.cert) cannot be read: {_told(error)}"
                ) from error
            raise ConfigurationError(
                f"the certificate {paths.cert} (security.ssl.internal.cert) and its key {paths.key} "
                f"(security.ssl.internal.key) cannot be used: {_told(error)}"
            ) from error
        try:
            context.load_verify_locations(paths.ca)
        except OSError as error:
            raise ConfigurationError(
                f"the CAs in {paths.ca} ({CA_SETTING}) cannot be used: {_told(error)}"
            ) from error
        return context


def _told(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        if error.reason == "KEY_VALUES_MISMATCH":
            return "the key is another certificate's"
        return "no PEM file, or an encrypted key" if error.reason is None else error.reason
    number = getattr(error, "errno", None)
    return os.strerror(number) if number else str(error)
