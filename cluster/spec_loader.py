"""The cluster spec from its four sources: command-line flags over environment over YAML file over defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tandem.config import ClusterSpec
from tandem.errors import ConfigError

ENV_PREFIX = "TANDEM_SPEC__"  # TANDEM_SPEC__ROUTER__HTTP_PORT=8080; numbers name list items: ..MODELS__0__SOURCE

Tree = dict[str, Any]


def load_spec(
    path: Path | None = None, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ
) -> ClusterSpec:
    """Args: `flags` maps dotted paths ("router.http_port", "models.0.prefill.workers") to values; None is "not given".

    Raises:
        ConfigError: one line naming the field, what was expected and what came.
    """
    tree = _read(path) if path is not None else {}
    for name, value in environ.items():
        if name.startswith(ENV_PREFIX):
            _put(tree, name.removeprefix(ENV_PREFIX).lower().split("__"), yaml.safe_load(value))
    for dotted, value in (flags or {}).items():
        if value is not None:
            _put(tree, dotted.split("."), value)
    try:
        return ClusterSpec.model_validate(tree)
    except ValidationError as error:
        raise _one_line(error) from None


def _read(path: Path) -> Tree:
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config: {path}: {error.strerror}", field="--config") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = " ".join(str(error).split())
        raise ConfigError(f"--config: {path}: expected YAML: {where}", field="--config") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"--config: {path}: expected a mapping, got {type(tree).__name__}", field="--config")
    return tree


def _put(tree: Tree, path: list[str], value: object) -> None:
    """Sets one leaf; numbers in the path are places in a list, which grows by one at most."""
    here: Any = tree
    for part, following in zip(path, [*path[1:], None], strict=True):
        key: Any = int(part) if isinstance(here, list) and part.isdigit() else part
        if isinstance(here, list) and key == len(here):
            here.append({})
        if following is None:
            here[key] = value
            return
        try:
            child = here[key]
        except (KeyError, IndexError, TypeError):
            child = None
        if not isinstance(child, dict | list):
            child = here[key] = [] if following.isdigit() else {}
        here = child


def _one_line(error: ValidationError) -> ConfigError:
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "expected a known field; see docs/configuration.md"
    came = "" if isinstance(first["input"], dict) else f", got {first['input']!r}"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    text = message if message.startswith(field.rsplit(".", 1)[-1]) else f"{field}: {message}"
    return ConfigError(f"{text}{came}{more}", field=field)
