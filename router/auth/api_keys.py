"""API keys: `tdm_ID_SECRET`. The id is public. The file holds only the SHA-256 of the key: its secret has 256 random
bits, so a slow hash would add no protection, and this one costs a request a microsecond.

Pure: keys_file reads and writes the file.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated

from pydantic import AwareDatetime, Field, model_validator

from router.auth.principal import TENANT_PATTERN, Principal
from tandem.config.auth import LimitsSpec, Name
from tandem.config.frozen import Frozen
from tandem.errors import NotFound

PREFIX = "tdm_"
_ID_BYTES, _SECRET_BYTES = 6, 32
_ID = r"[0-9a-f]{12}"
_KEY = re.compile(rf"{PREFIX}({_ID})_[A-Za-z0-9_-]{{43}}")

KeyId = Annotated[str, Field(pattern=rf"^{_ID}$")]


class KeySecret(Frozen):
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    expires: AwareDatetime | None = None

    def is_live(self, now: datetime) -> bool:
        return self.expires is None or now < self.expires

    @property
    def digest_and_end(self) -> tuple[bytes, float | None]:
        """The end is in Unix seconds; None: never."""
        return bytes.fromhex(self.sha256), None if self.expires is None else self.expires.timestamp()


class KeyRecord(Frozen):
    """One key in the file. During a rotation it has two secrets, the newest first."""

    id: KeyId
    tenant: Annotated[str, Field(pattern=rf"^{TENANT_PATTERN}$")]
    note: Annotated[str, Field(max_length=200)] = ""
    created: AwareDatetime
    secrets: Annotated[tuple[KeySecret, ...], Field(min_length=1, max_length=2)]
    models: tuple[Name, ...] | None = None
    priorities: tuple[Name, ...] | None = None
    limits: LimitsSpec = LimitsSpec()
    admin: bool = False

    @property
    def principal(self) -> Principal:
        return Principal(
            key_id=self.id,
            tenant=self.tenant,
            models=None if self.models is None else frozenset(self.models),
            priorities=None if self.priorities is None else frozenset(self.priorities),
            limits=self.limits,
            admin=self.admin,
        )


class KeyList(Frozen):
    """The content of a keys file."""

    keys: tuple[KeyRecord, ...] = ()

    @model_validator(mode="after")
    def _ids_differ(self) -> KeyList:
        if len({each.id for each in self.keys}) != len(self.keys):
            raise ValueError("keys: expected different ids")
        return self

    def find(self, key_id: str) -> KeyRecord:
        """Raises NotFound."""
        found = next((each for each in self.keys if each.id == key_id), None)
        if found is None:
            raise NotFound(f"id: there is no key {key_id[:40]!r}; `tandem keys list` shows all keys", field="id")
        return found

    def with_key(self, record: KeyRecord) -> KeyList:
        """Adds the record, or replaces the one with the same id."""
        kept = tuple(record if each.id == record.id else each for each in self.keys)
        return KeyList(keys=kept if record in kept else (*kept, record))

    def without(self, key_id: str) -> KeyList:
        """Raises NotFound."""
        gone = self.find(key_id)
        return KeyList(keys=tuple(each for each in self.keys if each is not gone))


@dataclass(frozen=True, slots=True)
class NewKey:
    """`text` is the key itself, which is shown once."""

    record: KeyRecord
    text: str


def create(
    tenant: str,
    now: datetime,
    *,
    expires: datetime | None = None,
    note: str = "",
    models: tuple[str, ...] | None = None,
    priorities: tuple[str, ...] | None = None,
    limits: LimitsSpec | None = None,
    admin: bool = False,
) -> NewKey:
    """Raises pydantic.ValidationError."""
    key_id = secrets.token_hex(_ID_BYTES)
    text, secret = _new_secret(key_id, expires)
    record = KeyRecord(
        id=key_id, tenant=tenant, note=note, created=now, secrets=(secret,), models=models, priorities=priorities,
        limits=limits or LimitsSpec(), admin=admin,
    )  # fmt: skip
    return NewKey(record, text)


def rotate(record: KeyRecord, now: datetime, grace: timedelta, expires: datetime | None) -> NewKey:
    """Adds a secret. The newest one before it stays valid for `grace`; an older one ends now."""
    text, secret = _new_secret(record.id, expires)
    ends = now + grace
    last = record.secrets[0]
    kept = last.model_copy(update={"expires": ends if last.expires is None else min(ends, last.expires)})
    secrets_ = (secret, kept) if kept.is_live(now) else (secret,)
    return NewKey(record.model_copy(update={"secrets": secrets_}), text)


def _new_secret(key_id: str, expires: datetime | None) -> tuple[str, KeySecret]:
    text = f"{PREFIX}{key_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    return text, KeySecret(sha256=hashlib.sha256(text.encode()).hexdigest(), expires=expires)


class KeyTable:
    """Finds the principal of a key by the id in it, so that one hash is enough."""

    def __init__(self, keys: KeyList) -> None:
        self._known: Mapping[str, tuple[Principal, list[tuple[bytes, float | None]]]] = {
            each.id: (each.principal, [secret.digest_and_end for secret in each.secrets]) for each in keys.keys
        }

    def principal(self, key: str, now_unix_s: float) -> Principal | None:
        """None if the key is malformed, unknown, expired or revoked."""
        matched = _KEY.fullmatch(key)
        known = self._known.get(matched[1]) if matched else None
        if known is None:
            return None
        principal, kept = known
        digest = hashlib.sha256(key.encode()).digest()
        for each, end_unix_s in kept:
            if hmac.compare_digest(digest, each) and (end_unix_s is None or now_unix_s < end_unix_s):
                return principal
        return None
