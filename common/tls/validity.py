"""Until when certificates are valid (pure): Python tells that of its own certificate to nobody who is not its peer."""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from typing import Final

_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_UTC_TIME, _VERSION = 0x17, 0xA0
_CENTURY_BEGINS: Final = 50
"""Years of two digits from here on are those of the last century (RFC 5280)."""


def ends_of_validity(pem: str) -> list[int]:
    """When each certificate of a PEM file ends, in seconds since the epoch, in the order of the file.

    Example: what holds no certificate has none.
        >>> ends_of_validity("")
        []
        >>> end_of_validity(b"")
        Traceback (most recent call last):
        ...
        ValueError: this is no certificate

    Raises:
        ValueError: one of them is none.
    """
    return [end_of_validity(ssl.PEM_cert_to_DER_cert(one)) for one in _PEM.findall(pem)]


def end_of_validity(der: bytes) -> int:
    """The same of one certificate.

    Args:
        der: the certificate, a sequence of which the first part is what was signed: version, number, algorithm,
            issuer, validity, ...

    Raises:
        ValueError: it is none.
    """
    try:
        _, signed, _ = _part(der, 0)
        _, at, _ = _part(der, signed)
        tag, _, end = _part(der, at)
        before = 3 if tag == _VERSION else 2
        at = end
        for _ in range(before):
            _, _, at = _part(der, at)
        _, at, _ = _part(der, at)
        _, _, at = _part(der, at)
        tag, begin, end = _part(der, at)
        text = der[begin:end].decode("ascii")
        if tag == _UTC_TIME:
            text = ("19" if int(text[:2]) >= _CENTURY_BEGINS else "20") + text
        return int(datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp())
    except (IndexError, ValueError) as error:
        raise ValueError("this is no certificate") from error


def _part(der: bytes, at: int) -> tuple[int, int, int]:
    """Tag, begin and end of the content of what is at a place."""
    tag, length, begin = der[at], der[at + 1], at + 2
    if length & 0x80:
        digits = length & 0x7F
        length, begin = int.from_bytes(der[begin : begin + digits]), begin + digits
    return tag, begin, begin + length
