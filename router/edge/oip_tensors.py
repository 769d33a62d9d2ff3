"""Converts tensors of the Open Inference Protocol to requests, and answers to tensors. Pure.

Inputs: `text_input` (BYTES [1] or [1, 1]) or `input_ids` (INT32, INT64 or UINT32 [n]). Sampling uses the names of the
completions API, as request parameters or in the optional `sampling_parameters` (BYTES [1] or [1, 1], a JSON object).
Outputs: `text_output`, `finish_reason` (BYTES [1]) and `output_ids` (INT32 [n]).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from router.edge.body_parsing import parse_fields
from router.edge.openai.request_schema import CompletionRequest
from router.edge.strict_model import unsupported
from router.requests.raw_request import RawRequest
from router.texts.json_limits import check_texts
from tandem.errors import InputError
from tandem.oip import grpc_predict_v2_pb2 as oip
from tandem.request import check_length

VERSION = "1"
INPUTS = (("text_input", "BYTES", (1,)), ("input_ids", "INT64", (-1,)), ("sampling_parameters", "BYTES", (1,)))
OUTPUTS = (("text_output", "BYTES", (1,)), ("output_ids", "INT32", (-1,)), ("finish_reason", "BYTES", (1,)))
# Fields of the completions API that shape an HTTP answer, and those that the protocol itself has.
_HTTP_FIELDS = frozenset({"model", "prompt", "stream", "stream_options", "n", "best_of", "echo", "suffix", "logprobs"})
_MAX_PARAMETERS = 64
_IGNORED_PREFIX = "triton_"  # parameters by which clients request what our streams always do
_DATA_TYPES = {"BYTES": oip.TYPE_STRING, "INT32": oip.TYPE_INT32, "INT64": oip.TYPE_INT64}
_INTEGERS = {"INT32": "<i4", "INT64": "<i8", "UINT32": "<u4"}

_Tensor = oip.ModelInferRequest.InferInputTensor


@dataclass(frozen=True, slots=True)
class InferRequest:
    """`wanted`: names of the outputs. `is_raw`: the tensors are raw bytes, in the request and so in the answer."""

    raw: RawRequest
    id: str
    wanted: tuple[str, ...]
    is_raw: bool


def model_config(name: str, platform: str) -> oip.ModelConfig:
    """The same for every model. Inputs are optional, as a prompt is text or token ids."""
    return oip.ModelConfig(
        name=name,
        platform=platform,
        backend=platform,
        max_batch_size=0,
        input=[
            oip.ModelInput(name=each, data_type=_DATA_TYPES[datatype], dims=shape, optional=True)
            for each, datatype, shape in INPUTS
        ],
        output=[
            oip.ModelOutput(name=each, data_type=_DATA_TYPES[datatype], dims=shape) for each, datatype, shape in OUTPUTS
        ],
        model_transaction_policy=oip.ModelTransactionPolicy(decoupled=True),
    )


def parse_infer(request: oip.ModelInferRequest, check_tokens: Callable[[int], None]) -> InferRequest:
    """Calls `check_tokens` with the number of token ids before it reads them. Raises InputError, UnsupportedField, and
    what `check_tokens` raises."""
    check_length("inputs", len(request.inputs), len(INPUTS))
    check_length("outputs", len(request.outputs), len(OUTPUTS))
    check_length("parameters", len(request.parameters), _MAX_PARAMETERS)
    raws = request.raw_input_contents
    if raws and len(raws) != len(request.inputs):
        raise InputError(
            f"raw_input_contents: expected one for each of {len(request.inputs)} inputs, got {len(raws)}",
            field="raw_input_contents",
        )
    tensors = {tensor.name: (tensor, raws[at] if raws else None) for at, tensor in enumerate(request.inputs)}
    known = [name for name, _, _ in INPUTS]
    if wrong := next((name for name in tensors if name not in known), None):
        raise InputError(f"inputs: expected {', '.join(known)}, got {wrong[:80]!r}", field="inputs")
    if len(tensors) != len(request.inputs):
        raise InputError("inputs: expected each name once", field="inputs")
    fields = _parameters(request.parameters)
    if "sampling_parameters" in tensors:
        fields |= _json_object(_text("sampling_parameters", *tensors["sampling_parameters"]))
    if wrong := next((name for name in fields if name in _HTTP_FIELDS), None):
        raise unsupported(f"parameters.{wrong}", "this parameter")
    prompt: str | list[int]
    if ("text_input" in tensors) == ("input_ids" in tensors):
        raise InputError("inputs: expected either text_input or input_ids", field="inputs")
    if "text_input" in tensors:
        prompt = _text("text_input", *tensors["text_input"])
    else:
        prompt = _ids(*tensors["input_ids"], check_tokens)
    parsed = parse_fields(CompletionRequest, fields | {"model": request.model_name, "prompt": prompt})
    [raw] = parsed.parse()
    return InferRequest(raw, request.id, _wanted(request), bool(raws))


def _wanted(request: oip.ModelInferRequest) -> tuple[str, ...]:
    names = tuple(name for name, _, _ in OUTPUTS)
    asked = tuple(each.name for each in request.outputs)
    if wrong := next((name for name in asked if name not in names), None):
        raise InputError(f"outputs: expected {', '.join(names)}, got {wrong[:80]!r}", field="outputs")
    return asked or names


def _parameters(given: Mapping[str, oip.InferParameter]) -> dict[str, object]:
    fields: dict[str, object] = {}
    for name, value in given.items():
        if name.startswith(_IGNORED_PREFIX):
            continue
        kind = value.WhichOneof("parameter_choice")
        if kind is None:
            raise InputError(f"parameters.{name[:80]}: expected a value, got none", field=f"parameters.{name[:80]}")
        fields[name] = getattr(value, kind)
    return fields


def _json_object(text: str) -> dict[str, object]:
    check_texts([("sampling_parameters", text)])
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"sampling_parameters: expected a JSON object: {error}", field="sampling_parameters") from None


def _text(name: str, tensor: _Tensor, raw: bytes | None) -> str:
    """The only element of a BYTES tensor."""
    if tensor.datatype != "BYTES" or len(tensor.shape) > 2 or any(size != 1 for size in tensor.shape):
        shape = list(tensor.shape[:8])
        raise InputError(
            f"{name}: expected BYTES of shape [1] or [1, 1], got {tensor.datatype[:20]} of {shape}", field=name
        )
    if raw is None:
        elements = tensor.contents.bytes_contents
        element = elements[0] if len(elements) == 1 else None
    else:
        element = raw[4:] if len(raw) >= 4 and struct.unpack_from("<I", raw)[0] == len(raw) - 4 else None
    if element is None:
        raise InputError(f"{name}: expected one element, after its length in 4 bytes if it is raw", field=name)
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: expected UTF-8: {error.reason} at byte {error.start}", field=name) from None


def _ids(tensor: _Tensor, raw: bytes | None, check_tokens: Callable[[int], None]) -> list[int]:
    dtype = _INTEGERS.get(tensor.datatype)
    if dtype is None or len(tensor.shape) not in (1, 2) or (len(tensor.shape) == 2 and tensor.shape[0] != 1):
        raise InputError(
            f"input_ids: expected INT32, INT64 or UINT32 of shape [n] or [1, n], got {tensor.datatype[:20]} of "
            f"{list(tensor.shape[:8])}",
            field="input_ids",
        )
    count = tensor.shape[-1]
    contents = tensor.contents
    typed = {"INT32": contents.int_contents, "INT64": contents.int64_contents, "UINT32": contents.uint_contents}
    found = len(typed[tensor.datatype]) if raw is None else len(raw) / np.dtype(dtype).itemsize
    if found != count:
        raise InputError(
            f"input_ids: expected {count} elements, according to its shape, got {found:g}", field="input_ids"
        )
    check_tokens(count)
    return list(typed[tensor.datatype]) if raw is None else np.frombuffer(raw, dtype).tolist()


def response(
    parsed: InferRequest, model: str, *, text: str, token_ids: Sequence[int], reason: str | None
) -> oip.ModelInferResponse:
    """`reason` None: more tokens follow."""
    reply = oip.ModelInferResponse(model_name=model, model_version=VERSION, id=parsed.id)
    for name in parsed.wanted:
        if name == "output_ids":
            tensor = reply.outputs.add(name=name, datatype="INT32", shape=[len(token_ids)])
            if parsed.is_raw:
                reply.raw_output_contents.append(np.asarray(token_ids, "<i4").tobytes())
            else:
                tensor.contents.int_contents.extend(token_ids)
            continue
        element = (text if name == "text_output" else reason or "").encode()
        tensor = reply.outputs.add(name=name, datatype="BYTES", shape=[1])
        if parsed.is_raw:
            reply.raw_output_contents.append(struct.pack("<I", len(element)) + element)
        else:
            tensor.contents.bytes_contents.append(element)
    return reply
