"""Chooses the kernel that reads KV blocks in place on a GPU, and whether decode steps are recorded.

Steps with prompts use FlashInfer, if installed. All others use FlashAttention 3, if installed, through torch's
`varlen_attn`, else a Triton kernel: FlashInfer would have to plan on the host before each replay. If neither works, all
steps use FlashInfer, unrecorded. FlashAttention 2 of torch is not usable: its pages have multiples of 256 tokens, a KV
block has at most 128, and results of long sequences that it splits are wrong
(github.com/pytorch/pytorch/issues/194167).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import cast

import torch
from torch.nn import attention

from tandem.engine.attention.paged_check import kernel_error, store_error
from tandem.engine.attention.varlen_attention import PagedKernel, PlannedKernel, StepRows, StoreKv, store_by_torch
from tandem.engine.device.graph_recorder import CudaGraphRecorder, GraphRecorder
from tandem.engine.kv_pool import DTYPES
from tandem.kvcache.layout import KvPoolLayout
from tandem.model.decoder import Decoder
from tandem.model.experts import SparseMlp, StackedExperts
from tandem.model.fp8 import FP8

_HALF = (torch.bfloat16, torch.float16)
_MOST_HEAD_DIM = 256
_FIRST_WITH_PAGES = (2, 12)  # torch version
_AMPERE, _HOPPER = 8, 9
_FA3_MODULE = "flash_attn_interface"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PagedPath:
    """`kernel` or `planned`, or both. `recorder` None: a decode step is launched operation by operation, as every
    other; else it is recorded with `kernel`. `planned` is for steps that are not recorded; None: they use `kernel`
    too. `store` writes the keys and values that these read."""

    kernel: PagedKernel | None
    recorder: GraphRecorder | None
    planned: PlannedKernel | None = None
    store: StoreKv = store_by_torch

    def of_step(self, rows: StepRows) -> PagedKernel:
        if self.planned is not None:
            return self.planned.plan(rows)
        assert self.kernel is not None
        return self.kernel


def choose_paged_path(
    model: Decoder, layout: KvPoolLayout, dtype: torch.dtype, device: torch.device
) -> PagedPath | None:
    """None: attention gathers KV blocks."""
    if device.type != "cuda":
        return None
    reason = unsupported_reason(model, layout, dtype)
    kernel = None if reason else _checked_kernel(model, layout, dtype, device)
    planned = None if reason else _checked_flashinfer(model, layout, dtype, device)
    if kernel is None and planned is None:
        reason = reason or "expected Triton, FlashAttention 3 or FlashInfer to work on this GPU"
        logger.warning("attention gathers KV blocks and decode steps are not recorded: %s", reason)
        return None
    unrecorded = "FlashInfer plans each step on the host" if kernel is None else changing_shapes(model)
    if unrecorded is not None:
        logger.warning("decode steps are not recorded: %s", unrecorded)
    recorder = CudaGraphRecorder(device) if unrecorded is None else None
    return PagedPath(kernel, recorder, planned, _checked_store(layout, dtype, device))


def changing_shapes(model: Decoder) -> str | None:
    """Why steps of equal size may have tensors of different shapes, which cannot be recorded; None: they do not."""
    mlps = [layer.mlp for layer in model.layers]
    separate = any(isinstance(mlp, SparseMlp) and not isinstance(mlp.experts, StackedExperts) for mlp in mlps)
    return "the model's experts are multiplied one by one, each for its own tokens" if separate else None


def _checked_kernel(
    model: Decoder, layout: KvPoolLayout, dtype: torch.dtype, device: torch.device
) -> PagedKernel | None:
    for name, kernel in available_kernels(device, DTYPES[layout.dtype]):
        wrong = kernel_error(kernel, layout, model.attention, dtype, device)
        if wrong is None:
            logger.info("attention uses %s", name)
            return kernel
        logger.warning("cannot use a paged kernel: %s: %s", name, wrong)
    return None


def _checked_store(layout: KvPoolLayout, dtype: torch.dtype, device: torch.device) -> StoreKv:
    if (ours := _triton(device)) is None:
        return store_by_torch
    store: StoreKv = ours.TritonAttention.store
    wrong = store_error(store, layout, dtype, device)
    if wrong is None:
        return store
    logger.warning("storing keys and values with torch, more slowly than Triton: %s", wrong)
    return store_by_torch


def _checked_flashinfer(
    model: Decoder, layout: KvPoolLayout, dtype: torch.dtype, device: torch.device
) -> PlannedKernel | None:
    if importlib.util.find_spec("flashinfer") is None or DTYPES[layout.dtype] != dtype:
        return None
    try:
        vendor = importlib.import_module("tandem.engine.attention.flashinfer_attention")
        planned: PlannedKernel = vendor.FlashInferAttention(layout, model.attention, dtype, device)
    except Exception as error:  # as `kernel_error` does
        wrong: str | None = f"{type(error).__name__}: {error}"
    else:
        wrong = kernel_error(planned, layout, model.attention, dtype, device)
        if wrong is None:
            logger.info("attention of steps with prompts uses FlashInfer")
            return planned
    logger.warning("cannot use FlashInfer: %s", wrong)
    return None


def unsupported_reason(model: Decoder, layout: KvPoolLayout, dtype: torch.dtype) -> str | None:
    """The property of the model that no paged kernel supports; None if there is none."""
    if model.attention.softcap is not None:
        return "the model caps its scores"
    if dtype not in _HALF:
        return f"the model is {dtype}, not {' or '.join(map(str, _HALF))}"
    if DTYPES[layout.dtype] not in (dtype, FP8):
        return f"KV blocks are {layout.dtype}"
    if layout.head_dim > _MOST_HEAD_DIM or layout.head_dim % 8:
        return f"heads have {layout.head_dim} dimensions, not a multiple of 8 up to {_MOST_HEAD_DIM}"
    return None


def available_kernels(device: torch.device, pool: torch.dtype) -> Iterator[tuple[str, PagedKernel]]:
    """Kernels for pools of this dtype, best first. All support any block size and split long sequences; only the Triton
    kernel supports fp8, on GPUs with fp8."""
    generation, _ = torch.cuda.get_device_capability(device)
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    has_fa3 = generation == _HOPPER and importlib.util.find_spec(_FA3_MODULE) is not None
    if version >= _FIRST_WITH_PAGES and has_fa3 and pool != FP8:
        attention.activate_flash_attention_impl("FA3")
        varlen = importlib.import_module("torch.nn.attention.varlen")  # takes over 1 s, which a CPU start can save
        yield "FlashAttention 3", cast(PagedKernel, varlen.varlen_attn)
    if (ours := _triton(device)) is not None:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        yield "Triton", ours.TritonAttention(processors)


def _triton(device: torch.device) -> ModuleType | None:
    """Our kernels, if this GPU and this installation can run them."""
    if torch.cuda.get_device_capability(device)[0] < _AMPERE or importlib.util.find_spec("triton") is None:
        return None
    # It imports Triton, which CPU machines lack.
    return importlib.import_module("tandem.engine.attention.triton_attention")
