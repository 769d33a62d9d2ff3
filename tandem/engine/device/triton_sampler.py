"""Draws tokens in Triton without sorting: the same choice as `tandem/sampling/sampler.py`, from the same noise.

Ordered by value and then id, the tokens that truncation keeps are the first ones. So the winner among all tokens is
the answer if it is kept. If not, nothing from it on is kept, and the next winner is sought among the tokens ahead of
it, with the same noise. Whether a token is kept follows from number and mass of the tokens ahead of it. If a share p of
the mass is kept, 1 + ln(1 / p) winners are expected.

Where top-k ends is found by torch's `topk`.

One program draws in one chunk of a row, and the next launch combines the row's chunks. The last one has a program per
row, which goes on alone until the row is decided. All sums have one order, whatever other rows there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.device.sampler import ROWS
from tandem.engine.step import Draw

BLOCK: Final = 2048  # tokens of a chunk
WARPS: Final = 8
_MOST_CHUNKS: Final = 128  # a wider vocabulary has larger ones
_LEFT: Final = 0.1  # rows that the last kernel may be expected to draw in again, which takes it 0.1 ms
_MOST_ROUNDS: Final = 8
_KEPT_OF_EQUALS: Final = 0.95  # a usual share of the mass, of values equal to the last that top-k keeps


def draw_rows(draws: Sequence[Draw], columns: Tensor, logits: Tensor, block: int = BLOCK) -> Tensor:
    """`DrawRows` for GPUs. `block`: at least `block_of` the vocabulary."""
    rows, vocab = logits.shape
    chunks, rounds = triton.cdiv(vocab, block), _rounds(draws)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    found = torch.empty(
        (rounds + 1, rows, _FIELDS.value * _MOST_CHUNKS + _STATE.value), dtype=torch.float64, device=logits.device
    )
    given = (logits, _limits(draws, columns, logits), columns, columns.view(torch.float64), found)
    sizes = {"block": block, "most_chunks": _MOST_CHUNKS, "num_warps": WARPS}
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        _draw[(rows, chunks)](*given, vocab, **sizes)
        for number in range(1, rounds + 1):
            _draw_again[(rows, chunks)](*given, vocab, number, is_first=number == 1, **sizes)
        _finish[(rows,)](*given, tokens, vocab, chunks, rounds + 1, is_first=rounds == 0, **sizes)
    return tokens


def block_of(vocab: int) -> int:
    """Tokens of a chunk."""
    return max(BLOCK, 1 << (-(-vocab // _MOST_CHUNKS) - 1).bit_length())


def _rounds(draws: Sequence[Draw]) -> int:
    """How often to draw again by chunks. The number of a row's winners that are not kept is Poisson distributed, of
    mean ln(1 / p): it is at least n with a chance below meanⁿ / n!."""
    shares = [min(draw.top_p, _KEPT_OF_EQUALS if draw.top_k else 1.0) for draw in draws]
    truncated = [share for share in shares if share < 1.0]
    if not truncated:
        return int(any(draw.min_p > 0.0 for draw in draws))
    mean = -math.log(min(truncated))
    rounds, left = 1, len(truncated) * mean
    while left > _LEFT and rounds < _MOST_ROUNDS:
        rounds += 1
        left *= mean / rounds
    return rounds


def _limits(draws: Sequence[Draw], columns: Tensor, logits: Tensor) -> Tensor:
    """fp32 [rows]: the smallest value that top-k keeps; anything for rows without, which are the first."""
    first = next((row for row, draw in enumerate(draws) if draw.top_k), len(draws))
    if first == len(draws):
        return logits  # of the right type; nothing of it is read
    most = min(max(draw.top_k for draw in draws[first:]), logits.shape[1])
    limits = logits.new_empty(len(draws))
    wanted = columns[3].clamp(1, most).unsqueeze(1) - 1
    for begin in range(first, len(draws), ROWS):  # a large `most` needs a lot of memory
        part = slice(begin, begin + ROWS)
        torch.gather(logits[part].topk(most, dim=1).values, 1, wanted[part], out=limits[part].unsqueeze(1))
    return limits


# Rows of `found` per launch: fp64 [_FIELDS, most_chunks] of the chunks, then _STATE numbers of the row.
_NOISY = tl.constexpr(0)  # the winner's logit with noise, -inf: there is none
_ID = tl.constexpr(1)  # the winner
_MASS = tl.constexpr(2)  # ahead of the last winner; of the first launch: of values above top-k's smallest
_COUNT = tl.constexpr(3)  # of the same tokens
_TOP = tl.constexpr(4)  # only of the first launch: the largest scaled logit, to which the mass is relative
_FIELDS = tl.constexpr(5)
_STATE = tl.constexpr(4)  # largest scaled logit, mass of the row, winner, whether it is kept
# Rows of `columns`, of which integers are read by one pointer and floats by another.
_POSITION = tl.constexpr(0)
_SEED_LOW = tl.constexpr(1)
_SEED_HIGH = tl.constexpr(2)
_TOP_K = tl.constexpr(3)
_TEMPERATURE = tl.constexpr(4)
_HAS_NOISE = tl.constexpr(5)
_TOP_P = tl.constexpr(6)
_LOG_MIN_P = tl.constexpr(7)


@triton.jit(do_not_specialize=["vocab"])  # type: ignore[untyped-decorator]
def _draw(  # type: ignore[no-untyped-def]
    logits, limits, integers, floats, found, vocab, block: tl.constexpr, most_chunks: tl.constexpr
):  # fmt: skip
    """The first winner of each chunk, and the mass of the chunk."""
    row, chunk, rows = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(0)
    ids = chunk * block + tl.arange(0, block)
    values = tl.load(logits + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
    limit = _limit(limits, integers, row, rows)
    scaled = values.to(tl.float64) / tl.load(floats + _TEMPERATURE * rows + row)
    noise = _noise(chunk, integers, row, rows, block) * tl.load(floats + _HAS_NOISE * rows + row)
    noisy, winner = _winner(tl.where(values >= limit, scaled + noise, float("-inf")), ids, vocab)
    top = tl.max(scaled, 0)
    counted = values > limit
    weights = tl.zeros([block], tl.float64)
    if tl.load(floats + _TOP_P * rows + row) < 1.0:
        weights = tl.exp(scaled - tl.where(top > float("-inf"), top, 0.0))
    to = found + row * (_FIELDS * most_chunks + _STATE) + chunk
    tl.store(to + _NOISY * most_chunks, noisy)
    tl.store(to + _ID * most_chunks, winner.to(tl.float64))
    tl.store(to + _MASS * most_chunks, tl.sum(tl.where(counted, weights, 0.0), 0))
    tl.store(to + _COUNT * most_chunks, tl.sum(counted.to(tl.int32), 0).to(tl.float64))
    tl.store(to + _TOP * most_chunks, top)


@triton.jit(do_not_specialize=["vocab", "number"])  # type: ignore[untyped-decorator]
def _draw_again(  # type: ignore[no-untyped-def]
    logits, limits, integers, floats, found, vocab, number,
    is_first: tl.constexpr, block: tl.constexpr, most_chunks: tl.constexpr,
):  # fmt: skip
    """Launch `number`: the tokens ahead of the last winner, in rows in which it may not be kept."""
    row, chunk, rows = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(0)
    best, total, winner, is_kept = _standing(
        logits, limits, integers, floats, found, vocab, tl.num_programs(1), number, row, rows, is_first, most_chunks
    )
    to = found + (number * rows + row) * (_FIELDS * most_chunks + _STATE)
    if chunk == 0:
        state = to + _FIELDS * most_chunks
        tl.store(state, best)
        tl.store(state + 1, total)
        tl.store(state + 2, winner.to(tl.float64))
        tl.store(state + 3, is_kept.to(tl.float64))
    if not is_kept:
        noisy, following, mass, count = _ahead(logits, integers, floats, vocab, winner, best, chunk, row, rows, block)
        tl.store(to + _NOISY * most_chunks + chunk, noisy)
        tl.store(to + _ID * most_chunks + chunk, following.to(tl.float64))
        tl.store(to + _MASS * most_chunks + chunk, mass)
        tl.store(to + _COUNT * most_chunks + chunk, count)


@triton.jit(do_not_specialize=["vocab", "chunks", "number"])  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    logits, limits, integers, floats, found, tokens, vocab, chunks, number,
    is_first: tl.constexpr, block: tl.constexpr, most_chunks: tl.constexpr,
):  # fmt: skip
    """The token of each row, after as many more draws as it takes."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    best, total, winner, is_kept = _standing(
        logits, limits, integers, floats, found, vocab, chunks, number, row, rows, is_first, most_chunks
    )
    at = tl.arange(0, most_chunks)
    while not is_kept:
        noisy_of = tl.full([most_chunks], float("-inf"), tl.float64)
        following_of = tl.zeros([most_chunks], tl.float64)
        mass_of = tl.zeros([most_chunks], tl.float64)
        count_of = tl.zeros([most_chunks], tl.float64)
        for chunk in range(chunks):
            noisy, following, mass, count = _ahead(
                logits, integers, floats, vocab, winner, best, chunk, row, rows, block
            )
            noisy_of = tl.where(at == chunk, noisy, noisy_of)
            following_of = tl.where(at == chunk, following.to(tl.float64), following_of)
            mass_of = tl.where(at == chunk, mass, mass_of)
            count_of = tl.where(at == chunk, count, count_of)
        winner, is_kept = _after(
            logits, integers, floats, vocab, winner, best, total, noisy_of, following_of, mass_of, count_of, row, rows
        )
    tl.store(tokens + row, tl.minimum(winner, vocab - 1))  # of a row with NaN any


@triton.jit  # type: ignore[untyped-decorator]
def _standing(  # type: ignore[no-untyped-def]
    logits, limits, integers, floats, found, vocab, chunks, number, row, rows,
    is_first: tl.constexpr, most_chunks: tl.constexpr,
):  # fmt: skip
    """What the launch before `number`, which may be the first, found of a row: the largest scaled logit, the mass
    relative to it of which top-p is a part, the winner, and whether it is certainly kept."""
    at = tl.arange(0, most_chunks)
    there = at < chunks
    before = found + ((number - 1) * rows + row) * (_FIELDS * most_chunks + _STATE)
    noisy = tl.load(before + _NOISY * most_chunks + at, mask=there, other=float("-inf"))
    ids = tl.load(before + _ID * most_chunks + at, mask=there, other=0.0)
    mass = tl.load(before + _MASS * most_chunks + at, mask=there, other=0.0)
    count = tl.load(before + _COUNT * most_chunks + at, mask=there, other=0.0)
    if is_first:
        tops = tl.load(before + _TOP * most_chunks + at, mask=there, other=float("-inf"))
        best = tl.max(tops, 0)
        origin = tl.where(best > float("-inf"), best, 0.0)
        # Top-k keeps all above its limit, and of those equal to the limit what is missing. Without top-k that is -inf.
        limit = _limit(limits, integers, row, rows).to(tl.float64) / tl.load(floats + _TEMPERATURE * rows + row)
        missing = tl.load(integers + _TOP_K * rows + row).to(tl.float64) - tl.sum(count, 0)
        total = tl.sum(mass * tl.exp(tops - origin), 0) + missing * tl.exp(limit - origin)
        _, winner_id = _winner(noisy, ids, vocab)
        winner = winner_id.to(tl.int64)
        is_kept = _is_free(logits, integers, floats, vocab, winner, best, row, rows)
    else:
        state = before + _FIELDS * most_chunks
        best, total = tl.load(state), tl.load(state + 1)
        winner = tl.load(state + 2).to(tl.int64)
        is_kept = tl.load(state + 3) > 0.0
        if not is_kept:
            winner, is_kept = _after(
                logits, integers, floats, vocab, winner, best, total, noisy, ids, mass, count, row, rows
            )
    return best, total, winner, is_kept


@triton.jit
def _after(  # type: ignore[no-untyped-def]
    logits, integers, floats, vocab, winner, best, total, noisy, ids, mass, count, row, rows
):  # fmt: skip
    """The winner and whether it is certainly kept, from what its chunks have ahead of it: the next one if it is not.
    The first token of the order is always kept."""
    top_p = tl.load(floats + _TOP_P * rows + row)
    top_k = tl.load(integers + _TOP_K * rows + row)
    bound = best + tl.load(floats + _LOG_MIN_P * rows + row)
    most, following = _winner(noisy, ids, vocab)
    is_lost = (top_p < 1.0) & (tl.sum(mass, 0) >= top_p * total)
    is_lost = is_lost | ((top_k > 0) & (tl.sum(count, 0) >= top_k.to(tl.float64)))
    is_lost = is_lost | (_scaled(logits, floats, vocab, winner, row, rows) < bound)
    is_lost = is_lost & (most > float("-inf"))
    winner = tl.where(is_lost, following.to(tl.int64), winner)
    is_free = _is_free(logits, integers, floats, vocab, winner, best, row, rows)
    return winner, is_free | (is_lost == 0)


@triton.jit  # type: ignore[untyped-decorator]
def _ahead(  # type: ignore[no-untyped-def]
    logits, integers, floats, vocab, winner, best, chunk, row, rows, block: tl.constexpr
):  # fmt: skip
    """Of a chunk's tokens ahead of a winner: the next one (its logit with noise, its id), their mass and number."""
    value = _value(logits, vocab, winner, row)
    ids = chunk * block + tl.arange(0, block)
    values = tl.load(logits + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
    is_ahead = (values > value) | ((values == value) & (ids < winner))
    scaled = values.to(tl.float64) / tl.load(floats + _TEMPERATURE * rows + row)
    mass = tl.sum(tl.where(is_ahead, tl.exp(scaled - best), 0.0), 0)
    count = tl.sum(is_ahead.to(tl.int32), 0).to(tl.float64)
    is_likely = scaled >= best + tl.load(floats + _LOG_MIN_P * rows + row)
    noise = _noise(chunk, integers, row, rows, block)
    noisy, following = _winner(tl.where(is_ahead & is_likely, scaled + noise, float("-inf")), ids, vocab)
    return noisy, following, mass, count


@triton.jit
def _is_free(logits, integers, floats, vocab, winner, best, row, rows):  # type: ignore[no-untyped-def]
    """Whether a winner is kept whatever is ahead of it."""
    whole = tl.load(floats + _TOP_P * rows + row) >= 1.0
    unlimited = tl.load(integers + _TOP_K * rows + row) == 0
    bound = best + tl.load(floats + _LOG_MIN_P * rows + row)
    return whole & unlimited & (_scaled(logits, floats, vocab, winner, row, rows) >= bound)


@triton.jit
def _value(logits, vocab, winner, row):  # type: ignore[no-untyped-def]
    return tl.load(logits + row * vocab + winner, mask=winner < vocab, other=float("-inf"))


@triton.jit
def _scaled(logits, floats, vocab, winner, row, rows):  # type: ignore[no-untyped-def]
    return _value(logits, vocab, winner, row).to(tl.float64) / tl.load(floats + _TEMPERATURE * rows + row)


@triton.jit
def _limit(limits, integers, row, rows):  # type: ignore[no-untyped-def]
    return tl.load(limits + row, mask=tl.load(integers + _TOP_K * rows + row) > 0, other=float("-inf"))


@triton.jit
def _winner(noisy, ids, vocab):  # type: ignore[no-untyped-def]
    """The largest value and its id, of equal ones the lowest. Of NaN alone: `vocab`."""
    most = tl.max(noisy, 0)
    return most, tl.min(tl.where(noisy == most, ids, vocab), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _noise(chunk, integers, row, rows, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp64 [block], as `philox.gumbel`: 1 - exceedance has 33 bits, so that its logarithm is as exact as log1p."""
    position = tl.load(integers + _POSITION * rows + row).to(tl.uint32)
    seed = (tl.load(integers + _SEED_HIGH * rows + row) << 32) | tl.load(integers + _SEED_LOW * rows + row)
    groups = chunk * (block // 4) + tl.arange(0, block // 4)
    words0, words1, words2, words3 = tl.philox(seed, groups, position, 0, 0)
    words = tl.interleave(tl.interleave(words0, words2), tl.interleave(words1, words3))
    uniform = ((~words).to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2⁻³²
    return -tl.log(-tl.log(uniform))
