"""What every rank is told about a step, in a form that crosses processes without pickle."""

from __future__ import annotations

import msgspec

from tandem.kvcache.host_tier import BlockCopies
from tandem.scheduler.plan import ExportRange


class Draw(msgspec.Struct, frozen=True, array_like=True):
    """How the token at `position` is drawn: SamplingParams that look at nothing but the logits. `top_k` 0: no limit."""

    position: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @property
    def truncates(self) -> bool:
        return bool(self.top_k) or self.top_p < 1.0 or self.min_p > 0.0


class SequenceStep(msgspec.Struct, frozen=True, array_like=True):
    """`token_ids` of one request, from position `start` on, with its block table up to the last of them.

    `scored`: prompt tokens whose logprobs are wanted, with the `top` likeliest; the first of them comes after
    `token_ids[scored_from]`. `greedy`: of what it samples, the likeliest token is all that is wanted;
    `draw`: one that is drawn so is.
    """

    token_ids: list[int]
    start: int
    blocks: list[int]
    samples: bool
    scored: list[int] = []
    scored_from: int = 0
    top: int = 0
    greedy: bool = False
    draw: Draw | None = None


class StepInput(msgspec.Struct, frozen=True, array_like=True):
    """Copies, then announcements, then one forward pass, each if there is any. Nothing and not `stop`: a sign of life
    from an idle leader. `ahead`: each sequence's token is the one that it was given in the step before, which had the
    same sequences and need not have ended; it is not known to the host."""

    sequences: list[SequenceStep]
    exports: list[ExportRange]
    stop: bool = False
    copies: BlockCopies | None = None
    ahead: bool = False


HEARTBEAT = StepInput([], [])
STOP = StepInput([], [], stop=True)

_decoder = msgspec.msgpack.Decoder(StepInput)


def encode_step(step: StepInput) -> bytes:
    return msgspec.msgpack.encode(step)


def decode_step(raw: bytes) -> StepInput:
    return _decoder.decode(raw)
