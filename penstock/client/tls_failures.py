"""What went wrong in a TLS handshake, in words (pure): what OpenSSL says of it, and what a user can do.

Both sides of a connection say something of their own: one refuses the other's certificate, the other hears that its own
is refused.
"""

from __future__ import annotations

import ssl
from typing import Final

_VERIFY: Final = {
    9: "its certificate is not valid yet: check the clocks of both machines",
    10: "its certificate has expired: renew it",
    18: "its certificate is signed by itself, and not in {ca}",
    19: "its certificate is not of a CA in {ca}",
    20: "its certificate is not of a CA in {ca}",
    21: "its certificate is not of a CA in {ca}",
    26: "its certificate is not made for this: its extendedKeyUsage lacks serverAuth or clientAuth",
    62: "its certificate is not for {name}: give it that name (subjectAltName), or set security.ssl.verify-hostname: false",
    64: "its certificate is not for {name}: give it that address (subjectAltName), or set security.ssl.verify-hostname: false",
}  # fmt: skip

_REASONS: Final = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it has shown no certificate: set security.ssl.internal.enabled, .cert, .key and .ca there",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it wants a certificate, and was shown none: set security.ssl.internal.enabled, .cert, .key and .ca here",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not know the CA of the certificate that it was shown: its own file of CAs lacks it",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it was shown a certificate that has expired: renew security.ssl.internal.cert here",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it refuses the certificate that it was shown: its log says why",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it refuses the certificate that it was shown: its log says why",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "it refuses the certificate that it was shown: its extendedKeyUsage lacks serverAuth or clientAuth",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "it refuses the handshake: its log says why",
    "TLSV1_ALERT_PROTOCOL_VERSION": "it speaks another version of TLS",
    "TLSV1_ALERT_INTERNAL_ERROR": "it refuses the handshake: its log says why",
    "UNSUPPORTED_PROTOCOL": "it speaks a version of TLS that is too old",
}  # fmt: skip

_NO_TLS: Final = (
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "RECORD_LAYER_FAILURE",
    "PACKET_LENGTH_TOO_LONG",
    "UNKNOWN_PROTOCOL",
)
SPEAKS_NO_TLS: Final = "it speaks no TLS: turn TLS on there, or off here"


def why_failed(error: OSError, name: str, ca_setting: str) -> str:
    """Why there is no TLS connection, said of the other side.

    Args:
        error: of the handshake, or of the first read behind it.
        name: of the host that was asked for.
        ca_setting: where the accepted CAs are, for the message.

    Example:
        >>> why_failed(ConnectionResetError(104, "reset"), "tm-1", "security.ssl.internal.ca")
        'it broke the connection off during the handshake: its log says why'
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        told = _VERIFY.get(error.verify_code)
        if told is not None:
            return told.format(name=name, ca=ca_setting)
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLEOFError | ConnectionResetError | BrokenPipeError):
        return "it broke the connection off during the handshake: its log says why"
    if isinstance(error, ssl.SSLError):
        reason = error.reason or ""
        if reason in _NO_TLS:
            return SPEAKS_NO_TLS
        return _REASONS.get(reason, f"the handshake failed: {reason or error}")
    return error.strerror or str(error)
