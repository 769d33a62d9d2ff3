"""Samples tokens on the logits' device: the same choice as `tandem/sampling/sampler.py`, from the same noise.

Copying the logits to the host would take longer than a step, and so would sorting them. On GPUs Triton's kernels decide
all rows (`triton_sampler.py`). Here is torch's way, to which they are compared at start: rows that top-k or top-p
truncates are decided among their largest logits, if these certainly include all that is kept. The few other rows are
sorted when the host waits for the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.device.copies import to_device
from tandem.engine.device.penalties import Numbers, penalised, penalty_arrays
from tandem.engine.step import Draw
from tandem.sampling import philox
from tandem.sampling.sampler import COLDEST

ROWS: Final = 64  # per batch, which bounds the memory
CANDIDATES: Final = 1024  # largest logits of a row that are looked at, beside those that top-k keeps
# Only in tokens on a device:
NOT_FINITE: Final = -1
UNDECIDED: Final = -2  # the candidates may not include all that is kept
_MASK: Final = 0xFFFFFFFF
_INTEGERS: Final = 4  # leading rows of `_columns`
_WHOLE, _NUCLEUS, _LIMITED = range(3)


class DrawRows(Protocol):
    def __call__(self, draws: Sequence[Draw], columns: Tensor, logits: Tensor) -> Tensor:
        """The tokens of rows, int64 [rows]. Those that top-k limits are the last. columns int64 [8, rows], of
        `_columns`; logits fp32 [rows, vocab_size], dense. Of a row with NaN: any token."""
        ...


def to_device_together(arrays: Sequence[Numbers], device: torch.device) -> list[Tensor]:
    """Copies arrays of eight-byte numbers in one transfer, on a GPU asynchronously."""
    flat = to_device(np.concatenate([array.ravel().view(np.int64) for array in arrays]), device)
    parts = zip(arrays, torch.split(flat, [array.size for array in arrays]), strict=True)
    return [
        (part.view(torch.float64) if array.dtype == np.float64 else part).view(array.shape) for array, part in parts
    ]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Draws of some rows. `columns`: int64 [8, rows], of `_columns`. logits fp32 [rows, vocab_size]"""

    draws: Sequence[Draw]
    columns: Tensor
    logits: Tensor

    def part(self, begin: int, end: int) -> _Rows:
        return _Rows(self.draws[begin:end], self.columns[:, begin:end], self.logits[begin:end])

    def batches(self) -> Iterator[_Rows]:
        return (self.part(begin, begin + ROWS) for begin in range(0, len(self.draws), ROWS))

    def integers(self) -> tuple[Tensor, ...]:
        """Position, low and high half of the seed, top-k. [rows, 1] each"""
        return self.columns[:_INTEGERS].unsqueeze(2).unbind()

    def floats(self) -> tuple[Tensor, ...]:
        """Temperature, whether there is noise, top-p, logarithm of min-p. fp64 [rows, 1] each"""
        return self.columns[_INTEGERS:].view(torch.float64).unsqueeze(2).unbind()


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """Of the rows that want them: `logits` fp64 [rows, vocab_size] and `normalisers` [rows, 1]; of the tokens [rows];
    and of the most likely tokens with their ids [rows, count], best first, of equal ones the lowest id first."""

    logits: Tensor
    normalisers: Tensor
    of_tokens: Tensor
    top_ids: Tensor
    top: Tensor

    def of_token(self, row: int, token: int) -> float:
        return float(self.logits[row, token] - self.normalisers[row, 0])


@dataclass(slots=True)
class Sampled:
    """`tokens` int64 [samples], some NOT_FINITE or UNDECIDED. Keeps the logits that it takes to decide the latter."""

    tokens: Tensor
    logprobs: DeviceLogprobs | None = None
    _truncated: list[_Rows] = field(default_factory=list)
    _place: dict[int, tuple[int, int]] = field(default_factory=dict)  # of a sample in `_truncated`

    def decide(self, sample: int) -> int:
        """The token of an undecided sample. Waits for the device."""
        part, row = self._place[sample]
        return int(_among(self._truncated[part].part(row, row + 1), None))


def sample_on_device(
    logits: Tensor,
    best: Tensor,
    draws: Mapping[int, Draw],
    last: Tensor,
    allowed: Mapping[int, NDArray[np.bool_]] | None = None,
    draw_rows: DrawRows | None = None,
) -> Sampled:
    """Draws some samples, of which there is at least one.

    Args:
        logits: fp32 [samples, vocab_size], of the model.
        best: int64 [samples], the tokens of samples that are not drawn. NOT_FINITE stays.
        last: int64 [samples], the token before each, for penalties.
        allowed: [vocab_size] each: the tokens among which these samples are drawn; without one: all.
        draw_rows: decides all samples. None: torch, which leaves some undecided.
    """
    effective = {sample: _effective(draw, logits.shape[1]) for sample, draw in draws.items()}
    order = sorted(draws, key=lambda sample: _kind(effective[sample]))
    ordered = [effective[sample] for sample in order]
    changed = {row: draw.penalties for row, draw in enumerate(ordered) if draw.penalties is not None}
    scored = [sample for sample, draw in draws.items() if draw.logprobs is not None]
    columns, samples, scored_samples, changed_rows, *changes = to_device_together(
        [_columns(ordered), _indices(order), _indices(scored), _indices(changed), *penalty_arrays(changed.values())],
        logits.device,
    )
    values = logits[samples]
    if changed:
        before = last[samples[changed_rows]]
        values.index_copy_(0, changed_rows, penalised(values[changed_rows], before, changes))
    if masked := [row for row, sample in enumerate(order) if allowed is not None and sample in allowed]:
        assert allowed is not None
        rows_allowed = _to_device_packed([allowed[order[row]] for row in masked], logits.device)
        masked_rows = to_device(_indices(masked), logits.device)
        values.index_copy_(0, masked_rows, values[masked_rows].masked_fill(~rows_allowed, -torch.inf))
    sampled = Sampled(best)
    if draw_rows is not None:
        drawn = draw_rows(ordered, columns, values)
    else:
        drawn = _drawn_by_torch(_Rows(ordered, columns, values), order, sampled)
    sampled.tokens = best.index_copy(0, samples, drawn).where(best != NOT_FINITE, NOT_FINITE)
    if scored:
        most = max(draws[sample].logprobs or 0 for sample in scored)
        sampled.logprobs = _logprobs(logits[scored_samples], sampled.tokens[scored_samples], most)
    return sampled


def _drawn_by_torch(rows: _Rows, order: Sequence[int], sampled: Sampled) -> Tensor:
    """Tokens of rows in an order by `_kind`, some UNDECIDED, for which `sampled` keeps the logits."""
    whole = sum(_kind(draw) == _WHOLE for draw in rows.draws)
    drawn = [_among_all(part) for part in rows.part(0, whole).batches()]
    for part in rows.part(whole, len(order)).batches():
        begin = sum(len(each) for each in drawn)
        places = {sample: (len(sampled._truncated), row) for row, sample in enumerate(order[begin : begin + ROWS])}
        sampled._place |= places
        sampled._truncated.append(part)
        drawn.append(_among(part, _candidates(part)))
    return torch.cat(drawn)


def _to_device_packed(rows: Sequence[NDArray[np.bool_]], device: torch.device) -> Tensor:
    """bool [rows, n]; eight times fewer bytes cross."""
    packed = to_device(np.packbits(np.stack(rows), axis=1, bitorder="little"), device)
    bits = packed.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=device) & 1
    return bits.flatten(1)[:, : len(rows[0])].bool()


def _indices(numbers: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(numbers, dtype=np.int64)


def _logprobs(logits: Tensor, tokens: Tensor, count: int) -> DeviceLogprobs:
    wide = logits.double()
    normalisers = wide.logsumexp(dim=1, keepdim=True)
    top_ids = _best_ids(logits, min(count, logits.shape[1]))
    return DeviceLogprobs(
        wide,
        normalisers,
        (wide.gather(1, tokens.clamp_min(0).unsqueeze(1)) - normalisers).squeeze(1),
        top_ids,
        wide.gather(1, top_ids) - normalisers,
    )


def _best_ids(logits: Tensor, count: int) -> Tensor:
    """By unique keys, because `topk` keeps any of equal values: the bits of a float in its order, then the lowest
    id."""
    bits = (logits + 0.0).view(torch.int32).long()  # -0.0 becomes 0.0
    in_order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return _MASK - ((in_order << 32) + (_MASK - ids)).topk(count, dim=1).values.bitwise_and(_MASK)


def _effective(draw: Draw, vocab: int) -> Draw:
    """Without truncation that changes nothing."""
    if draw.temperature < COLDEST and (draw.top_k or draw.top_p < 1.0 or draw.min_p > 0.0):
        return msgspec.structs.replace(draw, top_k=0, top_p=1.0, min_p=0.0)
    return msgspec.structs.replace(draw, top_k=0) if draw.top_k >= vocab else draw


def _kind(draw: Draw) -> int:
    """Order of rows, so that those of a kind are together."""
    return _LIMITED if draw.top_k else _NUCLEUS if draw.top_p < 1.0 else _WHOLE


def _columns(draws: Sequence[Draw]) -> NDArray[np.int64]:
    cold = [draw.temperature < COLDEST for draw in draws]
    integers = [
        [draw.position for draw in draws],
        [draw.seed & _MASK for draw in draws],
        [draw.seed >> 32 & _MASK for draw in draws],
        [draw.top_k for draw in draws],
    ]
    with np.errstate(divide="ignore"):
        floats = [
            [1.0 if is_cold else draw.temperature for draw, is_cold in zip(draws, cold, strict=True)],
            [0.0 if is_cold else 1.0 for is_cold in cold],
            [draw.top_p for draw in draws],
            np.log([draw.min_p for draw in draws]),
        ]
    return np.concatenate([np.array(integers, dtype=np.int64), np.array(floats, dtype=np.float64).view(np.int64)])


def _among_all(rows: _Rows) -> Tensor:
    """The tokens of rows that neither top-k nor top-p truncates."""
    temperature, has_noise, _, log_min_p = rows.floats()
    vocab = rows.logits.shape[1]
    scaled = rows.logits.double() / temperature
    groups = torch.arange(-(-vocab // philox.WORDS), device=scaled.device).expand(len(rows.draws), -1)
    words = torch.stack(_philox(groups, rows), dim=-1).flatten(1)[:, :vocab]
    noise = _gumbel(words)
    if any(draw.temperature < COLDEST for draw in rows.draws):
        noise *= has_noise
    noisy = noise.add_(scaled)
    if any(draw.min_p > 0.0 for draw in rows.draws):
        noisy = noisy.masked_fill(scaled < scaled.amax(dim=1, keepdim=True) + log_min_p, -torch.inf)
    return noisy.argmax(dim=1)


def _candidates(rows: _Rows) -> int | None:
    """How many of a row's largest logits are looked at; None: all."""
    wanted = CANDIDATES + max(draw.top_k for draw in rows.draws)
    return wanted if wanted < rows.logits.shape[1] else None


def _among(rows: _Rows, count: int | None) -> Tensor:
    """The tokens of truncated rows, UNDECIDED unless the `count` largest logits certainly include all that is kept.
    `count` None: sorts whole rows, and decides all."""
    temperature, _, top_p, log_min_p = rows.floats()
    *_, top_k = rows.integers()
    values, ids = _largest(rows.logits, count)
    scaled = values.double() / temperature
    best = scaled[:, :1]
    weights = (scaled - best).exp()
    kept = (torch.arange(scaled.shape[1], device=scaled.device) < top_k) | (top_k == 0)
    weights *= kept
    mass = weights.cumsum(dim=1)
    total = mass[:, -1:]
    if count is not None and not all(draw.top_k for draw in rows.draws):
        all_mass = (rows.logits.double() / temperature - best).exp().sum(dim=1, keepdim=True)
        total = total.where(top_k > 0, all_mass)
    kept &= (mass - weights < top_p * total) | (top_p >= 1.0)
    kept &= scaled >= best + log_min_p
    kept &= values > -torch.inf
    groups = ids // philox.WORDS
    words = torch.stack(_philox(groups, rows), dim=-1).gather(2, (ids % philox.WORDS).unsqueeze(2)).squeeze(2)
    noisy = (scaled + _gumbel(words)).masked_fill(~kept, -torch.inf)
    winning = ids.masked_fill(noisy < noisy.amax(dim=1, keepdim=True), rows.logits.shape[1])
    tokens = winning.amin(dim=1)
    if count is None:
        return tokens
    # The last kept value occurs among the candidates only, because it is larger than the smallest of them.
    least = values.masked_fill(~kept, torch.inf).amin(dim=1)
    return tokens.where(least > values[:, -1], UNDECIDED)


def _largest(logits: Tensor, count: int | None) -> tuple[Tensor, Tensor]:
    """The largest values of each row and their ids, best first. Of equal values the lowest id is first; of those equal
    to the last one, any may be missing."""
    if count is None:
        values, ids = logits.sort(dim=1, descending=True, stable=True)
        return values, ids
    ids, _ = logits.topk(count, dim=1, sorted=False).indices.sort(dim=1)
    values, order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _philox(groups: Tensor, rows: _Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four noise words of each group of tokens, as in `philox.words_of`. groups int64 [rows, n]; words the same."""
    position, k0, k1, _ = rows.integers()
    x0, x1 = groups, position
    x2, x3 = torch.zeros_like(x1), torch.zeros_like(x1)
    for _ in range(philox.ROUNDS):
        product0, product1 = x0 * philox.M0, x2 * philox.M1  # 32 by 32 bits; the sign bit is the highest of 64
        x0, x1, x2, x3 = (
            (product1 >> 32 & _MASK) ^ x1 ^ k0,
            product1 & _MASK,
            (product0 >> 32 & _MASK) ^ x3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = k0 + philox.W0 & _MASK, k1 + philox.W1 & _MASK
    return x0, x1, x2, x3


def _gumbel(words: Tensor) -> Tensor:
    return -(-(-((words.double() + 0.5) * 2.0**-32)).log1p()).log()
