"""Simulates one layout under one variant of the traffic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from planner.hardware import RoleHardware, make_setup, simulated_block_tokens
from planner.search.classes import classes_of
from planner.search.layout import ClusterLayout
from planner.search.traffic import busiest
from planner.simulator.result import SimResult
from planner.simulator.setup import Paper, Setup, Slo
from planner.simulator.simulate import simulate
from planner.traces.trace import TrafficTrace
from tandem.config.model import Role
from tandem.config.router import ClassSpec, RouterSpec

ENGINE_BLOCK_TOKENS = 16
MAX_QUEUED = 4096


@dataclass(frozen=True, slots=True)
class Job:
    """One simulation. `resample`: the number of the traffic like the recorded one; 0: the recorded. `steps`: how many
    times as long steps take. `most_misses`: it stops when more requests have missed an objective; None: never.
    `refuses`: routers refuse requests that are predicted to miss their TTFT; else these wait. `free_handoffs`: KV moves
    at once, to judge a pool beside any other."""

    layout: ClusterLayout
    requests: int
    load: float = 1.0
    prompts: float = 1.0
    outputs: float = 1.0
    steps: float = 1.0
    resample: int = 0
    most_misses: int | None = None
    refuses: bool = False
    free_handoffs: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Job:
        return cls(**(fields | {"layout": ClusterLayout(**fields["layout"])}))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The figures that a plan is chosen by. `joint`: the share of requests within their objectives; with objectives of
    classes, of the class that does worst, and `of_class` has each. `busy`, `prefill_busy`, `decode_busy`: mean shares
    of time in use.

    `complete` False: the simulation was stopped early, and the figures cover the part until then.
    """

    job: Job
    joint: float
    ttft_share: float | None
    tpot_share: float | None
    goodput_per_s: float
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p90_s: float | None
    tpot_p99_s: float | None
    prefill_busy: float | None
    decode_busy: float
    hit_rate: float
    tokens_per_s: float
    output_tokens_per_s: float
    rejected: int
    complete: bool
    of_class: Mapping[str, float] = field(default_factory=dict)

    @property
    def layout(self) -> ClusterLayout:
        return self.job.layout

    @property
    def class_line(self) -> str:
        shares = ", ".join(f"{name or 'default'} {share:.1%}" for name, share in self.of_class.items())
        return f"within objectives by class, of which the worst counts: {shares}"

    def meets(self, attainment: float) -> bool:
        """Whether so large a share of the requests met both objectives."""
        return self.complete and self.joint >= attainment

    @property
    def busy(self) -> float:
        """Mean over all devices."""
        layout = self.layout
        prefill = (self.prefill_busy or 0.0) * layout.prefill_workers * layout.prefill_tp
        return (prefill + self.decode_busy * layout.decode_workers * layout.decode_tp) / layout.devices

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Evaluation:
        return cls(**(fields | {"job": Job.from_json(fields["job"])}))


@dataclass(frozen=True, slots=True)
class Evaluator:
    """The inputs that all jobs share. `trace`: the requests to simulate. `paper`: its rule places them; None: the
    router's does. `longest_step_s`: of workers that decode, with prompts beside answers."""

    trace: TrafficTrace
    hardware: RoleHardware
    slo: Slo
    max_running_requests: int = 256
    paper: Paper | None = None
    longest_step_s: float | None = None

    def evaluate(self, job: Job) -> Evaluation:
        trace = busiest(self.trace, job.requests)
        if job.resample:
            trace = trace.resampled(job.resample)
        if (job.prompts, job.outputs) != (1.0, 1.0):
            trace = trace.with_lengths(job.prompts, job.outputs)
        trace = trace.at_rate(job.load)
        setup = self.setup(job.layout, job.steps, refuses=job.refuses)
        if job.free_handoffs:
            setup = replace(setup, kv_token_bytes=0.0)
        result = simulate(trace, setup, self.slo, most_misses=job.most_misses)
        return _evaluation(job, result)

    def setup(self, layout: ClusterLayout, steps: float = 1.0, *, refuses: bool = False) -> Setup:
        hardware, prefixes = self.hardware.stretched(steps), self.trace.prefixes
        prefill, decode = hardware.of(Role.PREFILL), hardware.of(Role.DECODE)
        setup = make_setup(
            decode,
            None if layout.is_aggregated else prefill.pool(layout.prefill_workers, layout.prefill_tp),
            decode.pool(layout.decode_workers, layout.decode_tp),
            router=router_spec(layout, classes_of(self.trace.labels, self.slo, refuses=refuses)),
            max_running_requests=self.max_running_requests,
            max_step_tokens=layout.step_tokens,
            block_tokens=simulated_block_tokens(
                ENGINE_BLOCK_TOKENS,
                float(self.trace.prompt_tokens.mean()),
                None if prefixes is None else prefixes.block_tokens,
            ),
        )
        return replace(setup, decode=replace(setup.decode, longest_step_s=self.longest_step_s), paper=self.paper)


def router_spec(layout: ClusterLayout, classes: tuple[ClassSpec, ...]) -> RouterSpec:
    """The router settings of a plan: prompts for two steps per worker, and a long queue, because a refusal misses the
    objective too."""
    return RouterSpec(
        max_prefill_tokens_in_flight=2 * layout.step_tokens, max_queued_requests=MAX_QUEUED, classes=classes
    )


def _evaluation(job: Job, result: SimResult) -> Evaluation:
    prefill = result.pools.get("prefill")
    found = result.attainment
    return Evaluation(
        job=job,
        joint=min(found.of_class.values(), default=1.0 if found.joint is None else found.joint),
        ttft_share=found.ttft,
        tpot_share=found.tpot,
        goodput_per_s=result.goodput_per_s if result.goodput_per_s is not None else result.finished / result.span_s,
        ttft_p50_s=result.ttft_s.p50,
        ttft_p90_s=result.ttft_s.p90,
        ttft_p99_s=result.ttft_s.p99,
        tpot_p50_s=result.tpot_s.p50,
        tpot_p90_s=result.tpot_s.p90,
        tpot_p99_s=result.tpot_s.p99,
        prefill_busy=None if prefill is None else prefill.busy,
        decode_busy=result.pools["decode"].busy,
        hit_rate=result.hit_rate,
        tokens_per_s=result.prompt_tokens_per_s + result.output_tokens_per_s,
        output_tokens_per_s=result.output_tokens_per_s,
        rejected=result.rejected,
        complete=result.complete,
        of_class=dict(found.of_class),
    )


def without_worker(job: Job, *, prefill: bool) -> Job | None:
    """The same job with one worker fewer; None if that pool would be empty."""
    layout = job.layout
    if prefill:
        if layout.prefill_workers < 1:
            return None
        return replace(job, layout=replace(layout, prefill_workers=layout.prefill_workers - 1))
    if layout.decode_workers < 2:
        return None
    return replace(job, layout=replace(layout, decode_workers=layout.decode_workers - 1))
