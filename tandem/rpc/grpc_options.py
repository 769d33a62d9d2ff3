"""Keepalive of connections inside the cluster: dead peers are detected, and idle connections stay open."""

from __future__ import annotations

KEEPALIVE_S = 10.0
KEEPALIVE_TIMEOUT_S = 5.0

_PINGS = (
    ("grpc.keepalive_time_ms", round(1000 * KEEPALIVE_S)),
    ("grpc.keepalive_timeout_ms", round(1000 * KEEPALIVE_TIMEOUT_S)),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
)

# A peer whose host is down is detected within 15 s, even without traffic.
CLIENT_OPTIONS = (
    *_PINGS,
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

# By default a gRPC server closes connections that are pinged more often than every five minutes.
SERVER_OPTIONS = (
    *_PINGS,
    ("grpc.http2.min_ping_interval_without_data_ms", round(1000 * KEEPALIVE_S) // 2),
    ("grpc.so_reuseport", 0),
)
