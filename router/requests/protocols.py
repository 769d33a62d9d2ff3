"""What a run needs of others, as protocols: the request it serves, and what turns its tokens into text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from router.requests.output import TextPiece
from tandem.images import PromptImage
from tandem.kvcache.blockhash import BlockHash
from tandem.request import SamplingParams


class Request(Protocol):
    """What the core reads of a valid request. `prompt` is read only if its logprobs were asked for."""

    @property
    def request_id(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def adapter(self) -> str:
        """Its fingerprint; empty: the base model."""
        ...

    @property
    def adapter_name(self) -> str: ...
    @property
    def prompt(self) -> Sequence[int]: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def block_hashes(self) -> Sequence[BlockHash]: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def session(self) -> bytes | None: ...
    @property
    def images(self) -> Sequence[PromptImage]: ...


class Assembler(Protocol):
    """Tokens to pieces of text."""

    @property
    def stopped(self) -> bool:
        """A stop string is complete."""
        ...

    @property
    def stop_string(self) -> str | None:
        """This one."""
        ...

    def push(self, token: Any) -> TextPiece: ...

    def flush(self) -> TextPiece | None:
        """The text held back, at an end that is no stop string."""
        ...
