"""What a worker's service process and its leader (rank 0) say to each other, over `tandem.rpc.channel`.

Frames of the Worker protocol pass through as bytes: the service ends the gRPC connection, the leader understands it.
"""

from __future__ import annotations

import msgspec

from kvtransfer.control import Peer


class LeaderReady(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded, the pool touched, the agents attached. `info` is a serialized WorkerInfo without address.
    Said again when an agent was replaced, since the new one listens elsewhere."""

    info: bytes


class SessionOpened(msgspec.Struct, frozen=True, tag=True):
    session: int
    router_id: str


class SessionClosed(msgspec.Struct, frozen=True, tag=True):
    session: int


class FromRouter(msgspec.Struct, frozen=True, tag=True):
    session: int
    frame: bytes


class ToRouter(msgspec.Struct, frozen=True, tag=True):
    session: int
    frame: bytes


class Peers(msgspec.Struct, frozen=True, tag=True):
    """The directory's agents of the model's other workers."""

    peers: tuple[Peer, ...]


class StateQuery(msgspec.Struct, frozen=True, tag=True):
    query: int


class StateAnswer(msgspec.Struct, frozen=True, tag=True):
    query: int
    state: bytes


class CacheChanged(msgspec.Struct, frozen=True, tag=True):
    """Block hashes, 16 bytes each, concatenated, in order."""

    stored: bool
    hashes: bytes


ToLeader = SessionOpened | SessionClosed | FromRouter | Peers | StateQuery
FromLeader = LeaderReady | ToRouter | StateAnswer | CacheChanged
