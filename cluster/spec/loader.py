"""The cluster spec from its four sources: command-line flags over environment over YAML file over defaults.

A variable is TANDEM_ and the path of a field, its parts joined by two underscores: TANDEM_ROUTER__HTTP_PORT=8080,
TANDEM_MODELS__0__SOURCE=..., TANDEM_LOG_LEVEL=debug. Others that begin with TANDEM_ (TANDEM_CACHE) are not of the
spec.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError

ENV_PREFIX = "TANDEM_"
MOST_MISTAKES = 10
CHART_VALUES = ("cluster",)
UNKNOWN = "extra_forbidden"  # pydantic's word
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
        ConfigError: a line for each mistake, naming the field, what was expected and what came.
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
        raise _config_error(error) from None


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


def _config_error(error: ValidationError) -> ConfigError:
    """A line for each mistake. What only follows from another one (a list without its one, wrong item) is left out."""
    found = error.errors(include_url=False)
    places = [each["loc"] for each in found]
    mistakes = [
        each for each in found
        if not any(place != each["loc"] and place[: len(each["loc"])] == each["loc"] for place in places)
    ]  # fmt: skip
    if any(each["loc"] == CHART_VALUES and each["type"] == UNKNOWN for each in mistakes):
        text = "cluster: these are values of the Helm chart: expected a file of what is below `cluster` in them"
        return ConfigError(text, field="cluster")
    lines = [_line(each) for each in mistakes[:MOST_MISTAKES]]
    if (left := len(mistakes) - len(lines)) > 0:
        lines.append(f"and {left} more")
    return ConfigError("\n".join(lines), field=_dotted(mistakes[0]["loc"]) or None)


def _line(mistake: ErrorDetails) -> str:
    field = _dotted(mistake["loc"])
    message = mistake["msg"].removeprefix("Value error, ")
    for theirs, ours in (("Input should be", "expected"), ("String should", "expected it to")):
        message = message.replace(theirs, ours, 1)
    if mistake["type"] == "missing":
        return f"{field}: expected a value, got none"
    if mistake["type"] == "too_short":
        return f"{field}: expected at least {mistake['ctx']['min_length']}, got {mistake['ctx']['actual_length']}"
    if mistake["type"] == UNKNOWN:
        return f"{field}: expected a known field (docs/configuration.md lists them){_meant(mistake['loc'])}"
    came = "" if isinstance(mistake["input"], dict | BaseModel) else f", got {mistake['input']!r}"
    # Our own validators, which look at several fields, name the one at fault themselves.
    text = f"{field}: {message}" if field and not message.startswith(field) else message
    return f"{text}{came}"


def _meant(loc: tuple[int | str, ...]) -> str:
    """The known field that is spelled nearly alike."""
    known: type[BaseModel] | None = ClusterSpec
    for part in loc[:-1]:
        if known is not None and isinstance(part, str):
            known = _section(known, part)
    close = difflib.get_close_matches(str(loc[-1]), known.model_fields if known is not None else (), 1)
    return f"; is it {close[0]}?" if close else ""


def _section(spec: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The class of a field's value, or of its items."""
    field = spec.model_fields.get(name)
    kinds = [None if field is None else field.annotation]
    while kinds:
        kind = kinds.pop()
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
        kinds.extend(get_args(kind))
    return None


def _dotted(loc: tuple[int | str, ...]) -> str:
    return ".".join(map(str, loc))


def _flat(error: Exception) -> str:
    return " ".join(str(error).split())
