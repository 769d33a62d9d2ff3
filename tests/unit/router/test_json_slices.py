"""A large answer is made in slices, all but the first in a thread, and is the same JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import msgspec
import pytest

from router.edge import json_slices
from router.edge.json_slices import ListMaker, Slices, at_once, joined, json_pieces, kept, on_demand, one_by_one
from router.edge.openai.answer_schema import (
    AssistantMessage,
    CachedTokens,
    ChatChoice,
    ChatCompletion,
    ChatFinishReason,
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionUsage,
    ErrorBody,
    ErrorDetail,
    TopLogprob,
)
from tests.unit.router.conftest import MODEL, Cluster
from tests.unit.router.test_sse import Stream, final, piece

SLICE_BYTES = 2000
TOKENS = 100


class CountingExecutor(Executor):
    """Runs at once what the event loop submits, and counts it."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def submit(self, call: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.made.append(call(*args, **more))
        future.set_result(self.made[-1])
        return future


def completion(each: ListMaker, choices: ListMaker) -> ChatCompletion:
    def entry(number: int) -> ChatTokenLogprob:
        return ChatTokenLogprob(f"{number}é", -0.5, None, [TopLogprob('"', -number / 3, [number])])

    def choice(index: int) -> ChatChoice:
        logprobs = ChatLogprobs(each(entry, range(index * 40)))
        return ChatChoice(index, AssistantMessage(content="\x00text\u2028"), logprobs, ChatFinishReason.STOP)

    usage = CompletionUsage(1, 2, 3, CachedTokens(0))
    return ChatCompletion(id="c", created=1, model="m", choices=choices(choice, range(4)), usage=usage)


@pytest.mark.parametrize("choices", [at_once, one_by_one])
def test_pieces_are_the_json_of_the_whole(choices: ListMaker) -> None:
    expected = msgspec.json.encode(completion(at_once, at_once))
    pieces = list(json_pieces(completion(on_demand, choices)))
    assert b"".join(pieces) == expected
    assert max(map(len, pieces)) < len(expected) / 4
    assert b"".join(json_pieces(completion(at_once, at_once))) == expected


@pytest.mark.parametrize("counts", [(0, 0), (0, 3), (3, 0), (70, 1), (32, 64)])
def test_the_items_of_two_lists_are_one(counts: tuple[int, int]) -> None:
    first, then = (on_demand(str, range(count)) for count in counts)
    expected = [str(number) for count in counts for number in range(count)]
    for _ in range(2):
        assert json.loads(b"".join(json_pieces(joined(kept(first), then)))) == expected


def test_what_is_kept_is_made_once_unless_that_was_stopped_half_way() -> None:
    made: list[int] = []

    def make(number: int) -> int:
        made.append(number)
        return number

    listed = kept(on_demand(make, range(100)))
    pieces = json_pieces(listed)
    assert next(pieces) == b"["
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]  # a generator
    begun = len(made)
    assert 0 < begun < 100
    for _ in range(3):
        assert json.loads(b"".join(json_pieces(listed))) == [*range(100)]
    assert made[begun:] == [*range(100)]


def test_what_msgspec_cannot_encode_is_an_error() -> None:
    with pytest.raises(TypeError):
        list(json_pieces(ErrorBody(ErrorDetail("m", "t", None, object()))))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        msgspec.json.encode(completion(on_demand, at_once))


def test_a_slice_ends_with_the_piece_that_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_slices, "SLICE_BYTES", 4)
    made = Slices([b"ab", b"cd", b"ef"])
    assert [made.next(), made.is_done, made.next(), made.is_done] == [b"abcd", False, b"ef", True]
    assert Slices([]).next() == b""


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [70] * TOKENS, "echo": True, "logprobs": 3, "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 3}),
    ("/v1/responses", {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 3}),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=[path for path, _ in REQUESTS])
async def test_a_large_answer_is_the_same_in_slices(
    cluster: Cluster, path: str, body: dict[str, Any], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.says("x" * TOKENS)
    body = {"model": MODEL, **body, "stream": stream, "seed": 1}
    executor = cluster.app.service.executor = CountingExecutor()
    at_once = await cluster.http.post(path, json=body)
    assert not executor.made or len(at_once.content) > json_slices.SLICE_BYTES
    executor.made.clear()
    monkeypatch.setattr(json_slices, "SLICE_BYTES", SLICE_BYTES)
    sliced = await cluster.http.post(path, json=body)
    assert sliced.status_code == at_once.status_code == 200
    parts = [part for part in executor.made if isinstance(part, bytes)]
    if not (stream and "chat" in path):  # whose events are small and come one by one
        assert len(parts) >= 3
    assert max(map(len, parts), default=0) < SLICE_BYTES + 32 * 400, "a slice and one piece"
    if stream:
        assert events(sliced.text) == events(at_once.text)
    else:
        assert "content-length" not in sliced.headers
        assert without_names(sliced.json()) == without_names(at_once.json())
    await cluster.settled()


def events(text: str) -> list[Any]:
    """Chunks of one choice, in their order: the choices' order may differ."""
    found = [without_names(json.loads(line[6:])) for line in text.split("\n") if line.startswith("data: {")]
    return sorted(found, key=lambda each: [choice["index"] for choice in each.get("choices", [])])


NAMES = ("id", "item_id", "created", "created_at")


def without_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_names(each) for key, each in value.items() if key not in NAMES}
    return [without_names(each) for each in value] if isinstance(value, list) else value


class Held(Executor):
    """Makes nothing until `release`."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[..., Any]]] = []

    def submit(self, call: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, call))
        return future

    def release(self) -> None:
        future, call = self.waiting.pop(0)
        future.set_result(call())


async def test_what_arrives_during_a_slice_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_slices, "SLICE_BYTES", 4)
    executor = Held()
    stream = Stream(executor=executor)
    await stream.begin("abc")
    assert stream.reader.writes == [b"begin "]
    stream.source.put(piece("d"))
    stream.source.finish(final())
    await stream.flush()
    assert stream.reader.writes == [b"begin "], "the thread has not made the rest"
    executor.release()
    while not stream.task.done():
        if executor.waiting:
            executor.release()
        await stream.flush()
    await stream.task
    assert b"".join(stream.reader.writes) == b"begin abcd end"


async def test_a_slow_reader_is_sent_one_slice_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_slices, "SLICE_BYTES", 4)
    executor = Held()
    stream = Stream(executor=executor)
    for text in ("efgh", "ijkl"):
        stream.source.put(piece(text))
    await stream.begin("abcd")
    stream.reader.write_paused = True
    executor.release()
    await stream.flush()
    assert not executor.waiting, "nothing is made for a client that does not read"
    stream.reader.resume()
    await stream.flush()
    assert len(executor.waiting) == 1
    stream.task.cancel()
