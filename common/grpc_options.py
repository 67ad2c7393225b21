"""gRPC settings that the daemons share: message sizes, keepalive, reconnection.

A connection is pinged every second, also while no call is under way. Who does not answer a ping in time
has its connection closed, and every call on it fails. How long that is depends on what the connection
is for:

- one that is there to notice a peer that is gone (a lost route, a machine without power: nothing closes
  the connection) waits ``WATCH_TIMEOUT_MS``: it breaks 1.5 to 2 s after the silence began;
- one whose calls must survive a pause of the peer waits as long as the peer may be silent at all.

A ping is answered by gRPC's own threads: a daemon that is only busy answers.
"""

from __future__ import annotations

from penstock.client.protocol import TRANSPORT_OPTIONS

PING_INTERVAL_MS = 1_000
WATCH_TIMEOUT_MS = 1_000
_SERVER_TIMEOUT_MS = 20_000
# A connection whose other end is too busy to greet is waited for; a refused one fails at once anyway.
_CONNECT_TIMEOUT_MS = 2_000

Options = list[tuple[str, int]]


def channel_options(ping_timeout_ms: int = WATCH_TIMEOUT_MS) -> Options:
    """Options of a daemon's channel to another daemon.

    Args:
        ping_timeout_ms: silence after a ping that breaks the connection and fails the calls on it.
    """
    return [
        *TRANSPORT_OPTIONS,
        ("grpc.keepalive_time_ms", PING_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", ping_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", _CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", 1_000),
    ]


def server_options() -> Options:
    """Options of a daemon's server; a port in use is an error, not shared.

    The server pings as well, to be rid of connections of peers that are gone. It is patient: those who
    call decide how long they wait.
    """
    return [
        *TRANSPORT_OPTIONS,
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", PING_INTERVAL_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_time_ms", PING_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", _SERVER_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
