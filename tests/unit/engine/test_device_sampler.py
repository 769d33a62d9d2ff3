"""Tokens drawn in tensors are those that the host draws."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import torch

from tandem.engine.device_sampler import ROWS, sample_on_device
from tandem.engine.output import best_of, launched
from tandem.engine.step import Draw, SequenceStep
from tandem.request import SamplingParams
from tandem.sampling.philox import words_of
from tandem.sampling.sampler import choose

VOCAB = 1003  # the last four tokens that share noise are three


def draw_of(params: SamplingParams, position: int) -> Draw:
    return Draw(position, params.seed, params.temperature, params.top_k or 0, params.top_p, params.min_p)


def test_every_kind_of_truncation_draws_what_the_host_draws() -> None:
    kinds = [
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=2**64 - 1 - number)
        for number, (temperature, top_k, top_p, min_p) in enumerate(
            product((0.3, 1.0, 2.0), (None, 1, 40, 5000), (1.0, 0.9, 0.05), (0.0, 0.1, 1.0))
        )
    ]
    assert len(kinds) > ROWS
    generator = torch.Generator().manual_seed(11)
    for position, spread in ((0, 1.0), (2**31 + 7, 4.0), (99, 12.0)):
        logits = torch.randn(len(kinds), VOCAB, generator=generator) * spread
        logits[::7, ::3] = -torch.inf
        logits[::5, :50] = logits[::5].amax(dim=1, keepdim=True)  # equals at the edges
        expected = [choose(row.numpy(), params, position).token_id for row, params in zip(logits, kinds, strict=True)]
        assert sample_on_device(logits, [draw_of(params, position) for params in kinds]).tolist() == expected


def test_whole_rows_are_drawn_without_sorting_them() -> None:
    params = [SamplingParams(temperature=1.3, seed=seed) for seed in range(200)]
    logits = torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(2))
    expected = [choose(row.numpy(), each, 5).token_id for row, each in zip(logits, params, strict=True)]
    assert sample_on_device(logits, [draw_of(each, 5) for each in params]).tolist() == expected
    assert len(set(expected)) > 100


def test_noise_does_not_hang_on_the_rows_beside() -> None:
    logits = torch.zeros(3, VOCAB)
    draws = [draw_of(SamplingParams(seed=9), position) for position in (4, 5, 4)]
    first, _, third = sample_on_device(logits, draws).tolist()
    assert first == third == int(words_of(9, 4, np.arange(VOCAB)).argmin())  # the smallest word is the largest noise


def test_a_step_draws_what_is_drawn_and_copies_what_the_host_wants() -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(4))
    logits[3, 8] = torch.nan  # of one that is drawn
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=6)
    steps = [
        SequenceStep([1], 4, [0], True, greedy=True),
        SequenceStep([1], 4, [0], True, draw=draw_of(sampled, 7)),
        SequenceStep([1, 2], 4, [0], False),
        SequenceStep([1], 4, [0], True),
        SequenceStep([1], 4, [0], True, draw=draw_of(sampled, 7)),
        SequenceStep([1], 4, [0], True, draw=draw_of(replace(sampled, seed=5), 8)),
    ]
    output = launched(steps, logits, best_of(logits), [], draws=True).wait()
    first = choose(logits[1].numpy(), sampled, 7).token_id
    last = choose(logits[4].numpy(), replace(sampled, seed=5), 8).token_id
    assert output.tokens == [int(logits[0].argmax()), first, int(logits[2].argmax()), None, last]
    assert [row is None for row in output.logits] == [True, True, False, True, True]
    on_host = launched(steps, logits, best_of(logits), []).wait()
    assert [row is None for row in on_host.logits] == [True, False, False, False, False]
