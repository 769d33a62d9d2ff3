"""A keys file with one key for each type of caller."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from router.auth import api_keys
from router.auth.keys_file import change_keys
from tandem.config.auth import AuthSpec


@dataclass
class Keys:
    """The texts and ids of keys by tenant."""

    path: Path
    texts: dict[str, str] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)

    def add(self, tenant: str, **may: Any) -> None:
        new = api_keys.create(tenant, datetime.now(UTC), **may)
        change_keys(self.path, lambda keys: keys.with_key(new.record))
        self.texts[tenant], self.ids[tenant] = new.text, new.record.id

    def bearer(self, tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.texts[tenant]}"}

    def metadata(self, tenant: str) -> tuple[tuple[str, str], ...]:
        return tuple(self.bearer(tenant).items())


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    keys = Keys(tmp_path / "keys.yaml")
    keys.add("acme")
    keys.add("rival")
    keys.add("operator", admin=True)
    keys.add("gone", expires=datetime.now(UTC) - timedelta(seconds=1))
    return keys


@pytest.fixture
def auth(keys: Keys, tmp_path: Path) -> AuthSpec:
    return AuthSpec(keys_file=str(keys.path), audit_log=str(tmp_path / "audit.jsonl"))
