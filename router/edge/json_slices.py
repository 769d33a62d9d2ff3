"""JSON of any size in slices. The event loop makes the first slice of an answer, which is all of most answers; a thread
makes the others one at a time, so that a large answer delays no other and is never in memory whole."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Protocol, TypeVar, cast

import msgspec
from msgspec import UNSET
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.edge.limits.http import SCOPE_KEY

SLICE_BYTES = 32 << 10  # about 1 ms of work
_BATCH = 32  # items encoded at a time: tokens, with up to 21 logprobs each

Given = TypeVar("Given")
Made = TypeVar("Made")


class ListMaker(Protocol):
    """Makes a list from `items`: `at_once`, or `on_demand` as it is encoded."""

    def __call__(self, make: Callable[[Given], Made], items: Sequence[Given], /) -> list[Made]: ...


def at_once(make: Callable[[Given], Made], items: Sequence[Given], /) -> list[Made]:
    return [make(each) for each in items]


def on_demand(make: Callable[[Given], Made], items: Sequence[Given], /) -> list[Made]:
    """Only `json_pieces` encodes such a list: msgspec raises TypeError. It may be encoded several times."""
    return cast(list[Made], _OnDemand(make, items, _BATCH))


def one_by_one(make: Callable[[Given], Made], items: Sequence[Given], /) -> list[Made]:
    """As `on_demand`, for items that are themselves encoded in pieces."""
    return cast(list[Made], _OnDemand(make, items, 1))


def kept(items: list[Made]) -> list[Made]:
    """A list made on demand, whose JSON is made once and stays in memory."""
    return cast(list[Made], _Kept(cast(_Listed, items)))


def joined(first: list[Made], then: list[Made]) -> list[Made]:
    """The items of two lists made on demand."""
    return cast(list[Made], _Joined(cast(_Listed, first), cast(_Listed, then)))


class _Listed(ABC):
    """A list of which `msgspec` knows nothing."""

    @abstractmethod
    def items(self) -> Iterator[bytes]:
        """Their JSON and the commas between them, in pieces."""

    def pieces(self) -> Iterator[bytes]:
        yield b"["
        yield from self.items()
        yield b"]"


class _OnDemand(_Listed):
    def __init__(self, make: Callable[[Given], object], items: Sequence[Given], batch: int) -> None:
        self._make = make
        self._items = items
        self._batch = batch

    def items(self) -> Iterator[bytes]:
        for at in range(0, len(self._items), self._batch):
            made = [self._make(each) for each in self._items[at : at + self._batch]]
            if at:
                yield b","
            if self._batch == 1:
                yield from json_pieces(made[0])
            else:
                yield msgspec.json.encode(made)[1:-1]


class _Kept(_Listed):
    def __init__(self, listed: _Listed) -> None:
        self._listed = listed
        self._made: list[bytes] | None = None

    def items(self) -> Iterator[bytes]:
        if self._made is not None:
            yield from self._made
            return
        made = []
        for piece in self._listed.items():
            made.append(piece)
            yield piece
        self._made = made


class _Joined(_Listed):
    def __init__(self, first: _Listed, then: _Listed) -> None:
        self._both = (first, then)

    def items(self) -> Iterator[bytes]:
        comma = b""
        for listed in self._both:
            for number, piece in enumerate(listed.items()):
                yield piece if number else comma + piece
                comma = b","


def json_pieces(value: object) -> Iterator[bytes]:
    """The JSON of an answer, as msgspec encodes it, in pieces that each take little time."""
    if isinstance(value, _Listed):
        yield from value.pieces()
        return
    try:
        yield msgspec.json.encode(value)
    except TypeError:  # a list in it is made on demand
        if isinstance(value, list):
            yield from _OnDemand(_same, value, 1).pieces()
        elif isinstance(value, msgspec.Struct):
            yield from _field_pieces(value)
        else:
            raise


def _field_pieces(value: msgspec.Struct) -> Iterator[bytes]:
    fields = [(name, part) for name in value.__struct_fields__ if (part := getattr(value, name)) is not UNSET]
    if (config := value.__struct_config__).tag_field is not None:
        fields.insert(0, (config.tag_field, config.tag))
    for number, (name, part) in enumerate(fields):
        yield b'%b"%b":' % (b"," if number else b"{", name.encode())
        yield from json_pieces(part)
    yield b"}"


def _same(item: object) -> object:
    return item


def next_slice(pieces: Iterator[bytes]) -> tuple[bytes, bool]:
    """Joins as many pieces as make a slice, which may be empty, and whether they were all."""
    parts: list[bytes] = []
    size = 0
    for piece in pieces:
        parts.append(piece)
        size += len(piece)
        if size >= SLICE_BYTES:
            return b"".join(parts), False
    return b"".join(parts), True


class Slices:
    """Joins pieces into slices. `is_done`: there is no further slice."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self.is_done = False

    def next(self) -> bytes:
        """May be empty."""
        made, is_last = next_slice(self._pieces)
        if is_last:
            self.is_done = True
        return made

    def stop(self) -> None:
        """Makes no further slice."""
        self.is_done = True


class JsonSlices(Response):
    """One JSON object. Only a large one goes through `executor`, and is sent without its length. `send` waits for a
    client that reads slowly."""

    media_type = "application/json"

    def __init__(self, pieces: Iterable[bytes], executor: Executor) -> None:
        self._slices = Slices(pieces)
        self._executor = executor
        super().__init__(self._slices.next())
        if not self._slices.is_done:
            del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._slices.is_done:
            await super().__call__(scope, receive, send)
            return
        connection, loop = scope[SCOPE_KEY], asyncio.get_running_loop()
        connection.when_lost(self._slices.stop)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self.body, "more_body": True})
            while not self._slices.is_done:
                part = await loop.run_in_executor(self._executor, self._slices.next)
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            connection.when_lost(None)
