"""Whether a daemon would believe itself: a handshake of its own certificate with its own CAs, in memory (pure).

Nobody else is likely to believe it then, and who starts the daemon is told at once.
"""

from __future__ import annotations

import ssl
from typing import Final

from penstock.client.tls_failures import why_failed

_TURNS_MAX: Final = 10
"""A handshake takes two."""


def why_refused_by_itself(of_client: ssl.SSLContext, of_server: ssl.SSLContext) -> str:
    """Why a handshake between two sides of one daemon fails, "" = it does not.

    Args:
        of_client: shows the certificate, and checks no name.
        of_server: the same, of the side that is connected to.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        of_client.wrap_bio(to_client, to_server),
        of_server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(_TURNS_MAX):
        for side in list(sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                return why_failed(error, "", "security.ssl.internal.ca")
            sides.remove(side)
    return ""
