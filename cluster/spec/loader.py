"""Reads the cluster spec from four sources: command-line flags override the environment, which overrides the YAML file,
which overrides the defaults.

A variable's name is TANDEM_ and a field's path, with parts joined by two underscores: TANDEM_ROUTER__HTTP_PORT=8080,
TANDEM_MODELS__0__SOURCE=..., TANDEM_LOG_LEVEL=debug. Other TANDEM_ variables, such as TANDEM_CACHE, are no spec fields.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from operator import eq
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError

ENV_PREFIX = "TANDEM_"
MAX_MISTAKES = 10
CHART_VALUES = ("cluster",)
UNKNOWN = "extra_forbidden"  # pydantic's error type
# Values of these fields, and any text with a user's name or password in a URL, are not repeated in errors.
SECRET_PATHS = (("security", "auth"), ("redis", "url"))
SECRET_SECTION = "vllm"  # engine options, which may hold a token
USER_INFO = re.compile(r"://[^/\s]*@")
SCALARS = frozenset(
    name
    for name, field in ClusterSpec.model_fields.items()
    if name != "models" and not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel))
)

Tree = dict[str, Any]


def load_spec(
    path: Path | None = None, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ
) -> ClusterSpec:
    """`flags` maps dotted paths ("router.http_port", "models.0.prefill.workers") to values; None means not given.

    Raises:
        ConfigError: one line per mistake, with the field, what was expected and what was given.
    """
    return _validated(_read(path) if path is not None else {}, flags or {}, environ)


def assignments(texts: Sequence[str]) -> dict[str, object]:
    """`flags` of `load_spec` from texts such as `models.0.prefill.engine.dtype=bfloat16`. Values are YAML.

    Raises ConfigError.
    """
    found: dict[str, object] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        if not (path and equals):
            raise ConfigError(
                f"--set: expected KEY=VALUE, such as models.0.prefill.engine.dtype=bfloat16, got {text!r}",
                field="--set",
            )
        found[path] = _value("--set", value)
    return found


def spec_of_text(
    text: str, fallbacks: Mapping[str, Any], flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> ClusterSpec:
    """Like `load_spec`, for the text of a file. `fallbacks` apply to fields that the text does not set."""
    tree = _parsed(text, "FILE")
    for dotted, value in fallbacks.items():
        if not _has(tree, dotted.split(".")):
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
        raise ConfigError(f"{where}: expected YAML: {_fault(error)}", field=field) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: expected a mapping, got {type(tree).__name__}", field=field)
    return tree


def _has(tree: Any, path: Sequence[str]) -> bool:
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
        raise ConfigError(f"{variable}: expected a YAML value: {_fault(error)}", field=variable) from None


def _put(tree: Tree, path: Sequence[str], value: object, *, given_by: str) -> None:
    """Sets one leaf. Numbers in the path are list indices; a list grows by at most one item.

    Raises ConfigError if the path continues below a value that has no fields.
    """
    here: Any = tree
    for part, following in zip(path, [*path[1:], None], strict=True):
        key: Any = part
        if isinstance(here, list):
            if not part.isdigit() or int(part) > len(here):
                raise ConfigError(
                    f"{given_by}: expected an index from 0 to {len(here)} after {path[0]}, got {part}", field=given_by
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
            got = _got(path, child)
            raise ConfigError(f"{given_by}: expected {part} to be a section or list{got}", field=given_by)
        here = child


def _config_error(error: ValidationError) -> ConfigError:
    """One line per mistake. Leaves out errors that only follow from another one, such as a list with one wrong item."""
    found = error.errors(include_url=False)
    places = [each["loc"] for each in found]
    mistakes = [
        each for each in found
        if not any(place != each["loc"] and place[: len(each["loc"])] == each["loc"] for place in places)
    ]  # fmt: skip
    if any(each["loc"] == CHART_VALUES and each["type"] == UNKNOWN for each in mistakes):
        text = "cluster: expected a cluster spec, got values of the Helm chart: use the part below `cluster`"
        return ConfigError(text, field="cluster")
    lines = [_line(each) for each in mistakes[:MAX_MISTAKES]]
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
        return f"{field}: expected a known field (docs/configuration.md lists them){_suggestion(mistake['loc'])}"
    given = "" if isinstance(mistake["input"], dict | BaseModel) else _got(mistake["loc"], mistake["input"])
    # Validators of several fields name the wrong field in their message.
    text = f"{field}: {message}" if field and not message.startswith(field) else message
    return f"{text}{given}"


def _got(loc: Sequence[int | str], value: object) -> str:
    """Empty if the value may hold a secret."""
    is_secret = any(all(map(eq, loc, path)) for path in SECRET_PATHS) or SECRET_SECTION in loc
    shown = repr(value)
    return "" if is_secret or USER_INFO.search(shown) else f", got {shown}"


def _suggestion(loc: tuple[int | str, ...]) -> str:
    """A hint with the known field that has a similar name."""
    known: type[BaseModel] | None = ClusterSpec
    for part in loc[:-1]:
        if known is not None and isinstance(part, str):
            known = _section(known, part)
    close = difflib.get_close_matches(str(loc[-1]), known.model_fields if known is not None else (), 1)
    return f"; did you mean {close[0]}?" if close else ""


def _section(spec: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The model class of a field's value, or of its items."""
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


def _fault(error: yaml.YAMLError) -> str:
    """Without the text at fault, which may be a secret."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return type(error).__name__
    mark = error.problem_mark
    what = ", ".join(filter(None, [error.context, error.problem]))
    return f"{what}, at line {mark.line + 1}, column {mark.column + 1}"


def _flat(error: Exception) -> str:
    return " ".join(str(error).split())
