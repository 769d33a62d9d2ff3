"""The drafter of a rank and the proposer of its leader, as configured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from tandem.checkpoint.json_fields import read_json_object
from tandem.checkpoint.model_config import ModelConfig
from tandem.checkpoint.model_store import resolve
from tandem.config.engine import EngineSpec
from tandem.config.speculation_heads import HEAD_FILES, head_folder
from tandem.engine.attention.kernels import choose_kernels, choose_matrices
from tandem.engine.attention.paged_kernels import PagedPath, choose_paged_path
from tandem.engine.attention.step_attention import attention_of
from tandem.engine.device_memory import insufficient_memory
from tandem.engine.drafts import eagle
from tandem.engine.drafts.drafter import AttendOf, Chain, Drafter
from tandem.engine.drafts.eagle import Eagle, EagleLayer
from tandem.engine.drafts.early_exit import ExitHead
from tandem.engine.drafts.medusa import Medusa
from tandem.engine.drafts.parts import Parts
from tandem.engine.kv_pool import DTYPES, KvPool, block_layout
from tandem.errors import ConfigError
from tandem.kvcache.layout import KvPoolLayout
from tandem.model.decoder import Decoder
from tandem.model.matrices import MatrixMaker
from tandem.model.parallel import TensorParallel
from tandem.model.rope import Rope
from tandem.model.weights import load_model
from tandem.native.library import Kernels
from tandem.speculation.drafting import DraftModel, EarlyExit, Heads, States
from tandem.speculation.proposers import Proposer
from tandem.speculation.speculator import Speculator
from tandem.speculation.text_proposers import Lookahead, Lookup


@dataclass(frozen=True, slots=True)
class Drafts:
    """How a rank drafts. `block`: a block of the draft model's KV, beside each of the model's. `needs_hidden`: of each
    step, so that none may run from a recording."""

    proposer: Proposer
    make: Callable[[KvPool], Drafter] | None = None
    block: KvPoolLayout | None = None
    needs_hidden: bool = False

    @property
    def block_bytes(self) -> int:
        return 0 if self.block is None else self.block.block_bytes

    def speculator(self, spec: EngineSpec) -> Speculator:
        return Speculator(
            spec.speculation_tokens,
            self.proposer,
            rests=spec.speculation == "auto",
            adaptive=spec.speculation_adaptive,
            branches=spec.speculation_branches,
        )


@dataclass(frozen=True, slots=True)
class Target:
    """The model that verifies, and how it computes."""

    model_dir: Path
    model: Decoder
    tp: TensorParallel
    matrix: MatrixMaker
    kernels: Kernels | None
    paged: PagedPath | None
    max_tokens: int

    def attend_of(self, pool: KvPool) -> AttendOf:
        return partial(attention_of, self.kernels, self.paged, pool, self.model.attention)


def choose_drafts(spec: EngineSpec, target: Target) -> Drafts | None:
    """Raises ConfigError and CheckpointError."""
    match spec.speculation:
        case "none":
            return None
        case "lookup" | "auto":
            return Drafts(Lookup())
        case "lookahead":
            return Drafts(Lookahead())
        case "draft":
            return _draft_model(spec, target)
        case "early_exit":
            return _early_exit(spec, target)
        case "eagle3":
            return _eagle(spec, target)
        case "medusa":
            with _parts(spec, target) as parts:
                heads = Medusa.load(parts)
            return Drafts(Heads("medusa", len(heads.heads)), lambda _: heads, needs_hidden=True)


def _parts(spec: EngineSpec, target: Target) -> AbstractContextManager[Parts]:
    device, dtype = torch.device(spec.device), DTYPES[spec.dtype]
    return Parts.open(head_folder(spec), HEAD_FILES[spec.speculation], target.model, target.matrix, device, dtype)


def _early_exit(spec: EngineSpec, target: Target) -> Drafts:
    layers, head = spec.speculation_layers, None
    if spec.speculation_model is not None:
        with _parts(spec, target) as parts:
            layers, head = layers or parts.config.positive_int("exit_layer"), ExitHead.load(parts, layers)
    assert layers is not None  # EngineSpec says so
    if layers >= len(target.model.layers):
        raise ConfigError(
            f"engine.speculation_layers: expected fewer than the model's {len(target.model.layers)} layers, got "
            f"{layers}",
            field="engine.speculation_layers",
        )
    device = torch.device(spec.device)

    def make(pool: KvPool) -> Drafter:
        return Chain(target.model, target.attend_of(pool), device, layers=layers, head=head)

    return Drafts(EarlyExit(), make)


def _eagle(spec: EngineSpec, target: Target) -> Drafts:
    """Its ranks divide it among them like the model's layers."""
    device, dtype, folder = torch.device(spec.device), DTYPES[spec.dtype], head_folder(spec)
    if (why := eagle.has_none(target.model.config)) is not None:
        raise ConfigError(f"engine.speculation: {why}", field="engine.speculation")
    with insufficient_memory("engine.speculation_model", "the EAGLE-3 head does not fit beside the model's weights"):
        layer, config = EagleLayer.load(folder, target.model, target.tp, target.matrix, device, dtype)
    rope = Rope(config.traits.rope, target.max_tokens, device, dtype)
    terms = replace(
        target.model.attention, scale=config.head_dim**-0.5, windows=(None,) * (len(target.model.layers) + 1)
    )

    def make(pool: KvPool) -> Drafter:
        attend_of = partial(attention_of, target.kernels, target.paged, pool, terms)
        return Eagle(target.model, layer, rope, attend_of, device, pool.layout.block_tokens)

    return Drafts(States("eagle3"), make, needs_hidden=True)


def _draft_model(spec: EngineSpec, target: Target) -> Drafts:
    """Each rank computes the whole draft model: a small one would wait for the others more than it computes."""
    folder = target.model_dir if spec.speculation_model is None else resolve(spec.speculation_model)
    device, dtype = torch.device(spec.device), DTYPES[spec.dtype]
    config = ModelConfig.load(folder)
    _check_vocabulary(folder, config, target)
    if target.model.config.traits.widest_window is not None:
        raise ConfigError(
            "engine.speculation: draft is for models with a layer that reads all tokens: this one releases blocks, "
            "which a draft model would read",
            field="engine.speculation",
        )
    block = block_layout(spec, layers=config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim)
    own = spec.model_copy(update={"weights": spec.speculation_weights or spec.weights})
    try:
        kernels = choose_kernels(own, block, 1)
        matrix = choose_matrices(own, kernels)
    except ConfigError as error:
        field = "engine.speculation_weights"
        raise ConfigError(f"{field}: the draft model cannot have these: {error.message}", field=field) from error
    most = min(target.max_tokens, config.max_position_tokens)
    with insufficient_memory("engine.speculation_model", "the draft model's weights do not fit beside the model's"):
        model = load_model(folder, config, TensorParallel(), device, dtype, max_tokens=most, matrix=matrix)
    draft = Target(
        folder, model, TensorParallel(), matrix, kernels, choose_paged_path(model, block, dtype, device), most
    )

    def make(pool: KvPool) -> Drafter:
        beside = KvPool(replace(block, num_blocks=pool.layout.num_blocks), device)
        return Chain(model, draft.attend_of(beside), device, vocab_size=target.model.config.vocab_size)

    return Drafts(DraftModel(most), make, block)


def _check_vocabulary(folder: Path, config: ModelConfig, target: Target) -> None:
    """Sizes may differ by rows that no token has."""
    own, others = (_vocabulary(each) for each in (folder, target.model_dir))
    same = own == others if own and others else config.vocab_size == target.model.config.vocab_size
    if not same:
        raise ConfigError(
            "engine.speculation_model: expected a draft model with the model's vocabulary of "
            f"{target.model.config.vocab_size} rows, got {folder.name} with {config.vocab_size} rows, or with other "
            "tokens in its tokenizer.json",
            field="engine.speculation_model",
        )


def _vocabulary(folder: Path) -> object:
    """None without a tokenizer."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    fields = read_json_object(path)
    added = {each.get("content"): each.get("id") for each in fields.get("added_tokens") or ()}
    return (fields.get("model") or {}).get("vocab"), added
