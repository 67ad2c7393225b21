"""gRPC settings that the daemons share: message sizes and keepalive.

A peer that vanishes without closing its connection is noticed within about three seconds by pings,
long before a call's own deadline.
"""

from __future__ import annotations

from penstock.protocol import MESSAGE_SIZE_MAX_BYTES, METADATA_SIZE_MAX_BYTES

_PING_INTERVAL_MS = 2_000
_PING_TIMEOUT_MS = 1_000

Options = list[tuple[str, int]]

_SIZES: Options = [
    ("grpc.max_receive_message_length", MESSAGE_SIZE_MAX_BYTES),
    ("grpc.max_send_message_length", MESSAGE_SIZE_MAX_BYTES),
    ("grpc.max_metadata_size", METADATA_SIZE_MAX_BYTES),
]


def channel_options() -> Options:
    """Options of a daemon's channel to another daemon."""
    return [
        *_SIZES,
        ("grpc.keepalive_time_ms", _PING_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
    ]


def server_options() -> Options:
    """Options of a daemon's server; a port in use is an error, not shared."""
    return [
        *_SIZES,
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _PING_INTERVAL_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_time_ms", _PING_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
    ]
