"""What copies and digests pieces within a GPU, by one launch each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from torch import Tensor

from kvtransfer.pool.device_digest import DigestKeys
from kvtransfer.pool.pool import PoolSpan
from tandem.kvcache.layout import KvPoolLayout


@dataclass(frozen=True, slots=True)
class Place:
    """A span in a pool. `words`: i32, all of the pool."""

    words: Tensor
    layout: KvPoolLayout
    span: PoolSpan


class Launch(Protocol):
    """What a piece under way uses on the host and on the device."""

    @property
    def digest(self) -> int:
        """Once the device has ended the piece."""
        ...


L = TypeVar("L", bound=Launch)


class PieceCopier(Protocol[L]):
    """Launches pieces of one pool on the current stream."""

    def launch(self, read: Place, write: Place | None, keys: DigestKeys | None) -> L:
        """Copies `read` to `write`, of the same shape and on the same device, if it is given, and digests it if `keys`
        are given."""
        ...

    def release(self, launch: L) -> None:
        """Call it once the device has ended the piece."""
        ...


AnyCopier: TypeAlias = PieceCopier[Any]
