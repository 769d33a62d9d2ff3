"""Any server with OpenAI's API: streamed completions (token ids) or chat completions (text)."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from urllib.parse import SplitResult

import msgspec

from cluster.cli.load.client import Answer, Ask, Heard
from cluster.cli.load.http_connection import HttpConnection
from router.terms import PRIORITY
from tandem.errors import (
    ConfigError,
    ErrorCode,
    InternalError,
    OverloadedError,
    TandemError,
    UnavailableError,
    error_from_code,
)

_SHOWN_CHARS = 300  # of a server's error
_BY_STATUS = {
    400: ErrorCode.INVALID_ARGUMENT,
    401: ErrorCode.UNAUTHENTICATED,
    403: ErrorCode.PERMISSION_DENIED,
    404: ErrorCode.NOT_FOUND,
    408: ErrorCode.DEADLINE_EXCEEDED,
    413: ErrorCode.PAYLOAD_TOO_LARGE,
    422: ErrorCode.INVALID_ARGUMENT,
    503: ErrorCode.UNAVAILABLE,
    504: ErrorCode.DEADLINE_EXCEEDED,
}


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def said(self) -> str:
        if self.delta is not None:
            return self.delta.content or self.delta.reasoning_content or ""
        return self.text or ""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


_EVENTS = msgspec.json.Decoder(_Event)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`chat`: /chat/completions with text; else /completions. `url` as in http://127.0.0.1:8000/v1."""

    url: SplitResult
    model: str
    chat: bool
    api_key: str | None = None
    ca: str | None = None
    ignore_eos: bool = True

    @property
    def path(self) -> str:
        return self.url.path.rstrip("/") + ("/chat/completions" if self.chat else "/completions")

    @property
    def address(self) -> tuple[str, int]:
        return self.url.hostname or "", self.url.port or (443 if self.url.scheme == "https" else 80)


class OpenAiClient:
    """Connections are opened as they are needed, and kept."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Raises ConfigError when the endpoint's CA file cannot be read."""
        self._endpoint = endpoint
        self._tls = _tls(endpoint)
        self._idle: list[HttpConnection] = []

    async def send(self, ask: Ask, heard: Heard) -> Answer:
        raw = self._request(ask)
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                reader = _Reader(connection, heard)
                try:
                    return await self._exchange(connection, raw, reader)
                except UnavailableError:
                    if connection.heard_anything:
                        raise
                    # An idle connection that the server had just given up: the request was not taken.
        connection = await self._connect()
        return await self._exchange(connection, raw, _Reader(connection, heard))

    async def _exchange(self, connection: HttpConnection, raw: bytes, reader: _Reader) -> Answer:
        try:
            status = await connection.send(raw, reader.feed)
        finally:
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()  # also when we were cancelled: the server learns of it
        if status != 200:
            raise _refusal(status, bytes(reader.rest))
        return reader.answer()

    async def _connect(self) -> HttpConnection:
        host, port = self._endpoint.address
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(HttpConnection, host, port, ssl=self._tls)
        except OSError as error:
            raise UnavailableError(f"nobody answers at {host}:{port}: {error}") from None
        return connection

    def _request(self, ask: Ask) -> bytes:
        endpoint = self._endpoint
        body: dict[str, object] = {
            "model": endpoint.model,
            "max_tokens": ask.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if endpoint.ignore_eos:
            body["ignore_eos"] = True
        if endpoint.chat:
            body["messages"] = [{"role": "user", "content": ask.prompt}]
        else:
            body["prompt"] = ask.prompt
        sent = msgspec.json.encode(body)
        head = [
            f"POST {endpoint.path} HTTP/1.1",
            f"host: {endpoint.url.netloc.rpartition('@')[2]}",
            "content-type: application/json",
            "accept: text/event-stream",
            f"content-length: {len(sent)}",
        ]
        if endpoint.api_key is not None:
            head.append(f"authorization: Bearer {endpoint.api_key}")
        if ask.priority:
            head.append(f"{PRIORITY}: {ask.priority}")
        return "\r\n".join([*head, "", ""]).encode() + sent

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()


class _Reader:
    """Server-sent events as they come; whatever else came is in `rest`."""

    def __init__(self, connection: HttpConnection, heard: Heard) -> None:
        self.rest = bytearray()
        self._connection, self._heard = connection, heard
        self._events_with_text = 0
        self._usage = _Usage()
        self._error: bytes | None = None

    def feed(self, data: bytes) -> None:
        self.rest += data
        if self._connection.status != 200:
            return
        came = 0
        *lines, self.rest = self.rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (said := line[5:].strip()) != b"[DONE]":
                came += self._event(bytes(said))
        if came:
            self._events_with_text += came
            self._heard(came)

    def _event(self, said: bytes) -> bool:
        """Whether a token is in it."""
        try:
            event = _EVENTS.decode(said)
        except msgspec.MsgspecError:
            self._error = said
            return False
        if event.error is not None:
            self._error = bytes(event.error)
        self._usage = event.usage or self._usage
        return any(choice.said for choice in event.choices)

    def answer(self) -> Answer:
        """Raises InternalError when an event was an error, or none of OpenAI's."""
        if self._error is not None:
            said = self._error[:_SHOWN_CHARS].decode(errors="replace")
            raise InternalError(f"an event of the stream is an error, or none of OpenAI's: {said}")
        usage = self._usage
        details = usage.prompt_tokens_details
        return Answer(
            output_tokens=usage.completion_tokens or self._events_with_text,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=None if details is None else details.cached_tokens,
        )


def _refusal(status: int, body: bytes) -> TandemError:
    said = f"HTTP {status}: {body[:_SHOWN_CHARS].decode(errors='replace').strip()}"
    if status == 429:
        return OverloadedError(said)
    return error_from_code(_BY_STATUS.get(status, ErrorCode.INTERNAL), said)


def _tls(endpoint: Endpoint) -> ssl.SSLContext | None:
    if endpoint.url.scheme != "https":
        return None
    try:
        return ssl.create_default_context(cafile=endpoint.ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--ca: {endpoint.ca}: expected a PEM file: {error}", field="--ca") from None
