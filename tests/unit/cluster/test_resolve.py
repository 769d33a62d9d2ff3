"""What can be known to be wrong is refused before anything is started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.devices import Gpu, GpuReport
from cluster.spec import resolve as resolve_module
from cluster.spec.kv_layouts import check_handoff
from cluster.spec.resolve import (
    ACTOR_BYTES,
    RAY_BYTES,
    ROUTER_BYTES,
    ResolvedModel,
    check_memory,
    check_ports,
    free_ports,
    needed_bytes,
    port_is_free,
    resolve,
    resolve_models,
)
from tandem.checkpoint.rope_config import LongRopeScaling
from tandem.config.model import ModelSpec
from tandem.config.spec import ClusterSpec
from tandem.config.speculation_heads import HEAD_FILES
from tandem.errors import CheckpointError, ConfigError, InsufficientMemory, PortInUse
from tandem.kvcache.layout import DTYPE_BYTES
from tandem.testing.models import write_tiny_llama

MakeSpec = Callable[..., ClusterSpec]
NAMED_WITHIN_S = 10.0


@pytest.fixture
def make_spec(tmp_path: Path) -> MakeSpec:
    folder = write_tiny_llama(tmp_path / "tiny", heads=4, kv_heads=2)
    http, grpc, admin = free_ports("127.0.0.1", "127.0.0.1", "127.0.0.1")

    def make(engine: Any = None, prefill: Any = None, source: str | None = None, **sections: Any) -> ClusterSpec:
        model = {"source": source or str(folder), "engine": engine or {"kv_blocks": 32}, "prefill": prefill or {}}
        settings = {
            "models": [model],
            "router": {"http_port": http, "grpc_port": grpc},
            "control": {"admin_port": admin},
        }
        return ClusterSpec.model_validate(settings | sections)

    return make


def quiet(what: str) -> None:
    """Progress nobody looks at."""


def test_a_good_spec_resolves(make_spec: MakeSpec) -> None:
    cluster = resolve(make_spec(), quiet)
    assert cluster.models[0].config.kv_heads == 2
    assert cluster.models[0].max_model_tokens == 2048


def test_a_port_in_use_names_port_and_flag(make_spec: MakeSpec) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        with pytest.raises(PortInUse, match=f"{port}.*--http-port"):
            check_ports(make_spec(router={"http_port": port}))


FOREIGN = "198.51.100.7"  # of a network for documents alone


@pytest.mark.parametrize(
    ("field", "host"),
    [
        ("transfer.bind_host", FOREIGN),
        ("transfer.bind_host", "2001:db8::7"),
        ("transfer.bind_host", "no-such-host.invalid"),
        ("control.admin_host", FOREIGN),
        ("router.http_host", FOREIGN),
        ("router.grpc_host", FOREIGN),
    ],
)
def test_an_address_that_no_interface_has_is_named_with_those_there_are(
    make_spec: MakeSpec, field: str, host: str
) -> None:
    section, name = field.split(".")
    keys = {"auth": {"keys_file": "absent"}, "allow_plaintext": True}
    spec = make_spec(**{section: {name: host}, "security": keys})
    with pytest.raises(ConfigError, match=rf"{field}: expected an address .*127\.0\.0\.1.*, got {host}") as raised:
        resolve(spec, quiet)
    assert raised.value.field == field


@pytest.mark.parametrize("command", ["up", "doctor"])
@pytest.mark.acceptance(32, here="an address that no interface has, a port in use")
def test_a_wrong_interface_and_a_taken_port_are_named_within_ten_seconds(command: str, tmp_path: Path) -> None:
    """Before the model, which is not there, is looked for."""
    started_s = time.monotonic()
    subprocess.run([sys.executable, "-m", "cluster", "--version"], capture_output=True, check=True)
    within_s = max(NAMED_WITHIN_S, 10 * (time.monotonic() - started_s))  # other tests may keep the machine busy
    with socket.create_server(("127.0.0.1", 0)) as held:
        for field, value in {"transfer.bind_host": FOREIGN, "router.http_port": held.getsockname()[1]}.items():
            settings = {field: value, "security.allow_plaintext": True, "models.0.source": str(tmp_path / "absent")}
            started_s = time.monotonic()
            with subprocess.Popen(
                [sys.executable, "-m", "cluster", command, *(f"--set={key}={it}" for key, it in settings.items())],
                env=os.environ | {"XDG_STATE_HOME": str(tmp_path), "PYTHONUNBUFFERED": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            ) as process:
                named = next(line for line in process.stdout or () if f"{field}: " in line)
                assert time.monotonic() - started_s < within_s
                assert str(value) in named
                process.kill()  # the doctor would go on


def test_ports_must_differ(make_spec: MakeSpec) -> None:
    (port,) = free_ports("127.0.0.1")
    with pytest.raises(ConfigError, match="different"):
        check_ports(make_spec(router={"http_port": port, "grpc_port": port}))


def test_a_width_that_does_not_fit_names_those_that_do(make_spec: MakeSpec) -> None:
    with pytest.raises(ConfigError, match=r"prefill\.tp.*1, 2.*4"):
        resolve(make_spec(prefill={"tp": 3}), quiet)


def test_memory_that_is_not_there_is_refused_with_numbers(make_spec: MakeSpec) -> None:
    with pytest.raises(InsufficientMemory, match="MiB are needed"):
        resolve(make_spec(engine={"kv_memory_bytes": 1 << 50}), quiet)


def test_what_is_no_worker_counts_too(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def needed(**more: Any) -> int:
        spec = make_spec(control={"backend": "subprocess"} | more.pop("control", {}), **more)
        return check_memory(spec, resolve_models(spec, quiet, fetch=False))

    alone = needed()
    index = 100 << 20
    assert needed(router={"replicas": 3, "index_memory_bytes": index}) - alone == (
        3 * (ROUTER_BYTES + index) - ROUTER_BYTES - (64 << 20)
    )
    assert alone - needed(redis={"mode": "none"}) == 256 << 20
    assert needed(control={"backend": "ray"}) - alone == RAY_BYTES + 3 * ACTOR_BYTES
    monkeypatch.setattr(resolve_module, "available_bytes", lambda: alone)
    assert needed() == alone
    monkeypatch.setattr(resolve_module, "available_bytes", lambda: alone - 1)
    with pytest.raises(InsufficientMemory, match=r"kv_memory_bytes or the number of workers$"):
        needed()


def test_without_weights_on_the_host_routers_are_named(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(engine={"device": "cuda"}, router={"replicas": 2})
    monkeypatch.setattr(resolve_module, "available_bytes", lambda: 0)
    with pytest.raises(InsufficientMemory, match=r"^router\.replicas: .* for processes .* lower router\.replicas or "):
        check_memory(spec, resolve_models(spec, quiet, fetch=False))


@pytest.mark.parametrize("unset", [{"max_running_requests": 8}, {"kv_memory_bytes": None}])
def test_a_pool_on_a_cpu_that_is_not_configured_counts_with_its_default(make_spec: MakeSpec, unset: Any) -> None:
    counted = [
        needed_bytes(resolve(make_spec(engine=engine), quiet).models[0])
        for engine in (unset, {"kv_memory_bytes": 512 << 20})
    ]
    assert counted[0] == counted[1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_host_tiers_count_beside_pools_and_alone_where_those_are_in_gpu_memory(
    make_spec: MakeSpec, device: str
) -> None:
    with pytest.raises(InsufficientMemory, match=r"lower .* or engine\.host_kv_memory_bytes"):
        resolve(make_spec(engine={"host_kv_memory_bytes": 1 << 50, "device": device}), quiet)


@pytest.mark.parametrize(
    ("device", "vllm", "each"),
    [
        ("cpu", {}, 8 + 32),
        ("cpu", {"max_loras": 40}, 40 + 40),
        ("cpu", {"max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": 64}, 4 * (2 + 3)),
    ],
)
def test_adapters_count_as_far_as_workers_keep_them(
    make_spec: MakeSpec, device: str, vllm: dict[str, int], each: int
) -> None:
    """`each`: adapters of rank 16 in the host's memory, for either worker."""

    def model(more: dict[str, Any]) -> ResolvedModel:
        engine = {"kind": "vllm", "device": device, "block_tokens": 32, "kv_memory_bytes": 1 << 20, "vllm": more}
        [found] = resolve_models(make_spec(engine=engine), quiet, fetch=False)
        return found

    config = model({}).config
    hidden, keys, feed_forward = config.hidden_size, config.kv_heads * config.head_dim, config.intermediate_size
    elements = 16 * config.layers * (2 * (hidden + hidden) + 2 * (hidden + keys) + 3 * (hidden + feed_forward))
    counted = needed_bytes(model({"enable_lora": True, **vllm})) - needed_bytes(model({}))
    assert counted == 2 * each * elements * DTYPE_BYTES[model({}).spec.engine.dtype]


def test_what_is_lowered_for_adapters_is_named(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(engine={"kind": "vllm", "block_tokens": 32, "vllm": {"enable_lora": True}})
    monkeypatch.setattr(resolve_module, "available_bytes", lambda: 0)
    with pytest.raises(InsufficientMemory, match=r"lower engine\.kv_memory_bytes or engine\.vllm\.max_cpu_loras or "):
        check_memory(spec, resolve_models(spec, quiet, fetch=False))


def test_a_context_beyond_the_models_is_refused(make_spec: MakeSpec) -> None:
    with pytest.raises(ConfigError, match="2048"):
        resolve(make_spec(engine={"max_model_tokens": 4096}), quiet)


def test_an_unknown_model_says_how_to_get_one(make_spec: MakeSpec) -> None:
    with pytest.raises(ConfigError, match="tandem pull"):
        resolve(make_spec(source="nobody/knows-it"), quiet)


def test_a_truncated_checkpoint_names_the_file(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec = make_spec()
    (tmp_path / "tiny" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        resolve(spec, quiet)


def test_a_redis_that_does_not_answer_is_named(make_spec: MakeSpec) -> None:
    (port,) = free_ports("127.0.0.1")
    redis = {"mode": "external", "url": f"redis://127.0.0.1:{port}"}
    with pytest.raises(ConfigError, match=r"redis\.url"):
        resolve(make_spec(redis=redis), quiet)


def two_gpus() -> GpuReport:
    found = (Gpu(ordinal=each, name="H200", memory_bytes=139 << 30, uuid=f"GPU-{each}") for each in range(2))
    return GpuReport(torch="2.13.0", cuda="12.8", gpus=tuple(found))


def test_workers_on_gpus_resolve_to_those_of_this_machine(make_spec: MakeSpec) -> None:
    assert resolve(make_spec(engine={"device": "cuda"}), quiet, two_gpus).devices == (0, 1)
    with pytest.raises(ConfigError, match="needs a share of 1 GPU"):
        resolve(make_spec(engine={"device": "cuda"}, prefill={"workers": 2}), quiet, two_gpus)


@pytest.mark.parametrize(
    ("transport", "engine", "text"),
    [
        ("nccl", {"device": "cuda"}, "nccl: torch has no NCCL"),
        ("nccl", {"kv_blocks": 32}, r"nccl: expected all workers on GPUs, got engine\.device cpu: set it to cuda"),
        ("nixl", {"kv_blocks": 32}, "nixl: nixl is not installed"),
    ],
)
def test_a_transport_that_cannot_work_here_is_refused_at_start(
    make_spec: MakeSpec, transport: str, engine: dict[str, Any], text: str
) -> None:
    missing = {"nccl": "torch has no NCCL", "nixl": "nixl is not installed"}

    def probe() -> GpuReport:
        return two_gpus().model_copy(update={"missing": missing})

    with pytest.raises(ConfigError, match=rf"^transfer\.transport: {text}") as refused:
        resolve(make_spec(engine=engine, transfer={"transport": transport}), quiet, probe)
    assert refused.value.field == "transfer.transport"
    assert resolve(make_spec(engine={"device": "cuda"}, transfer={"transport": "auto"}), quiet, probe)


@pytest.mark.parametrize("kind", sorted(HEAD_FILES))
def test_a_folder_without_heads_is_refused_before_anything_starts(
    make_spec: MakeSpec, tmp_path: Path, kind: str
) -> None:
    def resolved() -> None:
        spec = make_spec()
        engine = {"speculation": kind, "speculation_model": str(tmp_path / "heads")}
        changed = ModelSpec.model_validate(spec.models[0].model_dump() | {"engine": engine})
        resolve(spec.model_copy(update={"models": (changed,)}), quiet)

    with pytest.raises(ConfigError, match=f"engine.speculation_model: .*without {HEAD_FILES[kind]} and config.json"):
        resolved()
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / HEAD_FILES[kind]).touch()
    with pytest.raises(ConfigError, match=r"without config\.json"):
        resolved()
    (tmp_path / "heads" / "config.json").touch()
    resolved()


@pytest.mark.parametrize(
    ("roles", "field", "text"),
    [
        ({"prefill": {"engine": {"kv_dtype": "int8"}}}, "prefill.engine.kv_dtype", "expected auto, as on decode"),
        ({"decode": {"engine": {"kv_dtype": "int8"}}}, "decode.engine.kv_dtype", "expected auto, as on prefill"),
        ({"prefill": {"engine": {"dtype": "bfloat16"}}}, "prefill.engine.dtype", "float32.*got bfloat16.*KV pools of"),
        ({"decode": {"engine": {"block_tokens": 32}}}, "decode.engine.block_tokens", "expected 16, .*got 32: remove"),
        (
            {"engine": {"block_tokens": 32}, "prefill": {"engine": {"kind": "vllm"}}},
            "prefill.engine.kind",
            "expected tandem, .*got vllm: remove",
        ),
        (
            {"decode": {"engine": {"speculation": "eagle3", "speculation_model": "head"}}},
            "decode.engine.speculation",
            "expected the same for both roles, because KV depends on it: set it in engine.speculation",
        ),
        (
            {"engine": {"kind": "vllm", "block_tokens": 32}, "decode": {"engine": {"vllm": {"quantization": "x"}}}},
            "decode.engine.vllm",
            "expected the same for both roles",
        ),
    ],
)
def test_roles_whose_kv_pools_differ_are_refused_by_the_field(
    make_spec: MakeSpec, roles: dict[str, Any], field: str, text: str
) -> None:
    spec = make_spec()
    (model,) = spec.models
    changed = ModelSpec.model_validate(model.model_dump() | roles)
    with pytest.raises(ConfigError, match=text) as refused:
        resolve(spec.model_copy(update={"models": (changed,)}), quiet)
    assert refused.value.field == field


def test_roles_whose_contexts_turn_keys_differently_are_refused(make_spec: MakeSpec) -> None:
    """LongRoPE has other factors for contexts beyond the original one, and a handoff does not see them."""
    (model,) = resolve(make_spec(), quiet).models
    scaling = LongRopeScaling((1.0,), (2.0,), 512, 1.0)
    rope = replace(model.config.traits.rope, scaling=scaling)
    config = replace(model.config, traits=replace(model.config.traits, rope=rope))

    def of(prefill: int | None, decode: int | None) -> ModelSpec:
        roles = {
            "prefill": {"engine": {"max_model_tokens": prefill}},
            "decode": {"engine": {"max_model_tokens": decode}},
        }
        return ModelSpec.model_validate(model.spec.model_dump() | roles)

    for alike in ((None, None), (256, 512), (1024, None)):
        check_handoff(of(*alike), config)
    with pytest.raises(ConfigError, match="more than 512 for both roles, or for neither") as refused:
        check_handoff(of(None, 512), config)
    assert refused.value.field == "decode.engine.max_model_tokens"
    check_handoff(of(None, 512), model.config)


def test_roles_may_differ_in_what_a_handoff_does_not_see(make_spec: MakeSpec) -> None:
    prefill = {"engine": {"max_step_tokens": 2048, "kv_blocks": 64, "max_model_tokens": 1024}}
    (model,) = resolve(make_spec(prefill=prefill), quiet).models
    assert model.max_model_tokens == 1024  # what both roles can hold
    with pytest.raises(ConfigError, match=r"^prefill\.engine\.max_model_tokens: expected at most 2048"):
        resolve(make_spec(prefill={"engine": {"max_model_tokens": 4096}}), quiet)


def test_each_role_needs_the_memory_of_its_own_engine(make_spec: MakeSpec) -> None:
    with pytest.raises(InsufficientMemory, match="MiB are needed"):
        resolve(make_spec(prefill={"engine": {"host_kv_memory_bytes": 1 << 50}}), quiet)


def refusal(make_spec: MakeSpec, **tls: str) -> str:
    with pytest.raises(ConfigError) as refused:
        resolve(make_spec(transfer={"tls": tls}), quiet)
    assert "\n" not in refused.value.message
    assert refused.value.message.startswith(f"{refused.value.field}: ")
    return refused.value.field or ""


def test_tls_files_that_cannot_work_are_named(make_spec: MakeSpec, authority: Any, tmp_path: Path) -> None:
    ours, theirs = authority("ours"), authority("theirs")
    good, other = ours.issue("worker"), theirs.issue("worker")
    noise = tmp_path / "noise"
    noise.write_text("no certificate")
    resolve(make_spec(transfer={"tls": good}), quiet)
    for name in ("cert", "key", "ca"):
        assert refusal(make_spec, **(good | {name: str(tmp_path / "nowhere")})) == f"transfer.tls.{name}"
        assert refusal(make_spec, **(good | {name: str(noise)})) == f"transfer.tls.{name}"
    assert refusal(make_spec, **(good | {"key": other["key"]})) == "transfer.tls.key"
    assert refusal(make_spec, **(good | {"ca": other["ca"]})) == "transfer.tls.cert"
    assert refusal(make_spec, **ours.issue("late", expired=True)) == "transfer.tls.cert"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_free_ports_are_none_that_the_system_gives_to_connections(host: str) -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = free_ports(host, host, host)
    assert len(set(ports)) == 3
    assert max(ports) < lowest
    assert all(port_is_free(host, port) for port in ports)


def test_a_checkpoint_without_a_tokenizer_is_refused_with_the_remedy(make_spec: MakeSpec, tmp_path: Path) -> None:
    (tmp_path / "tiny" / "tokenizer.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json: expected a tokenizer file, found none; .*save_pretrained"
    ):
        resolve(make_spec(), quiet)


@pytest.mark.parametrize("setting", ["tool_parser", "reasoning_parser"])
def test_an_unknown_parser_is_refused_with_the_names(make_spec: MakeSpec, tmp_path: Path, setting: str) -> None:
    model = {"source": str(tmp_path / "tiny"), "engine": {"kv_blocks": 32}, setting: "own"}
    spec = make_spec().model_copy(update={"models": (ModelSpec.model_validate(model),)})
    with pytest.raises(ConfigError, match=rf"{setting}: expected one of .*, got 'own'"):
        resolve(spec, quiet)
