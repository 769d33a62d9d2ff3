"""A step as sent to every rank, in a form that crosses processes without pickle."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tandem.kvcache.host_tier import BlockCopies
from tandem.scheduler.plan import ExportRange
from tandem.speculation.proposers import Branch


class Penalties(msgspec.Struct, frozen=True, array_like=True):
    """Penalties and biases of a request, and the tokens that they apply to (tandem/sampling/penalties.py).

    `prompt`, `answer` and `biased` are token ids, `counts` the counts of `answer`: int32 arrays; `biases`: fp32.
    `adds_last`: the token before the sampled one also belongs to the output. `answer` does not count it, because only
    the device may know it.
    """

    repetition: float
    frequency: float
    presence: float
    adds_last: bool
    prompt: bytes
    answer: bytes
    counts: bytes
    biased: bytes
    biases: bytes


class Draw(msgspec.Struct, frozen=True, array_like=True):
    """How the device chooses the token at `position`. `temperature` 0: the most likely one. `top_k` 0: no limit.
    `logprobs`: as in SamplingParams."""

    position: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    penalties: Penalties | None = None
    logprobs: int | None = None


class BranchStep(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that are computed beside a request's chain, after its last token, which is computed for each again.
    `branch`: its tokens. `blocks`: the request's, but for those that these are written to. `copied`: two blocks, of
    which the first is copied to the second before."""

    branch: Branch
    blocks: list[int]
    copied: tuple[int, int] | None


class DraftStep(msgspec.Struct, frozen=True, array_like=True):
    """What the ranks draft for a request before they compute its `token_ids` and what they drafted after those.

    `count` tokens, each drawn by one of `draws`; none: the likeliest ones. The draft model first computes `missing`,
    which are the request's tokens from position `begin` on. `sample`: of the last step, the one that chose the last of
    `token_ids`. `beside`: how many more are drafted for each place, for `branches`.
    """

    count: int
    begin: int
    missing: list[int]
    sample: int
    draws: list[Draw]
    beside: int = 0
    branches: list[BranchStep] = []


class Drafted(NamedTuple):
    """For one request, often none. `beside`: by place, the likeliest ones after that of `tokens`."""

    tokens: tuple[int, ...] = ()
    beside: tuple[tuple[int, ...], ...] = ()


class SequenceStep(msgspec.Struct, frozen=True, array_like=True):
    """`token_ids` of one request from position `start` on, with its block table up to the last of them.

    `scored`: prompt tokens whose logprobs are requested, with the `top` most likely tokens; the first of them follows
    `token_ids[scored_from]`. `samples`: of how many last tokens the next one is chosen, 0 within a prompt.
    `greedy`: only the most likely tokens are needed. `draws`: the device chooses in these ways; `masked`: among tokens
    that the host names later. Neither: the host chooses, and needs the logits. `draft`: tokens that the ranks draft
    follow `token_ids`; `blocks`, `samples` and `draws` count them. `embeds`: the hidden state of its sample is wanted.
    """

    token_ids: list[int]
    start: int
    blocks: list[int]
    samples: int
    scored: list[int] = []
    scored_from: int = 0
    top: int = 0
    greedy: bool = False
    draws: list[Draw] = []
    masked: bool = False
    draft: DraftStep | None = None
    embeds: bool = False

    def with_drafted(self, drafted: Drafted) -> list[SequenceStep]:
        """With the drafted tokens, followed by its branches."""
        steps = [msgspec.structs.replace(self, token_ids=[*self.token_ids, *drafted.tokens], draft=None)]
        start = self.start + len(self.token_ids) - 1
        for each in self.draft.branches if self.draft else ():
            tokens = [self.token_ids[-1], *each.branch.tokens(*drafted)]
            steps.append(
                SequenceStep(
                    tokens, start, each.blocks, len(tokens), greedy=self.greedy, draws=self.draws[: len(tokens)]
                )
            )
        return steps


class StepInput(msgspec.Struct, frozen=True, array_like=True):
    """Copies, then exports, then one forward pass, each if present. An empty step without `stop` is a heartbeat of an
    idle leader.

    `ahead`: each sequence's token is the output of the previous step, which has the same sequences and may still be
    running. The host does not know it.
    """

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
