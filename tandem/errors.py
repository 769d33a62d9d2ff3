"""The tree of Tandem's errors, and the status of each in gRPC, HTTP and metrics.

    TandemError
    ├── InputError            the caller's fault: names the field, the expected value and the actual one
    │   ├── ModelNotFound
    │   ├── NotFound
    │   ├── ContextExceeded
    │   ├── UnsupportedField
    │   ├── PayloadTooLarge
    │   └── IdempotencyKeyReused
    ├── Unauthenticated       the caller's credentials are missing or unknown
    ├── PermissionDenied      the caller is known, but not allowed
    ├── AnswerNotKept         the idempotency key has been answered, but the answer is not there any more
    ├── AnswerUnderWay        another router has answered the idempotency key so far only in part
    ├── OverloadedError       refused before it was queued; retry after a delay
    │   └── RateLimited       over the limit of the API key
    ├── UnavailableError      a part of the cluster is missing; a retry may succeed
    │   ├── WorkerLost      the connection to it was lost
    │   │   └── WorkerDied  its engine's process ended by itself
    │   ├── GpuLost           a rank's GPU failed; its worker restarts
    │   ├── NoWorker
    │   └── KvExhausted
    ├── HandoffError          the KV blocks did not arrive intact (causes: kvtransfer/causes.py)
    ├── DeadlineExceeded
    ├── RequestCancelled
    ├── ConfigError           wrong configuration, checkpoint or machine: names the field and the fix
    │   ├── CheckpointError
    │   ├── PortInUse
    │   ├── IncompatiblePools
    │   ├── IncompatibleVersions
    │   └── InsufficientMemory
    ├── RequestQuarantined    it may be what made two workers die; not tried on a third
    └── InternalError         a bug in Tandem
        └── RequestFailed       this one request cannot be computed; its worker is well

An error states what was expected, what arrived and what to do. `WIRE` maps each code to its gRPC status, HTTP status
and metric label; a test fails if a code is missing there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar


class ErrorCode(StrEnum):
    INVALID_ARGUMENT = "invalid_argument"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    CONTEXT_EXCEEDED = "context_length_exceeded"
    UNSUPPORTED_FIELD = "unsupported_field"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    IDEMPOTENCY_KEY_REUSED = "idempotency_key_reused"
    ANSWER_NOT_KEPT = "answer_not_kept"
    ANSWER_UNDER_WAY = "answer_under_way"
    UNAUTHENTICATED = "invalid_api_key"
    PERMISSION_DENIED = "permission_denied"
    OVERLOADED = "overloaded"
    RATE_LIMITED = "rate_limit_exceeded"
    UNAVAILABLE = "unavailable"
    WORKER_LOST = "worker_lost"
    WORKER_DIED = "worker_died"
    GPU_LOST = "gpu_lost"
    NO_WORKER = "no_worker"
    KV_EXHAUSTED = "kv_exhausted"
    HANDOFF_FAILED = "handoff_failed"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    QUARANTINED = "request_quarantined"
    CONFIG = "config"
    CHECKPOINT = "checkpoint"
    PORT_IN_USE = "port_in_use"
    INCOMPATIBLE_POOLS = "incompatible_pools"
    INCOMPATIBLE_VERSIONS = "incompatible_versions"
    INSUFFICIENT_MEMORY = "insufficient_memory"
    INTERNAL = "internal"
    REQUEST_FAILED = "request_failed"


@dataclass(frozen=True, slots=True)
class Wire:
    """How clients see one error code. `openai_type` is the `type` of OpenAI's error object."""

    grpc_status: str
    http_status: int
    openai_type: str
    retryable: bool = False


WIRE: dict[ErrorCode, Wire] = {
    ErrorCode.INVALID_ARGUMENT: Wire("INVALID_ARGUMENT", 400, "invalid_request_error"),
    ErrorCode.MODEL_NOT_FOUND: Wire("NOT_FOUND", 404, "invalid_request_error"),
    ErrorCode.NOT_FOUND: Wire("NOT_FOUND", 404, "invalid_request_error"),
    ErrorCode.CONTEXT_EXCEEDED: Wire("INVALID_ARGUMENT", 400, "invalid_request_error"),
    ErrorCode.UNSUPPORTED_FIELD: Wire("INVALID_ARGUMENT", 400, "invalid_request_error"),
    ErrorCode.PAYLOAD_TOO_LARGE: Wire("INVALID_ARGUMENT", 413, "invalid_request_error"),
    ErrorCode.IDEMPOTENCY_KEY_REUSED: Wire("INVALID_ARGUMENT", 422, "invalid_request_error"),
    ErrorCode.ANSWER_NOT_KEPT: Wire("FAILED_PRECONDITION", 409, "invalid_request_error"),
    ErrorCode.ANSWER_UNDER_WAY: Wire("ABORTED", 409, "invalid_request_error", retryable=True),
    ErrorCode.UNAUTHENTICATED: Wire("UNAUTHENTICATED", 401, "invalid_request_error"),
    ErrorCode.PERMISSION_DENIED: Wire("PERMISSION_DENIED", 403, "invalid_request_error"),
    ErrorCode.OVERLOADED: Wire("RESOURCE_EXHAUSTED", 429, "rate_limit_error", retryable=True),
    ErrorCode.RATE_LIMITED: Wire("RESOURCE_EXHAUSTED", 429, "rate_limit_error", retryable=True),
    ErrorCode.UNAVAILABLE: Wire("UNAVAILABLE", 503, "server_error", retryable=True),
    ErrorCode.WORKER_LOST: Wire("UNAVAILABLE", 503, "server_error", retryable=True),
    ErrorCode.WORKER_DIED: Wire("UNAVAILABLE", 503, "server_error", retryable=True),
    ErrorCode.GPU_LOST: Wire("UNAVAILABLE", 503, "server_error", retryable=True),
    ErrorCode.NO_WORKER: Wire("UNAVAILABLE", 503, "server_error", retryable=True),
    ErrorCode.KV_EXHAUSTED: Wire("RESOURCE_EXHAUSTED", 503, "server_error", retryable=True),
    ErrorCode.HANDOFF_FAILED: Wire("UNAVAILABLE", 503, "server_error", retryable=True),
    ErrorCode.DEADLINE_EXCEEDED: Wire("DEADLINE_EXCEEDED", 504, "server_error", retryable=True),
    ErrorCode.CANCELLED: Wire("CANCELLED", 499, "invalid_request_error"),
    ErrorCode.QUARANTINED: Wire("INTERNAL", 500, "server_error"),
    ErrorCode.CONFIG: Wire("FAILED_PRECONDITION", 500, "server_error"),
    ErrorCode.CHECKPOINT: Wire("FAILED_PRECONDITION", 500, "server_error"),
    ErrorCode.PORT_IN_USE: Wire("FAILED_PRECONDITION", 500, "server_error"),
    ErrorCode.INCOMPATIBLE_POOLS: Wire("FAILED_PRECONDITION", 500, "server_error"),
    ErrorCode.INCOMPATIBLE_VERSIONS: Wire("FAILED_PRECONDITION", 500, "server_error"),
    ErrorCode.INSUFFICIENT_MEMORY: Wire("FAILED_PRECONDITION", 500, "server_error"),
    ErrorCode.INTERNAL: Wire("INTERNAL", 500, "server_error"),
    ErrorCode.REQUEST_FAILED: Wire("INTERNAL", 500, "server_error"),
}


class TandemError(Exception):
    """Root of all Tandem errors.

    Args:
        message: one line: what was expected, what arrived, what to do.
        field: the request field, option or file at fault, if there is one.
        retry_after_s: how long the caller should wait before a retry, if known.
    """

    code: ClassVar[ErrorCode] = ErrorCode.INTERNAL

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message

    @property
    def wire(self) -> Wire:
        return WIRE[self.code]


class InputError(TandemError):
    code = ErrorCode.INVALID_ARGUMENT


class ModelNotFound(InputError):
    code = ErrorCode.MODEL_NOT_FOUND


class NotFound(InputError):
    code = ErrorCode.NOT_FOUND


class ContextExceeded(InputError):
    code = ErrorCode.CONTEXT_EXCEEDED


class UnsupportedField(InputError):
    code = ErrorCode.UNSUPPORTED_FIELD


class PayloadTooLarge(InputError):
    code = ErrorCode.PAYLOAD_TOO_LARGE


class IdempotencyKeyReused(InputError):
    code = ErrorCode.IDEMPOTENCY_KEY_REUSED


class AnswerNotKept(TandemError):
    code = ErrorCode.ANSWER_NOT_KEPT


class AnswerUnderWay(TandemError):
    code = ErrorCode.ANSWER_UNDER_WAY


class Unauthenticated(TandemError):
    code = ErrorCode.UNAUTHENTICATED


class PermissionDenied(TandemError):
    code = ErrorCode.PERMISSION_DENIED


class OverloadedError(TandemError):
    code = ErrorCode.OVERLOADED


class RateLimited(OverloadedError):
    code = ErrorCode.RATE_LIMITED


class UnavailableError(TandemError):
    code = ErrorCode.UNAVAILABLE


class WorkerLost(UnavailableError):
    code = ErrorCode.WORKER_LOST


class WorkerDied(WorkerLost):
    code = ErrorCode.WORKER_DIED


class GpuLost(UnavailableError):
    code = ErrorCode.GPU_LOST


class NoWorker(UnavailableError):
    code = ErrorCode.NO_WORKER


class KvExhausted(UnavailableError):
    code = ErrorCode.KV_EXHAUSTED


class HandoffError(TandemError):
    code = ErrorCode.HANDOFF_FAILED


class DeadlineExceeded(TandemError):
    code = ErrorCode.DEADLINE_EXCEEDED


class RequestCancelled(TandemError):
    code = ErrorCode.CANCELLED


class RequestQuarantined(TandemError):
    code = ErrorCode.QUARANTINED


class ConfigError(TandemError):
    code = ErrorCode.CONFIG


class CheckpointError(ConfigError):
    code = ErrorCode.CHECKPOINT


class PortInUse(ConfigError):
    code = ErrorCode.PORT_IN_USE


class IncompatiblePools(ConfigError):
    code = ErrorCode.INCOMPATIBLE_POOLS


class IncompatibleVersions(ConfigError):
    code = ErrorCode.INCOMPATIBLE_VERSIONS


class InsufficientMemory(ConfigError):
    code = ErrorCode.INSUFFICIENT_MEMORY


class InternalError(TandemError):
    code = ErrorCode.INTERNAL


class RequestFailed(InternalError):
    code = ErrorCode.REQUEST_FAILED

    @classmethod
    def by(cls, error: Exception) -> RequestFailed:
        """`error` came up while the engine worked on one request. It stays the cause, for the log."""
        failed = cls(f"the request cannot be computed: {error!r}")
        failed.__cause__ = error
        return failed


def _by_code() -> dict[ErrorCode, type[TandemError]]:
    found: dict[ErrorCode, type[TandemError]] = {}
    pending: list[type[TandemError]] = [TandemError]
    while pending:
        cls = pending.pop()
        if cls is not TandemError:
            found[cls.code] = cls
        pending.extend(cls.__subclasses__())
    return found


_CLASSES = _by_code()


def error_from_code(code: str, message: str, field: str | None = None) -> TandemError:
    """The typed error for a code that a worker sent. A code of a newer worker that this version lacks becomes
    InternalError."""
    try:
        cls = _CLASSES[ErrorCode(code)]
    except (ValueError, KeyError):
        cls = InternalError
    return cls(message, field=field or None)


def shown(number: float) -> str:
    """For a message: a number of any size. A client may send integers of thousands of digits."""
    if isinstance(number, int):
        return str(number) if abs(number) < 10**20 else f"one of about {int(number.bit_length() * 0.30103)} digits"
    return f"{number:g}"
