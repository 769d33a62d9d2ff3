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

from planner.cost import CostModel, largest_chunk
from planner.simulator.setup import Paper, Setup, Slo
from router.policies.placement import PlacementPolicy, named_policy
from router.policies.predicted_times import handoff_s, prefill_s
from router.policies.types import Candidate, Placement, PlacementQuery, PlacementReason, PlacementRules, WaitReason
from tandem.config.router import Disaggregation
from tandem.errors import ConfigError

HEAVY_STEP_TOKENS = 8192  # of TaiChi's prefill-heavy workers, unless they have more
SHORT_TOKENS = 256  # LAPS: the largest of its short prefills
FULL_SHARE = 0.95  # TaiChi: of the KV blocks of a decode-heavy worker that is full
_RECENT = 100  # placements over which LAPS takes its shares


def with_paper(setup: Setup, slo: Slo) -> tuple[Setup, PlacementRules]:
    """The setup as `setup.paper` changes its workers, and the rules that place requests; None: the router's own.

    Raises ConfigError if the paper is about other clusters than this one.
    """
    paper = setup.paper
    if paper is None:
        return setup, named_policy(setup.router)
    if (setup.prefill is None) is not (paper is Paper.ECOSERVE):
        expected = "an aggregated cluster" if paper is Paper.ECOSERVE else "prefill workers"
        raise ConfigError(f"--paper {paper.value}: expected {expected}", field="--paper")
    disaggregation = Disaggregation.NEVER if paper is Paper.ECOSERVE else Disaggregation.ALWAYS
    usual = named_policy(setup.router.model_copy(update={"disaggregation": disaggregation}))
    match paper:
        case Paper.DEFLECTION:
            setup = replace(setup, decode=replace(setup.decode, longest_step_s=slo.tpot_s))
            return setup, Deflection(usual, slo, _Chunks.of(setup, slo))
        case Paper.PPD:
            return setup, PrefillCapableDecode(usual, slo)
        case Paper.LAPS:
            return setup, LengthAwarePrefill(usual, slo)
        case Paper.ECOSERVE:
            return setup, RollingActivation(usual, slo)
        case Paper.TAICHI:
            assert setup.prefill is not None
            heavy = max(HEAVY_STEP_TOKENS, setup.prefill.max_step_tokens or setup.max_step_tokens)
            setup = replace(setup, prefill=replace(setup.prefill, max_step_tokens=heavy))
            return setup, LatencyShifting(usual, slo, _Chunks.of(setup, Slo()))


@dataclass(slots=True)
class _PaperRules:
    """`usual`: the router's policy, which always hands off, or never in an aggregated cluster."""

    usual: PlacementPolicy
    slo: Slo

    def another_decode(
        self, query: PlacementQuery, decode_workers: Sequence[Candidate], prefill: Candidate
    ) -> Candidate | None:
        return self.usual.another_decode(query, decode_workers, prefill)

    def next_decode(self, query: PlacementQuery, decode_workers: Sequence[Candidate]) -> Candidate | None:
        return self.usual.next_decode(query, decode_workers)

    def _with_room(self, query: PlacementQuery, workers: Sequence[Candidate]) -> list[Candidate]:
        room = self.usual.prefill_room
        return [each for each in workers if each.worker_id not in query.excluded and room.keep(query, each)]


@dataclass(frozen=True, slots=True)
class _Chunks:
    """How long a decode worker takes for a prompt in chunks beside what decodes there."""

    cost: CostModel
    step_tokens: int
    block_tokens: int
    tpot_s: float | None

    @classmethod
    def of(cls, setup: Setup, slo: Slo) -> _Chunks:
        pool = setup.decode
        return cls(pool.cost, pool.max_step_tokens or setup.max_step_tokens, setup.block_tokens, slo.tpot_s)

    def soonest(self, query: PlacementQuery, workers: Sequence[Candidate]) -> tuple[float, Candidate | None]:
        """The worker whose first token would come first, and when. None: there is none."""
        times_s = [self._prefill_s(query, each) for each in workers]
        return min(zip(times_s, workers, strict=True), key=itemgetter(0), default=(math.inf, None))

    def _prefill_s(self, query: PlacementQuery, decode: Candidate) -> float:
        batch = decode.running_requests
        context = (decode.total_blocks - decode.free_blocks) * self.block_tokens
        chunk, step_s = largest_chunk(self.cost, self.step_tokens - batch, batch, context, self.tpot_s)
        if chunk == 0:
            return math.inf
        return math.ceil((decode.outstanding_tokens + decode.uncached_tokens(query)) / chunk) * step_s


@dataclass(slots=True)
class Deflection(_PaperRules):
    """Load-aware prefill deflection (arXiv 2607.02043): a decode worker prefills a prompt if its first token comes
    sooner there, in the largest chunks that keep the steps of what decodes there within the TPOT objective."""

    chunks: _Chunks

    def place(
        self, query: PlacementQuery, decode_workers: Sequence[Candidate], prefill_workers: Sequence[Candidate]
    ) -> Placement | WaitReason:
        usual = self.usual.place(query, decode_workers, prefill_workers)
        handoff_s = math.inf  # waits
        if isinstance(usual, Placement) and usual.prefill is not None:
            handoff_s = prefill_s(query, usual.prefill)
        here_s, decode = self.chunks.soonest(query, self._with_room(query, decode_workers))
        if decode is not None and here_s < handoff_s:
            return Placement(decode, None, PlacementReason.LOCAL_SOONER)
        return usual


@dataclass(slots=True)
class PrefillCapableDecode(_PaperRules):
    """PPD (arXiv 2603.13358): a later turn is prefilled on the decode worker that has the earlier ones cached, if its
    TTFT gains more, as a share of its objective, than the answers that decode there lose of theirs."""

    def place(
        self, query: PlacementQuery, decode_workers: Sequence[Candidate], prefill_workers: Sequence[Candidate]
    ) -> Placement | WaitReason:
        homes = [each for each in self._with_room(query, decode_workers) if each.cached_tokens]
        usual = self.usual.place(query, decode_workers, prefill_workers)
        if not homes:
            return usual
        home = max(homes, key=lambda each: (each.cached_tokens, -each.running_requests))
        if not isinstance(usual, Placement) or usual.prefill is None or self._gains(query, home, usual):
            return Placement(home, None, PlacementReason.LOCAL_SOONER)
        return usual

    def _gains(self, query: PlacementQuery, home: Candidate, usual: Placement) -> bool:
        assert usual.prefill is not None
        there_s = handoff_s(query, usual.decode, prefill_s(query, usual.prefill))
        gain = (there_s - prefill_s(query, home)) / (self.slo.ttft_s or 1.0)
        own_s = home.uncached_tokens(query) * home.pace.prefill_s_per_token
        loss = own_s / max(1, query.answer_tokens) / (self.slo.tpot_s or 1.0) if home.running_requests else 0.0
        return gain >= loss


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
        tokens = min(each.uncached_tokens(query) for each in prefill_workers)
        is_short = tokens <= SHORT_TOKENS
        ordered, own = sorted(prefill_workers, key=lambda each: each.worker_id), self._short_workers(prefill_workers)
        group = ordered[:own] if is_short else ordered[own:]
        found = self.usual.place(query, decode_workers, group)
        if (
            found is WaitReason.PREFILL_FULL
        ):  # waits at its worker: in the router's queue it would hold up the other kind
            decode = self.usual.decode.choose(query, decode_workers)
            if decode is not None:
                soonest = min(group, key=lambda each: prefill_s(query, each))
                found = Placement(decode, soonest, PlacementReason.HANDOFF_CONFIGURED)
        if isinstance(found, Placement):
            self._tokens = {kind: seen * (1 - 1 / _RECENT) for kind, seen in self._tokens.items()}
            self._tokens[is_short] += tokens
        return found

    def _short_workers(self, prefill_workers: Sequence[Candidate]) -> int:
        both, number = sum(self._tokens.values()), len(prefill_workers)
        share = self._tokens[True] / both if both else 0.5
        return min(max(1, round(share * number)), number - 1)


@dataclass(slots=True)
class RollingActivation(_PaperRules):
    """EcoServe (arXiv 2504.18154): one worker of an aggregated cluster takes prompts until another would come too late,
    or would stop what decodes there for longer than it is ahead of its TPOT objective; then the next one does."""

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
        stop_s = prefill_s(query, worker)
        if self.slo.ttft_s is not None and stop_s > self.slo.ttft_s:
            return False
        if self.slo.tpot_s is None or not worker.running_requests:
            return True
        ahead_s = self.slo.tpot_s - worker.pace.tpot_at_s(worker.running_requests)
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
        if not decode_workers:
            return WaitReason.NO_DECODE_WORKER
        light = [each for each in decode_workers if not _is_full(each)]
        here_s, decode = self.chunks.soonest(query, self._with_room(query, light))
        if decode is not None and here_s <= (self.slo.ttft_s or math.inf):
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
