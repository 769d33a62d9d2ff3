"""How a stub worker answers canaries: at once, and separately from clients' requests."""

from __future__ import annotations

from router.probes.canary import CANARY_ID_PREFIX
from tandem.v1 import inference_pb2, worker_pb2


def wire_id(frame: worker_pb2.RouterFrame) -> str:
    match frame.WhichOneof("frame"):
        case "reserve":
            return frame.reserve.work.request_id
        case "prefill":
            return frame.prefill.work.request_id
        case "generate":
            return frame.generate.work.request_id
        case "join":
            return frame.join.request_id
        case _:
            return frame.cancel.request_id


def is_canary(frame: worker_pb2.RouterFrame) -> bool:
    return wire_id(frame).startswith(CANARY_ID_PREFIX)


def canary_answer(frame: worker_pb2.RouterFrame) -> worker_pb2.WorkerFrame | None:
    answer, request_id = worker_pb2.WorkerFrame(), wire_id(frame)
    match frame.WhichOneof("frame"):
        case "reserve":
            answer.reserved.add(request_id=request_id)
        case "prefill":
            answer.tokens.add(request_id=request_id)
        case "join" | "generate":
            answer.tokens.add(request_id=request_id)
            answer.ended.add(request_id=request_id, finish_reason=inference_pb2.FINISH_REASON_LENGTH)
        case _:
            return None
    return answer
