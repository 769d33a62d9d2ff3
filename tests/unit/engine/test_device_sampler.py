"""Tokens drawn in tensors are those that the host draws."""

from __future__ import annotations

import random
from collections.abc import Sequence as Several
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.engine.device import copies as device_copies
from tandem.engine.device import sampler as device_sampler
from tandem.engine.device.sampler import CANDIDATES, ROWS, UNDECIDED, DrawRows, Sampled, sample_on_device
from tandem.engine.output import best_of, launched
from tandem.engine.step import Draw, SequenceStep
from tandem.engine.step_inputs import next_draw
from tandem.kvcache.blockhash import HashKey
from tandem.request import SamplingParams
from tandem.sampling.philox import words_of
from tandem.sampling.sampler import Choice, choose
from tandem.scheduler.sequence import Sequence

VOCAB = 1003  # the last four tokens that share noise are three


def draw_of(params: SamplingParams, position: int) -> Draw:
    return Draw(position, params.seed, params.temperature, params.top_k or 0, params.top_p, params.min_p)


def sample(logits: Tensor, draws: Several[Draw]) -> Sampled:
    best = best_of(logits)
    return sample_on_device(logits, best, dict(enumerate(draws)), torch.zeros_like(best))


def tokens_of(logits: Tensor, draws: Several[Draw]) -> list[int]:
    sampled = sample(logits, draws)
    tokens: list[int] = sampled.tokens.tolist()
    return [sampled.decide(row) if token == UNDECIDED else token for row, token in enumerate(tokens)]


def rows_of_all_kinds(count: int, vocab: int, seed: int) -> tuple[Tensor, list[SamplingParams]]:
    """Flat and peaked logits, equal ones, and some that are never drawn; and how to draw from each."""
    draw = random.Random(seed)
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed))
    for row in logits:
        row *= draw.choice((0.0, 0.01, 1.0, 4.0, 12.0))
        if draw.random() < 0.4:
            row.copy_((row * draw.choice((1.0, 8.0))).round() / 8.0)
        if draw.random() < 0.3:
            row[draw.randrange(3) :: draw.choice((2, 3, 50))] = -torch.inf
    params = [
        SamplingParams(
            temperature=draw.choice((0.0, 0.2, 0.8, 1.0, 2.5)),
            top_k=draw.choice((None, None, None, 1, 7, 50, vocab - 1, vocab, 2**31 - 1)),
            top_p=draw.choice((1.0, 1.0, 0.95, 0.9, 0.5, 0.02)),
            min_p=draw.choice((0.0, 0.0, 0.05, 0.6, 1.0)),
            seed=draw.choice((0, draw.randrange(2**64))),
        )
        for _ in range(count)
    ]
    return logits, params


def test_rows_of_all_kinds_draw_what_the_host_draws() -> None:
    logits, params = rows_of_all_kinds(200, VOCAB, 5)
    expected = [choose(row.numpy(), each, 9).token_id for row, each in zip(logits, params, strict=True)]
    assert tokens_of(logits, [draw_of(each, 9) for each in params]) == expected


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
        assert tokens_of(logits, [draw_of(params, position) for params in kinds]) == expected


def test_whole_rows_are_drawn_without_sorting_them() -> None:
    params = [SamplingParams(temperature=1.3, seed=seed) for seed in range(200)]
    logits = torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(2))
    expected = [choose(row.numpy(), each, 5).token_id for row, each in zip(logits, params, strict=True)]
    assert tokens_of(logits, [draw_of(each, 5) for each in params]) == expected
    assert len(set(expected)) > 100


def test_noise_does_not_hang_on_the_rows_beside() -> None:
    logits = torch.zeros(3, VOCAB)
    draws = [draw_of(SamplingParams(seed=9), position) for position in (4, 5, 4)]
    first, _, third = tokens_of(logits, draws)
    assert first == third == int(words_of(9, 4, np.arange(VOCAB)).argmin())  # the smallest word is the largest noise


def test_a_step_draws_what_is_drawn_and_copies_what_the_host_wants() -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(4))
    logits[3, 8] = torch.nan  # of one that is drawn
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=6)
    steps = [
        SequenceStep([1], 4, [0], 1, greedy=True),
        SequenceStep([1], 4, [0], 1, draws=[draw_of(sampled, 7)]),
        SequenceStep([1, 2], 4, [0], 0),
        SequenceStep([1], 4, [0], 1),
        SequenceStep([1], 4, [0], 1, draws=[draw_of(sampled, 7)]),
        SequenceStep([1], 4, [0], 1, draws=[draw_of(replace(sampled, seed=5), 8)]),
    ]
    best = best_of(logits)
    output = launched(steps, logits, best, best, []).wait()
    first = choose(logits[1].numpy(), sampled, 7).token_id
    last = choose(logits[4].numpy(), replace(sampled, seed=5), 8).token_id
    assert output.tokens == [int(logits[0].argmax()), first, int(logits[2].argmax()), None, last]
    assert [row is None for row in output.logits] == [True, True, False, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # bfloat16: many equal values
def test_a_wide_row_is_decided_among_its_largest_logits_or_in_whole(dtype: torch.dtype) -> None:
    kinds = [
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=7 + number)
        for number, (temperature, top_k, top_p, min_p) in enumerate(
            product((0.5, 1.0), (None, 3, CANDIDATES, 4000), (1.0, 0.97, 0.2), (0.0, 0.01))
        )
    ]
    generator = torch.Generator().manual_seed(3)
    decided = {}
    for spread in (0.0, 0.5, 8.0):
        logits = (torch.randn(len(kinds), 9001, generator=generator) * spread).to(dtype).float()
        draws = [draw_of(params, 5) for params in kinds]
        expected = [choose(row.numpy(), params, 5).token_id for row, params in zip(logits, kinds, strict=True)]
        assert tokens_of(logits, draws) == expected
        decided[spread] = sum(token != UNDECIDED for token in sample(logits, draws).tokens.tolist())
    assert decided[0.0] < decided[0.5] < decided[8.0]
    assert decided[8.0] == len(kinds)


def test_equal_values_at_the_edge_of_the_candidates_are_not_decided_by_chance() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, 4000:4010] = 1.0
    params = SamplingParams(temperature=0.1, top_k=20, seed=1)
    draw = draw_of(params, 3)
    assert sample(logits, [draw]).tokens.tolist() == [UNDECIDED]
    assert tokens_of(logits, [draw]) == [choose(logits[0].numpy(), params, 3).token_id]
    assert sample(logits, [replace_draw(draw, top_k=10)]).tokens.tolist() != [UNDECIDED]


def replace_draw(draw: Draw, **changes: Any) -> Draw:
    return Draw(**{name: getattr(draw, name) for name in Draw.__struct_fields__} | changes)


def random_params(draw: random.Random, number: int) -> SamplingParams:
    return SamplingParams(
        temperature=draw.choice((0.0, 0.7, 1.3)),
        top_p=draw.choice((1.0, 0.9)),
        top_k=draw.choice((None, 30)),
        seed=number,
        logprobs=draw.choice((None, 0, 3, 7)),
        presence_penalty=draw.choice((0.0, 0.3)),
        frequency_penalty=draw.choice((0.0, 0.7, -0.4)),
        repetition_penalty=draw.choice((1.0, 1.3, 0.8)),
        logit_bias=draw.choice(((), ((5, -100.0), (900, 2.5)))),
        stop_token_ids=frozenset(range(0, VOCAB, 2)) | {5},
        min_tokens=draw.choice((0, 1, 5, 14)),
    )


@pytest.mark.parametrize("seed", range(6))
def test_penalties_biases_and_logprobs_are_those_of_the_host(seed: int) -> None:
    check_requests(seed, None)


def check_requests(seed: int, draw_rows: DrawRows | None) -> None:
    """Of requests in their prompt and in their answer, of which some was generated elsewhere. The host knows the last
    token only after the launch."""
    draw = random.Random(seed)
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    logits[::3] = logits[::3].bfloat16().float()  # equal values
    logits[::4, ::5] = -0.0
    logits[1::4, ::5] = 0.0
    steps, lasts, expected = list[SequenceStep](), list[int](), list[Choice]()
    for number, row in enumerate(logits):
        params, generated = random_params(draw, number), draw.choice((0, 1, 9))
        tokens = [draw.randrange(VOCAB // draw.choice((1, 50))) for _ in range(12 + generated)]
        make = {"request_id": "r", "prompt_tokens": 12, "sampling": params, "hash_key": HashKey("m")}
        own = Sequence(tokens=tokens, block_tokens=16, arrival=0, answered_tokens=draw.choice((0, 4)), **make)  # type: ignore[arg-type]
        expected.append(choose(row.numpy(), params, len(tokens), own.history(len(tokens))))
        lasts.append(tokens[-1])
        ahead = replace(own, tokens=[*tokens[:-1], 0] if generated else tokens, _history=None, _history_tokens=0)
        steps.append(SequenceStep([1], 4, [0], 1, draws=[next_draw(ahead)]))
    output = launched(steps, logits, best_of(logits), torch.tensor(lasts), [], draw_rows=draw_rows).wait()
    assert output.tokens == [choice.token_id for choice in expected]
    for number, choice in enumerate(expected):
        found = output.logprobs.get(number)
        assert (found is None) == (choice.logprob is None)
        if found is not None:
            assert found.logprob == pytest.approx(choice.logprob, abs=1e-12)
            assert [each.token_id for each in found.top] == [each.token_id for each in choice.top]
            top = [each.logprob for each in choice.top]
            assert [each.logprob for each in found.top] == pytest.approx(top, abs=1e-12)


def test_the_logprob_of_a_token_that_was_decided_late_is_its_own() -> None:
    logits = torch.randn(1, 9001, generator=torch.Generator().manual_seed(8))
    params = SamplingParams(temperature=1.5, top_p=0.99, seed=4, logprobs=2)
    draw = replace_draw(draw_of(params, 6), logprobs=2)
    output = launched([SequenceStep([1], 4, [0], 1, draws=[draw])], logits, best_of(logits), best_of(logits), []).wait()
    expected = choose(logits[0].numpy(), params, 6)
    assert output.late == {0}
    assert output.tokens == [expected.token_id]
    assert output.logprobs[0].logprob == pytest.approx(expected.logprob, abs=1e-12)


def test_the_host_waits_for_nothing_while_it_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy to the device, and no operation whose result or shape the host must know."""
    copies = 0
    plain = device_copies.to_device

    def counted(*args: Any) -> Tensor:
        nonlocal copies
        copies += 1
        return plain(*args)

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique")
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(device_sampler, "to_device", counted)
    monkeypatch.setattr(torch, "tensor", None)  # it would copy from memory that is not pinned
    draw = random.Random(2)
    requests = [
        Sequence("r", [1, 2, 3], 2, replace(random_params(draw, n), temperature=0.8), HashKey("m"), 16, 0)
        for n in range(90)
    ]
    logits = torch.randn(90, 2000)
    best = best_of(logits)
    draws = {row: next_draw(each) for row, each in enumerate(requests)}
    with Watch():  # type: ignore[no-untyped-call]
        sample_on_device(logits, best, draws, best)
    assert copies == 1
