"""The items of a response: reasoning, messages and function calls, and the events that tell of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from router.edge.json_slices import ListMaker, at_once, on_demand
from router.edge.openai.answer_schema import ChatTokenLogprob
from router.edge.openai.responses_answer_schema import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    ContentPartEvent,
    CustomToolCallItem,
    FunctionCallItem,
    InputDeltaEvent,
    InputDoneEvent,
    OutputItem,
    OutputItemEvent,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ReasoningTextDeltaEvent,
    ReasoningTextDoneEvent,
    ResponseEvent,
    ResponseStatus,
    TextDeltaEvent,
    TextDoneEvent,
)
from router.model_formats.events import CallArguments, CallEnded, CallInput, CallStarted, Event, Reasoning, Text
from router.requests.output import OutToken

# Makes the logprobs of tokens; empty if the client asked for none.
Scored = Callable[[Sequence[OutToken], ListMaker], list[ChatTokenLogprob]]


@dataclass
class _Item:
    """`number`: its place in the output. `texts`: of its one part, or of a call's arguments or input."""

    number: int
    id: str
    texts: list[str] = field(default_factory=list)
    status: ResponseStatus = "in_progress"

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass
class _Message(_Item):
    tokens: list[OutToken] = field(default_factory=list)  # with logprobs


@dataclass
class _Reasoning(_Item):
    pass


@dataclass
class _Call(_Item):
    call_id: str = ""
    name: str = ""
    is_custom: bool = False


class OutputItems:
    """Collects the items of one answer. Each method gives the events that a stream sends; their sequence numbers are
    set later."""

    def __init__(self, request_id: str, call_id: Callable[[CallStarted], str], scored: Scored) -> None:
        self._request_id = request_id
        self._call_id = call_id
        self._scored = scored
        self._items: list[_Item] = []

    def open_message(self) -> Iterator[ResponseEvent]:
        yield from self._opened(_Message(len(self._items), f"msg_{self._request_id}{self._suffix()}"))

    def take(
        self, events: Sequence[Event], tokens: Sequence[OutToken] = (), listed: ListMaker = at_once
    ) -> Iterator[ResponseEvent]:
        """`tokens`: with logprobs; they go to the message that the events add to."""
        waiting = list(tokens)
        for event in events:
            match event:
                case Text():
                    yield from self._text(event.text, waiting, listed)
                    waiting = []
                case Reasoning():
                    yield from self._reasoning(event.text)
                case CallStarted():
                    yield from self._call(event)
                case CallArguments():
                    call = self._items[-1]
                    call.texts.append(event.text)
                    yield ArgumentsDeltaEvent(item_id=call.id, output_index=call.number, delta=event.text)
                case CallInput():
                    call = self._items[-1]
                    call.texts.append(event.text)
                    yield InputDeltaEvent(item_id=call.id, output_index=call.number, delta=event.text)
                case CallEnded():
                    yield from self._closed("completed", is_whole=True)
        if waiting and self._items and isinstance(self._items[-1], _Message):
            yield from self._text("", waiting, listed)

    def end(self, status: ResponseStatus) -> Iterator[ResponseEvent]:
        yield from self._closed(status)

    def structs(self, listed: ListMaker = at_once) -> list[OutputItem]:
        return [self._struct(item, listed) for item in self._items]

    def _text(self, text: str, tokens: Sequence[OutToken], listed: ListMaker) -> Iterator[ResponseEvent]:
        if not self._is_open(_Message):
            yield from self.open_message()
        message = self._items[-1]
        scored = [token for token in tokens if token.logprob is not None]
        if not text and not scored:
            return
        message.texts.append(text)
        if isinstance(message, _Message):
            message.tokens += scored
        logprobs = self._scored(scored, listed)
        yield TextDeltaEvent(item_id=message.id, output_index=message.number, delta=text, logprobs=logprobs)

    def _reasoning(self, text: str) -> Iterator[ResponseEvent]:
        if not self._is_open(_Reasoning):
            yield from self._opened(_Reasoning(len(self._items), f"rs_{self._request_id}{self._suffix()}"))
        item = self._items[-1]
        item.texts.append(text)
        yield ReasoningTextDeltaEvent(item_id=item.id, output_index=item.number, delta=text)

    def _call(self, event: CallStarted) -> Iterator[ResponseEvent]:
        item_id = f"{'ctc' if event.is_custom else 'fc'}_{self._request_id}{self._suffix()}"
        call_id = self._call_id(event)
        call = _Call(len(self._items), item_id, call_id=call_id, name=event.name, is_custom=event.is_custom)
        yield from self._opened(call)

    def _suffix(self) -> str:
        return f"_{len(self._items)}" if self._items else ""

    def _is_open(self, kind: type[_Item]) -> bool:
        return bool(self._items) and isinstance(self._items[-1], kind) and self._items[-1].status == "in_progress"

    def _opened(self, item: _Item) -> Iterator[ResponseEvent]:
        yield from self._closed("completed")
        self._items.append(item)
        added = self._struct(item, at_once)
        if isinstance(added, OutputMessage | ReasoningItem):
            added.content = []
        yield OutputItemEvent(type="response.output_item.added", output_index=item.number, item=added)
        if not isinstance(item, _Call):
            yield self._part_event("response.content_part.added", item)

    def _closed(self, status: ResponseStatus, *, is_whole: bool = False) -> Iterator[ResponseEvent]:
        """Closes the last item, if it is open. `is_whole`: a call is."""
        if not self._is_open(_Item):
            return
        item = self._items[-1]
        item.status = "incomplete" if isinstance(item, _Call) and not is_whole else status
        at, number = item.id, item.number
        match item:
            case _Call() if item.is_custom:
                yield InputDoneEvent(item_id=at, output_index=number, input=item.text)
            case _Call():
                yield ArgumentsDoneEvent(item_id=at, output_index=number, name=item.name, arguments=item.text)
            case _Reasoning():
                yield ReasoningTextDoneEvent(item_id=at, output_index=number, text=item.text)
                yield self._part_event("response.content_part.done", item)
            case _Message():
                logprobs = self._scored(item.tokens, on_demand)
                yield TextDoneEvent(item_id=at, output_index=number, text=item.text, logprobs=logprobs)
                yield self._part_event("response.content_part.done", item)
        done = self._struct(item, on_demand)
        yield OutputItemEvent(type="response.output_item.done", output_index=item.number, item=done)

    def _part_event(self, type: str, item: _Item) -> ResponseEvent:
        return ContentPartEvent(type=type, item_id=item.id, output_index=item.number, part=self._part(item, on_demand))  # type: ignore[arg-type]

    def _part(self, item: _Item, listed: ListMaker) -> OutputText | ReasoningText:
        if isinstance(item, _Message):
            return OutputText(text=item.text, logprobs=self._scored(item.tokens, listed))
        return ReasoningText(text=item.text)

    def _struct(self, item: _Item, listed: ListMaker) -> OutputItem:
        match item:
            case _Call() if item.is_custom:
                return CustomToolCallItem(
                    id=item.id, call_id=item.call_id, name=item.name, input=item.text, status=item.status
                )
            case _Call():
                return FunctionCallItem(
                    id=item.id, call_id=item.call_id, name=item.name, arguments=item.text, status=item.status
                )
            case _Message():
                part = OutputText(text=item.text, logprobs=self._scored(item.tokens, listed))
                return OutputMessage(id=item.id, status=item.status, content=[part])
            case _:
                return ReasoningItem(id=item.id, status=item.status, content=[ReasoningText(text=item.text)])
