"""`tandem doctor`: checks everything that a start needs, one by one. Each failure names its fix."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

from rich.console import Console

from cluster.backends import embedded_redis
from cluster.cli import state_file
from cluster.cli.console import console
from cluster.cli.machine_limits import check_disks, check_open_files, check_shared_memory
from cluster.cli.run_dirs import run_base
from cluster.cli.state_file import ClusterState
from cluster.devices import GpuReport, device_name
from cluster.spec.check_tls import check_tls
from cluster.spec.gpus import GpuProbe, gpu_workers, probe_gpus, resolve_devices
from cluster.spec.kv_paths import kv_paths, used_paths
from cluster.spec.loader import assignments, load_spec
from cluster.spec.redis_probe import check_redis
from cluster.spec.requirements import check_requirements
from cluster.spec.resolve import check_auth, check_memory, check_ports, check_transfer, needed_bytes, resolve_models
from tandem.config.model import Role
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError, PortInUse, TandemError
from tandem.machine_memory import available_bytes
from tandem.text.tokenizer import Tokenizer
from tandem.text.words import plural

_INDENT = "\n    "
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class Unchecked(Exception):
    """No error: the check cannot run because another one failed, which reports it, or what it found only costs time."""


def run_doctor(
    config: Path | None, model: str | None, settings: Sequence[str] = (), probe: GpuProbe = probe_gpus
) -> int:
    screen = console()
    healthy = _passes(screen, "secrets and volumes", _requirements)  # first: the spec may depend on them
    spec = load_spec(config, {**assignments(settings), "models.0.source": model})
    for name, check in CHECKS:
        healthy &= _passes(screen, name, partial(check, spec))
    probe = cache(probe)
    healthy &= _passes(screen, "devices", partial(devices, spec, probe))
    healthy &= _passes(screen, "transfer", partial(transfer, spec, probe))
    return 0 if healthy else 1


def _passes(screen: Console, name: str, check: Callable[[], str]) -> bool:
    try:
        screen.print(f"[green]✓[/] {name}: {check()}", soft_wrap=True)
    except Unchecked as reason:
        screen.print(f"[yellow]–[/] {name}: {reason}", soft_wrap=True)
    except TandemError as error:
        screen.print(f"[red]✗[/] {name}: {error.message}", soft_wrap=True)
        return False
    return True


def _requirements() -> str:
    return ", ".join(check_requirements()) or "none required"


def _ports(spec: ClusterSpec) -> str:
    ports = f"{spec.control.admin_port} is"
    if spec.router.replicas:
        ports = f"{spec.router.http_port}, {spec.router.grpc_port} and {spec.control.admin_port} are"
    try:
        check_ports(spec)
    except PortInUse:
        if (running := _running(spec)) is None:
            raise
        return f"{ports} in use by the running cluster {running.name} (pid {running.pid})"
    return f"{ports} free"


def _running(spec: ClusterSpec) -> ClusterState | None:
    """The cluster of this spec if it runs on this machine on these ports, or is starting."""
    running = state_file.read(spec.name)
    if running is None or not running.admin:
        return running
    router, control = spec.router, spec.control
    wanted = [f"{control.admin_host}:{control.admin_port}"]
    if router.replicas:
        wanted += [f"{router.http_host}:{router.http_port}", f"{router.grpc_host}:{router.grpc_port}"]
    return running if wanted == [running.admin, running.http, running.grpc][: len(wanted)] else None


def _tls(spec: ClusterSpec) -> str:
    soon = check_tls(spec)
    inside = "mutual TLS" if spec.security.tls is not None else "no TLS"
    edge = "TLS" if spec.router.tls is not None else "no TLS"
    return "; ".join([f"between the cluster's processes: {inside}; at the edge: {edge}", *soon])


def _auth(spec: ClusterSpec) -> str:
    check_auth(spec)
    auth = spec.security.auth
    means = [
        name
        for name, given in (("API keys", auth.keys_file or auth.api_key_sha256), ("JWTs", auth.jwt))
        if given is not None
    ]
    return " or ".join(means) if means else "clients are not authenticated"


def _shared_memory(spec: ClusterSpec) -> str:
    try:
        os.close(os.memfd_create("tandem-doctor", os.MFD_ALLOW_SEALING))
    except OSError as error:
        raise ConfigError(
            f"memfd_create failed ({error.strerror}): allow it in the container's seccomp profile"
        ) from None
    return f"sealed memory files work, {check_shared_memory(spec)}"


def _huge_pages(spec: ClusterSpec) -> str:
    slower = "decoding in float32 takes up to a third longer on CPUs"
    try:
        setting = HUGE_PAGES.read_text()
    except OSError:
        raise Unchecked(f"this system has none: {slower}") from None
    if "[never]" in setting:
        raise Unchecked(f"off: {slower} than with madvise in {HUGE_PAGES}")
    return "for weights on CPUs"


def _run_folder(spec: ClusterSpec) -> str:
    return str(run_base(spec.name).parent)


def devices(spec: ClusterSpec, probe: GpuProbe) -> str:
    """The machine's GPUs, and which reads the memory of which."""
    report = probe()
    resolve_devices(spec, lambda: report)
    used = sorted({model.engine_of(role).device for model in spec.models for role in Role})
    build = f"CUDA {report.cuda}" if report.cuda else "no CUDA"
    count = plural(len(report.gpus), "GPU") if report.gpus else "no GPU"
    lines = [
        f"torch {report.torch} ({build}), {count}, {plural(os.cpu_count() or 1, 'CPU')}; workers on {', '.join(used)}"
    ]
    lines += [
        f"{device_name(gpu.ordinal)}  {gpu.name}, {gpu.memory_bytes >> 20} MiB, {gpu.uuid}" for gpu in report.gpus
    ]
    lines += _peer_access(report)
    return _INDENT.join(lines)


def transfer(spec: ClusterSpec, probe: GpuProbe) -> str:
    """How KV will move. Raises ConfigError if workers of this cluster could not exchange it."""
    check_transfer(spec, probe)
    encrypted = spec.transfer.tls is not None or spec.security.tls is not None
    transport = spec.transfer.transport
    said = f"{transport}, {'encrypted' if encrypted else 'not encrypted'} across hosts"
    if not gpu_workers(spec):
        return said
    try:
        used = used_paths(spec, report := probe())
    except ConfigError:
        raise Unchecked(f"{said}; between GPUs not checked: the devices are not as the configuration says") from None
    works, refused = kv_paths(transport, report, used, encrypted=encrypted)
    if refused:
        raise ConfigError(
            _INDENT.join(
                [
                    f"transfer.transport: expected one that works between all workers, got {transport}: set auto, or "
                    "mend what is refused:",
                    *refused,
                    *works,
                ]
            ),
            field="transfer.transport",
        )
    return _INDENT.join([said, *works])


def _peer_access(report: GpuReport) -> Iterator[str]:
    """One row of the matrix for each GPU, if there are several."""
    ordinals = [gpu.ordinal for gpu in report.gpus]
    for reader in ordinals if len(ordinals) > 1 else ():
        seen = [device_name(owner) for owner in ordinals if (reader, owner) in report.peers]
        yield f"{device_name(reader)}  reads the memory of {', '.join(seen) or 'no other GPU'}"


def _redis(spec: ClusterSpec) -> str:
    if spec.redis.mode == "none":
        return "none: routers do not share their prefix index"
    if spec.redis.mode == "embedded":
        return f"embedded, {embedded_redis.binary().name}"
    return f"answers, version {check_redis(spec.redis.url or '')}"


def _model(spec: ClusterSpec) -> str:
    models = resolve_models(spec, progress=lambda what: None, fetch=False)
    from tandem.engine.factory import check_checkpoint  # noqa: PLC0415 (imports torch, which the other checks do not need)

    for model in models:
        Tokenizer.load(model.folder)
        check_checkpoint(model.folder)
    return ", ".join(f"{model.spec.served_name} in {model.folder}" for model in models)


def _memory(spec: ClusterSpec) -> str:
    if (running := _running(spec)) is not None:
        raise Unchecked(f"not checked: the running cluster {running.name} uses it")
    if spec.control.ray_address is not None:
        raise Unchecked("not checked: workers are on the machines of the Ray cluster")
    try:
        models = resolve_models(spec, progress=lambda what: None, fetch=False)
    except TandemError:
        raise Unchecked("not checked: the model is missing") from None
    needed, available = check_memory(spec, models) >> 20, f"{available_bytes() >> 20} MiB available"
    on_host = any(map(needed_bytes, models))
    what = "weights, KV pools and processes" if on_host else "processes (weights and KV pools are on the devices)"
    return f"about {needed} MiB needed for {what}, {available}"


CHECKS: tuple[tuple[str, Callable[[ClusterSpec], str]], ...] = (
    ("ports", _ports),
    ("shared memory", _shared_memory),
    ("huge pages", _huge_pages),
    ("tls", _tls),
    ("callers", _auth),
    ("run folder", _run_folder),
    ("open files", check_open_files),
    ("disks", lambda spec: check_disks()),
    ("redis", _redis),
    ("model", _model),
    ("memory", _memory),
)
