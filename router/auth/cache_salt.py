"""What keeps the cached blocks of tenants apart: a salt that block hashes are keyed with (tandem.kvcache.blockhash)."""

from __future__ import annotations

import hashlib
import hmac


class CacheSalts:
    """Args: `secret` is the same for all routers of a cluster, so that they find each other's blocks, and known to
    nobody else."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def salt(self, tenant: str, client_salt: str) -> bytes:
        """32 bytes; none where neither is given. Requests share cached blocks only where both agree."""
        if not tenant and not client_salt:
            return b""
        parts = (tenant.encode(), client_salt.encode("utf-8", "replace"))
        sized = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return hmac.digest(self._secret, b"tandem.cache-salt.v1" + sized, hashlib.sha256)
