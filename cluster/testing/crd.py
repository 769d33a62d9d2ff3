"""Objects against their CustomResourceDefinition as the API server checks them: defaults, fields and types, and the CEL
rules of `x-kubernetes-validations`, for an update those with `oldSelf` too."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import celpy
import jsonschema
import yaml
from celpy import celtypes
from celpy.adapter import json_to_cel
from celpy.celparser import CELParseError
from celpy.evaluation import CELEvalError

RULES = "x-kubernetes-validations"
OLD_SELF = re.compile(r"\boldSelf\b")
# Of names in CEL, as the API server escapes them.
RESERVED = re.compile(
    "true|false|null|in|as|break|const|continue|else|for|function|if|import|let|loop|package|namespace|return|var|void|while"
)
ESCAPES = {"__": "__underscores__", ".": "__dot__", "-": "__dash__", "/": "__slash__"}

Schema = Mapping[str, Any]


def definitions(text: str | bytes) -> dict[tuple[str, str], Definition]:
    """Those in YAML, as `kubectl get crd -o yaml` prints them or a release ships them, by apiVersion and kind."""
    found = {}
    for document in yaml.load_all(text, Loader=yaml.CSafeLoader):
        for each in document.get("items", [document]) if document else ():
            if each.get("kind") == "CustomResourceDefinition":
                spec = each["spec"]
                for version in spec["versions"]:
                    key = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
                    found[key] = Definition.of(version["schema"]["openAPIV3Schema"])
    return found


@dataclass(frozen=True, slots=True)
class Definition:
    """Of one version of a kind."""

    schema: Schema
    validator: Any

    @classmethod
    def of(cls, schema: Schema) -> Definition:
        implied = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {"type": "object"}}
        whole = {**schema, "properties": {**schema["properties"], **implied}}
        return cls(whole, jsonschema.Draft202012Validator(closed(whole)))

    def faults(self, manifest: Any, former: Any = None) -> Iterator[str]:
        """Each with its path. `former`: the object that the manifest changes. As in the API server, rules are evaluated
        only if fields and types are right."""
        value = _with_defaults(self.schema, manifest)
        wrong = [
            f"{'.'.join(map(str, error.path))}: {error.message[:200]}" for error in self.validator.iter_errors(value)
        ]
        yield from wrong
        if not wrong:
            yield from _broken_rules(
                self.schema, value, None if former is None else _with_defaults(self.schema, former)
            )


def closed(node: Any) -> Any:
    """Converts a structural schema of Kubernetes to a JSON Schema that refuses unknown fields."""
    if isinstance(node, list):
        return [closed(each) for each in node]
    if not isinstance(node, dict):
        return node
    found = {name: closed(each) for name, each in node.items()}
    if node.get("x-kubernetes-int-or-string"):
        found["type"] = ["integer", "string"]
    if node.get("nullable") and isinstance(found.get("type"), str):
        found["type"] = [found["type"], "null"]
    named = isinstance(node.get("properties"), dict)
    if named and "additionalProperties" not in node and not node.get("x-kubernetes-preserve-unknown-fields"):
        found["additionalProperties"] = False
    return found


def _fields(schema: Schema, value: Any) -> Iterator[tuple[Any, Schema]]:
    """Keys or indexes of the parts of a value, with their schemas."""
    if isinstance(value, dict):
        named, others = schema.get("properties", {}), schema.get("additionalProperties")
        for name in value:
            if isinstance(part := named.get(name, others), dict):
                yield name, part
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        yield from ((index, schema["items"]) for index in range(len(value)))


def _with_defaults(schema: Schema, value: Any) -> Any:
    if isinstance(value, dict):
        missing = {name: part["default"] for name, part in schema.get("properties", {}).items() if "default" in part}
        value = {**copy.deepcopy(missing), **value}
    elif isinstance(value, list):
        value = list(value)
    for key, part in _fields(schema, value):
        value[key] = _with_defaults(part, value[key])
    return value


def _broken_rules(schema: Schema, value: Any, former: Any, path: str = "") -> Iterator[str]:
    for rule in schema.get(RULES, ()):
        if former is not None or not OLD_SELF.search(rule["rule"]):
            variables = {"self": _cel(schema, value)} | ({} if former is None else {"oldSelf": _cel(schema, former)})
            if said := _broken(rule, variables):
                yield f"{(path + rule.get('fieldPath', '')).removeprefix('.') or 'object'}: {said}"
    for key, part in _fields(schema, value):
        place = f"[{key}]" if isinstance(key, int) else f".{key}"
        yield from _broken_rules(part, value[key], _counterpart(schema, value, former, key), path + place)


def _counterpart(schema: Schema, value: Any, former: Any, key: Any) -> Any:
    """The former of one part of a value; none for parts without a lasting name, as those of most lists."""
    if isinstance(former, dict):
        return former.get(key)
    if isinstance(former, list) and schema.get("x-kubernetes-list-type") == "map":
        names = schema["x-kubernetes-list-map-keys"]
        same = (each for each in former if all(each.get(name) == value[key].get(name) for name in names))
        return next(same, None)
    return None


def _broken(rule: Mapping[str, str], variables: Mapping[str, Any]) -> str:
    """What the API server says; empty if the rule holds. A rule with what this CEL lacks is one that does not hold."""
    try:
        if _program(rule["rule"]).evaluate(variables):
            return ""
        if "messageExpression" in rule:
            return str(_program(rule["messageExpression"]).evaluate(variables))
    except (CELEvalError, CELParseError) as error:
        reason = str(error.args[0]).partition(" (in activation")[0].strip().splitlines()[0]
        return f"expected a rule that can be evaluated, got {rule['rule']}: {reason}"
    return rule.get("message") or f"failed rule: {rule['rule']}"


_ENVIRONMENT = celpy.Environment()  # here, as it sets Python's recursion limit, which hypothesis refuses in a test


@functools.cache
def _program(rule: str) -> celpy.Runner:
    return _ENVIRONMENT.program(_ENVIRONMENT.compile(rule.strip()))


def _cel(schema: Schema, value: Any) -> Any:
    parts = dict(_fields(schema, value))
    if isinstance(value, dict):
        named = schema.get("properties", {})
        return celtypes.MapType(
            {
                celtypes.StringType(_escaped(name) if name in named else name): _cel(parts.get(name, {}), each)
                for name, each in value.items()
            }
        )
    if isinstance(value, list):
        return celtypes.ListType([_cel(parts.get(index, {}), each) for index, each in enumerate(value)])
    if schema.get("type") == "number":
        return celtypes.DoubleType(value)
    return json_to_cel(value)


def _escaped(name: str) -> str:
    """Of a property, so that a rule can name it."""
    if RESERVED.fullmatch(name):
        return f"__{name}__"
    return re.sub(r"__|[./-]", lambda found: ESCAPES[found[0]], name)
