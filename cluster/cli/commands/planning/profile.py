"""`tandem profile`: measures the engine's steps on this hardware over a grid and writes them as a cost model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import psutil
from rich.console import Console

from cluster.cli.commands.planning.inputs import check_writable
from cluster.cli.commands.planning.running_pair import LONG_PROMPT, SHORT_PROMPT, RunningPair, measure_pair
from cluster.profiling.measured import build_alone
from cluster.profiling.neighbour import Load, neighbours
from cluster.profiling.profiler import FixedWork, Grid, Profiler, open_profiler
from cluster.spec.loader import load_spec
from cluster.spec.resolve import ResolvedModel, resolve_models
from planner.acceptance import MOST_TOKENS, Acceptance, chance_of
from planner.devices import find_device
from planner.fitted import Measurements, fit, read_measured, write_measured
from planner.hardware import check_one_cost
from planner.profiled import sizes_of
from planner.shared_host import Contention, HostCores
from tandem.config.engine import EngineSpec
from tandem.config.model import Role
from tandem.errors import CheckpointError, InternalError, UnavailableError
from tandem.speculation.speculator import Speculator
from tandem.text.chat_template import ChatTemplate
from tandem.text.tokenizer import Tokenizer
from tandem.training.own_answers import OwnAnswers

FIXED_RUNS = 9
FIXED_AROUND = 3  # before and after a pair of workers
ACCEPTANCE_TOKENS = 2000
MOST_OFF = 1.5  # times: more is not how steps of an engine differ that is alone


def run_profile(config: Path | None, model: str | None, device: str, output: Path, grid: Grid | None = None) -> int:
    """Measures workers of one rank; links come from the device file. Raises InputError, ConfigError and
    CheckpointError."""
    check_writable("output", output)
    console = Console(stderr=True, highlight=False)
    spec = load_spec(config, {"models.0.source": model})
    resolved = resolve_models(spec, console.print, fetch=True)[0]
    check_one_cost(resolved.spec)
    # Steps take the same time however requests are batched.
    continuous = {"batching": "continuous", "batching_window_s": None}
    engine = resolved.spec.engine_of(Role.DECODE).model_copy(update=continuous)
    link = find_device(device).link.shape()
    plain = engine.without_speculation
    with open_profiler(resolved.folder, plain, grid or Grid()) as profiler:
        profiler.fixed_work()  # warms up
        prefills, decodes = profiler.prefills(console.print), profiler.decodes(console.print)
        mixed, masks_s = profiler.mixed(console.print), profiler.mask_s_per_row(console.print)
        host = None if engine.on_gpu else _host_cores(profiler, engine, resolved, console.print)
        measured, usual = Measurements(prefills, decodes, link, mixed), profiler.usual_work
        if host is not None:
            before = profiler.fixed_work(FIXED_AROUND)
            pair = measure_pair(host, str(resolved.folder), plain, console.print)
            around = zip(before, profiler.fixed_work(FIXED_AROUND), usual, strict=True)
            slower = FixedWork(*(sum(each) / 2 / usual_s for *each, usual_s in around))
            if pair is not None:
                host, measured = pair.host, as_in_a_worker(measured, pair, slower, console.print)
    acceptance = None if engine.speculation == "none" else measured_acceptance(engine, resolved.folder, console.print)
    about = {
        "model": resolved.spec.served_name,
        "sizes": sizes_of(resolved.config),
        "engine": engine.model_dump_json(exclude_none=True),
    }
    write_measured(output, {1: measured}, about, host, masks_s, acceptance, usual._asdict())
    error = read_measured(output)[1].fit_error
    console.print(f"{output}: {len(prefills)} prefill and {len(decodes)} decode steps, mean fit error {error:.1%}")
    return 0


def as_in_a_worker(
    measured: Measurements, pair: RunningPair, slower: FixedWork, report: Callable[[str], None]
) -> Measurements:
    """Steps take as much longer or shorter as in a running worker: they differ by some percent, all alike. `slower`:
    how many times as long as usual fixed work took while the pair was measured."""
    model = fit(measured.prefills, measured.decodes, measured.link, "profile", piecewise=True)
    decode = pair.decode_s / (model.decode_step_s(1, pair.context) * slower.decoding_s)
    alone_s = model.prefill_s(LONG_PROMPT, 0) - model.prefill_s(SHORT_PROMPT, 0)
    prefill = pair.prefill_s / max(1e-9, alone_s * slower.prompts_s)
    if not all(1 / MOST_OFF < factor < MOST_OFF for factor in (prefill, decode)):
        report(f"steps in a running worker took {prefill:.2f} and {decode:.2f} times as long, which is not believed")
        return measured
    report(f"in a running worker prompts take {prefill:.3f}, decode steps {decode:.3f} times as long as alone")
    return measured.scaled(prefill, decode)


def measured_acceptance(
    engine: EngineSpec, folder: Path, report: Callable[[str], None], tokens: int = ACCEPTANCE_TOKENS
) -> Acceptance | None:
    """Of the model's own answers to its own questions; None if it cannot ask itself. The chance is that of a proposer
    that proposes in each step and gives as many tokens a step: look-up itself proposes in few."""
    template = ChatTemplate.load(folder)
    if template is None:
        report("acceptance not measured: the model has no chat template")
        return None
    with build_alone(folder, engine.model_copy(update={"speculation_adaptive": False})) as rank:
        asked = OwnAnswers(rank, Tokenizer.load(folder), template, (), seed=0)
        try:
            asked.take(tokens, lambda _: None)
        except CheckpointError as error:
            report(f"acceptance not measured: {error.message}")
            return None
        speculator = rank.engine.speculator
    if speculator is None:
        raise InternalError("engine.speculation: expected a speculator, got none")
    most = min(speculator.most, MOST_TOKENS)
    per_step = asked.given_tokens / max(1, asked.given_tokens - speculator.accepted)
    found = Acceptance(round(chance_of(per_step, most), 3), most, round(_draft_share(speculator), 3))
    report(f"speculation gives {per_step:.2f} tokens a step, and a draft takes {found.draft_share:.1%} of one")
    return found


def _draft_share(speculator: Speculator) -> float:
    """Time to draft a token, of a step of one token."""
    if speculator.drafting is None or not speculator.pass_costs.is_known:
        return 0.0
    pass_s, step_s = sum(speculator.pass_costs.line()), sum(speculator.costs.line())
    return min(1.0, pass_s / step_s / (speculator.most if speculator.drafting.at_once else 1))


def _host_cores(
    profiler: Profiler, engine: EngineSpec, resolved: ResolvedModel, report: Callable[[str], None]
) -> HostCores | None:
    """Measures how much longer steps take while every core of this host runs a worker.

    If memory is too small for so many workers, reports that and returns None: the other measurements stay valid.
    """
    cores = max(1, len(os.sched_getaffinity(0)) // engine.threads_per_rank)

    def steps_s(others: int = 0, load: Load = "prompts") -> FixedWork:
        with neighbours(others, resolved.folder, engine, load):
            return profiler.fixed_work(FIXED_RUNS)

    needed, free = cores * psutil.Process().memory_info().rss, psutil.virtual_memory().available
    if needed > free:
        report(f"contention not measured: {cores} workers need {needed >> 30} GiB more, and {free >> 30} GiB are free")
        return None
    try:
        before = steps_s()
        beside_prompts, beside_decoding = (steps_s(cores - 1, load) for load in get_args(Load))
        after = steps_s()
    except UnavailableError as error:
        report(f"contention not measured: {error.message}")
        return None
    alone = [(one + other) / 2 for one, other in zip(before, after, strict=True)]
    (prompts, decoding), (slower_prompts, slower_decoding) = (
        (round(max(1.0, seconds / alone_s), 3) for seconds, alone_s in zip(each, alone, strict=True))
        for each in (beside_prompts, beside_decoding)
    )
    report(
        f"{cores} ranks in parallel: prompts take {prompts:.2f} times as long beside prompts and {slower_prompts:.2f} "
        f"times beside decoding, decode steps {decoding:.2f} and {slower_decoding:.2f} times"
    )
    return HostCores(cores, Contention(prompts, slower_prompts, decoding, slower_decoding))
