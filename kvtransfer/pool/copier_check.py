"""Whether a copier is right: it must do to small pools what torch's operations do."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvtransfer.pool.device_digest import DigestKeys
from kvtransfer.pool.piece_copier import AnyCopier, Place
from kvtransfer.pool.pool import PoolSpan
from tandem.kvcache.layout import KvPoolLayout

_KEY = 7


def copier_error(copier: AnyCopier, layout: KvPoolLayout, device: torch.device) -> str | None:
    """What a copier does wrong with small pools of such blocks, on the current stream; None if nothing."""
    layout = replace(layout, num_blocks=6, layers=min(layout.layers, 3))
    generator = torch.Generator(device).manual_seed(0)

    def some_pool() -> Tensor:
        size = layout.pool_bytes // torch.int64.itemsize
        return torch.randint(-(1 << 63), (1 << 63) - 1, (size,), generator=generator, device=device)

    keys = DigestKeys(_KEY, layout.head_bytes // torch.int32.itemsize, device)
    for copies, digests in ((True, False), (True, True), (False, True)):
        source, target = some_pool(), some_pool()
        read, write = _spans(layout)
        expected, expected_digest = _by_torch(source, target, layout, read, write, keys)
        launch = copier.launch(
            Place(source.view(torch.int32), layout, read),
            Place(target.view(torch.int32), layout, write) if copies else None,
            keys if digests else None,
        )
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        digest = launch.digest
        copier.release(launch)
        if digests and digest != expected_digest:
            return f"the digest of a piece is {digest:#x}, expected {expected_digest:#x}"
        if copies and not torch.equal(target, expected):
            return "a copied piece has other bytes than its source"
    return None


def _spans(layout: KvPoolLayout) -> tuple[PoolSpan, PoolSpan]:
    """Scattered blocks in another order, a partial last one, and parts of the layers and heads."""
    tokens = max(1, layout.block_tokens - 1)
    layers, heads = max(1, layout.layers - 1), max(1, layout.kv_heads - 1)
    layer, head = layout.layers - layers, layout.kv_heads - heads
    return (
        PoolSpan((4, 0, 1, 5), tokens, layer, layers, head, heads),
        PoolSpan((1, 2, 5, 3), tokens, layer, layers, 0, heads),
    )


def _by_torch(
    source: Tensor, target: Tensor, layout: KvPoolLayout, read: PoolSpan, write: PoolSpan, keys: DigestKeys
) -> tuple[Tensor, int]:
    shape = (layout.num_blocks, layout.layers, layout.sides, layout.kv_heads, layout.block_tokens, -1)
    copied = target.clone()
    parts = []
    for index, (read_id, write_id) in enumerate(zip(read.block_ids, write.block_ids, strict=True)):
        tokens = read.last_block_tokens if index == len(read.block_ids) - 1 else layout.block_tokens
        part = _part(source.view(shape)[read_id], read, tokens)
        _part(copied.view(shape)[write_id], write, tokens).copy_(part)
        parts.append(part.view(torch.int32))
    return copied, keys.digest(parts)


def _part(block: Tensor, span: PoolSpan, tokens: int) -> Tensor:
    layers = slice(span.layer_start, span.layer_start + span.layer_count)
    return block[layers, :, span.head_start : span.head_start + span.head_count, :tokens]
