"""Chooses the kernel that reads KV blocks in place on a GPU, and whether decode steps are recorded.

Steps with prompts use FlashInfer, if installed. All others use FlashAttention 3, if installed, through torch's
`varlen_attn`, else a Triton kernel: FlashInfer would have to plan on the host before each replay. FlashAttention 2 of
torch is not usable: its pages have multiples of 256 tokens, a KV block has at most 128, and results of long sequences
that it splits are wrong (github.com/pytorch/pytorch/issues/194167).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch.nn import attention

from tandem.engine.attention.paged_check import kernel_error
from tandem.engine.attention.varlen_attention import PagedKernel, PlannedKernel, StepRows
from tandem.engine.device.graph_recorder import CudaGraphRecorder, GraphRecorder
from tandem.engine.kv_pool import DTYPES
from tandem.kvcache.layout import KvPoolLayout
from tandem.model.decoder import Decoder
from tandem.model.experts import SparseMlp
from tandem.model.fp8 import FP8

_HALF = (torch.bfloat16, torch.float16)
_MOST_HEAD_DIM = 256
_FIRST_WITH_PAGES = (2, 12)  # torch version
_AMPERE, _HOPPER = 8, 9
_FA3_MODULE = "flash_attn_interface"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PagedPath:
    """`recorder` None: a decode step is launched operation by operation, as every other. `planned` is for steps that
    are not recorded; None: they use `kernel` too."""

    kernel: PagedKernel
    recorder: GraphRecorder | None
    planned: PlannedKernel | None = None

    def of_step(self, rows: StepRows) -> PagedKernel:
        return self.kernel if self.planned is None else self.planned.plan(rows)


def choose_paged_path(
    model: Decoder, layout: KvPoolLayout, dtype: torch.dtype, device: torch.device
) -> PagedPath | None:
    """`recorder` None: decode steps are launched operation by operation, like other steps."""
    if device.type != "cuda":
        return None
    kernel = _checked_kernel(model, layout, dtype, device)
    if kernel is None:
        return None
    planned = _checked_flashinfer(model, layout, dtype, device)
    # The number of tokens per expert determines shapes, so the host must wait for it.
    if any(isinstance(layer.mlp, SparseMlp) for layer in model.layers):
        logger.warning("decode steps are not recorded: the model has experts")
        return PagedPath(kernel, None, planned)
    return PagedPath(kernel, CudaGraphRecorder(device), planned)


def _checked_kernel(
    model: Decoder, layout: KvPoolLayout, dtype: torch.dtype, device: torch.device
) -> PagedKernel | None:
    reason = unsupported_reason(model, layout, dtype)
    if reason is None:
        reason = "no paged kernel for this GPU: expected Triton or FlashAttention 3"
        for name, kernel in available_kernels(device, DTYPES[layout.dtype]):
            wrong = kernel_error(kernel, layout, model.attention, dtype, device)
            if wrong is None:
                logger.info("attention uses %s", name)
                return kernel
            reason = f"{name}: {wrong}"
            logger.warning("cannot use a paged kernel: %s", reason)
    logger.warning("attention gathers KV blocks and decode steps are not recorded: %s", reason)
    return None


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
            logger.info("attention of prompts uses FlashInfer")
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
    if generation >= _AMPERE and importlib.util.find_spec("triton") is not None:
        ours = importlib.import_module(
            "tandem.engine.attention.triton_attention"
        )  # imports Triton, which CPU machines lack
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        yield "Triton", ours.TritonAttention(processors)
