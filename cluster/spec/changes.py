"""Compares a changed spec with the running one, and tells which fields can change while the cluster runs. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from cluster.spec.loader import spec_of_text
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError

LIVE = (
    "models.*.prefill.workers", "models.*.decode.workers", "models.*.adapters", "models.*.adapters.*", "autoscaler.*",
    "router.*", "log_level", "log_levels.*",
)  # fmt: skip
FIXED = ("router.replicas", "router.http_*", "router.grpc_*", "router.tls*")  # of those: how many there are, and where
MAX_SHOWN_CHARS = 60
SHOWN_FIELDS = 6


@dataclass(frozen=True, slots=True)
class SpecSource:
    """The spec that the running cluster was asked to have, with ports as given, and the command-line flags for it."""

    spec: ClusterSpec
    flags: Mapping[str, Any]

    def changed_by(self, text: str) -> ClusterSpec:
        """The spec in the YAML `text`. Flags and environment of `tandem up` still override it, except in fields that
        can change live, where the file wins over the flags.

        Raises:
            ConfigError: the text is not a spec, or changes fields that need a restart; lists them.
        """
        live = {field: value for field, value in self.flags.items() if is_live(field)}
        fixed = {field: value for field, value in self.flags.items() if not is_live(field)}
        spec = spec_of_text(text, fallbacks=live, flags=fixed)
        if fixed_changes := [field for field in changed_fields(self.spec, spec) if not is_live(field)]:
            more = f" and {len(fixed_changes) - SHOWN_FIELDS} more" if len(fixed_changes) > SHOWN_FIELDS else ""
            raise ConfigError(
                f"{', '.join(fixed_changes[:SHOWN_FIELDS])}{more}: changing this needs a restart of the cluster (stop "
                "`tandem up` and start it again); nothing was changed",
                field=fixed_changes[0],
            )
        return spec


def is_live(field: str) -> bool:
    """Whether the field can change while the cluster runs."""
    return _matches(field, LIVE) and not _matches(field, FIXED)


def _matches(field: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(field, pattern) for pattern in patterns)


def decides_nothing(field: str, old: ClusterSpec, new: ClusterSpec) -> bool:
    """Whether no running part depends on this fixed field: a controller with an `advertised_address` may listen
    elsewhere, ports of routers matter only if the cluster starts some, and how a controller ends is its own affair."""
    if field == "control.when_stopped":
        return True
    if field in ("control.admin_host", "control.admin_port"):
        return old.control.advertised_address is not None
    return _matches(field, FIXED) and not (old.router.replicas or new.router.replicas) and "tls" not in field


def changed_fields(old: ClusterSpec, new: ClusterSpec) -> list[str]:
    """Dotted paths, as in docs/configuration.md."""
    return [path for path, _, _ in _changes("", old.model_dump(mode="json"), new.model_dump(mode="json"))]


def shown_changes(old: ClusterSpec, new: ClusterSpec) -> list[str]:
    """Each changed field with its old and new value."""
    found = _changes("", old.model_dump(mode="json"), new.model_dump(mode="json"))
    return [f"{path} {_shown(one)} → {_shown(other)}" for path, one, other in found]


def _shown(value: Any) -> str:
    text = "unset" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 1]}…"


def _changes(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            yield from _changes(f"{path}.{name}" if path else name, old.get(name), new.get(name))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _changes(f"{path}.{index}", one, other)
    elif old != new:
        yield path, old, new
