"""What a model thinks of answers that it gave: hidden states of each of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tandem.engine.factory import Rank
from tandem.engine.kv_pool import KvPool
from tandem.engine.step import SequenceStep
from tandem.kvcache.layout import blocks_for
from tandem.training.own_answers import Answer

Report = Callable[[int], None]


def ignored(_: int) -> None:
    """Reports nothing."""


@dataclass(frozen=True, slots=True)
class States:
    """Of the tokens that chose one of an answer's: `hidden` [tokens, hidden] after the last layer's norm; `early` after
    an early layer, if asked for; `chosen` [tokens, ahead]: the token that it chose, and those that followed, -1 after
    the answer's end."""

    hidden: Tensor
    early: Tensor | None
    chosen: Tensor


@torch.inference_mode()
def states_of(
    rank: Rank, answers: Sequence[Answer], ahead: int, layer: int | None = None, report: Report = ignored
) -> States:
    """One answer after the other, so that memory is bounded. Calls `report` with how many are done."""
    pool = _pool(rank, answers)
    hidden, early, chosen = list[Tensor](), list[Tensor](), list[Tensor]()
    for answer in answers:
        rows = slice(answer.begin - 1, len(answer.tokens) - 1)
        hidden.append(rank.model.normed(_hidden(rank, pool, answer, None)[rows]))
        if layer is not None:
            early.append(_hidden(rank, pool, answer, layer)[rows].clone())
        chosen.append(_chosen(answer, ahead))
        report(len(chosen))
    return States(torch.cat(hidden), torch.cat(early) if early else None, torch.cat(chosen))


@torch.inference_mode()
def tapped(rank: Rank, answers: Sequence[Answer], taps: Sequence[int], report: Report = ignored) -> list[Tensor]:
    """Of each answer [tokens, taps · hidden] in bfloat16: what these layers get, prompt included. Calls `report` with
    how many answers are done."""
    pool, found = _pool(rank, answers), list[Tensor]()
    for answer in answers:
        entered: dict[int, Tensor] = {}
        _hidden(rank, pool, answer, max(taps) + 1, entered)
        found.append(torch.cat([entered[tap] for tap in taps], dim=1).bfloat16().cpu())
        report(len(found))
    return found


def _pool(rank: Rank, answers: Sequence[Answer]) -> KvPool:
    longest = max(len(answer.tokens) for answer in answers)
    layout = replace(rank.layout, num_blocks=max(2, blocks_for(longest, rank.layout.block_tokens)))
    return KvPool(layout, rank.pool.tensor.device)


def _hidden(
    rank: Rank, pool: KvPool, answer: Answer, layers: int | None, entered: dict[int, Tensor] | None = None
) -> Tensor:
    count = len(answer.tokens)
    blocks = [*range(blocks_for(count, pool.layout.block_tokens))]
    step = SequenceStep(list(answer.tokens), 0, blocks, samples=0)
    device, attend = pool.tensor.device, rank.runner.attention_over(pool, [step])
    tokens = torch.tensor(answer.tokens, dtype=torch.int64, device=device)
    return rank.model.hidden(
        tokens,
        torch.arange(count, device=device),
        attend,
        layers=layers,
        entered=None if entered is None else entered.__setitem__,
    )


def _chosen(answer: Answer, ahead: int) -> Tensor:
    tokens = np.array([*answer.tokens[answer.begin :], *[-1] * ahead], dtype=np.int64)
    return torch.from_numpy(np.lib.stride_tricks.sliding_window_view(tokens, ahead)[: answer.answered].copy())
