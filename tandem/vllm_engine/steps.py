"""A step of vLLM on its way to the other ranks of a worker: what models of text and images need, in a form that runs
nothing.

vLLM sends its steps as pickles, which Tandem reads from no socket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tandem.errors import InternalError
from tandem.scheduler.plan import ExportRange
from tandem.vllm_engine.connector import StepExports

_Blocks = tuple[list[int], ...]  # of each kind of KV


class _Image(msgspec.Struct, array_like=True):
    """`item`: what positions are made of, as vLLM's own encoder writes it, without pixels. `is_embed`: a byte for each
    token; empty: all are."""

    item: bytes
    identifier: str
    offset: int
    length: int
    is_embed: bytes


class _New(msgspec.Struct, array_like=True):
    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: _Blocks
    num_computed_tokens: int
    prefill_token_ids: list[int] | None
    lora_request: LoRARequest | None
    images: list[_Image]


class _Step(msgspec.Struct, array_like=True):
    new: list[_New]
    req_ids: list[str]
    resumed: set[str]
    all_token_ids: dict[str, list[int]]
    new_block_ids: list[_Blocks | None]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]
    scheduled: dict[str, int]
    finished: set[str]
    preempted: set[str] | None
    exports: tuple[ExportRange, ...]
    constrained: bool
    pixels: dict[str, dict[int, bytes]]  # of the images that this step reads, by request and number
    free_encodings: list[str]


class _Masks(msgspec.Struct, array_like=True):
    """`rows`: of each request, in words of 32 tokens."""

    request_ids: list[str]
    rows: bytes


# Empty in every step without drafts.
NOT_SENT = (
    "scheduled_spec_decode_tokens",
    "num_invalid_spec_tokens",
    "has_sync_kv_loads",
    "ec_connector_metadata",
    "new_block_ids_to_zero",
    "kv_cache_block_copies",
    "num_spec_tokens_to_schedule",
)

_INLINE = 1 << 62  # bytes of a tensor that vLLM's encoder puts into its message
_decoder = msgspec.msgpack.Decoder(_Step)


def encode(step: SchedulerOutput, features_of: Callable[[str], Sequence[MultiModalFeatureSpec]]) -> bytes:
    """`features_of`: of a request that is not new. Raises InternalError for a step that has more than is sent."""
    again, exports = step.scheduled_cached_reqs, step.kv_connector_metadata
    more = [name for name in NOT_SENT if getattr(step, name)]
    if more or again.new_token_ids or not isinstance(exports, StepExports):
        raise InternalError(f"a step for the other ranks has what is not sent to them: {', '.join(more) or 'tokens'}")
    new = [
        _New(
            each.req_id,
            each.prompt_token_ids,
            each.sampling_params,
            each.block_ids,
            each.num_computed_tokens,
            each.prefill_token_ids,
            each.lora_request,
            [_image(feature) for feature in each.mm_features],
        )
        for each in step.scheduled_new_reqs
    ]
    wire = _Step(
        new,
        again.req_ids,
        again.resumed_req_ids,
        again.all_token_ids,
        again.new_block_ids,
        again.num_computed_tokens,
        again.num_output_tokens,
        step.num_scheduled_tokens,
        step.finished_req_ids,
        step.preempted_req_ids,
        exports.ranges,
        step.has_structured_output_requests,
        _pixels(step, features_of),
        step.free_encoder_mm_hashes,
    )
    return msgspec.msgpack.encode(wire)


Pixels = dict[str, dict[int, MultiModalKwargsItem]]


def decode(raw: bytes) -> tuple[SchedulerOutput, Pixels]:
    """And the images that the step reads, which belong into the features of its requests."""
    wire = _decoder.decode(raw)
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [
        NewRequestData(
            req_id=each.req_id,
            prompt_token_ids=each.prompt_token_ids,
            mm_features=[_feature(image) for image in each.images],
            sampling_params=each.sampling_params,
            pooling_params=None,
            block_ids=each.block_ids,
            num_computed_tokens=each.num_computed_tokens,
            lora_request=each.lora_request,
            prefill_token_ids=each.prefill_token_ids,
        )
        for each in wire.new
    ]
    step.scheduled_cached_reqs = CachedRequestData(
        req_ids=wire.req_ids,
        resumed_req_ids=wire.resumed,
        new_token_ids=[],
        all_token_ids=wire.all_token_ids,
        new_block_ids=wire.new_block_ids,
        num_computed_tokens=wire.num_computed_tokens,
        num_output_tokens=wire.num_output_tokens,
    )
    step.num_scheduled_tokens = wire.scheduled
    step.total_num_scheduled_tokens = sum(wire.scheduled.values())
    step.finished_req_ids, step.preempted_req_ids = wire.finished, wire.preempted
    step.kv_connector_metadata = StepExports(wire.exports)
    step.has_structured_output_requests = wire.constrained
    step.scheduled_encoder_inputs = {request_id: [*images] for request_id, images in wire.pixels.items()}
    step.free_encoder_mm_hashes = wire.free_encodings
    pixels = {
        request_id: {number: _item(raw) for number, raw in images.items()} for request_id, images in wire.pixels.items()
    }
    return step, pixels


def _pixels(
    step: SchedulerOutput, features_of: Callable[[str], Sequence[MultiModalFeatureSpec]]
) -> dict[str, dict[int, bytes]]:
    if not step.scheduled_encoder_inputs:
        return {}
    new = {each.req_id: each.mm_features for each in step.scheduled_new_reqs}
    return {
        request_id: {number: _raw((new.get(request_id) or features_of(request_id))[number].data) for number in numbers}
        for request_id, numbers in step.scheduled_encoder_inputs.items()
    }


def _image(feature: MultiModalFeatureSpec) -> _Image:
    place = feature.mm_position
    is_embed = b"" if place.is_embed is None else place.is_embed.numpy().astype(np.uint8).tobytes()
    light = MultiModalKwargsItem({name: each for name, each in feature.data.items() if each.field.keep_on_cpu})
    return _Image(_raw(light), feature.identifier, place.offset, place.length, is_embed)


def _raw(item: MultiModalKwargsItem) -> bytes:
    (raw,) = MsgpackEncoder(_INLINE).encode(item)
    return bytes(raw)


def _item(raw: bytes) -> MultiModalKwargsItem:
    return MsgpackDecoder(MultiModalKwargsItem, share_mem=False).decode([raw])


def _feature(image: _Image) -> MultiModalFeatureSpec:
    is_embed = torch.from_numpy(np.frombuffer(image.is_embed, np.bool_).copy()) if image.is_embed else None
    place = PlaceholderRange(image.offset, image.length, is_embed)
    return MultiModalFeatureSpec(_item(image.item), "image", image.identifier, place)


def encode_masks(masks: GrammarOutput | None) -> bytes:
    """What the constrained requests of a step may be answered with."""
    if masks is None:
        return msgspec.msgpack.encode(_Masks([], b""))
    return msgspec.msgpack.encode(_Masks(masks.structured_output_request_ids, masks.grammar_bitmask.tobytes()))


def decode_masks(raw: bytes) -> GrammarOutput | None:
    wire = msgspec.msgpack.decode(raw, type=_Masks)
    rows = len(wire.request_ids)
    if not rows:
        return None
    return GrammarOutput(wire.request_ids, np.frombuffer(wire.rows, np.int32).reshape(rows, -1).copy(), [0] * rows)
