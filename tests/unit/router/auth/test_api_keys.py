"""The format of keys and of their file, rotation, and which keys are refused."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from router.auth import api_keys
from router.auth.api_keys import KeyList, KeyTable
from router.auth.keys_file import change_keys, read_keys
from tandem.config.auth import LimitsSpec
from tandem.errors import ConfigError, NotFound

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def at(**later: float) -> float:
    return (NOW + timedelta(**later)).timestamp()


def test_the_file_has_only_the_hash_of_a_key_with_256_random_bits() -> None:
    new = api_keys.create("acme", NOW)
    prefix, key_id, secret = new.text.split("_", 2)
    assert (prefix, key_id) == ("tdm", new.record.id)
    assert len(secret) * 6 >= 256
    assert new.record.secrets[0].sha256 == hashlib.sha256(new.text.encode()).hexdigest()
    assert secret not in new.record.model_dump_json()
    assert len({api_keys.create("acme", NOW).text for _ in range(100)}) == 100


def test_only_the_whole_key_is_valid_and_only_until_it_expires() -> None:
    new = api_keys.create("acme", NOW, expires=NOW + timedelta(hours=1), admin=True, models=("m",))
    table = KeyTable(KeyList(keys=(new.record,)))
    found = table.principal(new.text, at(minutes=59))
    assert found is not None
    assert (found.tenant, found.key_id, found.admin, found.models) == ("acme", new.record.id, True, frozenset({"m"}))
    assert table.principal(new.text, at(hours=1)) is None
    other = api_keys.create("acme", NOW).text
    mixed = new.text[:17] + other[17:]
    text = new.text
    for wrong in ("", "x", text[:-1], text + "x", text.upper(), f" {text}", text + "\n", mixed, other):
        assert table.principal(wrong, at()) is None, wrong


def test_a_rotated_key_has_at_most_two_valid_secrets() -> None:
    first = api_keys.create("acme", NOW, limits=LimitsSpec(requests_per_minute=5))
    second = api_keys.rotate(first.record, NOW, timedelta(hours=1), None)
    third = api_keys.rotate(second.record, NOW, timedelta(hours=1), None)
    table = KeyTable(KeyList(keys=(second.record,)))
    assert table.principal(first.text, at(minutes=59)) == table.principal(second.text, at(minutes=59)) is not None
    assert table.principal(first.text, at(minutes=61)) is None
    assert table.principal(second.text, at(days=999)) is not None
    table = KeyTable(KeyList(keys=(third.record,)))
    assert [table.principal(each.text, at()) is None for each in (first, second, third)] == [True, False, False]
    at_once = api_keys.rotate(first.record, NOW, timedelta(0), NOW + timedelta(days=1))
    assert len(at_once.record.secrets) == 1
    short = api_keys.create("acme", NOW, expires=NOW + timedelta(minutes=1))
    kept = api_keys.rotate(short.record, NOW, timedelta(hours=1), None).record.secrets[1]
    assert kept.expires == NOW + timedelta(minutes=1), "grace prolongs nothing"


@pytest.mark.parametrize("tenant", ["", "a b", "x" * 65, "a\n", "é"])
def test_tenants_are_short_plain_names(tenant: str) -> None:
    with pytest.raises(ValidationError):
        api_keys.create(tenant, NOW)


def test_a_written_file_reads_the_same_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    records = [
        api_keys.create("acme", NOW, note="team: 1", models=("a/b",), priorities=("batch",), admin=True).record,
        api_keys.create("acme", NOW, expires=NOW, limits=LimitsSpec(tokens_per_minute=7)).record,
    ]
    for record in records:
        change_keys(path, lambda keys, record=record: keys.with_key(record))  # type: ignore[misc]
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(read_keys(path).keys) == records
    change_keys(path, lambda keys: keys.without(records[0].id))
    assert list(read_keys(path).keys) == records[1:]
    with pytest.raises(NotFound, match="tandem keys list"):
        change_keys(path, lambda keys: keys.without(records[0].id))
    assert [each.name for each in tmp_path.iterdir()] == ["keys.yaml"], "nothing else is left"


def test_concurrent_changes_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    records = [api_keys.create(f"tenant-{n}", NOW).record for n in range(20)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda record: change_keys(path, lambda keys: keys.with_key(record)), records))
    assert {each.id for each in read_keys(path).keys} == {each.id for each in records}


def test_the_error_of_a_broken_file_does_not_repeat_its_content(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    good = api_keys.create("acme", NOW).record.model_dump(mode="json")
    wrong = {
        "expected YAML": "keys: [SECRET",
        "keys.0.tenant": yaml.safe_dump({"keys": [good | {"tenant": "SECRET here"}]}),
        "keys.0.secrets.0.sha256": yaml.safe_dump({"keys": [good | {"secrets": [{"sha256": "SECRET"}]}]}),
        "expected YAML ": "[" * 10_000,
        "different ids": yaml.safe_dump({"keys": [good, good]}),
        "SECRET_field": yaml.safe_dump({"keys": [good | {"SECRET_field": 1}]}),
        "dictionary": "- SECRET",
    }
    for expected, text in wrong.items():
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(ConfigError) as refused:
            read_keys(path)
        assert expected.strip() in refused.value.message
        assert refused.value.message.startswith("security.auth.keys_file: ")
        assert "SECRET" not in refused.value.message.replace("SECRET_field", "")
    with pytest.raises(ConfigError, match="tandem keys create"):
        read_keys(tmp_path / "none.yaml")
    path.chmod(0o620)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_keys(path)
