"""Protocol versions of the KV plane.

A pair of workers uses the newest version that both support (`tandem.rpc.versions`).

    1  the digest of a piece covers its bytes
    2  links may carry int8; the digest covers the header too, so that wrong blocks, layers or tickets are detected;
       both ends send heartbeats, and a receiver answers any number of probes; `process_group` sends a piece as
       several messages; pieces of `mapped` may be larger, and digests of large ones follow them

Fields added later default to the previous behaviour: digests are xxh3, pools are in host memory.
"""

from __future__ import annotations

PROTOCOL_VERSION = 2
OLDEST_PROTOCOL_VERSION = 1
_ADDRESS_IN_DIGEST = 2
_BEATS = 2
_MANY_PROBES = 2
_STRIPED_GROUPS = 2
_INT8 = 2
_LARGE_PIECES = 2
_MAPPED_DIGESTS_FOLLOW = 2


def binds_address(version: int) -> bool:
    return version >= _ADDRESS_IN_DIGEST


def has_heartbeats(version: int) -> bool:
    return version >= _BEATS


def has_many_probes(version: int) -> bool:
    return version >= _MANY_PROBES


def stripes_groups(version: int) -> bool:
    return version >= _STRIPED_GROUPS


def supports_int8(version: int) -> bool:
    return version >= _INT8


def supports_large_pieces(version: int) -> bool:
    return version >= _LARGE_PIECES


def mapped_digests_follow(version: int) -> bool:
    return version >= _MAPPED_DIGESTS_FOLLOW
