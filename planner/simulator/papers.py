"""Placement rules that papers propose, in place of the router's own: baselines for it, on the same simulated workers.

Each is written from its paper, for what a router sees of a worker (`Candidate`) and for a plan's step costs. Of what a
paper changes inside an engine, only the size of chunks is simulated. docs/placement-papers.md says what is left out,
and what each paper claims beside what is found here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from planner.cost import LEAST_CHUNK, CostModel, largest_chunk
from planner.simulator.setup import Paper, PoolSetup, Setup, Slo
from router.policies.placement import PlacementPolicy, named_policy
from router.policies.predicted_times import prefill_s
from router.policies.types import Candidate, Placement, PlacementQuery, PlacementReason, PlacementRules, WaitReason
from tandem.config.router import Disaggregation
from tandem.errors import ConfigError

HEAVY_STEP_TOKENS = 8192  # of TaiChi's prefill-heavy workers, unless they have more
SHORT_TOKENS = 256  # LAPS: the largest of its short prefills
FULL_SHARE = 0.95  # TaiChi: of the KV blocks of a decode-heavy worker that is full
TURN_SHARE = 0.5  # PPD: of a prompt that is cached, if it is a later turn
_RECENT = 100  # placements over which LAPS takes its shares


def with_paper(setup: Setup, slo: Slo) -> tuple[Setup, PlacementRules]:
    """The setup as `setup.paper` changes its workers, and the rules that place requests; None: the router's own.

    Raises ConfigError if the paper is about other clusters than this one, or needs an objective.
    """
    paper = setup.paper
    if paper is None:
        return setup, named_policy(setup.router)
    if (setup.prefill is None) is not (paper is Paper.ECOSERVE):
        raise _wrong(paper, "an aggregated cluster" if paper is Paper.ECOSERVE else "prefill workers")
    if setup.autoscaler.enabled:
        raise _wrong(paper, "no autoscaler, because the rule gives each worker its part for good")
    if slo.ttft_s is None or slo.tpot_s is None:
        raise _wrong(paper, "--ttft and --tpot with it")
    if paper is Paper.TAICHI:
        setup = _with_heavy_prefills(setup)
    most = max(_step_tokens(setup, pool) for _, pool in setup.pools())
    changes = {
        "disaggregation": Disaggregation.NEVER if paper is Paper.ECOSERVE else Disaggregation.ALWAYS,
        "max_prefill_tokens_in_flight": max(setup.router.max_prefill_tokens_in_flight, 2 * most),
    }
    setup = replace(setup, router=setup.router.model_copy(update=changes))
    usual = named_policy(setup.router)
    match paper:
        case Paper.DEFLECTION:
            setup = replace(setup, decode=replace(setup.decode, longest_step_s=slo.tpot_s))
            return setup, Deflection(usual, slo.ttft_s, slo.tpot_s, _Chunks.of(setup, slo.tpot_s))
        case Paper.PPD:
            return setup, PrefillCapableDecode(usual, slo.ttft_s, slo.tpot_s)
        case Paper.LAPS:
            return setup, LengthAwarePrefill(usual, slo.ttft_s, slo.tpot_s)
        case Paper.ECOSERVE:
            return setup, RollingActivation(usual, slo.ttft_s, slo.tpot_s, setup.block_tokens)
        case Paper.TAICHI:
            return setup, LatencyShifting(usual, slo.ttft_s, slo.tpot_s, _Chunks.of(setup, math.inf))


def _wrong(paper: Paper, expected: str) -> ConfigError:
    return ConfigError(f"--paper {paper.value}: expected {expected}", field="--paper")


def _with_heavy_prefills(setup: Setup) -> Setup:
    assert setup.prefill is not None
    heavy = max(HEAVY_STEP_TOKENS, _step_tokens(setup, setup.prefill))
    return replace(setup, prefill=replace(setup.prefill, max_step_tokens=heavy))


def _step_tokens(setup: Setup, pool: PoolSetup) -> int:
    return pool.max_step_tokens or setup.max_step_tokens


@dataclass(slots=True)
class _PaperRules:
    """`usual`: the router's policy, which always hands off, or never in an aggregated cluster."""

    usual: PlacementPolicy
    ttft_s: float
    tpot_s: float

    def another_decode(
        self, query: PlacementQuery, decode_workers: Sequence[Candidate], prefill: Candidate
    ) -> Candidate | None:
        return self.usual.another_decode(query, decode_workers, prefill)

    def next_decode(self, query: PlacementQuery, decode_workers: Sequence[Candidate]) -> Candidate | None:
        return self.usual.next_decode(query, decode_workers)

    def _with_room(self, query: PlacementQuery, workers: Sequence[Candidate]) -> list[Candidate]:
        room = self.usual.prefill_room
        return [each for each in _allowed(query, workers) if room.keep(query, each)]


def _allowed(query: PlacementQuery, workers: Sequence[Candidate]) -> list[Candidate]:
    return [each for each in workers if each.worker_id not in query.excluded]


@dataclass(frozen=True, slots=True)
class _Chunks:
    """How long a decode worker takes for a prompt in chunks beside what decodes there."""

    cost: CostModel
    step_tokens: int
    block_tokens: int
    longest_s: float

    @classmethod
    def of(cls, setup: Setup, longest_s: float) -> _Chunks:
        return cls(setup.decode.cost, _step_tokens(setup, setup.decode), setup.block_tokens, longest_s)

    def soonest(self, query: PlacementQuery, workers: Sequence[Candidate]) -> tuple[float, Candidate | None]:
        """The worker whose first token would come first, and when. None: there is none."""
        times_s = [self._prefill_s(query, each) for each in workers]
        return min(zip(times_s, workers, strict=True), key=itemgetter(0), default=(math.inf, None))

    def _prefill_s(self, query: PlacementQuery, decode: Candidate) -> float:
        batch, own = decode.running_requests, decode.uncached_tokens(query)
        tokens = decode.outstanding_tokens + own
        most = min(self.step_tokens - batch, max(tokens, LEAST_CHUNK))
        context = (decode.total_blocks - decode.free_blocks) * self.block_tokens
        middle = decode.cached_tokens + own // 2  # where its middle chunk begins
        longest_s = self.longest_s if batch else math.inf
        chunk, step_s = largest_chunk(self.cost, most, middle, batch, context, longest_s)
        return math.ceil(tokens / chunk) * step_s if chunk else math.inf


@dataclass(slots=True)
class Deflection(_PaperRules):
    """Load-aware prefill deflection (arXiv 2607.02043): a decode worker prefills a prompt if its first token comes
    sooner there, in the largest chunks that keep the steps of what decodes there within the TPOT objective."""

    chunks: _Chunks

    def place(
        self, query: PlacementQuery, decode_workers: Sequence[Candidate], prefill_workers: Sequence[Candidate]
    ) -> Placement | WaitReason:
        usual = self.usual.place(query, decode_workers, prefill_workers)
        there_s = math.inf  # it waits
        if isinstance(usual, Placement) and usual.prefill is not None:
            there_s = prefill_s(query, usual.prefill)
        here_s, decode = self.chunks.soonest(query, self._with_room(query, decode_workers))
        if decode is not None and here_s < there_s:
            return Placement(decode, None, PlacementReason.LOCAL_SOONER)
        return usual


@dataclass(slots=True)
class PrefillCapableDecode(_PaperRules):
    """PPD (arXiv 2603.13358): a later turn is prefilled on the decode worker that has the earlier ones cached, if its
    TTFT gains more, as a share of its objective, than all answers that decode there lose, as shares of theirs."""

    def place(
        self, query: PlacementQuery, decode_workers: Sequence[Candidate], prefill_workers: Sequence[Candidate]
    ) -> Placement | WaitReason:
        usual = self.usual.place(query, decode_workers, prefill_workers)
        least = TURN_SHARE * query.prompt_tokens
        homes = [each for each in self._with_room(query, decode_workers) if each.cached_tokens >= least]
        if not homes:
            return usual
        home = max(homes, key=lambda each: (each.cached_tokens, -each.running_requests))
        if not isinstance(usual, Placement) or usual.prefill is None or self._gains(query, home, usual):
            return Placement(home, None, PlacementReason.LOCAL_SOONER)
        return usual

    def _gains(self, query: PlacementQuery, home: Candidate, usual: Placement) -> bool:
        assert usual.prefill is not None
        there_s = usual.decode.pace.reserve_s + prefill_s(query, usual.prefill)
        own_s = home.uncached_tokens(query) * home.pace.prefill_s_per_token
        lost_s = home.running_requests * own_s / max(1, query.answer_tokens)  # of TPOT
        return (there_s - prefill_s(query, home)) / self.ttft_s >= lost_s / self.tpot_s


@dataclass(slots=True)
class LengthAwarePrefill(_PaperRules):
    """LAPS (arXiv 2601.11589): short and long prefills go to prefill workers of their own, whose numbers follow the
    tokens of each kind. With one prefill worker, they cannot."""

    _tokens: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})  # of short, of long

    def place(
        self, query: PlacementQuery, decode_workers: Sequence[Candidate], prefill_workers: Sequence[Candidate]
    ) -> Placement | WaitReason:
        if len(prefill_workers) < 2:
            return self.usual.place(query, decode_workers, prefill_workers)
        ordered, own = sorted(prefill_workers, key=lambda each: each.worker_id), self._short_workers(prefill_workers)
        tokens = min(each.uncached_tokens(query) for each in ordered[:own])
        is_short = tokens <= SHORT_TOKENS
        found = self._in_group(query, decode_workers, ordered[:own] if is_short else ordered[own:])
        if isinstance(found, Placement):
            self._tokens = {kind: seen * (1 - 1 / _RECENT) for kind, seen in self._tokens.items()}
            self._tokens[is_short] += found.prefiller.uncached_tokens(query)
        return found

    def _in_group(
        self, query: PlacementQuery, decode_workers: Sequence[Candidate], group: Sequence[Candidate]
    ) -> Placement | WaitReason:
        """If all of the group are full, it waits at one of them: in the router's queue it would hold up the others."""
        found, allowed = self.usual.place(query, decode_workers, group), _allowed(query, group)
        if found is not WaitReason.PREFILL_FULL or not allowed:
            return found
        soonest = min(allowed, key=lambda each: prefill_s(query, each))
        decode = self.usual.another_decode(query, decode_workers, soonest)
        return found if decode is None else Placement(decode, soonest, PlacementReason.HANDOFF_CONFIGURED)

    def _short_workers(self, prefill_workers: Sequence[Candidate]) -> int:
        both, number = sum(self._tokens.values()), len(prefill_workers)
        share = self._tokens[True] / both if both else 0.5
        return min(max(1, round(share * number)), number - 1)


@dataclass(slots=True)
class RollingActivation(_PaperRules):
    """EcoServe (arXiv 2504.18154): one worker of an aggregated cluster takes prompts until another would come too late,
    find no KV blocks, or stop what decodes there for longer than it is ahead of its TPOT objective; then the next one
    does. If none is in time, the router's own rule places the prompt."""

    block_tokens: int
    _active: str = ""

    def place(
        self, query: PlacementQuery, decode_workers: Sequence[Candidate], prefill_workers: Sequence[Candidate]
    ) -> Placement | WaitReason:
        ordered = sorted(self._with_room(query, decode_workers), key=lambda each: each.worker_id)
        turn = [each for each in ordered if each.worker_id >= self._active]
        for each in [*turn, *ordered[: len(ordered) - len(turn)]]:
            if self._is_in_time(query, each):
                self._active = each.worker_id
                return Placement(each, None, PlacementReason.LOCAL_CONFIGURED)
        return self.usual.place(query, decode_workers, ())

    def _is_in_time(self, query: PlacementQuery, worker: Candidate) -> bool:
        stop_s, needed = prefill_s(query, worker), query.prompt_tokens + query.answer_tokens
        if stop_s > self.ttft_s or worker.free_blocks * self.block_tokens < needed:
            return False
        if not worker.running_requests:
            return True
        ahead_s = self.tpot_s - worker.pace.tpot_at_s(worker.running_requests)
        return stop_s <= ahead_s * query.answer_tokens / 2  # of an answer that is half done, as they are on average


@dataclass(slots=True)
class LatencyShifting(_PaperRules):
    """TaiChi (arXiv 2508.01989): workers of both kinds prefill and decode, prefill-heavy ones in large chunks and
    decode-heavy ones in small. A prompt is prefilled where it decodes, on a decode-heavy worker, if it meets the TTFT
    objective there, and on a prefill-heavy one otherwise; it decodes there too while the others are full."""

    chunks: _Chunks

    def place(
        self, query: PlacementQuery, decode_workers: Sequence[Candidate], prefill_workers: Sequence[Candidate]
    ) -> Placement | WaitReason:
        if not decode_workers or not prefill_workers:
            return self.usual.place(query, decode_workers, prefill_workers)
        light = [each for each in decode_workers if not _is_full(each)]
        here_s, decode = self.chunks.soonest(query, self._with_room(query, light))
        if decode is not None and here_s <= self.ttft_s:
            return Placement(decode, None, PlacementReason.LOCAL_SOONER)
        heavy = self._with_room(query, prefill_workers)
        if not heavy:
            return WaitReason.PREFILL_FULL
        soonest = min(heavy, key=lambda each: (prefill_s(query, each), each.worker_id))
        if not light:
            return Placement(soonest, None, PlacementReason.LOCAL_PREFILL_FULL)
        return self.usual.place(query, light, [soonest])


def _is_full(worker: Candidate) -> bool:
    return worker.free_blocks < (1 - FULL_SHARE) * worker.total_blocks
