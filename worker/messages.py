"""Messages between a worker's service process and its leader (rank 0), over `tandem.rpc.channel`.

Frames of the Worker protocol pass through as bytes: the service terminates gRPC, the leader decodes the frames.
"""

from __future__ import annotations

import msgspec

from kvtransfer.control import Peer
from tandem.engine.api import AdapterFiles


class LeaderReady(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded, the pool's memory is touched, the agents are attached. `info`: a serialized WorkerInfo
    without address. Sent again when an agent was replaced, because the new one listens at another address."""

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
    """The transfer agents of the model's other workers, from the directory."""

    peers: tuple[Peer, ...]


class WantedAdapters(msgspec.Struct, frozen=True, tag=True):
    """Those of the model, from the directory."""

    adapters: tuple[AdapterFiles, ...]


class StateQuery(msgspec.Struct, frozen=True, tag=True):
    query: int


class StateAnswer(msgspec.Struct, frozen=True, tag=True):
    query: int
    state: bytes


class CacheChanged(msgspec.Struct, frozen=True, tag=True):
    """Block hashes, 16 bytes each, concatenated, in order."""

    stored: bool
    hashes: bytes


class Computing(msgspec.Struct, frozen=True, tag=True):
    """A long step is under way, and has finished layers since the last message."""


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """The leader was asked to stop. If its connection ends without this, it died."""


ServiceToLeader = SessionOpened | SessionClosed | FromRouter | Peers | WantedAdapters | StateQuery
LeaderToService = LeaderReady | ToRouter | StateAnswer | CacheChanged | Computing | Leaving
