"""What `RequestRun` wants done, in order: the only output of the core. A dispatcher carries the actions out.

Frames go to workers, output to the client, decisions to `router.requests.core`, facts to observers.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from router.prefix_index.mirror import WorkerKey
from router.requests.events import PromptToken, Token
from router.requests.output import Final, TextPiece, Usage
from tandem.errors import TandemError
from tandem.request import RequestState


class _Action(msgspec.Struct, frozen=True, tag=True):
    pass


# ---- frames


class Frame(_Action, frozen=True):
    """To `worker`, where the request's name is `wire_id`."""

    worker: WorkerKey
    wire_id: str


class Opening(Frame, frozen=True):
    """Gives the worker a part of the request; the worker's messages about `wire_id` reach the run from then on."""


class Generate(Opening, frozen=True):
    """Prefill locally and decode."""


class Reserve(Opening, frozen=True):
    """Room for the KV cache that `sender` will push: the prompt and the first `answer_tokens` tokens of the answer."""

    sender: WorkerKey
    answer_tokens: int


class Prefill(Opening, frozen=True):
    """Compute the prompt and push it where the ticket says."""

    ticket: object


class Join(Frame, frozen=True):
    """Decode on, from `first_token`, as soon as the KV cache is there and verified."""

    first_token: int


class Hold(Frame, frozen=True):
    """Send no further token until Push or Resume."""


class Push(Frame, frozen=True):
    """Push the KV cache of a held request where the ticket says."""

    ticket: object


class Resume(Frame, frozen=True):
    """Go on with a held request."""


class Leave(Frame, frozen=True):
    """The worker's messages no longer reach the run. `cancel`: the worker drops the request. `may_report`: a report of
    its handoff that is under way still reaches the run."""

    cancel: bool
    may_report: bool = False


# ---- output


class EmitPromptScores(_Action, frozen=True):
    """Logprobs of the whole prompt; they precede the first piece."""

    tokens: Sequence[PromptToken]


# ---- decisions that are not the run's


class ChooseDecode(_Action, frozen=True):
    """The decode worker refused: send `Rerouted`, or queue the request again."""

    refusal: TandemError


class Requeue(_Action, frozen=True):
    """The attempt is over and the request waits again. `refused`: no worker was at fault, there was no room."""

    cause: TandemError
    refused: bool


# ---- facts


class Fact(_Action, frozen=True):
    """For observers."""


class AttemptStarted(Fact, frozen=True):
    wire_id: str
    decode: WorkerKey
    prefill: WorkerKey | None


class PrefillSent(Fact, frozen=True):
    """The decode worker reserved room, and the prefill worker has its part."""


class FirstToken(Fact, frozen=True):
    """Of an attempt, by `worker`. `of_answer`: also the first of the answer, not of its continuation. `sent_s`: when
    the worker was given the prompt. `reserve_s`: what Reserve took before; None: prefilled locally."""

    worker: WorkerKey
    token: Token
    of_answer: bool
    sent_s: float
    reserve_s: float | None


class HandoffSeen(Fact, frozen=True):
    """A worker's report of its side, perhaps after the request's end. `anchor_s`: the zero of the report's stages on
    the router's clock. `exposed_s`: of a decode worker's report, from the first token to the join."""

    wire_id: str
    anchor_s: float
    moved_blocks: int
    exposed_s: float | None
    report: object


class Joined(Fact, frozen=True):
    """It decodes, after a handoff, since `at_s`."""

    at_s: float


class TokenGaps(Fact, frozen=True):
    """Seconds between tokens of the answer, up to the one of `last_token_s`. `is_paced`: one worker sampled all of them
    in its decode batch, one after another."""

    gaps_s: Sequence[float]
    last_token_s: float
    is_paced: bool


class HandoffFailed(Fact, frozen=True):
    """Why its handoff failed."""

    error: TandemError


class AttemptFailed(Fact, frozen=True):
    error: TandemError


class WorkersBlamed(Fact, frozen=True):
    """An attempt failed, and these workers may be at fault."""

    workers: Sequence[WorkerKey]


class Moved(Fact, frozen=True):
    """It decodes on another worker now, and no longer on `source`."""

    source: WorkerKey


class MoveFailed(Fact, frozen=True):
    """It goes on where it was, not at `target`."""

    target: WorkerKey


class End(Fact, frozen=True):
    """The request reached its end state. `final` exactly when it finished, else `error`. Nothing follows."""

    state: RequestState
    usage: Usage
    cached_prefill_tokens: int
    cached_decode_tokens: int
    final: Final | None = None
    error: TandemError | None = None


Action = Frame | TextPiece | EmitPromptScores | ChooseDecode | Requeue | Fact
