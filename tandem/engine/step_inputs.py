"""What a step's input says of one request: its tokens and blocks, and how its next token is drawn."""

from __future__ import annotations

import numpy as np

from tandem.engine.step import BranchStep, DraftStep, Draw, Penalties, SequenceStep
from tandem.kvcache.layout import blocks_for
from tandem.sampling.sampler import COLDEST, needs_only_argmax
from tandem.scheduler.plan import Chunk
from tandem.scheduler.sequence import Sequence
from tandem.speculation.proposers import Draft


def sequence_step(chunk: Chunk, block_tokens: int, samples_on_device: bool) -> SequenceStep:
    end = chunk.start + chunk.count
    reach = end + chunk.proposes
    sequence = chunk.sequence
    top = sequence.sampling.prompt_logprobs
    greedy = needs_only_argmax(sequence.sampling)
    samples = chunk.chain_samples
    drawn = samples if samples_on_device and not greedy else 0
    first = sequence.scored_tokens  # after a preemption, earlier tokens are recomputed but were already scored
    scored = [] if top is None else sequence.tokens[first : min(end + 1, sequence.prompt_tokens)]
    return SequenceStep(
        token_ids=[*sequence.tokens[chunk.start : end], *chunk.proposed],
        start=chunk.start,
        blocks=sequence.blocks[: blocks_for(reach, block_tokens)],
        samples=samples,
        scored=scored,
        scored_from=max(0, first - 1 - chunk.start),
        top=top or 0,
        greedy=greedy,
        draws=[next_draw(sequence, ahead) for ahead in range(drawn)],
        masked=drawn > 0 and sequence.grammar is not None,
        draft=None if chunk.draft is None else _draft_step(sequence, chunk.draft, block_tokens),
        embeds=samples > 0 and sequence.sampling.embeds,
    )


def _draft_step(sequence: Sequence, draft: Draft, block_tokens: int) -> DraftStep:
    """Tokens are drafted with the noise of their positions, so that they agree with those chosen if the logits do."""
    is_cold = sequence.sampling.temperature < COLDEST
    first, written = divmod(len(sequence.tokens) - 1, block_tokens)
    return DraftStep(
        count=draft.count,
        begin=draft.begin,
        missing=sequence.tokens[draft.begin : draft.end],
        sample=draft.sample,
        draws=[] if is_cold else [next_draw(sequence, ahead, penalised=False) for ahead in range(draft.count)],
        beside=draft.beside,
        branches=[
            BranchStep(
                each,
                [*sequence.blocks[:first], *each.blocks],
                (sequence.blocks[first], each.blocks[0]) if written else None,
            )
            for each in draft.branches
        ],
    )


def next_draw(sequence: Sequence, ahead: int = 0, *, penalised: bool = True) -> Draw:
    """`ahead`: proposed tokens before it, which no request with penalties has on a device."""
    params = sequence.sampling
    return Draw(
        position=len(sequence.tokens) + ahead,
        seed=params.seed,
        temperature=params.temperature,
        top_k=params.top_k or 0,
        top_p=params.top_p,
        min_p=params.min_p,
        penalties=_penalties(sequence) if penalised and params.changes_logits else None,
        logprobs=params.logprobs,
    )


def _penalties(sequence: Sequence) -> Penalties:
    """In a step ahead, the last token is not known."""
    params, adds_last = sequence.sampling, sequence.generated > 0
    history = sequence.history(len(sequence.tokens) - adds_last)
    answer, counts = history.answer()
    forbidden = params.stop_token_ids if counts.sum() + adds_last < params.min_tokens else frozenset()
    biases = [(token, bias) for token, bias in params.logit_bias if token not in forbidden]
    biased = np.array([*biases, *((token, -np.inf) for token in sorted(forbidden))], dtype=np.float64).reshape(-1, 2)
    return Penalties(
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        adds_last=adds_last,
        prompt=history.prompt.astype(np.int32).tobytes() if params.repetition_penalty != 1.0 else b"",
        answer=answer.astype(np.int32).tobytes(),
        counts=counts.astype(np.int32).tobytes(),
        biased=biased[:, 0].astype(np.int32).tobytes(),
        biases=biased[:, 1].astype(np.float32).tobytes(),
    )
