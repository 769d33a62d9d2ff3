"""`tandem chat`: a conversation with a running cluster, or one answer to a question from a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from rich.console import Console

from cluster.cli.admin_client import find_routed, refuse_cluster_beside
from cluster.cli.router_client import chat_request, check_api_key, edge_channel, generate
from cluster.interruptible import INTERRUPTED
from tandem.errors import ConfigError, TandemError
from tandem.v1 import inference_pb2

DEFAULT_MAX_TOKENS = 1024
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}
_HINT = "Ctrl-C ends an answer. /clear forgets the conversation. /bye or Ctrl-D ends it."


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Settings of every request. `temperature` None: the model's own sampling. `max_tokens` None: the command ends an
    answer after DEFAULT_MAX_TOKENS, for a request may not name more than the context has. `raw`: sends each text as a
    plain prompt, without a chat template. `images`: go with the first question."""

    model: str
    temperature: float | None
    max_tokens: int | None
    raw: bool = False
    images: tuple[Path, ...] = ()

    def question(self, text: str, *, is_first: bool) -> inference_pb2.ChatMessage:
        """Raises ConfigError for an image that cannot be read."""
        if not (self.images and is_first):
            return inference_pb2.ChatMessage(role="user", content=text)
        files = [inference_pb2.ContentPart(image=_file(path)) for path in self.images]
        return inference_pb2.ChatMessage(role="user", parts=[*files, inference_pb2.ContentPart(text=text)])

    def request(self, messages: list[inference_pb2.ChatMessage]) -> inference_pb2.GenerateRequest:
        request = chat_request(messages, model=self.model, temperature=self.temperature, max_tokens=self.max_tokens)
        if self.raw:
            request.prompt = messages[-1].content  # replaces the chat
        return request


def run_chat(
    question: str | None,
    options: ChatOptions,
    address: str | None,
    cluster: str | None,
    ca: Path | None = None,
    api_key: str | None = None,
) -> int:
    if options.raw and options.images:
        raise ConfigError("--image: expected no --raw beside it: images need a chat template", field="--image")
    check_api_key(api_key)
    refuse_cluster_beside("--address", address, cluster)
    given = str(ca) if ca is not None else None
    if address is None:
        found = find_routed(cluster)
        address, given = found.grpc, given or found.edge_ca
    at_terminal = question is None and sys.stdin.isatty()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C raises KeyboardInterrupt from here on
    with asyncio.Runner() as runner:
        channel = runner.run(_open(address, given))
        chat = Conversation(runner, channel, options, api_key)
        try:
            if question is not None:
                chat.ask(question)
            elif at_terminal:
                _talk(chat)
            else:
                for line in sys.stdin:
                    if line.strip():
                        chat.ask(line.rstrip("\n"))
        except KeyboardInterrupt:
            return 0 if at_terminal else INTERRUPTED
        finally:
            runner.run(channel.close())
    return 0


class Conversation:
    """Questions and answers so far. `ask` prints an answer as it comes."""

    def __init__(
        self, runner: asyncio.Runner, channel: grpc.aio.Channel, options: ChatOptions, api_key: str | None
    ) -> None:
        self._runner = runner
        self._channel = channel
        self._options = options
        self._api_key = api_key
        self._messages: list[inference_pb2.ChatMessage] = []
        self._notes = Console(stderr=True, highlight=False)

    def ask(self, text: str) -> None:
        """Raises the router's error; KeyboardInterrupt if Ctrl-C ended the answer, of which the part that came stays in
        the conversation."""
        question = self._options.question(text, is_first=not self._messages)
        answer: list[str] = []
        try:
            self._runner.run(self._print_answer([*self._messages, question], answer))
        finally:
            if answer:
                said = inference_pb2.ChatMessage(role="assistant", content="".join(answer))
                self._messages += [question, said]

    def forget(self) -> None:
        self._messages.clear()

    def note(self, text: str, style: str = "dim") -> None:
        self._notes.print(text, style=style, markup=False)

    async def _print_answer(self, messages: list[inference_pb2.ChatMessage], answer: list[str]) -> None:
        """Appends the texts of the answer to `answer`."""
        tokens, is_at_limit = 0, False
        events = generate(self._channel, self._options.request(messages), self._api_key)
        try:
            async for event in events:
                if event.chunk.reasoning and sys.stdout.isatty():
                    print(f"\x1b[2m{_shown(event.chunk.reasoning)}\x1b[22m", end="", flush=True)
                if event.chunk.text:
                    answer.append(event.chunk.text)
                    print(_shown(event.chunk.text), end="", flush=True)
                tokens += len(event.chunk.token_ids)
                is_over = self._options.max_tokens is None and tokens >= DEFAULT_MAX_TOKENS
                is_at_limit = is_over or event.finished.reason == inference_pb2.FINISH_REASON_LENGTH
                if is_over:
                    break
        finally:
            await events.aclose()
            print()
        if is_at_limit:
            self.note(f"The answer ended after {tokens} tokens; --max-tokens allows more, up to the model's context.")


def _talk(chat: Conversation) -> None:
    """Reads questions from the terminal until its end, /bye, or Ctrl-C instead of a question."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, PLC0415  gives `input` line editing and history
    chat.note(_HINT)
    while True:
        try:
            text = input("you> ").strip()
        except EOFError:
            print()
            return
        match text:
            case "":
                continue
            case "/bye":
                return
            case "/clear":
                chat.forget()
                continue
        try:
            chat.ask(text)
        except KeyboardInterrupt:
            chat.note("The answer was ended.")
        except TandemError as error:
            chat.note(f"error: {error.message}", style="red")


def _shown(text: str) -> str:
    """Without what would steer a terminal."""
    return text.translate(_CONTROLS) if sys.stdout.isatty() else text


async def _open(address: str, ca: str | None) -> grpc.aio.Channel:
    """On the event loop, as gRPC asks."""
    return edge_channel(address, ca)


def _file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--image: {path}: expected a file, got: {error.strerror}", field="--image") from error
