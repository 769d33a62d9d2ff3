"""`tandem up`: starts a cluster, prints its addresses when it is ready, and runs it until Ctrl-C."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape

from cluster.certificates import folder_spec
from cluster.cli.commands.running import running_cluster
from cluster.cli.console import console
from cluster.interruptible import run_interruptible
from cluster.keeper.lossy_output import lossy_output
from cluster.spec.changes import SpecSource
from cluster.spec.loader import assignments, load_spec
from cluster.spec.requirements import check_requirements
from tandem.config.auth import key_hash
from tandem.config.observability import LogTarget
from tandem.errors import ConfigError

MIN_API_KEY_CHARS = 8


@dataclass(frozen=True, slots=True)
class UpFlags:
    """The options, in the order of the command line. None: not given."""

    config: Path | None
    model: str | None
    prefill: int | None
    decode: int | None
    prefill_tp: int | None
    decode_tp: int | None
    routers: int | None
    http_port: int | None
    grpc_port: int | None
    admin_port: int | None
    backend: str | None
    redis_url: str | None
    disaggregation: str | None
    name: str | None
    tls: Path | None = None
    autoscale: bool = False
    dry_run: bool = False
    settings: tuple[str, ...] | None = None  # KEY=VALUE; options of their own override them
    host: str | None = None
    served_model_name: str | None = None
    max_model_len: int | None = None
    dtype: str | None = None
    api_key: str | None = None

    def source(self) -> SpecSource:
        """Raises ConfigError."""
        fields = {field: value for field, value in self._fields().items() if value is not None}
        given = assignments(self.settings or ()) | fields
        spec = load_spec(self.config, given)
        if self.dry_run and not spec.autoscaler.enabled:
            raise ConfigError(
                "--dry-run: expected together with --autoscale (or autoscaler.enabled): it makes the autoscaler change "
                "nothing; the cluster itself starts",
                field="--dry-run",
            )
        return SpecSource(spec, given)

    def _fields(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "models.0.source": self.model,
            "models.0.prefill.workers": self.prefill,
            "models.0.decode.workers": self.decode,
            "models.0.prefill.tp": self.prefill_tp,
            "models.0.decode.tp": self.decode_tp,
            "router.replicas": self.routers,
            "models.0.name": self.served_model_name,
            "models.0.engine.max_model_tokens": self.max_model_len,
            "models.0.engine.dtype": self.dtype,
            "router.http_host": self.host,
            "router.grpc_host": self.host,
            "router.http_port": self.http_port,
            "router.grpc_port": self.grpc_port,
            "router.disaggregation": self.disaggregation,
            "control.admin_port": self.admin_port,
            "control.backend": self.backend,
            "redis.mode": "external" if self.redis_url else None,
            "redis.url": self.redis_url,
            "security.auth.api_key_sha256": None if self.api_key is None else _hash_of(self.api_key),
            "autoscaler.enabled": True if self.autoscale else None,
            "autoscaler.dry_run": True if self.dry_run else None,
            **_tls_fields(self.tls),
        }


def _hash_of(api_key: str) -> str:
    """Raises ConfigError."""
    if len(api_key) < MIN_API_KEY_CHARS or not (api_key.isascii() and api_key.isprintable()) or " " in api_key:
        raise ConfigError(
            f"--api-key: expected at least {MIN_API_KEY_CHARS} printable ASCII characters without spaces, as a header "
            "takes them; `openssl rand -hex 32` makes a good key",
            field="--api-key",
        )
    return key_hash(api_key)


def _tls_fields(folder: Path | None) -> dict[str, str]:
    """The files of a `tandem certs` folder, for security.tls and router.tls."""
    if folder is None:
        return {}
    edge = {"cert": f"{folder.absolute()}/edge.pem", "key": f"{folder.absolute()}/edge.key"}
    inside = folder_spec(folder).model_dump()
    return {f"security.tls.{name}": path for name, path in inside.items()} | {
        f"router.tls.{name}": path for name, path in edge.items()
    }


def run_up(flags: UpFlags) -> int:
    check_requirements()  # first: the spec may depend on the Secrets
    source = flags.source()
    with lossy_output():
        return run_interruptible(_up(source))


async def _up(source: SpecSource) -> int:
    spec = source.spec
    screen = console()
    started_s = time.monotonic()

    def progress(text: str) -> None:
        screen.print(f"[dim]{time.monotonic() - started_s:5.1f} s[/]  {escape(text)}")

    async with running_cluster(spec, progress, source) as cluster:
        models = ", ".join(
            f"{model.served_name} ({model.prefill.workers}P:{model.decode.workers}D, "
            f"TP {model.prefill.tp}:{model.decode.tp})"
            for model in spec.models
        )
        screen.print(f"[green]ready[/] in {time.monotonic() - started_s:.1f} s: {models}")
        scheme = "http" if spec.router.tls is None else "https"
        for http_address, grpc_address in cluster.routers:
            screen.print(f"  OpenAI API  {scheme}://{http_address}/v1")
            screen.print(f"  gRPC        {grpc_address}")
        if not cluster.routers:
            join = f"python -m router --join {cluster.admin_address} --cluster {spec.name} --name NAME"
            screen.print(f"  routers     none of its own; to add one: {join}", markup=False, soft_wrap=True)
        elif spec.router.dashboard:
            screen.print(f"  dashboard   {scheme}://{cluster.http_address}/dashboard/")
        screen.print(f"  admin       {cluster.admin_address}   (tandem status)")
        logs = "here" if spec.observability.logs.target is LogTarget.STDOUT else cluster.log_dir
        screen.print(f"  logs        {logs}", markup=False, soft_wrap=True)
        screen.print("Press Ctrl-C to stop the cluster.")
        try:
            code = await cluster.wait_stopped()
        finally:
            screen.print("stopping")
    return code
