"""How long connections inside the cluster live: neither side keeps one to a host that is gone, and idle ones stay."""

from __future__ import annotations

KEEPALIVE_S = 10.0
KEEPALIVE_TIMEOUT_S = 5.0

_PINGS = (
    ("grpc.keepalive_time_ms", round(1000 * KEEPALIVE_S)),
    ("grpc.keepalive_timeout_ms", round(1000 * KEEPALIVE_TIMEOUT_S)),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
)

# A peer whose host is gone is noticed in 15 s, without traffic of its own.
CLIENT_OPTIONS = (
    *_PINGS,
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

# gRPC's servers end connections that are pinged more often than every five minutes, unless they are told otherwise.
SERVER_OPTIONS = (
    *_PINGS,
    ("grpc.http2.min_ping_interval_without_data_ms", round(1000 * KEEPALIVE_S) // 2),
    ("grpc.so_reuseport", 0),
)
