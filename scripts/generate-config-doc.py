"""Writes docs/configuration.md from the configuration schema.

generate-config-doc.py [--check]     --check: writes nothing; exits 1 if the page is stale
"""

from __future__ import annotations

import enum
import inspect
import json
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from schema_words import type_of

from tandem.config.engine import EngineOverrides
from tandem.config.spec import ClusterSpec

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

*For operators. After this page you know every key with its type, default and meaning.*

<!-- Generated from tandem/config by scripts/generate-config-doc.py; change that and run `make docs`. -->

The YAML file (`tandem up --config FILE`), the environment, the flags and the Helm values under `cluster` share this
schema. `tandem up` validates it at start. An unknown key is an error that names it. Every section has defaults, so an
empty file gives the default cluster: one prefill and one decode worker of the demo model on this machine.
[`deploy/tandem.yaml`](../deploy/tandem.yaml) lists all defaults.

Flags override the environment, and the environment overrides the file. A variable is `TANDEM_` plus the key's path,
with `__` between its parts and numbers for list items: `TANDEM_ROUTER__HTTP_PORT=8080`,
`TANDEM_MODELS__0__PREFILL__WORKERS=2`. `tandem up --set KEY=VALUE` takes any path: `--set models.0.prefill.workers=2`.
"""


def models_of(root: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yields (dotted path, model) of `root` and all sections in it, in order; a list is `name[]`."""
    pending: list[tuple[str, type[BaseModel]]] = [("", root)]
    while pending:
        path, model = pending.pop(0)
        yield path, model
        below = []
        for name, field in model.model_fields.items():
            inner, many = _nested(field.annotation)
            if inner is not None:
                dotted = f"{path}.{name}" if path else name
                below.append((dotted + ("[]" if many else ""), inner))
        pending = below + pending


def _nested(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    optional = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    for argument in typing.get_args(annotation):
        found, many = _nested(argument)
        if found is not None:
            return found, many or not optional
    return None, False


def kind_of(schema: dict[str, Any], annotation: Any) -> str:
    """The type and its limits in words."""
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return " \\| ".join(f"`{member.value}`" for member in annotation)
    choices = schema.get("anyOf", [schema])
    said = []
    for choice in choices:
        said.append("unset" if choice.get("type") == "null" else type_of(choice))
    return " or ".join(said)


def row(name: str, field: FieldInfo, schema: dict[str, Any]) -> str:
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    if isinstance(default, enum.Enum):
        default = default.value
    shown = "required" if field.is_required() else "unset" if default is None else f"`{json.dumps(default)}`"
    shown = shown.replace('"', "")
    description = (field.description or "").replace("|", "\\|").replace("<", "&lt;")
    return f"| `{name}` | {kind_of(schema, _without_none(field.annotation))} | {shown} | {description} |"


def _section(name: str, model: type[BaseModel]) -> str:
    field = model.model_fields[name]
    return f"`{name}`" + (
        " (unset; give all of its keys or none)" if not field.is_required() and field.default is None else ""
    )


def _without_none(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        rest = [argument for argument in typing.get_args(annotation) if argument is not type(None)]
        return rest[0] if len(rest) == 1 else annotation
    return annotation


def page() -> str:
    parts = [INTRODUCTION]
    for path, model in models_of(ClusterSpec):
        title = f"`{path}`" if path else "The cluster"
        text = inspect.cleandoc(model.__doc__ or "")
        schema = model.model_json_schema()["properties"]
        rows = [
            row(name, field, schema[name])
            for name, field in model.model_fields.items()
            if _nested(field.annotation)[0] is None
        ]
        inner = [name for name, field in model.model_fields.items() if _nested(field.annotation)[0] is not None]
        parts.append(f"## {title}\n")
        if text and model is not ClusterSpec:
            parts.append(text + "\n")
        if rows and model is not EngineOverrides:  # the rows of `models[].engine`
            parts.append("\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]) + "\n")
        if inner:
            parts.append("Sections: " + ", ".join(_section(name, model) for name in inner) + ".\n")
    return "\n".join(parts)


def main(check: bool) -> int:
    wanted = page()
    if check:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != wanted:
            print("docs/configuration.md is stale: run make docs", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
