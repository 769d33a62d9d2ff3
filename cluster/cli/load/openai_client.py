"""A load client for any OpenAI-compatible server: streamed completions (token ids) or chat completions (text)."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from urllib.parse import SplitResult

import msgspec

from cluster.cli.load.client import LoadRequest, LoadResponse, OnTokens
from cluster.cli.load.http_connection import HttpConnection
from router.request_terms import PRIORITY
from tandem.errors import (
    ConfigError,
    ErrorCode,
    InternalError,
    OverloadedError,
    TandemError,
    UnavailableError,
    error_from_code,
)

MAX_ERROR_CHARS = 300  # of a server's error in ours
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
    def output(self) -> str:
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
class OpenAiEndpoint:
    """`url`: for example http://127.0.0.1:8000/v1. `chat`: use /chat/completions instead of /completions."""

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
    """Opens connections on demand and keeps them alive."""

    def __init__(self, endpoint: OpenAiEndpoint) -> None:
        """Raises ConfigError if the endpoint's CA file cannot be read."""
        self._endpoint = endpoint
        self._tls = _tls(endpoint)
        self._idle: list[HttpConnection] = []

    async def send(self, request: LoadRequest, on_tokens: OnTokens) -> LoadResponse:
        raw = self._request(request)
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                reader = _Reader(connection, on_tokens)
                try:
                    return await self._exchange(connection, raw, reader)
                except UnavailableError:
                    if connection.received_any:
                        raise
                    # The server had closed the idle connection, so it has not accepted the request: try again.
        connection = await self._connect()
        return await self._exchange(connection, raw, _Reader(connection, on_tokens))

    async def _exchange(self, connection: HttpConnection, raw: bytes, reader: _Reader) -> LoadResponse:
        try:
            status = await connection.send(raw, reader.feed)
        finally:
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()  # if cancelled too, so that the server stops generating
        if status != 200:
            raise _refusal(status, bytes(reader.rest))
        return reader.response()

    async def _connect(self) -> HttpConnection:
        host, port = self._endpoint.address
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(HttpConnection, host, port, ssl=self._tls)
        except OSError as error:
            raise UnavailableError(f"cannot connect to {host}:{port}: {error}") from None
        return connection

    def _request(self, request: LoadRequest) -> bytes:
        endpoint = self._endpoint
        body: dict[str, object] = {
            "model": endpoint.model,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if endpoint.ignore_eos:
            body["ignore_eos"] = True
        if endpoint.chat:
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        encoded = msgspec.json.encode(body)
        head = [
            f"POST {endpoint.path} HTTP/1.1",
            f"host: {endpoint.url.netloc.rpartition('@')[2]}",
            "content-type: application/json",
            "accept: text/event-stream",
            f"content-length: {len(encoded)}",
        ]
        if endpoint.api_key is not None:
            head.append(f"authorization: Bearer {endpoint.api_key}")
        if request.priority:
            head.append(f"{PRIORITY}: {request.priority}")
        return "\r\n".join([*head, "", ""]).encode() + encoded

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()


class _Reader:
    """Parses server-sent events as they arrive. `rest`: bytes that are not a complete line, or the body of an error."""

    def __init__(self, connection: HttpConnection, on_tokens: OnTokens) -> None:
        self.rest = bytearray()
        self._connection, self._on_tokens = connection, on_tokens
        self._events_with_text = 0
        self._usage = _Usage()
        self._error: bytes | None = None

    def feed(self, data: bytes) -> None:
        self.rest += data
        if self._connection.status != 200:
            return
        new_events = 0
        *lines, self.rest = self.rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (data_field := line[5:].strip()) != b"[DONE]":
                new_events += self._event(bytes(data_field))
        if new_events:
            self._events_with_text += new_events
            self._on_tokens(new_events)

    def _event(self, data: bytes) -> bool:
        """Whether the event contains a token."""
        try:
            event = _EVENTS.decode(data)
        except msgspec.MsgspecError:
            self._error = data
            return False
        if event.error is not None:
            self._error = bytes(event.error)
        self._usage = event.usage or self._usage
        return any(choice.output for choice in event.choices)

    def response(self) -> LoadResponse:
        """Raises InternalError if an event was an error, or not in OpenAI's format."""
        if self._error is not None:
            shown = self._error[:MAX_ERROR_CHARS].decode(errors="replace")
            raise InternalError(f"expected an OpenAI event in the stream, got an error or another format: {shown}")
        usage = self._usage
        details = usage.prompt_tokens_details
        return LoadResponse(
            output_tokens=usage.completion_tokens or self._events_with_text,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=None if details is None else details.cached_tokens,
        )


def _refusal(status: int, body: bytes) -> TandemError:
    message = f"HTTP {status}: {body[:MAX_ERROR_CHARS].decode(errors='replace').strip()}"
    if status == 429:
        return OverloadedError(message)
    return error_from_code(_BY_STATUS.get(status, ErrorCode.INTERNAL), message)


def _tls(endpoint: OpenAiEndpoint) -> ssl.SSLContext | None:
    if endpoint.url.scheme != "https":
        return None
    try:
        return ssl.create_default_context(cafile=endpoint.ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--ca: {endpoint.ca}: expected a PEM file: {error}", field="--ca") from None
