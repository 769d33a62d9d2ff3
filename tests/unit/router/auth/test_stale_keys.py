"""Keys that cannot be read again: accepted for a time, then refused, since a revocation would not be seen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from router.auth.key_refresh import KeyRefresh, WatchedFile
from router.auth.keys_file import change_keys
from router.auth.principal import AccessLevel
from tandem.config.auth import AuthSpec, key_hash
from tandem.errors import ConfigError, Unauthenticated, UnavailableError
from tandem.testing.models import FakeClock
from tests.unit.router.auth.conftest import Keys


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_lost_keys_file_is_accepted_for_a_time_and_then_refused_until_it_is_back(keys: Keys) -> None:
    clock = FakeClock()
    sources = KeyRefresh(AuthSpec(keys_file=str(keys.path), max_stale_s=60.0), clock, poll_s=0.001)
    key = keys.bearer("acme")["authorization"]
    sources.start()
    content = keys.path.read_text()
    clock.advance(1000.0)
    await _until(lambda: _is_accepted(sources, key))  # read again since
    keys.path.unlink()
    await asyncio.sleep(0.05)
    clock.advance(59.0)
    assert _is_accepted(sources, key)
    clock.advance(2.0)
    with pytest.raises(UnavailableError, match=r"max_stale_s") as refused:
        sources.identify(key, AccessLevel.CALLER)
    assert refused.value.wire.http_status == 503
    with pytest.raises(Unauthenticated):
        sources.identify("Bearer unknown", AccessLevel.CALLER)

    keys.path.write_text(content)
    keys.path.chmod(0o600)
    change_keys(keys.path, lambda known: known.without(keys.ids["rival"]))
    await _until(lambda: _is_accepted(sources, key))
    await _until(lambda: _is_unknown(sources, keys.bearer("rival")["authorization"]))
    await sources.close()


def test_a_read_that_failed_once_is_tried_again_though_the_file_did_not_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, read, faults = tmp_path / "file", list[str](), [ConfigError("EIO"), ConfigError("EIO")]
    path.write_text("old")

    def load(path: Path) -> None:
        if path.read_text() != "old" and faults:
            raise faults.pop()
        read.append(path.read_text())

    watched = WatchedFile(path, load, FakeClock())
    path.write_text("newer")
    for _ in range(7):
        watched.poll()
    assert read == ["old", "newer"]
    assert [each.message for each in caplog.records].count("EIO; the content loaded before stays in use") == 1


def _is_unknown(sources: KeyRefresh, key: str) -> bool:
    try:
        sources.identify(key, AccessLevel.CALLER)
    except Unauthenticated:
        return True
    return False


def _is_accepted(sources: KeyRefresh, key: str) -> bool:
    try:
        return sources.identify(key, AccessLevel.CALLER).tenant == "acme"
    except UnavailableError:
        return False


async def test_the_key_of_the_spec_is_accepted_beside_a_file_and_alone(keys: Keys) -> None:
    own = AuthSpec(api_key_sha256=key_hash("a.key-of-mine"))  # also one with a dot, as JWTs have
    for spec in (own, own.model_copy(update={"keys_file": str(keys.path)})):
        found = KeyRefresh(spec, FakeClock())
        principal = found.identify("Bearer a.key-of-mine", AccessLevel.ADMIN)
        assert (principal.tenant, principal.admin) == ("default", True)
        with pytest.raises(Unauthenticated):
            found.identify("Bearer a.key-of-mine2", AccessLevel.CALLER)
    assert found.identify(keys.bearer("acme")["authorization"], AccessLevel.CALLER).tenant == "acme"
    with pytest.raises(ValidationError, match=r"security.auth.mode: expected required"):
        AuthSpec.model_validate({"mode": "none", "api_key_sha256": key_hash("a.key-of-mine")})
