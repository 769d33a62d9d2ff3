"""`tandem keys`: creates, lists, rotates and revokes API keys in a keys file. Routers reload it when it changes."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pydantic import ValidationError

from cluster.cli.console import BOXED, console, fitted
from router.auth import api_keys
from router.auth.api_keys import KeyList, KeyRecord, NewKey
from router.auth.keys_file import change_keys, read_keys
from tandem.config.auth import LimitsSpec
from tandem.errors import ConfigError

TITLES = ("id", "tenant", "admin", "models", "priorities", "requests/min", "tokens/min", "expires", "note")
SPARE = ("tokens/min", "requests/min", "priorities", "note", "models")  # dropped first on a narrow terminal
FOLDED = ("models", "priorities", "expires", "note")

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_DURATION = re.compile(r"(\d{1,6})([smhd])")


@dataclass(frozen=True, slots=True)
class KeyFlags:
    """The options of `tandem keys create`."""

    tenant: str
    note: str
    expires_in: str | None
    models: list[str]
    priorities: list[str]
    requests_per_minute: int | None
    tokens_per_minute: int | None
    admin: bool


def run_create(path: Path, flags: KeyFlags) -> int:
    new = _new_key(flags)
    change_keys(path, lambda keys: keys.with_key(new.record))
    _show(new)
    return 0


def run_rotate(path: Path, key_id: str, grace: str, expires_in: str | None) -> int:
    now = datetime.now(UTC)
    made: list[NewKey] = []

    def change(keys: KeyList) -> KeyList:
        made.append(api_keys.rotate(keys.find(key_id), now, duration("--grace", grace), _expiry(now, expires_in)))
        return keys.with_key(made[-1].record)

    change_keys(path, change)
    _show(made[-1])
    print(f"the previous secret stays valid for {grace}", file=sys.stderr)
    return 0


def run_revoke(path: Path, key_id: str) -> int:
    change_keys(path, lambda keys: keys.without(key_id))
    print(f"key {key_id} is revoked; running routers refuse it within seconds", file=sys.stderr)
    return 0


def run_list(path: Path, as_json: bool) -> int:
    keys = read_keys(path)
    if as_json:
        print(json.dumps([_as_json(each) for each in keys.keys], indent=2))
        return 0
    rows = [
        (
            each.id,
            each.tenant,
            "yes" if each.admin else "",
            ", ".join(each.models) if each.models is not None else "all",
            ", ".join(each.priorities) if each.priorities is not None else "all",
            str(each.limits.requests_per_minute or ""),
            str(each.limits.tokens_per_minute or ""),
            " and ".join(_expiry_text(secret.expires) for secret in each.secrets),
            each.note,
        )
        for each in keys.keys
    ]
    screen = console()
    screen.print(fitted(screen.width, TITLES, rows, left=TITLES, spare=SPARE, folded=FOLDED, box=BOXED))
    return 0


def duration(field: str, text: str) -> timedelta:
    """`30m`, `12h`, `90d`. Raises ConfigError naming the field."""
    matched = _DURATION.fullmatch(text)
    if matched is None:
        raise ConfigError(f"{field}: expected a number and s, m, h or d (90d), got {text[:40]!r}", field=field)
    return timedelta(**{_UNITS[matched[2]]: int(matched[1])})


def _new_key(flags: KeyFlags) -> NewKey:
    now = datetime.now(UTC)
    try:
        return api_keys.create(
            flags.tenant,
            now,
            expires=_expiry(now, flags.expires_in),
            note=flags.note,
            models=tuple(flags.models) or None,
            priorities=tuple(flags.priorities) or None,
            limits=LimitsSpec(requests_per_minute=flags.requests_per_minute, tokens_per_minute=flags.tokens_per_minute),
            admin=flags.admin,
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = "--" + "-".join(str(first["loc"][0]).split("_"))
        raise ConfigError(f"{field}: {first['msg']}, got {first['input']!r}", field=field) from None


def _expiry(now: datetime, expires_in: str | None) -> datetime | None:
    return None if expires_in is None else now + duration("--expires-in", expires_in)


def _show(new: NewKey) -> None:
    """Prints only the key on stdout, for scripts."""
    record = new.record
    print(f"key {record.id} of tenant {record.tenant!r}; it is shown only once:", file=sys.stderr)
    print(new.text)


def _expiry_text(expires: datetime | None) -> str:
    if expires is None:
        return "never"
    return ("expired " if expires <= datetime.now(UTC) else "") + expires.strftime("%Y-%m-%d %H:%MZ")


def _as_json(record: KeyRecord) -> dict[str, object]:
    """Without the hashes."""
    shown = record.model_dump(mode="json", exclude={"secrets"})
    shown["expires"] = [secret["expires"] for secret in record.model_dump(mode="json")["secrets"]]
    return shown
