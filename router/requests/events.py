"""What happens to a request on its way: the only input of `router.requests.state_machine.RequestRun`.

`worker` is the worker that an event comes from. Tickets, reports and tokens pass through the core unread: production
gives it the Worker protocol's messages, the simulator its own objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from router.prefix_index.mirror import WorkerKey
from tandem.errors import TandemError
from tandem.request import FinishReason


class Token(Protocol):
    """One sampled token. The core reads its id; of an attempt's first token also what the worker had cached; and of a
    step's first token how many tokens were proposed for it, how many of them were right, and where they came from."""

    @property
    def token_id(self) -> int: ...

    @property
    def cached_tokens(self) -> int: ...

    @property
    def proposed_tokens(self) -> int: ...

    @property
    def accepted_tokens(self) -> int: ...

    @property
    def from_prediction(self) -> bool: ...


class PromptToken(Protocol):
    """One token of the prompt with its logprobs."""

    @property
    def token_id(self) -> int: ...


class _Event(msgspec.Struct, frozen=True, tag=True):
    pass


# ---- from the router itself


class Submitted(_Event, frozen=True):
    """The request was parsed and may be queued."""


class Queued(_Event, frozen=True):
    """Admission took it."""


class Started(_Event, frozen=True):
    """It goes to workers; `prefill` None: the decode worker prefills. `credited_tokens`: cached by the prefix index.
    `tokens_ahead`: prompt tokens that the worker that prefills has to compute first."""

    decode: WorkerKey
    prefill: WorkerKey | None
    credited_tokens: int = 0
    tokens_ahead: int = 0


class Rerouted(_Event, frozen=True):
    """Another decode worker takes the place of the one that refused; the prefill worker stays."""

    decode: WorkerKey


class MoveStarted(_Event, frozen=True):
    """A request that decodes is to go on at `target`."""

    target: WorkerKey


class Yielded(_Event, frozen=True):
    """It gives its place on the workers to others, unless it has its first token."""

    cause: TandemError


class Rejected(_Event, frozen=True):
    """The router refuses it, or ends it where it has begun."""

    error: TandemError


# ---- from the client


class Cancelled(_Event, frozen=True):
    """The client left."""


class Expired(_Event, frozen=True):
    """The client's deadline passed."""


class ReaderBehind(_Event, frozen=True):
    """The client leaves too much of the answer unread."""


# ---- from workers


class Reserved(_Event, frozen=True):
    """The decode worker has room; the `ticket` permits the prefill worker to fill it."""

    worker: WorkerKey
    ticket: object
    cached_tokens: int


class PromptScored(_Event, frozen=True):
    """Logprobs of prompt tokens, before the first token of the answer."""

    worker: WorkerKey
    tokens: Sequence[PromptToken]


class TokenSampled(_Event, frozen=True):
    """One token. `RequestRun.on_token` takes the same without this object."""

    worker: WorkerKey
    token: Token


class TokensSampled(_Event, frozen=True):
    """Several tokens of a request that decodes, without their text."""

    worker: WorkerKey
    token_ids: Sequence[int]


class HandoffReported(_Event, frozen=True):
    """A worker's report of its side of the handoff of `wire_id`. `age_s`: how long ago the zero of the report's stages
    was. `joined_after_s`: after that zero, when the request joined the decode batch; None: the report of a sender."""

    worker: WorkerKey
    wire_id: str
    moved_bytes: int
    moved_blocks: int
    age_s: float
    joined_after_s: float | None
    report: object


class HoldAnswered(_Event, frozen=True):
    """A decode worker answered a Hold; `held` False: the request goes on there."""

    worker: WorkerKey
    held: bool


class AttemptEnded(_Event, frozen=True):
    """A worker is done with the request: `error`, or `reason`, or neither from a worker that breaks the protocol."""

    worker: WorkerKey
    reason: FinishReason | None = None
    error: TandemError | None = None


class WorkerGone(_Event, frozen=True):
    """The link to a worker that has the request was lost."""

    worker: WorkerKey
    error: TandemError


class WorkerStalled(_Event, frozen=True):
    """A worker that has the request shows no progress: the request leaves it."""

    worker: WorkerKey
    error: TandemError


class SuspectHeard(_Event, frozen=True):
    """A worker that the request left because it stalled goes on: the request is not what stopped it."""

    worker: WorkerKey


class SuspectDied(_Event, frozen=True):
    """A worker that the request left because it stalled never went on, and its engine's process ended."""

    worker: WorkerKey


Event = (
    Submitted
    | Queued
    | Started
    | Rerouted
    | MoveStarted
    | Yielded
    | Rejected
    | Cancelled
    | Expired
    | ReaderBehind
    | Reserved
    | PromptScored
    | TokenSampled
    | TokensSampled
    | HandoffReported
    | HoldAnswered
    | AttemptEnded
    | WorkerGone
    | WorkerStalled
    | SuspectHeard
    | SuspectDied
)
