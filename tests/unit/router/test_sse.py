"""Events of a streamed answer: those that arrive together are one write; a client that does not read gets none."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Executor
from typing import Any, cast

import pytest

from router.edge import write_pauses
from router.edge.limits.http import SCOPE_KEY
from router.edge.openai.answer_format import AnswerFormat, ChatFormat, TextEventTemplate
from router.edge.openai.request_schema import UsageEvents
from router.edge.sse import SseResponse, WriteBatcher
from router.edge.write_pauses import FEW_TOKENS_PER_S, LOAD_INTERVAL_S, PAUSE_S, WritePauses
from router.requests.answers import AnswerReader, Answers, Arrival, SubmittedRequest
from router.requests.output import Final, OutToken, ResponseStream, TextPiece, Usage
from router.testing.stub_worker import until
from tandem.errors import RequestCancelled, WorkerLost
from tandem.request import FinishReason

LONG_PAUSE_S = 0.3  # what a test does at its start happens before its end, on a slow machine too
MANY = int(FEW_TOKENS_PER_S * LOAD_INTERVAL_S)  # tokens


class Reader:
    """A client's connection that keeps its writes and can stop reading."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.write_paused = False
        self._resumed = asyncio.Event()

    def when_lost(self, call: Any) -> None:
        """This connection is never lost."""

    async def drained(self) -> None:
        await self._resumed.wait()

    def resume(self) -> None:
        self.write_paused = False
        self._resumed.set()

    def write_chunk(self, data: bytes) -> None:
        self.writes.append(data)


class Texts:
    """A format that is the texts themselves."""

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
    """A streamed answer. `flush` waits until what was put has been written."""

    def __init__(self, batcher: WriteBatcher | None = None, executor: Executor | None = None) -> None:
        self.batcher = batcher or WriteBatcher()
        self.executor = executor or cast(Executor, None)  # for large writes only
        self.source = ResponseStream("r", lambda: None)
        self.reader = Reader()
        self.answers = Answers("r", [SubmittedRequest(cast(Any, None), cast(Any, None), self.source)], 1)
        self.task: asyncio.Task[None]

    async def begin(self, first: str) -> None:
        self.source.put(piece(first))
        form = cast(AnswerFormat, Texts())
        response = SseResponse(self.answers, form, await self.answers.next(), self.batcher, self.executor)
        scope = {"type": "http", SCOPE_KEY: self.reader}
        self.task = asyncio.create_task(response(scope, cast(Any, None), _send))
        await self.flush()

    async def flush(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)


async def _send(message: Any) -> None:
    """Drops the head and the end of the answer."""


async def test_pieces_that_arrive_together_are_one_write() -> None:
    stream = Stream()
    await stream.begin("a")
    stream.source.put(piece("b"))
    stream.source.put(piece("c"))
    await stream.flush()
    stream.source.put(piece("d"))
    stream.source.finish(final())
    await stream.task
    assert stream.reader.writes == [b"begin a", b"bc", b"d end"]


async def test_a_last_write_that_fails_ends_its_own_stream_and_no_other() -> None:
    batcher = WriteBatcher()
    broken, whole = Stream(batcher), Stream(batcher)
    await broken.begin("a")
    await whole.begin("a")

    def fail(data: bytes) -> None:
        raise OSError("the connection is gone")

    broken.reader.write_chunk = fail  # type: ignore[method-assign]
    broken.source.fail(WorkerLost("gone"))
    whole.source.put(piece("b"))
    await whole.flush()
    assert whole.reader.writes[-1] == b"b"
    with pytest.raises(OSError, match="the connection is gone"):
        await broken.task
    whole.task.cancel()


async def test_a_client_that_is_cut_because_it_reads_too_slowly_is_told_when_it_reads_on() -> None:
    stream = Stream()
    await stream.begin("a")
    stream.reader.write_paused = True
    stream.source.put(piece("b"))
    stream.source.fail(RequestCancelled("the client left too much of the answer unread"))
    await stream.flush()
    assert stream.reader.writes == [b"begin a"]
    stream.reader.resume()
    await stream.task
    assert stream.reader.writes == [b"begin a", b"b failed"]


def test_pauses_grow_while_the_router_is_busy_and_shrink_when_it_has_caught_up() -> None:
    now_s, busy_s, found = 0.0, 0.0, []
    pauses = WritePauses(lambda: now_s, lambda: busy_s)
    for share in (0.7, 0.9, 0.9, 0.98, 0.98, 0.98, 0.9, 0.9, 0.9):
        now_s, busy_s = now_s + LOAD_INTERVAL_S, busy_s + share * LOAD_INTERVAL_S
        pauses.measure(MANY)
        found.append(round(pauses.pause_s / PAUSE_S))
    assert found == [0, 1, 1, 2, 3, 3, 2, 1, 1]


def test_pauses_stay_while_the_router_would_be_busy_without_them_and_end_when_it_would_not() -> None:
    """They about halve its work: of half the tokens, it would have half of the work before."""
    now_s, busy_s, found = 0.0, 0.0, []
    pauses = WritePauses(lambda: now_s, lambda: busy_s)
    for share, tokens in ((0.9, 10), (0.45, 10), (0.4, 8), (0.6, 7), (0.6, 7), (0.9, 10), (0.2, 10)):
        now_s, busy_s = now_s + LOAD_INTERVAL_S, busy_s + share * LOAD_INTERVAL_S
        pauses.measure(tokens * MANY)
        found.append(round(pauses.pause_s / PAUSE_S))
    assert found == [1, 1, 1, 0, 0, 1, 0]


def test_few_tokens_are_never_paused() -> None:
    now_s = 0.0
    pauses = WritePauses(lambda: now_s, lambda: now_s)  # busy all the time
    found = []
    for tokens in (MANY, MANY, MANY // 2, MANY):
        now_s += LOAD_INTERVAL_S
        pauses.measure(tokens)
        found.append(round(pauses.pause_s / PAUSE_S))
    assert found == [1, 2, 0, 1]


async def test_all_streams_go_on_at_the_end_of_one_pause() -> None:
    pauses = WritePauses()
    pauses.pause_s = LONG_PAUSE_S
    first = asyncio.create_task(pauses.pause())
    await asyncio.sleep(0)
    given_up, later = asyncio.create_task(pauses.pause()), asyncio.create_task(pauses.pause())
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.wait((first, later), timeout=10, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0)
    assert (first.done(), later.done(), given_up.cancelled()) == (True, True, True)


async def test_a_busy_router_writes_less_often_until_it_is_no_longer_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAUSE_S", "MAX_PAUSE_S"):
        monkeypatch.setattr(write_pauses, name, LONG_PAUSE_S)
    monkeypatch.setattr(write_pauses, "FEW_TOKENS_PER_S", 0)
    now_s, busy_s = 0.0, 0.0
    stream = Stream(WriteBatcher(WritePauses(lambda: now_s, lambda: busy_s)))
    await stream.begin("a")
    now_s = busy_s = LOAD_INTERVAL_S  # busy all the time
    stream.source.put(piece("b"))
    await stream.flush()
    stream.source.put(piece("c"))
    await stream.flush()
    for text in "de":  # the last write before them was the first in which it was known to be busy
        stream.source.put(piece(text))
        await stream.flush()
    assert stream.reader.writes == [b"begin a", b"b", b"c"]
    await until(lambda: len(stream.reader.writes) > 3)
    assert stream.reader.writes == [b"begin a", b"b", b"c", b"de"]
    now_s += LOAD_INTERVAL_S + LONG_PAUSE_S  # idle all the time
    for text in "fg":
        stream.source.put(piece(text))
        await stream.flush()
    assert stream.reader.writes[4:] == [b"f", b"g"]
    stream.source.finish(final())
    await stream.task


async def test_the_end_of_an_answer_does_not_wait_for_a_pause() -> None:
    stream = Stream(paused())
    await stream.begin("a")
    stream.source.put(piece("b"))
    await stream.flush()
    assert stream.reader.writes == [b"begin a"]
    stream.source.finish(final())
    await stream.flush()
    assert stream.reader.writes == [b"begin a", b"b end"]
    await stream.task


async def test_a_stream_slower_than_the_pauses_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(paused())
    await stream.begin("a")
    loop = asyncio.get_running_loop()
    now_s = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now_s)
    for text in "bcd":
        now_s += 2 * LONG_PAUSE_S
        stream.source.put(piece(text))
        await stream.flush()
    assert stream.reader.writes == [b"begin a", b"b", b"c", b"d"]
    stream.source.finish(final())
    await stream.flush()
    await stream.task


def paused() -> WriteBatcher:
    """Of a router that stays busy."""
    pauses = WritePauses(lambda: 0.0, lambda: 0.0)
    pauses.pause_s = LONG_PAUSE_S
    return WriteBatcher(pauses)


async def test_a_client_that_does_not_read_gets_everything_once_it_reads_again() -> None:
    stream = Stream()
    await stream.begin("a")
    stream.reader.write_paused = True
    for text in "bcd":
        stream.source.put(piece(text))
        await stream.flush()
    assert stream.reader.writes == [b"begin a"]
    stream.reader.resume()
    await stream.flush()
    assert stream.reader.writes == [b"begin a", b"bcd"]
    stream.source.finish(final())
    await stream.task


async def test_an_error_is_written_after_the_pieces_before_it() -> None:
    stream = Stream()
    await stream.begin("a")
    stream.source.put(piece("b"))
    stream.source.fail(WorkerLost("gone"))
    await stream.task
    assert b"".join(stream.reader.writes) == b"begin ab failed"


async def test_a_bug_ends_only_its_own_request() -> None:
    stream = Stream()
    await stream.begin("a")
    stream.source.put(cast(TextPiece, "no piece"))
    await asyncio.wait([stream.task])
    assert isinstance(stream.task.exception(), AttributeError)


def test_an_event_around_a_text_is_the_event_with_the_text() -> None:
    def make(text: str) -> bytes:
        return json.dumps({"model": "\x00", "text": text, "n": 1}, ensure_ascii=False).encode()

    events = TextEventTemplate(make)
    for text in ("", "a", '"quoted" \\ \n', "\x00", "日本 é", "\u2028"):
        assert json.loads(events.fill(text)) == json.loads(make(text))


def test_chat_events_of_several_choices_name_their_choice() -> None:
    answers = cast(Any, type("A", (), {}))()
    answers.request_id, answers.submitted = "r", [None, None]
    answers.reader = lambda index: AnswerReader(None, f"r/{index}")
    answers.model = cast(Any, type("M", (), {"name": "m\x00", "tokenizer": None}))()
    form = ChatFormat(answers, usage=UsageEvents.LAST, logprobs=False)
    sent = form.events([Arrival(1, [piece('a"b')], None), Arrival(0, [piece("c")], None)])
    events = [json.loads(each.removeprefix(b"data: ")) for each in sent]
    assert [(each["choices"][0]["index"], each["choices"][0]["delta"]) for each in events] == [
        (1, {"content": 'a"b'}),
        (0, {"content": "c"}),
    ]
    assert all(each["usage"] is None and each["model"] == "m\x00" for each in events)
