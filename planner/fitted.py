"""Cost models fitted to measurements: published tables, or the output of `tandem profile`.

    prefill(n, m) = a + b·n + c·(n² + 2·n·m)          n tokens after m tokens of context
    decode(B, s)  = a + b·s + c·B                     B requests with s tokens of context in all

Attention is the quadratic term; a chunk costs what it adds to it. Output of `tandem profile` is fitted piecewise:
between any two measured chunk sizes prefill has its own b, between any two batch sizes decode its own c, because 24
rows do not cost three times as much as 8.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from planner.acceptance import Acceptance
from planner.cost import CostModel, PrefillWork
from planner.shapes import LinkShape
from planner.shared_host import Contention, HostCores
from tandem.errors import ConfigError


class PrefillPoint(NamedTuple):
    """A measured prefill of `sequences` prompts, each of `tokens` tokens after `context` tokens."""

    tokens: int
    context: int
    seconds: float
    sequences: int = 1


class DecodePoint(NamedTuple):
    """A measured decode step."""

    batch: int
    context_tokens: int
    seconds: float


class MixedPoint(NamedTuple):
    """A measured step of a prompt of `tokens` tokens beside a batch that decodes."""

    tokens: int
    batch: int
    context_tokens: int
    seconds: float


class Reach(NamedTuple):
    """The most in a step: tokens of prompts, requests that decode, and tokens of one request's context."""

    prompt_tokens: int
    requests: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Plane:
    """a + b·x + c·y, at least 0."""

    a: float
    b: float
    c: float

    def at(self, x: float, y: float) -> float:
        return max(0.0, self.a + self.b * x + self.c * y)


@dataclass(frozen=True, slots=True)
class PiecewisePlane:
    """The first plane holds below the first breakpoint, the next ones from each breakpoint on."""

    planes: tuple[Plane, ...]
    breakpoints: tuple[float, ...] = ()

    def plane(self, at: float) -> Plane:
        return self.planes[bisect_right(self.breakpoints, at)]


@dataclass(frozen=True, slots=True)
class FittedCostModel:
    """`prefill` has breakpoints in tokens of a step, `decode` in requests. `beside`: what decoding adds to a step with
    prompts, over what it takes alone without the fixed cost of a step: less than 1 where rows share products. `reach`:
    what was measured; None: not known."""

    prefill: PiecewisePlane
    decode: PiecewisePlane
    link: LinkShape
    fit_error: float | None = None
    source: str = ""
    beside: float = 1.0
    reach: Reach | None = field(default=None, repr=False)  # calibrations are known by this text

    def beyond(self, asked: Reach) -> str | None:
        """A note if more is asked for than was measured."""
        names = ("prompt tokens in a step", "requests at a time", "tokens of a context")
        over = [
            f"{most:,} {name} (measured: {measured:,})"
            for name, most, measured in zip(names, asked, self.reach or asked, strict=True)
            if most > measured
        ]
        return f"the last slope continues beyond what was measured, up to {', '.join(over)}" if over else None

    def prefill_s(self, tokens: int, context: int) -> float:
        return self.step_s([PrefillWork(tokens, context)], 0, 0) if tokens else 0.0

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        return self.step_s((), batch, context_tokens) if batch else 0.0

    def step_s(self, prefills: Sequence[PrefillWork], batch: int, context_tokens: int) -> float:
        """The fixed cost of a step is counted once. No step is shorter than its prompts or its decoding alone."""
        prefill_s, decode_s, shared_s = self.parts_s(prefills, batch, context_tokens)
        if not prefills or not batch:
            return max(0.0, prefill_s + decode_s)
        return max(decode_s, prefill_s + self.beside * max(0.0, decode_s - shared_s))

    def parts_s(self, prefills: Sequence[PrefillWork], batch: int, context_tokens: int) -> tuple[float, float, float]:
        """Of the prompts alone, of decoding alone, and of what both contain."""
        tokens = sum(work.tokens for work in prefills)
        pairs = sum(work.tokens * (work.tokens + 2 * work.context) for work in prefills)
        prefill_s = self.prefill.plane(tokens).at(tokens, pairs) if prefills else 0.0
        decode_s = self.decode.plane(batch).at(context_tokens, batch) if batch else 0.0
        return prefill_s, decode_s, min(self.prefill.planes[0].at(0, 0), self.decode.planes[0].at(0, 0))

    def transfer_s(self, num_bytes: int) -> float:
        if num_bytes == 0:
            return 0.0
        return num_bytes / (self.link.efficiency * self.link.bytes_per_s) + self.link.latency_s


def fit(
    prefills: Sequence[PrefillPoint],
    decodes: Sequence[DecodePoint],
    link: LinkShape,
    source: str,
    *,
    piecewise: bool = False,
    mixed: Sequence[MixedPoint] = (),
) -> FittedCostModel:
    """Fits by least squares of relative errors. `piecewise`: with a breakpoint at every inner measured size. Without
    `mixed`, prompts and decoding add up.

    Raises ConfigError when there are too few points.
    """
    if len(prefills) < 3 or len(decodes) < 3:
        raise ConfigError(
            f"{source}: expected at least 3 prefill and 3 decode measurements, got {len(prefills)} and {len(decodes)}",
            field="--cost",
        )
    for kind, points in (("prefill", prefills), ("decode", decodes), ("mixed", mixed)):
        for point in points:
            if not 0 < point.seconds < np.inf:
                raise ConfigError(f"{source}: {kind}: expected seconds above 0, got {point.seconds}", field="--cost")
    tokens = [p.sequences * p.tokens for p in prefills]
    pairs = [p.sequences * p.tokens * (p.tokens + 2 * p.context) for p in prefills]
    batches, contexts = [d.batch for d in decodes], [d.context_tokens for d in decodes]
    prefill = _fit(tokens, pairs, [p.seconds for p in prefills], _inner_sizes(tokens) if piecewise else ())
    decode = _fit(batches, contexts, [d.seconds for d in decodes], _inner_sizes(batches) if piecewise else ())
    model = FittedCostModel(
        PiecewisePlane(tuple(Plane(base, slope, prefill.of_y) for base, slope in prefill.of_x), prefill.breakpoints),
        PiecewisePlane(tuple(Plane(base, decode.of_y, slope) for base, slope in decode.of_x), decode.breakpoints),
        link,
        fit_error=max(prefill.error, decode.error),
        source=source,
        reach=Reach(
            max(tokens),
            max(batches),
            max(*(p.tokens + p.context for p in prefills), *(d.context_tokens // max(1, d.batch) for d in decodes)),
        ),
    )
    return replace(model, beside=_beside(model, mixed)) if mixed else model


def _beside(model: FittedCostModel, mixed: Sequence[MixedPoint]) -> float:
    """By least squares of relative errors."""
    rows = []
    for tokens, batch, context_tokens, seconds in mixed:
        prefill_s, decode_s, shared_s = model.parts_s([PrefillWork(tokens, 0)], batch, context_tokens)
        rows.append(((seconds - prefill_s) / seconds, max(0.0, decode_s - shared_s) / seconds))
    found = np.array(rows)
    weight = float((found[:, 1] ** 2).sum())
    return max(0.0, float((found[:, 0] * found[:, 1]).sum()) / weight) if weight else 1.0


def _inner_sizes(measured: Sequence[float]) -> tuple[float, ...]:
    return tuple(sorted(set(measured))[1:-1])


class _Fit(NamedTuple):
    """base + slope·x between any two breakpoints, plus of_y·y. `error`: mean relative error."""

    of_x: list[tuple[float, float]]
    breakpoints: tuple[float, ...]
    of_y: float
    error: float


def _fit(x: Sequence[float], y: Sequence[float], seconds: Sequence[float], breakpoints: tuple[float, ...]) -> _Fit:
    """Fits coefficients of at least 0, because more work never costs less."""
    target = np.array(seconds)
    starts, ends = np.array([0.0, *breakpoints]), np.array([*breakpoints, np.inf])
    ramps = np.clip(np.array(x, dtype=np.float64)[:, None] - starts, 0.0, ends - starts)  # [points, pieces]
    columns = np.column_stack([np.ones(len(x)), np.array(y, dtype=np.float64), ramps])
    weighted = columns / target[:, None]
    scale = np.maximum(np.abs(weighted).max(axis=0), 1e-300)
    used = list(range(columns.shape[1]))
    found = np.zeros(columns.shape[1])
    while used:
        part = np.linalg.lstsq(weighted[:, used] / scale[used], np.ones(len(x)), rcond=None)[0] / scale[used]
        if (part >= 0).all():
            found[used] = part
            break
        used.pop(int(np.argmin(part * scale[used])))  # drops the most negative coefficient
    error = float(np.abs(columns @ found / target - 1).mean())
    slopes = found[2:]
    reached = found[0] + np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(starts))])  # at each start
    of_x = list(zip((reached - slopes * starts).tolist(), slopes.tolist(), strict=True))
    return _Fit(of_x, breakpoints, float(found[1]), error)


def read_measured(path: Path) -> dict[int, CostModel]:
    """Reads a file of `write_measured`. Raises ConfigError."""
    try:
        found: dict[int, CostModel] = {}
        for entry in read_json(path)["widths"]:
            prefills = [PrefillPoint(*point) for point in entry["prefill"]]
            decodes = [DecodePoint(*point) for point in entry["decode"]]
            mixed = [MixedPoint(*point) for point in entry.get("mixed", ())]
            link = LinkShape(**entry["link"])
            found[int(entry["tp"])] = fit(prefills, decodes, link, path.name, piecewise=True, mixed=mixed)
        return found
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path.name}: expected a cost model written by `tandem profile`: {error}", field="--cost"
        ) from None


class Measurements(NamedTuple):
    """Of workers of one width."""

    prefills: Sequence[PrefillPoint]
    decodes: Sequence[DecodePoint]
    link: LinkShape
    mixed: Sequence[MixedPoint] = ()

    def scaled(self, prefill: float, decode: float) -> Measurements:
        """With prompts and decoding that take as many times as long."""
        model = fit(self.prefills, self.decodes, self.link, "measured", piecewise=True)
        alone_s = {each: min(each.seconds, model.prefill_s(each.tokens, 0)) for each in self.mixed}
        return Measurements(
            [each._replace(seconds=prefill * each.seconds) for each in self.prefills],
            [each._replace(seconds=decode * each.seconds) for each in self.decodes],
            self.link,
            [
                each._replace(seconds=prefill * alone_s[each] + decode * (each.seconds - alone_s[each]))
                for each in self.mixed
            ],
        )


def read_mask_s_per_row(path: Path) -> float | None:
    """Reads the cost of masks from a file of `write_measured`; None: it was not measured. Raises ConfigError."""
    found = read_json(path).get("mask_s_per_row")
    if found is not None and not (isinstance(found, float | int) and found >= 0):
        raise ConfigError(f"{path.name}: mask_s_per_row: expected seconds, got {found!r}", field="--cost")
    return found


def read_acceptance(path: Path) -> Acceptance | None:
    """Reads what speculation gave from a file of `write_measured`; None: it was not measured. Raises ConfigError."""
    found = read_json(path).get("acceptance")
    try:
        acceptance = None if found is None else Acceptance(**found)
        is_possible = acceptance is None or acceptance.is_possible
    except TypeError:
        is_possible = False
    if not is_possible:
        raise ConfigError(
            f"{path.name}: acceptance: expected chance, tokens and draft_share, got {found!r}", field="--cost"
        )
    return acceptance


def read_host(path: Path) -> HostCores:
    """Reads the host from a file of `write_measured`. Raises ConfigError."""
    host = read_json(path).get("host")
    if host is None:
        raise ConfigError(
            f"{path.name}: expected a `host` entry, found none: measure one with `tandem profile --device cpu`",
            field="--one-host",
        )
    try:
        return HostCores(**host | {"contention": Contention(**host["contention"])})
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{path.name}: host: expected what this version of `tandem profile` writes: {error}", field="--one-host"
        ) from None


def write_measured(
    path: Path,
    widths: dict[int, Measurements],
    about: Mapping[str, Any],
    host: HostCores | None = None,
    mask_s_per_row: float | None = None,
    acceptance: Acceptance | None = None,
    fixed_work: Mapping[str, float] | None = None,
) -> None:
    """Writes the measurements, not the fit: `read_measured` fits them again. `fixed_work`: seconds that it took while
    they were made, to tell how fast the machine was."""
    entries = [
        {
            "tp": tp,
            "prefill": [list(point) for point in each.prefills],
            "decode": [list(point) for point in each.decodes],
            "mixed": [list(point) for point in each.mixed],
            "link": {
                "bytes_per_s": each.link.bytes_per_s,
                "latency_s": each.link.latency_s,
                "efficiency": each.link.efficiency,
            },
        }
        for tp, each in widths.items()
    ]
    content: dict[str, Any] = {"about": dict(about), "widths": entries}
    content |= {} if host is None else {"host": asdict(host)}
    content |= {} if mask_s_per_row is None else {"mask_s_per_row": mask_s_per_row}
    content |= {} if acceptance is None else {"acceptance": asdict(acceptance)}
    content |= {} if fixed_work is None else {"fixed_work": dict(fixed_work)}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Raises ConfigError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--cost: {path}: {error.strerror}", field="--cost") from None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"--cost: {path}: expected a JSON object", field="--cost")
    return found
