"""The interface between the player and a server, for every API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

OnTokens = Callable[[int], None]  # called with the number of tokens that just arrived


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """`prompt`: token ids or text. `priority`: a priority class; empty means the server's default."""

    prompt: Sequence[int] | str
    output_tokens: int
    priority: str = ""


@dataclass(frozen=True, slots=True)
class LoadResponse:
    """What the server reported at the end. None: not reported."""

    output_tokens: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    queue_s: float | None = None
    handed_off: bool | None = None
    kv_bytes_moved: int | None = None


class LoadClient(Protocol):
    """One client per run; `send` calls may overlap."""

    async def send(self, request: LoadRequest, on_tokens: OnTokens) -> LoadResponse:
        """Sends one request and reads its whole response. Raises TandemError: a refusal, or a lost connection."""
        ...

    async def close(self) -> None: ...
