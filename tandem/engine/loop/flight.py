"""A step on its way: what was planned, what runs, and what comes of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tandem.engine.api import PromptScores
from tandem.engine.output import Launched, StepOutput
from tandem.engine.step import StepInput
from tandem.engine.step_work import StepWork
from tandem.errors import TandemError
from tandem.grammar.masks import Following
from tandem.scheduler.plan import Chunk, StepPlan
from tandem.scheduler.sequence import Sequence


@dataclass(slots=True)
class Flight:
    """A step in progress. `discarded` sequences are in it, but their output is not used. `failed` ones end with it."""

    plan: StepPlan
    step: StepInput
    launched: Launched | None
    discarded: set[Sequence] = field(default_factory=set)
    failed: dict[Sequence, TandemError] = field(default_factory=dict)
    has_advanced: bool = False  # the scheduler has counted its tokens
    following: dict[Sequence, Following] = field(default_factory=dict)  # what grammars allow
    began_s: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0  # that the model took
    draft_seconds: float = 0.0  # of these, to draft


def first_samples(plan: StepPlan) -> Iterator[tuple[Chunk, int]]:
    """Each chunk that samples, and the number of its first sample in the step's output."""
    sample = 0
    for chunk in plan.chunks:
        if chunk.samples:
            yield chunk, sample
            sample += chunk.sampled_tokens


def prompt_scores(flight: Flight, output: StepOutput) -> list[PromptScores]:
    both = zip(flight.plan.chunks, flight.step.sequences, strict=True)
    scored = [chunk.sequence for chunk, inputs in both if inputs.scored]
    scores: list[PromptScores] = []
    for sequence, tokens in zip(scored, output.scores, strict=True):
        scores.append(PromptScores(sequence.request_id, sequence.scored_tokens, tokens))
        sequence.scored_tokens += len(tokens)
    return scores


def work_of(plan: StepPlan, accepted: Mapping[Sequence, int]) -> StepWork:
    work = StepWork()
    for chunk in plan.chunks:
        decodes = chunk.start >= chunk.sequence.prompt_tokens
        work = work.with_chunk(
            chunk.start,
            chunk.computed_tokens,
            decodes=decodes,
            samples=chunk.sampled_tokens,
            proposed=chunk.proposed_tokens,
            accepted=accepted.get(chunk.sequence, 0),
        )
    return work
