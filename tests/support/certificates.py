"""Certificates for tests, made by a real library: good ones, and such as must be refused."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import trustme

from common.tls.tls_files_store import TlsFiles, TlsPaths

LOOPBACK = ("127.0.0.1", "localhost", "127.0.0.2", "127.0.0.3")


class CertificateFiles:
    """The three files of a daemon, in a directory of their own.

    Args:
        directory: is made.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.cert = directory / "cert.pem"
        self.key = directory / "key.pem"
        self.ca = directory / "ca.pem"

    def write(self, issuer: trustme.CA, trusted: list[trustme.CA], **options: Any) -> None:
        """A new certificate, and the CAs that are believed; each file is replaced at once."""
        names: Any = options.pop("names", LOOPBACK)
        issued = issuer.issue_cert(*names, **options)
        chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
        _replace(self.key, issued.private_key_pem.bytes())
        _replace(self.cert, chain)
        self.trust(trusted)

    def trust(self, trusted: list[trustme.CA]) -> None:
        """Other CAs are believed from now on."""
        _replace(self.ca, b"".join(ca.cert_pem.bytes() for ca in trusted))

    @property
    def settings(self) -> dict[str, str]:
        """As they are configured."""
        return {
            "security.ssl.internal.enabled": "true",
            "security.ssl.internal.cert": str(self.cert),
            "security.ssl.internal.key": str(self.key),
            "security.ssl.internal.ca": str(self.ca),
        }

    def files(self, *, verify_hostname: bool = True) -> TlsFiles:
        """As a daemon reads them."""
        paths = TlsPaths(self.cert, self.key, self.ca)
        return TlsFiles(paths, verify_hostname=verify_hostname)


def certificate_files(
    directory: Path, issuer: trustme.CA, trusted: list[trustme.CA] | None = None, **options: Any
) -> CertificateFiles:
    """Files with a new certificate of an issuer, who is believed unless others are named."""
    made = CertificateFiles(directory)
    made.write(issuer, [issuer] if trusted is None else trusted, **options)
    return made


def expired() -> dict[str, Any]:
    """Options of a certificate whose time is over."""
    now = dt.datetime.now(dt.UTC)
    day = dt.timedelta(days=1)
    return {"not_before": now - 2 * day, "not_after": now - day}


def not_yet_valid() -> dict[str, Any]:
    """Options of a certificate whose time is still to come."""
    now = dt.datetime.now(dt.UTC)
    day = dt.timedelta(days=1)
    return {"not_before": now + day, "not_after": now + 2 * day}


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".new")
    temporary.touch(mode=0o600)
    temporary.write_bytes(content)
    temporary.replace(path)
