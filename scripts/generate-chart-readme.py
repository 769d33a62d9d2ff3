"""Writes helm/tandem/README.md, the chart's values, from values.yaml with its comments and values.schema.json.

generate-chart-readme.py [--check]     --check: writes nothing; exits 1 if the page is stale
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml
from schema_words import type_of

CHART = Path(__file__).resolve().parent.parent / "helm" / "tandem"
PAGE = CHART / "README.md"
HEAD = "| value | type | default | meaning |\n|---|---|---|---|\n"
INTRODUCTION = """\
# The chart `{name}`

<!-- Generated from values.yaml and its schema by scripts/generate-chart-readme.py: run `make docs`. -->

{description}

```bash
helm install demo oci://REGISTRY/charts/{name} --version {version} \\
  --namespace tandem --create-namespace --values mine.yaml
helm --namespace tandem test demo --logs
```

It needs Kubernetes {kube} and {needs}. The repository has `docs/deploy.md`, which explains the values step by step,
and values for many kinds of clusters in `helm/tandem/examples`. Helm refuses a wrong key or type and names it.

`cluster` has the keys of `docs/configuration.md`. All other values:

"""

Path_ = tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A key of values.yaml. `above`: the comment before it; `beside`: the one on its line."""

    path: Path_
    above: str
    beside: str


def entries(text: str, schema: dict[str, Any]) -> Iterator[Entry]:
    """The keys that the schema names and that stand on lines of their own, in order."""
    root = yaml.compose(text)
    assert root is not None
    return _keys_below(root, (), text.splitlines(), schema)


def _keys_below(section: yaml.Node, path: Path_, lines: list[str], schema: dict[str, Any]) -> Iterator[Entry]:
    if not isinstance(section, yaml.MappingNode) or section.flow_style or "properties" not in schema_at(schema, path):
        return
    for key, value in section.value:
        number = key.start_mark.line
        above = takewhile(lambda line: line.lstrip().startswith("#"), reversed(lines[:number]))
        yield Entry((*path, key.value), _joined([line.lstrip()[2:] for line in above][::-1]), _comment(lines[number]))
        yield from _keys_below(value, (*path, key.value), lines, schema)


def _comment(line: str) -> str:
    """Behind the value: ` # ` begins it, and no string of values.yaml has that."""
    return line.partition(" # ")[2].strip()


def _joined(lines: list[str]) -> str:
    """Paragraphs; a line that is indented further begins an item of a list."""
    return "".join(f"\n- {each.strip()}" if each.startswith("  ") else f" {each}" for each in lines).strip()


def schema_at(root: dict[str, Any], path: Path_) -> dict[str, Any]:
    found: dict[str, Any] = root
    for name in path:
        found = _resolved(root, found).get("properties", {}).get(name, {})
    return _resolved(root, found)


def _resolved(root: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """A definition's name in words is the type of a string."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [_resolved(root, each) for each in schema["anyOf"]]}
    if "$ref" not in schema:
        return schema
    name = schema["$ref"].rsplit("/", 1)[1]
    target = {**root["$defs"][name], **schema}
    if target.get("type") != "object":
        words = re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower()
        return {"type": words, "description": target.get("description", "")}
    return target


def value_at(values: Any, path: Path_) -> Any:
    for name in path:
        values = values[name]
    return values


def _row(path: Path_, kind: str, default: str, meaning: str) -> str:
    return (
        f"| `{'.'.join(path)}` | {kind} | {default} | {meaning.replace('|', chr(92) + '|').replace(chr(10), ' ')} |\n"
    )


def _default(value: Any) -> str:
    return f"`{json.dumps(value)}`".replace("|", "\\|")


def rows(found: list[Entry], values: Any, schema: dict[str, Any]) -> Iterator[str]:
    """One for each value, and one for a section that has a comment of its own beside its key or above it."""
    paths = {entry.path for entry in found}
    for entry in found:
        meaning = " ".join(filter(None, (entry.above, entry.beside)))
        if any(path[:-1] == entry.path for path in paths):
            if meaning and len(entry.path) > 1:
                yield _row(entry.path, "section", "", meaning)
            yield from _unnamed(entry.path, paths, schema)
        else:
            yield _row(
                entry.path, type_of(schema_at(schema, entry.path)), _default(value_at(values, entry.path)), meaning
            )


def _unnamed(path: Path_, paths: set[Path_], schema: dict[str, Any]) -> Iterator[str]:
    """What the schema takes beside what values.yaml has."""
    for name, each in schema_at(schema, path).get("properties", {}).items():
        if (*path, name) not in paths:
            yield _row((*path, name), type_of(_resolved(schema, each)), "unset", each.get("description", ""))


def page() -> str:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    values, schema = yaml.safe_load(text), json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    found = [entry for entry in entries(text, schema) if entry.path[0] != "cluster"]
    parts = [
        INTRODUCTION.format(
            name=about["name"],
            description=about["description"],
            version=about["version"],
            kube=about["kubeVersion"].removeprefix(">=").removesuffix("-0") + " or newer",
            needs=f"the {about['annotations']['tandem.dev/needs']}",
        )
    ]
    sections = list(dict.fromkeys(entry.path[0] for entry in found if len(entry.path) > 1))
    single = [entry for entry in found if entry.path[0] not in sections]
    parts.append(HEAD + "".join(rows(single, values, schema)))
    for section in sections:
        own = [entry for entry in found if entry.path[0] == section]
        said = " ".join(filter(None, (own[0].above, own[0].beside)))
        parts.append(
            f"\n## `{section}`\n\n{said + chr(10) + chr(10) if said else ''}{HEAD}" + "".join(rows(own, values, schema))
        )
    return "".join(parts)


def main(check: bool) -> int:
    wanted = page()
    if check:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != wanted:
            print("helm/tandem/README.md is stale: run make docs", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
