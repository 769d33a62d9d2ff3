"""What the player asks of a server, whatever it speaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Heard = Callable[[int], None]  # so many tokens have just come


@dataclass(frozen=True, slots=True)
class Ask:
    """`prompt` is token ids or a text. `priority` empty: the server's default class."""

    prompt: Sequence[int] | str
    output_tokens: int
    priority: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server said at the end. None: it does not say."""

    output_tokens: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    queue_s: float | None = None
    handed_off: bool | None = None
    kv_bytes_moved: int | None = None


class Client(Protocol):
    """One for a run; `send` may run many times at once."""

    async def send(self, ask: Ask, heard: Heard) -> Answer:
        """One request to its end. Raises TandemError: the server's refusal, or what became of the connection."""
        ...

    async def close(self) -> None: ...
