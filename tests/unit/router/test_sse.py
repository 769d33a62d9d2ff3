"""Events of a streamed answer: one write for all that comes at once, none while the client does not read."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from router.edge.openai.format import AnswerFormat, ChatFormat, TextEvents
from router.edge.sse import LOOK_S, REST_S, SCOPE_KEY, SseResponse, Turns
from router.requests.answers import Answers, Arrival, SubmittedRequest
from router.requests.output import Final, OutToken, ResponseStream, TextPiece, Usage
from tandem.errors import WorkerLost
from tandem.request import FinishReason


class Reader:
    """A client's connection that counts writes, and stops reading when told to."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.write_paused = False
        self._resumed = asyncio.Event()

    def when_lost(self, call: Any) -> None:
        """It stays."""

    async def drained(self) -> None:
        await self._resumed.wait()

    def resume(self) -> None:
        self.write_paused = False
        self._resumed.set()

    def write_chunk(self, data: bytes) -> None:
        self.writes.append(data)


class Texts:
    """The plainest format: the texts themselves."""

    def begin(self) -> list[bytes]:
        return [b"begin "]

    def events(self, arrivals: list[Arrival]) -> list[bytes]:
        return [piece.text.encode() for arrival in arrivals for piece in arrival.pieces]

    def end(self) -> list[bytes]:
        return [b" end"]

    def failed(self, error: Exception) -> list[bytes]:
        return [b" failed"]


def piece(text: str) -> TextPiece:
    return TextPiece(text, (OutToken(1, None, (), False),))


def final() -> Final:
    return Final(FinishReason.STOP, Usage(1, 1, 0), cast(Any, None))


class Stream:
    """An answer that is being streamed. `turn` lets what was put go out."""

    def __init__(self, turns: Turns | None = None) -> None:
        self.turns = turns or Turns()
        self.source = ResponseStream("r", lambda: None)
        self.reader = Reader()
        self.answers = Answers("r", [SubmittedRequest(cast(Any, None), cast(Any, None), self.source)], 1)
        self.task: asyncio.Task[None]

    async def begin(self, first: str) -> None:
        self.source.put(piece(first))
        response = SseResponse(self.answers, cast(AnswerFormat, Texts()), await self.answers.next(), self.turns)
        scope = {"type": "http", SCOPE_KEY: self.reader}
        self.task = asyncio.create_task(response(scope, cast(Any, None), _send))
        await self.turn()

    async def turn(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)


async def _send(message: Any) -> None:
    """Head and end of the answer go another way."""


async def test_what_comes_at_once_is_one_write() -> None:
    stream = Stream()
    await stream.begin("a")
    stream.source.put(piece("b"))
    stream.source.put(piece("c"))
    await stream.turn()
    stream.source.put(piece("d"))
    stream.source.finish(final())
    await stream.task
    assert stream.reader.writes == [b"begin a", b"bc", b"d end"]


async def test_a_last_write_that_fails_ends_its_own_stream_and_no_other() -> None:
    turns = Turns()
    broken, whole = Stream(turns), Stream(turns)
    await broken.begin("a")
    await whole.begin("a")

    def fail(data: bytes) -> None:
        raise OSError("the connection is gone")

    broken.reader.write_chunk = fail  # type: ignore[method-assign]
    broken.source.fail(WorkerLost("gone"))
    whole.source.put(piece("b"))
    await whole.turn()
    assert whole.reader.writes[-1] == b"b"
    with pytest.raises(OSError, match="the connection is gone"):
        await broken.task
    whole.task.cancel()


async def test_a_busy_router_writes_less_often_until_it_is_no_longer_busy() -> None:
    now_s, busy_s = 0.0, 0.0
    stream = Stream(Turns(lambda: now_s, lambda: busy_s))
    await stream.begin("a")
    now_s = busy_s = LOOK_S  # not idle for a moment
    stream.source.put(piece("b"))
    await stream.turn()
    stream.source.put(piece("c"))
    await stream.turn()
    stream.source.put(piece("d"))
    await stream.turn()
    assert stream.reader.writes == [b"begin a", b"b"]
    await asyncio.sleep(2 * REST_S)
    assert stream.reader.writes == [b"begin a", b"b", b"cd"]
    now_s = 2 * LOOK_S  # idle all the time
    for text in "ef":
        stream.source.put(piece(text))
        await stream.turn()
    assert stream.reader.writes[3:] == [b"e", b"f"]
    stream.source.finish(final())
    await stream.task


async def test_nothing_is_written_while_the_client_does_not_read_and_nothing_is_lost() -> None:
    stream = Stream()
    await stream.begin("a")
    stream.reader.write_paused = True
    for text in "bcd":
        stream.source.put(piece(text))
        await stream.turn()
    assert stream.reader.writes == [b"begin a"]
    stream.reader.resume()
    await stream.turn()
    assert stream.reader.writes == [b"begin a", b"bcd"]
    stream.source.finish(final())
    await stream.task


async def test_an_answer_that_fails_says_so_after_what_came_before() -> None:
    stream = Stream()
    await stream.begin("a")
    stream.source.put(piece("b"))
    stream.source.fail(WorkerLost("gone"))
    await stream.task
    assert b"".join(stream.reader.writes) == b"begin ab failed"


async def test_a_fault_of_ours_ends_the_request_that_has_it() -> None:
    stream = Stream()
    await stream.begin("a")
    stream.source.put(cast(TextPiece, "no piece"))
    await asyncio.wait([stream.task])
    assert isinstance(stream.task.exception(), AttributeError)


def test_an_event_around_a_text_is_the_event_with_the_text() -> None:
    def make(text: str) -> bytes:
        return json.dumps({"model": "\x00", "text": text, "n": 1}, ensure_ascii=False).encode()

    events = TextEvents(make)
    for text in ("", "a", '"quoted" \\ \n', "\x00", "日本 é", "\u2028"):
        assert json.loads(events.of(text)) == json.loads(make(text))


def test_chat_events_of_several_choices_name_their_choice() -> None:
    answers = cast(Any, type("A", (), {}))()
    answers.request_id, answers.submitted = "r", [None, None]
    answers.model = cast(Any, type("M", (), {"name": "m\x00", "tokenizer": None}))()
    form = ChatFormat(answers, include_usage=True, logprobs=False)
    sent = form.events([Arrival(1, [piece('a"b')], None), Arrival(0, [piece("c")], None)])
    events = [json.loads(each.removeprefix(b"data: ")) for each in sent]
    assert [(each["choices"][0]["index"], each["choices"][0]["delta"]) for each in events] == [
        (1, {"content": 'a"b'}),
        (0, {"content": "c"}),
    ]
    assert all(each["usage"] is None and each["model"] == "m\x00" for each in events)
