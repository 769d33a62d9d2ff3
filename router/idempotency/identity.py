"""What makes two requests the same: the key and who sends it; and what tells that they ask the same."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

import msgspec

from router.auth.call import Call
from router.idempotency.keyed_answers import HEADER, KeyedRequest
from router.idempotency.keyed_metrics import Api
from router.request_terms import TENANT, TIMEOUT, timeout_s
from tandem.errors import InputError

MAX_WAIT_S = 60.0

_KEY = re.compile(r"[\x20-\x7e]{1,255}")


def keyed_request(
    cluster: str, header: Callable[[str], str | None], call: Call | None, method: str, body: bytes, api: Api
) -> KeyedRequest:
    """Args:
    header: gives the value of a header, or of a call's metadata, by its lower-case name.
    method: of which API, and its path there.

    Raises InputError naming the header.
    """
    key = header(HEADER) or ""
    if not _KEY.fullmatch(key):
        raise InputError(f"{HEADER}: expected 1 to 255 printable ASCII characters, got {key[:40]!r}", field=HEADER)
    wait_s = min(MAX_WAIT_S, timeout_s(header(TIMEOUT)) or MAX_WAIT_S)
    claimed = header(TENANT) or ""
    identity = _digest(cluster, *_caller(call), claimed, key)
    return KeyedRequest(identity, _digest(method, body), wait_s, api, claimed if call is None else call.tenant)


def _caller(call: Call | None) -> tuple[str, tuple[str, ...] | None]:
    """Keys of one tenant that may use other models are others: an answer must not reach them."""
    if call is None:
        return "", None
    models = call.principal.models
    return call.principal.tenant, None if models is None else tuple(sorted(models))


def _digest(*parts: object) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(parts), digest_size=32).digest()
