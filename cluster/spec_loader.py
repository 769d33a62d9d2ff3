"""The cluster spec from its four sources: command-line flags over environment over YAML file over defaults.

A variable is TANDEM_ and the path of a field, its parts joined by two underscores: TANDEM_ROUTER__HTTP_PORT=8080,
TANDEM_MODELS__0__SOURCE=..., TANDEM_LOG_LEVEL=debug. Others that begin with TANDEM_ (TANDEM_CACHE) are not of the
spec.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from tandem.config import ClusterSpec
from tandem.errors import ConfigError

ENV_PREFIX = "TANDEM_"
SCALARS = frozenset(
    name
    for name, field in ClusterSpec.model_fields.items()
    if name != "models" and not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel))
)

Tree = dict[str, Any]


def load_spec(
    path: Path | None = None, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ
) -> ClusterSpec:
    """Args: `flags` maps dotted paths ("router.http_port", "models.0.prefill.workers") to values; None is "not given".

    Raises:
        ConfigError: one line naming the field, what was expected and what came.
    """
    return _validated(_read(path) if path is not None else {}, flags or {}, environ)


def spec_of_text(
    text: str, below: Mapping[str, Any], flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> ClusterSpec:
    """As `load_spec`, of a file's text; `below` holds where the file says nothing. Raises ConfigError."""
    tree = _parsed(text, "FILE")
    for dotted, value in below.items():
        if not _says(tree, dotted.split(".")):
            _put(tree, dotted.split("."), value, given_by=dotted)
    return _validated(tree, flags, environ)


def _validated(tree: Tree, flags: Mapping[str, Any], environ: Mapping[str, str]) -> ClusterSpec:
    for name, text in sorted(environ.items()):
        if (parts := _field_of(name)) is not None:
            _put(tree, parts, _value(name, text), given_by=name)
    for dotted, value in flags.items():
        if value is not None:
            _put(tree, dotted.split("."), value, given_by=dotted)
    try:
        return ClusterSpec.model_validate(tree)
    except ValidationError as error:
        raise _one_line(error) from None


def _read(path: Path) -> Tree:
    try:
        return _parsed(path.read_text(encoding="utf-8"), f"--config: {path}")
    except OSError as error:
        raise ConfigError(f"--config: {path}: {error.strerror}", field="--config") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config: {path}: expected YAML: {_flat(error)}", field="--config") from None


def _parsed(text: str, where: str) -> Tree:
    field = where.partition(":")[0]
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: expected YAML: {_flat(error)}", field=field) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: expected a mapping, got {type(tree).__name__}", field=field)
    return tree


def _says(tree: Any, path: Sequence[str]) -> bool:
    for part in path:
        if isinstance(tree, list) and part.isdigit() and int(part) < len(tree):
            tree = tree[int(part)]
        elif isinstance(tree, dict) and part in tree:
            tree = tree[part]
        else:
            return False
    return True


def _field_of(variable: str) -> list[str] | None:
    path = variable.removeprefix(ENV_PREFIX).lower()
    if path == variable.lower() or not ("__" in path or path in SCALARS):
        return None
    return path.split("__")


def _value(variable: str, text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{variable}: expected a YAML value: {_flat(error)}", field=variable) from None


def _put(tree: Tree, path: Sequence[str], value: object, *, given_by: str) -> None:
    """Sets one leaf; numbers in the path are places in a list, which grows by one at most.

    Raises ConfigError when the path leads through something that has no parts.
    """
    here: Any = tree
    for part, following in zip(path, [*path[1:], None], strict=True):
        key: Any = part
        if isinstance(here, list):
            if not part.isdigit() or int(part) > len(here):
                raise ConfigError(
                    f"{given_by}: expected a place from 0 to {len(here)} after {path[0]}, got {part}", field=given_by
                )
            key = int(part)
            if key == len(here):
                here.append(None)
        if following is None:
            here[key] = value
            return
        child = here[key] if isinstance(here, list) else here.get(key)
        if child is None:
            child = here[key] = [] if following.isdigit() else {}
        if not isinstance(child, dict | list):
            raise ConfigError(f"{given_by}: expected {part} to have parts, got {child!r}", field=given_by)
        here = child


def _one_line(error: ValidationError) -> ConfigError:
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected", 1)
    if first["type"] == "extra_forbidden":
        message = "expected a known field (docs/configuration.md lists them)"
    came = "" if isinstance(first["input"], dict | BaseModel) else f", got {first['input']!r}"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    # Our own validators, which look at several fields, name the one at fault themselves.
    text = f"{field}: {message}" if field and not message.startswith(field) else message
    return ConfigError(f"{text}{came}{more}", field=field or None)


def _flat(error: Exception) -> str:
    return " ".join(str(error).split())
