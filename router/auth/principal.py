"""Who calls and what they may do, derived from an API key or a JWT and never from what a request claims."""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from enum import StrEnum

from tandem.config.auth import LimitsSpec

TENANT_PATTERN = r"[A-Za-z0-9_.:@-]{1,64}"
TENANT_SHAPE = re.compile(TENANT_PATTERN)
NO_LIMITS = LimitsSpec()


class AccessLevel(StrEnum):
    """Which credential a route or method requires."""

    PUBLIC = "public"  # none: probes
    CALLER = "caller"  # any valid key or token
    ADMIN = "admin"  # one with the admin flag, as the answer covers all tenants
    CONTROLLER = "controller"  # the secret of the cluster's own controller


@dataclass(frozen=True, slots=True)
class Principal:
    """`key_id` identifies it in the audit log and is not secret. `models`, `priorities` None: all are allowed."""

    key_id: str
    tenant: str
    models: frozenset[str] | None = None
    priorities: frozenset[str] | None = None
    limits: LimitsSpec = NO_LIMITS
    admin: bool = False

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


ANONYMOUS = Principal(key_id="", tenant="", admin=True)  # every caller of a router without security.auth
SPEC_KEY = Principal(key_id="api-key", tenant="default", admin=True)  # who has the key of security.auth.api_key_sha256


class CacheSalts:
    """Keeps the cached blocks of tenants apart: a salt is part of the key of block hashes (tandem.kvcache.blockhash).

    Args: `secret` is the same for all routers of a cluster, so that they find each other's blocks. Only they have it.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def salt(self, tenant: str, client_salt: str) -> bytes:
        """32 bytes, or none if both are empty. Requests share cached blocks only if both are equal."""
        if not tenant and not client_salt:
            return b""
        parts = (tenant.encode(), client_salt.encode("utf-8", "replace"))
        sized = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return hmac.digest(self._secret, b"tandem.cache-salt.v1" + sized, hashlib.sha256)
