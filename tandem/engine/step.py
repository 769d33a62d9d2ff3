"""What every rank is told about a step, in a form that crosses processes without pickle."""

from __future__ import annotations

import msgspec

from tandem.kvcache.host_tier import BlockCopies
from tandem.scheduler.scheduler import ExportRange


class SequenceStep(msgspec.Struct, frozen=True, array_like=True):
    """`token_ids` of one request, from position `start` on, with its block table up to the last of them.

    `scored`: prompt tokens whose logprobs are wanted, with the `top` likeliest; the first of them comes after
    `token_ids[scored_from]`.
    """

    token_ids: list[int]
    start: int
    blocks: list[int]
    samples: bool
    scored: list[int] = []
    scored_from: int = 0
    top: int = 0


class StepInput(msgspec.Struct, frozen=True, array_like=True):
    """Copies, then announcements, then one forward pass, each if there is any. Nothing and not `stop`: a sign of life
    from an idle leader."""

    sequences: list[SequenceStep]
    exports: list[ExportRange]
    stop: bool = False
    copies: BlockCopies | None = None


HEARTBEAT = StepInput([], [])
STOP = StepInput([], [], stop=True)

_decoder = msgspec.msgpack.Decoder(StepInput)


def encode_step(step: StepInput) -> bytes:
    return msgspec.msgpack.encode(step)


def decode_step(raw: bytes) -> StepInput:
    return _decoder.decode(raw)
