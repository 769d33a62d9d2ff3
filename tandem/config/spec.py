"""The schema of a whole cluster: its control plane, and the rules between sections, which have files of their own here.

YAML file, environment, command line and Helm values share it. A spec is frozen: `cluster/spec/loader.py` reads and
validates it once, resolves it before anything is built, and nothing changes it afterwards. The defaults are what
`tandem up` runs.
"""

from __future__ import annotations

from itertools import product
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tandem.config.auth import STDOUT, is_loopback
from tandem.config.autoscaler import AutoscalerSpec
from tandem.config.engine import EngineSpec
from tandem.config.frozen import Frozen, Port
from tandem.config.model import (
    ModelSpec,
    Role,
)
from tandem.config.observability import LogLevel, LogLevels, LogTarget, ObservabilitySpec
from tandem.config.router import RouterSpec
from tandem.config.security import SecuritySpec
from tandem.config.transfer import TransferSpec

EMBEDDED_REDIS_BYTES = 256 << 20  # at most; then it evicts


class RedisSpec(Frozen):
    mode: Literal["embedded", "external", "none"] = Field(
        "embedded", description="embedded: start a Valkey server; external: use the one at url; none: run without."
    )
    url: str | None = Field(
        None,
        description="external: redis://, rediss:// (TLS; ?ssl_ca_certs=FILE) or unix:// URL; redis+sentinel://HOST:PORT,"
        "HOST:PORT/SERVICE or redis+cluster://HOST:PORT,HOST:PORT.",
    )

    @model_validator(mode="after")
    def _url_matches_mode(self) -> RedisSpec:
        if (self.mode == "external") != (self.url is not None):
            raise ValueError("redis.url: expected if and only if redis.mode is 'external'")
        return self


class ControlSpec(Frozen):
    backend: Literal["ray", "subprocess"] = Field(
        "ray", description="ray: place workers on a Ray cluster; subprocess: start them on this machine."
    )
    ray_address: str | None = Field(
        None, description="Address of a running Ray cluster; unset: start one on this machine."
    )
    devices: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, max_length=64)] | None = Field(
        None,
        description="Ordinals of this machine's GPUs that workers may use, as CUDA_VISIBLE_DEVICES leaves them; unset: "
        "all. Not with ray_address: there each node has its own CUDA_VISIBLE_DEVICES.",
    )
    admin_host: str = Field("127.0.0.1", description="Address of the controller's admin port.")
    admin_port: Port = Field(50052, description="Admin API for `tandem status` and similar commands; 0: any free port.")
    advertised_address: Annotated[str, Field(pattern=r"^.+:[0-9]{1,5}$")] | None = Field(
        None,
        description="Address (HOST:PORT) at which workers and routers find the controller, if not at the admin port: "
        "one that stays when the controller moves to another machine.",
    )
    start_timeout_s: Annotated[float, Field(gt=0)] = Field(
        120.0, description="Time within which a worker must be ready."
    )
    drain_timeout_s: Annotated[float, Field(gt=0)] = Field(
        600.0,
        description="A worker that is removed or restarted waits this long for its requests to end or move. "
        "The remaining requests then migrate, as after the loss of a worker.",
    )
    when_stopped: Literal["end", "leave"] = Field(
        "end",
        description="What a signal to `tandem up` means for workers. end: they end too. leave: they serve on, with "
        "routers that joined, and the next controller takes them over. leave needs ray_address: a local Ray ends with "
        "tandem up.",
    )

    @model_validator(mode="after")
    def _workers_can_be_left(self) -> ControlSpec:
        if self.when_stopped == "leave" and (self.backend != "ray" or self.ray_address is None):
            raise ValueError(
                "control.when_stopped: expected end without control.ray_address: workers end with `tandem up` then, "
                "so it cannot leave them"
            )
        return self

    @model_validator(mode="after")
    def _devices_are_of_this_machine(self) -> ControlSpec:
        if self.devices is None:
            return self
        if len(set(self.devices)) != len(self.devices):
            raise ValueError(f"control.devices: expected different ordinals, got {list(self.devices)}")
        if self.ray_address is not None:
            raise ValueError(
                "control.devices: expected none with control.ray_address: set CUDA_VISIBLE_DEVICES for `ray start`"
            )
        return self


def _check_ray_device(model: ModelSpec, role: Role, engine: EngineSpec) -> None:
    """Ray chooses the GPUs. It may give two shares of one GPU to one worker, whose ranks need different ones."""
    if ":" in engine.device:
        raise ValueError(
            f"{model.engine_field(role, 'device')}: expected cuda with control.backend ray, which chooses the GPU, got "
            f"{engine.device}: use cuda, or control.backend subprocess"
        )
    if engine.on_gpu and model.pool(role).tp > 1 and engine.device_share <= 0.5:
        raise ValueError(
            f"{model.engine_field(role, 'device_share')}: expected more than 0.5 for workers of {model.pool(role).tp} "
            f"ranks ({role}.tp) with control.backend ray, which may place two smaller shares on one GPU, got "
            f"{engine.device_share:g}: raise it, or use control.backend subprocess or tp 1"
        )


class ClusterSpec(Frozen):
    """A whole cluster."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,40}$")] = Field("tandem", description="Name of the cluster.")
    models: Annotated[tuple[ModelSpec, ...], Field(min_length=1)] = (ModelSpec(),)
    transfer: TransferSpec = TransferSpec()
    router: RouterSpec = RouterSpec()
    redis: RedisSpec = RedisSpec()
    control: ControlSpec = ControlSpec()
    autoscaler: AutoscalerSpec = AutoscalerSpec()
    observability: ObservabilitySpec = ObservabilitySpec()
    security: SecuritySpec = SecuritySpec()
    log_level: LogLevel = Field("info", description="Log level of all processes.")
    log_levels: LogLevels = LogLevels()

    def log_level_of(self, part: Literal["controller", "router", "worker"]) -> LogLevel:
        own: LogLevel | None = getattr(self.log_levels, part)
        return own or self.log_level

    @property
    def of_routers(self) -> tuple[RouterSpec, LogLevel]:
        """What routers that run can change to."""
        return self.router, self.log_level_of("router")

    @model_validator(mode="after")
    def _names_differ(self) -> ClusterSpec:
        names = [name for model in self.models for name in model.names]
        if len(set(names)) != len(names):
            raise ValueError(f"models: expected different names of models and adapters, got {names}")
        return self

    @model_validator(mode="after")
    def _devices_can_be_assigned(self) -> ClusterSpec:
        pools = [(model, role, model.engine_of(role)) for model in self.models for role in Role]
        if self.control.devices is not None and not any(engine.on_gpu for _, _, engine in pools):
            raise ValueError("control.devices: expected together with engine.device cuda; all workers run on the CPU")
        if self.control.backend == "ray":
            for model, role, engine in pools:
                _check_ray_device(model, role, engine)
        return self

    @model_validator(mode="after")
    def _nodes_have_groups(self) -> ClusterSpec:
        for model, role in product(self.models, Role):
            on_nodes = self.control.backend == "ray" and self.control.ray_address is not None
            if model.pool(role).node_groups and not on_nodes:
                raise ValueError(
                    f"models: {model.served_name}: {role}.node_groups: expected none without control.backend ray and "
                    "control.ray_address: all workers are on this machine"
                )
        return self

    @model_validator(mode="after")
    def _tls_covers_all(self) -> ClusterSpec:
        if self.security.tls is None:
            return self
        if not self.transfer.can_encrypt:
            raise ValueError(
                f"transfer.transport: {self.transfer.transport} cannot be encrypted; with security.tls, expected auto, "
                "mapped or tcp"
            )
        scheme = (self.redis.url or "unix:").partition(":")[0]
        if not scheme.startswith(("rediss", "unix")):
            raise ValueError(
                f"redis.url: with security.tls, expected rediss:// (or rediss+sentinel://, rediss+cluster://) or "
                f"unix://, got {scheme}://"
            )
        return self

    @model_validator(mode="after")
    def _autoscaler_has_objectives(self) -> ClusterSpec:
        classes = [each for each in self.router.classes if not each.batch]
        if self.autoscaler.enabled and not any(each.ttft_slo_s or each.tpot_slo_s for each in classes):
            raise ValueError(
                "autoscaler.enabled: expected a class in router.classes with batch false and with ttft_slo_s or "
                "tpot_slo_s, the objectives of the autoscaler"
            )
        return self

    @model_validator(mode="after")
    def _internal_ports_are_closed(self) -> ClusterSpec:
        if self.security.tls is not None or self.security.allow_plaintext:
            return self
        hosts = {"control.admin_host": self.control.admin_host, "transfer.bind_host": self.transfer.bind_host}
        for field, host in hosts.items():
            if not is_loopback(host):
                raise ValueError(
                    f"{field}: {host} is not loopback, and internal ports are not encrypted: set security.tls "
                    "(`tandem certs init` makes the files), or `security.allow_plaintext: true` in a network where you "
                    "trust everyone"
                )
        return self

    @model_validator(mode="after")
    def _audit_log_reaches_stdout(self) -> ClusterSpec:
        if self.security.auth.audit_log == STDOUT and self.observability.logs.target is not LogTarget.STDOUT:
            raise ValueError(
                "security.auth.audit_log: expected a file, or stdout together with `observability.logs.target: "
                "stdout`: otherwise the standard output of a router is a file of bounded size"
            )
        return self

    @model_validator(mode="after")
    def _strangers_are_asked(self) -> ClusterSpec:
        router = self.router
        self.security.auth.check_hosts({"router.http_host": router.http_host, "router.grpc_host": router.grpc_host})
        return self
