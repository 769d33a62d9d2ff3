"""Traffic, model and hardware from the options that the planning commands share."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner.acceptance import Acceptance
from planner.calibration.file import read_calibration
from planner.cost import CostModel
from planner.devices import DeviceSpec, find_device
from planner.fitted import (
    FittedCostModel,
    Reach,
    read_acceptance,
    read_host,
    read_mask_s_per_row,
    read_measured,
)
from planner.hardware import Hardware, MixedHardware, RoleHardware, check_calibration
from planner.models import ElementSizes, engine_bytes, find_model
from planner.profiled import Profiled
from planner.published import read_distserve, read_splitwise
from planner.simulator.setup import Slo
from planner.traces.arrivals import ArrivalProcess, Diurnal, Gamma, Ramp
from planner.traces.read import read_trace, with_gap_noted
from planner.traces.rows import parse_conditions
from planner.traces.synthetic import LengthSpec, SharedPrefixes, synthetic_trace
from planner.traces.trace import TrafficTrace
from tandem.config.model import Role
from tandem.errors import ConfigError, InputError
from tandem.files import replace_file

SYNTHETIC = "synthetic"
_NUMBERS = {"poisson": 1, "gamma": 2, "ramp": 3, "diurnal": 3}


@dataclass(frozen=True, slots=True)
class TrafficFlags:
    """`trace`: a file, a ServeGen folder, or "synthetic". `lengths`: mean tokens PROMPT:OUTPUT, or with :CV:CV.
    `where`: COLUMN=VALUE of the rows to take."""

    trace: str
    arrivals: str | None = None
    lengths: str | None = None
    prefixes: str | None = None
    start_s: float = 0.0
    duration_s: float | None = None
    requests: int | None = None
    load: float = 1.0
    prompts: float = 1.0
    outputs: float = 1.0
    seed: int = 0
    jitter: bool = True
    where: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HardwareFlags:
    """`cost`: a table or measured cost model: FILE, FILE:MODEL or FILE:MODEL/HARDWARE. `one_host`: all workers share
    the cores of the host on which it was measured. `constrained`: the share of requests with a schema or grammar.
    `calibration`: a file of `tandem calibrate`."""

    model: str
    device: str
    cost: str | None = None
    price: float | None = None
    element_bytes: float | None = None  # of weights and KV; None: as profiled, else as published or the device's
    one_host: bool = False
    constrained: float = 0.0
    acceptance: str | None = None
    kv_bytes: float | None = None  # None: as element_bytes
    expert_bytes: float | None = None  # None: as published, or as element_bytes
    calibration: Path | None = None
    device_option: str = "--device"  # that named it


def parse_slo(ttft: float | None, tpot: float | None, of_class: Sequence[str] | None) -> Slo:
    """`of_class`: CLASS=TTFT,TPOT. Raises ConfigError."""
    found: dict[str, Slo] = {}
    for given in of_class or ():
        name, equals, both = given.partition("=")
        try:
            limits = [float(each) if each.strip() else None for each in both.split(",")]
            if not equals or len(limits) != 2 or name in found or limits == [None, None]:
                raise ValueError
        except ValueError:
            raise ConfigError(
                "--class-slo: expected CLASS=TTFT,TPOT in seconds, once for each class, such as batch=30,0.2 or "
                f"batch=30,; got {given}",
                field="--class-slo",
            ) from None
        found[name] = Slo(limits[0], limits[1])
    return Slo(ttft, tpot, tuple(found.items()))


def load_traffic(flags: TrafficFlags) -> TrafficTrace:
    """Raises InputError, ConfigError."""
    process = None if flags.arrivals is None else parse_arrivals(flags.arrivals)
    if flags.trace == SYNTHETIC:
        if flags.where:
            raise ConfigError("--where: expected none with a synthetic trace, which has no rows", field="--where")
        trace = _synthetic(flags, process)
    else:
        for option, given in (("--lengths", flags.lengths), ("--prefixes", flags.prefixes)):
            if given is not None:
                raise ConfigError(f"{option}: expected none with a trace file, which has its own", field=option)
        where = parse_conditions(flags.where)
        trace = read_trace(Path(flags.trace), arrivals=process, seed=flags.seed, jitter=flags.jitter, where=where)
    if flags.start_s or flags.duration_s is not None:
        end_s = math.inf if flags.duration_s is None else flags.start_s + flags.duration_s
        trace = trace.between(flags.start_s, end_s)
    if flags.requests is not None:
        trace = trace.head(flags.requests)
    trace = trace.with_used_labels()
    if process is None:
        trace = with_gap_noted(trace)
    for option, factor in (("--load", flags.load), ("--prompts", flags.prompts), ("--outputs", flags.outputs)):
        if not 0 < factor < math.inf:
            raise ConfigError(f"{option}: expected a factor above 0, got {factor:g}", field=option)
    if (flags.prompts, flags.outputs) != (1.0, 1.0):
        trace = trace.with_lengths(flags.prompts, flags.outputs)
    return trace.at_rate(flags.load)


def parse_arrivals(text: str) -> ArrivalProcess:
    """poisson:RATE, gamma:RATE:CV, ramp:FROM:TO:SECONDS, diurnal:RATE:SWING:PERIOD_S. Raises ConfigError."""
    kind, *rest = text.split(":")
    try:
        values = [float(each) for each in rest]
    except ValueError:
        values = []
    if _NUMBERS.get(kind) != len(values):
        raise ConfigError(
            "--arrivals: expected poisson:RATE, gamma:RATE:CV, ramp:FROM:TO:SECONDS or diurnal:RATE:SWING:PERIOD_S, "
            f"got {text[:60]!r}",
            field="--arrivals",
        )
    match kind:
        case "ramp":
            return Ramp(*values)
        case "diurnal":
            return Diurnal(*values)
        case _:
            return Gamma(*values)


def _synthetic(flags: TrafficFlags, process: ArrivalProcess | None) -> TrafficTrace:
    if process is None or flags.lengths is None:
        raise ConfigError("synthetic: expected --arrivals and --lengths with a synthetic trace", field="--lengths")
    lengths = _floats("--lengths", flags.lengths, "PROMPT:OUTPUT or PROMPT:OUTPUT:PROMPT_CV:OUTPUT_CV", (2, 4))
    prompt_cv, output_cv = lengths[2:] or (0.0, 0.0)
    shared = None
    if flags.prefixes is not None:
        expected = "COUNT:TOKENS:SHARE, the first two whole numbers"
        count, tokens, share = _floats("--prefixes", flags.prefixes, expected, (3,))
        if not (count.is_integer() and tokens.is_integer()):
            raise ConfigError(f"--prefixes: expected {expected}, got {flags.prefixes[:60]!r}", field="--prefixes")
        shared = SharedPrefixes(int(count), int(tokens), share)
    return synthetic_trace(
        flags.requests or 1000,
        process,
        LengthSpec(lengths[0], prompt_cv),
        LengthSpec(lengths[1], output_cv),
        prefixes=shared,
        seed=flags.seed,
    )


def _floats(option: str, text: str, expected: str, counts: tuple[int, ...]) -> list[float]:
    try:
        values = [float(each) for each in text.split(":")]
    except ValueError:
        values = []
    if len(values) not in counts:
        raise ConfigError(f"{option}: expected {expected}, got {text[:60]!r}", field=option)
    return values


def load_hardware(flags: HardwareFlags) -> Hardware:
    """Raises ConfigError."""
    hardware = _uncalibrated(flags)
    if flags.calibration is None:
        return hardware
    found = read_calibration(flags.calibration)
    check_calibration(found, hardware)
    return replace(hardware, calibration=found)


def _uncalibrated(flags: HardwareFlags) -> Hardware:
    device = find_device(flags.device, flags.device_option)
    if flags.price is not None:
        device = device.model_copy(update={"price_per_hour": flags.price})
    sizes = {
        "--element-bytes": flags.element_bytes, "--kv-bytes": flags.kv_bytes, "--expert-bytes": flags.expert_bytes
    }  # fmt: skip
    for option, size in sizes.items():
        if size is not None and not 0 < size <= 16:
            raise ConfigError(f"{option}: expected more than 0 and at most 16, got {size:g}", field=option)
    if not 0 <= flags.constrained <= 1:
        raise ConfigError(
            f"--constrained: expected a share from 0 to 1, got {flags.constrained:g}", field="--constrained"
        )
    acceptance = None if flags.acceptance is None else Acceptance.parse(flags.acceptance)
    profiled = None if flags.cost is None else _profiled(flags.cost)
    model = find_model(flags.model, _elements(flags, device, profiled))
    if flags.expert_bytes is not None and model.shape.experts is None:
        raise ConfigError(f"--expert-bytes: expected none: {model.name} has no experts", field="--expert-bytes")
    hardware = Hardware(model, device, constrained=flags.constrained, acceptance=acceptance, profiled=profiled)
    if flags.cost is not None:
        return _with_cost(hardware, flags.cost, one_host=flags.one_host)
    if flags.one_host:
        raise ConfigError("--one-host: expected --cost with a file of `tandem profile`", field="--one-host")
    return hardware


def _with_cost(hardware: Hardware, cost: str, *, one_host: bool) -> Hardware:
    """With the step times of a file, and what else a profile has measured. Raises ConfigError."""
    path, profiled = _cost_path(cost), hardware.profiled
    host = read_host(path) if one_host else None
    measured = _costs(cost, hardware.device, is_profile=profiled is not None)
    if profiled is None:
        return replace(hardware, measured=measured, host=host)
    profiled.check(hardware.model, hardware.device)
    masks_s, acceptance = read_mask_s_per_row(path), hardware.acceptance
    notes = list(profiled.notes(hardware.model))
    if acceptance is None and (acceptance := read_acceptance(path)) is not None:
        notes.append(f"speculation is on, because {profiled.file} was measured with it")
    return replace(
        hardware,
        measured=measured,
        host=host,
        mask_s_per_row=hardware.mask_s_per_row if masks_s is None else masks_s,
        acceptance=acceptance,
        notes=tuple(notes),
    )


def _elements(flags: HardwareFlags, device: DeviceSpec, profiled: Profiled | None) -> ElementSizes:
    """As a profile was measured; else as the options say, or the device has them. Raises ConfigError for options that
    contradict a profile."""
    if profiled is None or profiled.engine is None:
        kv = next(size for size in (flags.kv_bytes, flags.element_bytes, device.element_bytes) if size is not None)
        return ElementSizes(flags.element_bytes, kv, device.element_bytes, flags.expert_bytes)
    engine = profiled.engine
    weights, kv, activations = engine_bytes(engine)
    for option, given, measured in (
        ("--element-bytes", flags.element_bytes, weights),
        ("--kv-bytes", flags.kv_bytes, kv),
        ("--expert-bytes", flags.expert_bytes, weights),
    ):
        if given not in (None, measured):
            raise ConfigError(
                f"{option}: expected {measured:g} or none, because {profiled.file} was measured with weights "
                f"{engine.weights}, kv_dtype {engine.kv_dtype} and dtype {engine.dtype}, got {given:g}",
                field=option,
            )
    return ElementSizes(weights, kv, activations)


def load_role_hardware(flags: HardwareFlags, devices: Mapping[Role, str]) -> RoleHardware:
    """With the devices that options of a role name; `flags.device` is that of other roles. Raises ConfigError."""
    if not devices:
        return load_hardware(flags)
    if flags.cost is not None:
        option = f"--{next(iter(devices))}-device"
        raise ConfigError(
            f"{option}: expected none with --cost, because {flags.cost} was measured on one device; leave out one of "
            "them",
            field=option,
        )
    of_roles = (
        replace(flags, device=devices[role], device_option=f"--{role}-device") if role in devices else flags
        for role in Role
    )
    prefill, decode = map(load_hardware, of_roles)
    return decode if prefill.device == decode.device else MixedHardware.pair(prefill, decode)


def _cost_path(cost: str) -> Path:
    return Path(cost.partition(":")[0])


def _profiled(cost: str) -> Profiled | None:
    """None: the file is none of `tandem profile`. Raises ConfigError."""
    path = _cost_path(cost)
    return None if path.suffix == ".csv" else Profiled.read(path)


def _costs(cost: str, device: DeviceSpec, *, is_profile: bool) -> dict[int, CostModel]:
    path, (_, _, what) = _cost_path(cost), cost.partition(":")
    if path.suffix == ".csv":
        model, _, hardware = what.partition("/")
        return read_splitwise(path, model, hardware, device.link.shape())
    costs = read_measured(path) if is_profile else read_distserve(path, what, device.link.shape())
    if not costs:
        raise ConfigError(f"--cost: {path}: expected step times of one TP width or more, got none", field="--cost")
    return costs


def calibration_json(hardware: RoleHardware) -> dict[str, Any]:
    found = None if hardware.is_mixed else hardware.of(Role.DECODE).calibration
    return {} if found is None else {"calibration": found.model_dump(mode="json")}


def describe_costs(hardware: RoleHardware, tp: int, others: Iterable[int] = (), asked: Reach | None = None) -> str:
    """`tp`: of decode workers, beside workers of other widths. `asked`: the most in a step."""
    if not hardware.is_mixed:
        alone, widths = hardware.of(Role.DECODE), dict.fromkeys((tp, *others))
        beyond = [_beyond(alone.measured.get(each), asked) for each in widths]
        notes = [*alone.notes, *dict.fromkeys(note for note in beyond if note is not None)]
        return "; ".join((describe_cost(alone, tp, widths), *notes))
    return "; ".join(f"{role}: {describe_cost(hardware.of(role), tp)}" for role in Role)  # no device is measured


def _beyond(cost: CostModel | None, asked: Reach | None) -> str | None:
    return cost.beyond(asked) if isinstance(cost, FittedCostModel) and asked is not None else None


def reach_of(trace: TrafficTrace, step_tokens: int, running_requests: int) -> Reach:
    """The most in a step of a worker with these limits."""
    longest = int((trace.prompt_tokens + trace.output_tokens).max())
    return Reach(step_tokens, min(running_requests, len(trace)), longest)


def describe_cost(hardware: Hardware, tp: int, others: Iterable[int] = ()) -> str:
    """The source of the step times and their error, for decode workers `tp` wide beside workers of other widths."""
    if (calibration := hardware.calibration) is not None:
        uncorrected = describe_cost(replace(hardware, calibration=None), tp)
        return "; ".join((str(calibration), *calibration.notes_for({tp, *others}), f"without it: {uncorrected}"))
    if (gap := hardware.model.gap) is not None:
        served = replace(hardware, model=replace(hardware.model, gap=None))
        lacks = f"; Tandem's engine does not serve {hardware.model.name}: it lacks {gap}"
        return describe_cost(served, tp) + lacks
    if hardware.constrained:
        masks = f"; {hardware.constrained:.0%} of the rows constrained, {hardware.mask_s_per_row * 1e6:.0f} µs each"
        return describe_cost(replace(hardware, constrained=0.0), tp) + masks
    if (found := hardware.acceptance) is not None:
        drafts = f", a draft of {found.draft_share:.0%} of a step for each" if found.draft_share else ""
        proposals = f"; speculation: up to {found.tokens} tokens, each right with {found.chance:.0%}{drafts}"
        return describe_cost(replace(hardware, acceptance=None), tp) + proposals
    if not hardware.measured:
        device = hardware.device
        fit = "not fitted to measurements"
        if (error := hardware.roofline_error) is not None:
            fit = f"TPOT {100 * error:.0f} % off measurements on average, TTFT not measured"
        return f"roofline of {device.name} (MFU {device.mfu:g}, MBU {device.mbu:g}; {fit})"
    error = hardware.cost(tp).fit_error
    known = "fit error not published" if error is None else f"mean fit error {error:.1%}"
    host = hardware.host
    shared = (
        ""
        if host is None
        else f"; {host.cores} ranks run in parallel, then with steps up to {host.contention.most:g} times as long"
    )
    return f"measured at TP {tp}: {known}{shared}"


def check_writable(option: str, path: Path | None) -> None:
    """Before the work, whose result would be lost. None: nothing is written. Raises InputError."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(f"{option}: expected a file that can be written, got {path}", field=option)


def write_result(option: str, path: Path, text: str) -> None:
    """Writes `text` and a line's end, to a file of mode 0600. An earlier file stays if that fails.

    Raises ConfigError.
    """
    data, is_special = f"{text}\n".encode(), path.is_symlink() or (path.exists() and not path.is_file())
    try:
        if is_special or not os.access(path.absolute().parent, os.W_OK):  # a pipe, or a file in a folder of others
            path.write_bytes(data)
        else:
            replace_file(path, data)
    except OSError as error:
        raise ConfigError(f"{option}: {path}: {error.strerror}", field=option) from None
