"""A request's output for its client: pieces of text with their tokens, then one end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from router.texts.detokenizer import Detokenizer, StopStrings, TokenDecoder
from tandem.errors import TandemError
from tandem.request import FinishReason, TokenLogprob
from tandem.v1 import inference_pb2, worker_pb2

MAX_UNREAD_PIECES = 1024


class OutToken(msgspec.Struct, frozen=True, gc=False):  # one per token: created much faster than a frozen dataclass
    """One generated token. `logprob` None: not requested. `is_stop`: a stop token, which has no text."""

    token_id: int
    logprob: float | None
    top: tuple[TokenLogprob, ...]
    is_stop: bool


class TextPiece(msgspec.Struct, frozen=True, gc=False):
    """`text` may be empty: a character is incomplete, or a stop string may have begun."""

    text: str
    tokens: tuple[OutToken, ...]


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):  # in recordings without what is 0
    """Of the tokens that workers proposed, `accepted_tokens` are the answer's and `unused_tokens` are not; the last two
    count those of them that came from the client's prediction."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    accepted_tokens: int = 0
    unused_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Timeline(msgspec.Struct, frozen=True):
    """The time a request spent in each phase. See tandem.v1.Timeline."""

    queue_s: float
    prefill_s: float
    handoff_s: float
    decode_s: float
    ttft_s: float
    total_s: float
    kv_bytes_moved: int
    kv_blocks_moved: int
    cached_tokens_prefill: int
    cached_tokens_decode: int
    prefill_worker: str
    decode_worker: str


class Final(msgspec.Struct, frozen=True):
    reason: FinishReason
    usage: Usage
    timeline: Timeline


class OutputAssembler:
    """Turns the tokens of one request into pieces. Pure."""

    def __init__(
        self, decoder: TokenDecoder, prompt: Sequence[int], stop: Sequence[str], stop_token_ids: frozenset[int]
    ) -> None:
        self._detokenizer = Detokenizer(decoder, prompt)
        self._stops = StopStrings(stop)
        self._has_stops = bool(stop)
        self._stop_token_ids = stop_token_ids
        self.stopped = False  # a stop string was found
        self.stop_string: str | None = None  # this one

    def push(self, message: worker_pb2.StepToken) -> TextPiece:
        token_id = message.token_id
        is_stop = token_id in self._stop_token_ids
        token = _scored(message, is_stop) if message.HasField("logprobs") else OutToken(token_id, None, (), is_stop)
        if is_stop:
            return TextPiece("", (token,))
        text = self._detokenizer.push(token_id)
        if self._has_stops:
            text = self._stop(text)
        return TextPiece(text, (token,))

    def flush(self) -> TextPiece | None:
        """Returns the text held back, if the answer ends without a stop string."""
        text = self._stop(self._detokenizer.flush()) + self._stops.flush()
        return TextPiece(text, ()) if text else None

    def _stop(self, text: str) -> str:
        """What is before a stop string."""
        result = self._stops.push(text)
        self.stopped, self.stop_string = result.stopped, result.stop
        return result.text


def _scored(message: worker_pb2.StepToken, is_stop: bool) -> OutToken:
    top = tuple(TokenLogprob(each.token_id, each.logprob) for each in message.logprobs.top)
    return OutToken(message.token_id, message.logprobs.logprob, top, is_stop)


class ResponseStream:
    """Carries output from a request to its one reader at the edge. Bounded: a slow reader ends its request.

    `prompt_scores`: logprobs of the prompt from its second token on, if requested; set before the first piece.
    `embedding`: as in `StepToken`, if requested; set before the first piece. `stop_string`: that ended the answer; set
    with `final`.
    """

    def __init__(self, request_id: str, on_cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self.final: Final | None = None
        self.stop_string: str | None = None
        self.prompt_scores: tuple[inference_pb2.TokenLogprobs, ...] = ()
        self.embedding = b""
        self._on_cancel: Callable[[], None] | None = on_cancel  # None after the end: it would be a reference cycle
        self._pieces: list[TextPiece] = []
        self._times: list[float] | None = None  # of the pieces, once `keep_times` was called
        self._error: TandemError | None = None  # None once raised: its traceback would be a reference cycle
        self._waiting: asyncio.Future[None] | None = None  # `next` awaits it
        self._wakes: Callable[[], None] | None = None  # replaces `next`

    def keep_times(self) -> None:
        """For `take_times`, from now on. Pieces that came before get this time."""
        self._times = [time.monotonic()] * len(self._pieces)

    def take_times(self) -> list[float]:
        """The monotonic seconds at which each piece came that was taken since the last call."""
        assert self._times is not None  # after `keep_times`
        times, self._times = self._times, []
        return times

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Calls `wake` on every change from now on, so that one reader can wait for several streams."""
        self._wakes = wake

    def take(self) -> list[TextPiece]:
        """Returns the pieces since the last call. After them, raises the TandemError that ended the request, once."""
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            return pieces
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # its traceback holds this frame: a reference cycle
        return []

    @property
    def has_failed(self) -> bool:
        """`take` raises after it has returned the remaining pieces."""
        return self._error is not None

    @property
    def fails_next(self) -> bool:
        return self._error is not None and not self._pieces

    def put(self, piece: TextPiece) -> bool:
        """Returns False if more than `MAX_UNREAD_PIECES` are unread."""
        self._pieces.append(piece)
        if self._times is not None:
            self._times.append(time.monotonic())
        self._wake()
        return len(self._pieces) <= MAX_UNREAD_PIECES

    def finish(self, final: Final, stop_string: str | None = None) -> None:
        self.final, self.stop_string, self._on_cancel = final, stop_string, None
        self._wake()

    def fail(self, error: TandemError) -> None:
        self._error, self._on_cancel = error, None
        self._wake()

    def cancel(self) -> None:
        """Cancels the request. Idempotent; no effect after the end."""
        if self._on_cancel is not None:
            self._on_cancel()

    async def next(self) -> list[TextPiece]:
        """Waits for pieces and takes all of them; empty: the end. Raises as `take`. For one reader."""
        while not (pieces := self.take()) and self._on_cancel is not None:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return pieces

    def _wake(self) -> None:
        if self._wakes is not None:
            self._wakes()
        elif self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def __aiter__(self) -> AsyncIterator[list[TextPiece]]:
        """Yields all pieces available each time. Raises the TandemError that ended the request."""
        while pieces := await self.next():
            yield pieces
