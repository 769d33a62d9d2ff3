"""Whether the roles of a model can exchange KV blocks, as far as the configuration tells."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.session.reshard import check_compatible
from kvtransfer.versions import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from tandem.checkpoint.model_config import ModelConfig
from tandem.checkpoint.rope_config import LongRopeScaling
from tandem.config.model import ModelSpec, Role
from tandem.errors import ConfigError, IncompatiblePools
from tandem.kvcache.layout import cell_width


@dataclass(frozen=True, slots=True)
class _RoleLayout:
    """A role's `kvtransfer.session.reshard.KvShape`, as far as it follows from the configuration."""

    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    tp: int
    model_fingerprint: str = ""
    adapter: str = ""
    joined: bool = False
    packed: bool = False
    protocol: int = PROTOCOL_VERSION
    oldest_protocol: int = OLDEST_PROTOCOL_VERSION


def check_handoff(spec: ModelSpec, config: ModelConfig) -> None:
    """Raises ConfigError naming the field if workers of the two roles cannot exchange KV blocks."""
    prefill, decode = (_role_layout(spec, role, config) for role in Role)
    engines = [spec.engine_of(role) for role in Role]
    has_layer = any(engine.drafter_layers for engine in engines)
    for name in ("vllm", *(("speculation", "speculation_model") if has_layer else ())):
        if getattr(engines[0], name) != getattr(engines[1], name):
            field = max((spec.engine_field(role, name) for role in Role), key=len)  # of a role that has its own
            raise ConfigError(
                f"{field}: expected the same for both roles, because KV depends on it: set it in engine.{name}",
                field=field,
            )
    _check_rotation(spec, config)
    try:
        check_compatible(prefill, decode)
    except IncompatiblePools as error:
        if error.field is None:  # the widths, which the message names
            raise
        raise _handoff_refusal(spec, error.field) from None


def _check_rotation(spec: ModelSpec, config: ModelConfig) -> None:
    """LongRoPE turns keys by the longest context that is served."""
    ropes = (config.traits.rope, config.traits.window_rope)
    originals = {
        each.scaling.original_max_position_tokens
        for each in ropes
        if each is not None and isinstance(each.scaling, LongRopeScaling)
    }
    served = {role: spec.engine_of(role).max_model_tokens or config.max_position_tokens for role in Role}
    for original in originals:
        if len({tokens > original for tokens in served.values()}) > 1:
            field = max((spec.engine_field(role, "max_model_tokens") for role in Role), key=len)
            told = " and ".join(f"{tokens} on {role.value} workers" for role, tokens in served.items())
            raise ConfigError(
                f"{field}: expected more than {original} for both roles, or for neither, because this model turns the "
                f"keys of longer contexts otherwise, got {told}",
                field=field,
            )


def _role_layout(spec: ModelSpec, role: Role, config: ModelConfig) -> _RoleLayout:
    engine = spec.engine_of(role)
    pool = spec.pool(role) if spec.pool(role).workers else spec.decode
    head_dim = cell_width(config.head_dim, engine.pool_dtype)
    is_vllm = engine.kind == "vllm"  # on CPUs, the only device so far
    return _RoleLayout(
        engine.pool_dtype,
        config.layers + engine.drafter_layers,
        config.kv_heads,
        2 * head_dim if is_vllm else head_dim,
        engine.block_tokens,
        pool.tp,
        joined=is_vllm,
        packed=is_vllm,
    )


def _handoff_refusal(spec: ModelSpec, property_name: str) -> ConfigError:
    """`property_name`: of a KV layout. It differs because the roles' engines differ."""
    prefill, decode = (spec.engine_of(role) for role in Role)
    names = {"block_tokens": ("block_tokens",), "joined": ("kind",)}.get(property_name, ("kv_dtype", "dtype"))
    name = next(each for each in names if getattr(prefill, each) != getattr(decode, each))
    ours, theirs = getattr(prefill, name), getattr(decode, name)
    role = Role.PREFILL if getattr(spec.prefill.engine, name) is not None else Role.DECODE
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    given, wanted = (ours, theirs) if role is Role.PREFILL else (theirs, ours)
    pools = "" if name in {"block_tokens", "kind"} else f" (KV pools of {prefill.pool_dtype} and {decode.pool_dtype})"
    field = spec.engine_field(role, name)
    return ConfigError(
        f"{field}: expected {wanted}, as on {other} workers, because handoffs need the same KV layout on both sides, "
        f"got {given}{pools}: remove it, or set the same value for both roles",
        field=field,
    )
