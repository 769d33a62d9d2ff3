"""Which kernel reads KV blocks where they lie on a GPU, and whether decode steps are recorded there.

FlashAttention 3, where it is installed, by torch's `varlen_attn`; else a kernel in Triton. torch's FlashAttention 2 is
no choice: its pages are of 256 tokens or multiples of that, where a KV block holds at most 128, and long sequences that
it splits come out wrong (github.com/pytorch/pytorch/issues/194167).
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

from tandem.engine.attention.paged_check import fault
from tandem.engine.attention.varlen_attention import PagedKernel
from tandem.engine.graph_recorder import CudaGraphRecorder, GraphRecorder
from tandem.engine.kv_pool import DTYPES
from tandem.kvcache.layout import KvPoolLayout
from tandem.model.decoder import Decoder
from tandem.model.experts import SparseMlp
from tandem.model.fp8 import FP8

_HALF = (torch.bfloat16, torch.float16)
_MOST_HEAD_DIM = 256
_FIRST_WITH_PAGES = (2, 12)  # of torch
_AMPERE, _HOPPER = 8, 9
_FA3_MODULE = "flash_attn_interface"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PagedPath:
    """`recorder` None: a decode step is launched operation by operation, as every other."""

    kernel: PagedKernel
    recorder: GraphRecorder | None


def choose_paged_path(
    model: Decoder, layout: KvPoolLayout, dtype: torch.dtype, device: torch.device
) -> PagedPath | None:
    """`dtype`: the model's. None: blocks are gathered, for `StepAttention`; on a GPU a warning says why."""
    if device.type != "cuda":
        return None
    kernel = _checked_kernel(model, layout, dtype, device)
    if kernel is None:
        return None
    # How many tokens each expert gets decides on shapes, and the host has to wait for that.
    if any(isinstance(layer.mlp, SparseMlp) for layer in model.layers):
        logger.warning("decode steps are not recorded: the model has experts")
        return PagedPath(kernel, None)
    return PagedPath(kernel, CudaGraphRecorder(device))


def _checked_kernel(
    model: Decoder, layout: KvPoolLayout, dtype: torch.dtype, device: torch.device
) -> PagedKernel | None:
    reason = refusal(model, layout, dtype)
    if reason is None:
        reason = "there is no paged kernel for this GPU: expected Triton or FlashAttention 3"
        for name, kernel in kernels_there(device, DTYPES[layout.dtype]):
            wrong = fault(kernel, layout, model.attention, dtype, device)
            if wrong is None:
                logger.info("attention by %s", name)
                return kernel
            reason = f"{name}: {wrong}"
            logger.warning("a paged kernel is not used: %s", reason)
    logger.warning("attention copies KV blocks together, and decode steps are not recorded: %s", reason)
    return None


def refusal(model: Decoder, layout: KvPoolLayout, dtype: torch.dtype) -> str | None:
    """What about this model no paged kernel takes."""
    if model.attention.softcap is not None:
        return "the model caps its scores"
    if dtype not in _HALF:
        return f"the model is {dtype}, not {' or '.join(map(str, _HALF))}"
    if DTYPES[layout.dtype] not in (dtype, FP8):
        return f"KV blocks are {layout.dtype}"
    if layout.head_dim > _MOST_HEAD_DIM or layout.head_dim % 8:
        return f"heads have {layout.head_dim} dimensions, not a multiple of 8 up to {_MOST_HEAD_DIM}"
    return None


def kernels_there(device: torch.device, pool: torch.dtype) -> Iterator[tuple[str, PagedKernel]]:
    """Those that are there for pools of this dtype, the best first. All take blocks of any size and split long
    sequences; only ours widens fp8, on GPUs that know it."""
    generation, _ = torch.cuda.get_device_capability(device)
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    has_fa3 = generation == _HOPPER and importlib.util.find_spec(_FA3_MODULE) is not None
    if version >= _FIRST_WITH_PAGES and has_fa3 and pool != FP8:
        attention.activate_flash_attention_impl("FA3")
        varlen = importlib.import_module("torch.nn.attention.varlen")  # takes more than a second, for nothing on a CPU
        yield "FlashAttention 3", cast(PagedKernel, varlen.varlen_attn)
    if generation >= _AMPERE and importlib.util.find_spec("triton") is not None:
        ours = importlib.import_module(
            "tandem.engine.attention.triton_attention"
        )  # imports Triton, which a CPU has none of
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        yield "Triton", ours.TritonAttention(processors)
