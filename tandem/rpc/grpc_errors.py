"""Maps TandemError to gRPC status and back, with google.rpc details: ErrorInfo (reason, field), and RetryInfo if a
retry may help."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # ships stubs, not py.typed
from grpc import aio
from grpc_status import rpc_status

from tandem.errors import (
    DeadlineExceeded,
    OverloadedError,
    RequestCancelled,
    TandemError,
    UnavailableError,
    error_from_code,
)

DOMAIN = "tandem"
DEFAULT_RETRY_AFTER_S = 1.0

_BY_STATUS: dict[grpc.StatusCode, type[TandemError]] = {
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: RequestCancelled,
}


def retry_after_s(error: TandemError) -> float | None:
    """How long the caller should wait before a retry; None if a retry cannot help."""
    if not error.wire.retryable:
        return None
    return DEFAULT_RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s


def status_proto(error: TandemError) -> status_pb2.Status:
    """google.rpc.Status of an error."""
    info = error_details_pb2.ErrorInfo(reason=error.code.value.upper(), domain=DOMAIN)
    if error.field is not None:
        info.metadata["field"] = error.field
    details = [_packed(info)]
    delay_s = retry_after_s(error)
    if delay_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(delay_s * 1e9))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    code: int = grpc.StatusCode[error.wire.grpc_status].value[0]
    return status_pb2.Status(code=code, message=error.message, details=details)


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


async def abort(context: aio.ServicerContext[Any, Any], error: TandemError) -> NoReturn:
    """Ends an RPC with `error`; never returns."""
    status = rpc_status.to_status(status_proto(error))
    await context.abort(status.code, status.details, status.trailing_metadata)


def error_from_rpc(error: aio.AioRpcError) -> TandemError:
    """The typed error of a failed call, from its ErrorInfo if the peer is a Tandem process, else from the status
    code."""
    message = error.details() or error.code().name
    status = rpc_status.from_call(error)
    if status is None:
        return _BY_STATUS.get(error.code(), UnavailableError)(message)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    typed: TandemError | None = None
    delay_s: float | None = None
    for detail in status.details:
        if detail.Unpack(info) and info.domain == DOMAIN:
            typed = error_from_code(info.reason.lower(), message, info.metadata.get("field"))
        elif detail.Unpack(retry):
            delay_s = retry.retry_delay.ToNanoseconds() / 1e9
    found = typed or _BY_STATUS.get(error.code(), UnavailableError)(message)
    found.retry_after_s = delay_s
    return found
