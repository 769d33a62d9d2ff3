"""A model on a device: which widths fit, what a worker's KV pool holds, and what its steps cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from planner.cost import CostModel, RooflineCostModel
from planner.devices import DeviceSpec
from planner.models import PlannedModel
from planner.shared_host import HostCores
from planner.simulator.setup import MAX_MODEL_TOKENS, PoolSetup, Setup
from tandem.config.spec import ClusterSpec, PoolSpec, RouterSpec
from tandem.errors import ConfigError

_ROUNDING = 32  # a request's last block is half empty: in blocks of a 32nd of the mean prompt that is 1.6 %


@dataclass(frozen=True, slots=True)
class Hardware:
    """`measured`: cost models by TP width that replace the roofline where they are given. `host`: the one that all
    workers run on; None: each has its own hardware."""

    model: PlannedModel
    device: DeviceSpec
    measured: Mapping[int, CostModel] = field(default_factory=dict)
    host: HostCores | None = None

    def cost(self, tp: int) -> CostModel:
        """Raises ConfigError when a measured model lacks this width."""
        if self.measured:
            if tp not in self.measured:
                known = ", ".join(map(str, sorted(self.measured)))
                raise ConfigError(f"tp: the cost model was measured at {known}, got {tp}", field="tp")
            return self.measured[tp]
        device = self.device
        return RooflineCostModel(
            self.model.shape, device.shape(), device.link.shape(tp), tp, device.fabric.shape() if tp > 1 else None
        )

    def widths(self) -> list[int]:
        """TP widths that the model can be cut into, fit into a node and leave room for KV."""
        most = self.device.devices_per_node
        known = sorted(self.measured) if self.measured else [1 << power for power in range(most.bit_length())]
        return [tp for tp in known if tp <= most and self.model.fits_tp(tp) and self.kv_tokens(tp) > 0]

    def kv_rank_bytes(self, *widths: int) -> float:
        """What each rank has for KV. The spec gives the ranks of both roles the same, so the narrowest width says."""
        return self.device.memory_bytes * self.device.memory_share - self.model.weights_bytes / min(widths)

    def kv_tokens(self, tp: int, rank_bytes: float | None = None) -> int:
        """What the KV pool of one worker holds; `rank_bytes` None: all there is. Ranks beyond the KV heads keep
        copies."""
        memory = tp * (self.kv_rank_bytes(tp) if rank_bytes is None else rank_bytes)
        copies = max(1, tp / self.model.kv_heads)
        return max(0, int(memory / (self.model.shape.kv_token_bytes * copies)))

    def pool(self, workers: int, tp: int, rank_bytes: float | None = None) -> PoolSetup:
        """Raises ConfigError when the weights leave no room."""
        tokens = self.kv_tokens(tp, rank_bytes)
        if tokens == 0:
            need = self.model.weights_bytes / (self.device.memory_bytes * self.device.memory_share)
            raise ConfigError(
                f"tp: {self.model.name} takes more than {need:.1f} x {self.device.name}: expected more ranks than {tp}",
                field="tp",
            )
        return PoolSetup(workers, tp, self.cost(tp), tokens)


def setup_of_spec(
    spec: ClusterSpec, hardware: Hardware, *, mean_prompt_tokens: float, trace_block: int | None
) -> Setup:
    """The cluster that `spec` describes, on this hardware. Raises ConfigError."""
    if len(spec.models) != 1:
        raise ConfigError(f"models: expected one to simulate, got {len(spec.models)}", field="models")
    model = spec.models[0]
    engine = model.engine

    def pool(name: str, wanted: PoolSpec) -> PoolSetup:
        if not hardware.model.fits_tp(wanted.tp):
            fitting = ", ".join(str(tp) for tp in range(1, hardware.model.heads + 1) if hardware.model.fits_tp(tp))
            raise ConfigError(
                f"{name}.tp: expected one of {fitting} for {hardware.model.name}, got {wanted.tp}", field=f"{name}.tp"
            )
        found = hardware.pool(wanted.workers, wanted.tp)
        own_tokens = None if engine.kv_blocks is None else engine.kv_blocks * engine.block_tokens
        return found if own_tokens is None else replace(found, kv_tokens=own_tokens)

    setup = make_setup(
        hardware,
        pool("prefill", model.prefill) if model.prefill.workers else None,
        pool("decode", model.decode),
        router=spec.router,
        max_running_requests=engine.max_running_requests,
        max_step_tokens=engine.max_step_tokens,
        max_model_tokens=engine.max_model_tokens or MAX_MODEL_TOKENS,
        block_tokens=simulated_block_tokens(engine.block_tokens, mean_prompt_tokens, trace_block),
    )
    return replace(setup, autoscaler=spec.autoscaler)


def make_setup(
    hardware: Hardware,
    prefill: PoolSetup | None,
    decode: PoolSetup,
    *,
    router: RouterSpec,
    max_running_requests: int,
    max_step_tokens: int,
    block_tokens: int,
    max_model_tokens: int = MAX_MODEL_TOKENS,
) -> Setup:
    shape = hardware.model.shape
    return Setup(
        prefill, decode, shape.layers, shape.kv_token_bytes, router, max_running_requests, max_step_tokens,
        max_model_tokens, block_tokens, host=hardware.host,
    )  # fmt: skip


def simulated_block_tokens(engine_block: int, mean_prompt_tokens: float, trace_block: int | None) -> int:
    """Bookkeeping in larger blocks than the engine's, where prompts are so long that the difference does not show."""
    size = engine_block
    most = mean_prompt_tokens / _ROUNDING
    while size * 2 <= most:
        size *= 2
    if trace_block is not None:
        while size > 1 and size % trace_block and trace_block % size:
            size //= 2
    return size
