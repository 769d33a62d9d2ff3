"""Errors of the Messages API. The HTTP status is that of every other API."""

from __future__ import annotations

from router.edge.anthropic.answer_schema import MessagesError, MessagesErrorDetail

PATH = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_messages_path(path: str) -> bool:
    return path == PATH or path.startswith(f"{PATH}/")


def messages_error(status: int, message: str, request_id: str) -> MessagesError:
    other = "invalid_request_error" if status < 500 else "api_error"
    return MessagesError(error=MessagesErrorDetail(_TYPES.get(status, other), message), request_id=request_id)
