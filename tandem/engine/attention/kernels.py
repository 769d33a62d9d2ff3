"""Chooses a rank's kernels: native ones if configured, supported and correct, else torch's."""

from __future__ import annotations

import logging

import torch

from tandem.config.engine import EngineSpec
from tandem.engine.attention.native_attention import supports
from tandem.engine.kv_pool import DTYPES
from tandem.errors import ConfigError
from tandem.kvcache.layout import KvPoolLayout
from tandem.model.device_matrices import QuantiseRows, checked_rows, quantised_rows
from tandem.model.kernel_check import checked_kernels
from tandem.model.matrices import MatrixMaker, Weights
from tandem.model.ops import is_native
from tandem.native.library import Kernels

# A ring's order of additions depends on the batch; a sum of two has only one order.
_MOST_INVARIANT_RANKS = 2

logger = logging.getLogger(__name__)


def choose_kernels(spec: EngineSpec, layout: KvPoolLayout, tp: int) -> Kernels | None:
    """The native kernels, or None for torch's own.

    Raises ConfigError naming the field if the configuration needs native kernels and they are not available.
    """
    _check_weights(spec)
    needed_by = _needed_by(spec)
    if spec.batch_invariant and tp > _MOST_INVARIANT_RANKS:
        raise _unsupported("engine.batch_invariant", f"tp of at most {_MOST_INVARIANT_RANKS}", str(tp))
    if spec.kernels == "torch":
        if needed_by:
            raise _unsupported(needed_by, "engine.kernels auto or native", "torch")
        return None
    if not is_native(DTYPES[spec.dtype], torch.device(spec.device)):
        if needed_by:
            raise _unsupported(needed_by, "device cpu and dtype float32", f"{spec.device} and {spec.dtype}")
        return None
    if not supports(layout):
        if needed_by:
            raise _unsupported(needed_by, "a model whose head_dim is a multiple of 8", "another")
        return None
    try:
        return checked_kernels(spec.threads_per_rank)
    except ConfigError as error:
        if needed_by:
            raise ConfigError(f"{needed_by}: {error}", field=needed_by) from error
        logger.warning("using torch's slower kernels: %s", error)
        return None


def choose_matrices(spec: EngineSpec, kernels: Kernels | None) -> MatrixMaker:
    """Raises ConfigError if a GPU cannot multiply the configured weights."""
    weights, device = Weights(spec.weights), torch.device(spec.device)
    quantise: QuantiseRows = quantised_rows
    if device.type == "cuda" and weights.row_dtype is not None:
        quantise = checked_rows(weights.row_dtype, device, DTYPES[spec.dtype])
    return MatrixMaker(weights, kernels, spec.batch_invariant, quantise)


def _check_weights(spec: EngineSpec) -> None:
    on_cpu, said = spec.device == "cpu", None
    if on_cpu and spec.weights == "fp8":
        said = "fp8 needs a GPU of compute capability 8.9 or more; on a CPU: dense, int8 or int4"
    if not on_cpu and spec.weights == "int4":
        said = "int4 is for CPUs; on a GPU: dense, int8 or fp8"
    if said is not None:
        raise ConfigError(f"engine.weights: {said}", field="engine.weights")


def _needed_by(spec: EngineSpec) -> str | None:
    """The field that requires native kernels, if any."""
    if spec.weights != "dense" and spec.device == "cpu":
        return "engine.weights"
    if spec.kv_dtype == "int8":
        return "engine.kv_dtype"
    if spec.batch_invariant:
        return "engine.batch_invariant"
    return "engine.kernels" if spec.kernels == "native" else None


def _unsupported(field: str, expected: str, got: str) -> ConfigError:
    return ConfigError(f"{field}: requires {expected}, got {got}", field=field)
