"""A Jinja sandbox with bounded time, iterations and text, for templates that come with checkpoints.

Jinja's own sandbox keeps a template from reaching Python, but not from looping for ever or filling memory. So every
loop and macro body starts with a tick, and the size of every text or list is checked before it is created.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from jinja2 import Template, Undefined, nodes
from jinja2.ext import Extension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.clock import Clock


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    template_chars: int = 256 << 10
    text_chars: int = 16 << 20  # of the output, and of every intermediate text or list
    iterations: int = 1_000_000
    seconds: float = 5.0


class LimitExceeded(Exception):
    """The message names the limit."""


class Budget:
    """The remaining limits of one rendering."""

    NAME: Final = "budget of this rendering"  # not an identifier, so a template cannot name or set it
    _TICKS_PER_LOOK: Final = 64

    def __init__(self, limits: TemplateLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._deadline_s = clock.now_s() + limits.seconds
        self._iterations = 0
        self._chars = 0

    def tick(self) -> None:
        self._iterations += 1
        if self._iterations > self._limits.iterations:
            raise LimitExceeded(f"{self._limits.iterations} iterations")
        if self._iterations % self._TICKS_PER_LOOK == 0:
            self._check_time()

    def spend(self, chars: int) -> None:
        self._chars += chars
        check_size(self._chars, self._limits)
        self._check_time()

    def _check_time(self) -> None:
        if self._clock.now_s() > self._deadline_s:
            raise LimitExceeded(f"{self._limits.seconds} seconds")


def check_size(size: int, limits: TemplateLimits) -> None:
    if size > limits.text_chars:
        raise LimitExceeded(f"{limits.text_chars} characters")


class _Ticks(Extension):
    """Functions for compiled templates. Templates cannot name an extension attribute themselves."""

    def tick(self, context: Context) -> str:
        budget = context.parent[Budget.NAME]
        budget.tick()
        return ""

    def concat(self, *parts: object) -> str:
        environment = self.environment
        if not isinstance(environment, LimitedEnvironment):
            raise TypeError("expected a LimitedEnvironment")
        return environment.concat([environment.text(part) for part in parts])


# String methods whose result is no larger than the string, and two that are measured first (replace, join).
# fmt: off
_STR_METHODS: Final = frozenset((
    "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal",
    "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition",
    "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split",
    "splitlines", "startswith", "strip", "swapcase", "title", "upper",
))
_FILTERS: Final = frozenset((
    "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "int", "items",
    "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "round", "safe",
    "select", "selectattr", "sort", "sum", "title", "trim", "unique", "upper",
))
# fmt: on
_GLOBALS: Final = ("dict", "namespace", "range", "cycler", "joiner")
_MAX_INDENT: Final = 64
_MAX_SEPARATORS: Final = 8
_MAX_BITS: Final = 2048
_FORMAT_WIDTH = re.compile(r"%[^a-zA-Z%]*(?:\d{4,}|\*)")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, limits: TemplateLimits) -> None:
        # Chat templates expect trim_blocks and lstrip_blocks.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Ticks])
        self._limits = limits
        self.finalize = self._finalized
        self.globals = {name: self.globals[name] for name in _GLOBALS}
        self.filters = {name: self.filters[name] for name in _FILTERS}
        self.filters |= {
            "join": self._join,
            "replace": self._replace,
            "string": self.text,
            "tojson": self._to_json,
            "indent": self._indent,
        }

    def compile_limited(self, source: str) -> Template:
        """Raises TemplateSyntaxError."""
        tree = self.parse(source)
        _add_ticks(tree)
        tree.set_environment(self)
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    # Text

    def text(self, value: object) -> str:
        """`str(value)`. The size of a container is checked first, because lists may contain each other many times."""
        if not isinstance(value, str | int | float | bool | Undefined | None):
            self._measure(value)
        return str(value)

    def _finalized(self, value: object) -> object:
        return value if isinstance(value, str) else self.text(value)

    def _measure(self, value: object) -> None:
        pending, size = [value], 0
        while pending:
            each = pending.pop()
            size += len(each) if isinstance(each, str) else 1
            check_size(size, self._limits)
            if isinstance(each, dict):
                pending.extend(each)
                pending.extend(each.values())
            elif isinstance(each, list | tuple | set | frozenset):
                pending.extend(each)

    def concat(self, parts: Iterable[str]) -> str:
        """Joins captured blocks and macros."""
        kept = list(parts)
        check_size(sum(map(len, kept)), self._limits)
        return "".join(kept)

    def _join(self, values: Iterable[object], d: str = "", attribute: str | None = None) -> str:
        texts = [self.text(each if attribute is None else self.getitem(each, attribute)) for each in values]
        check_size(sum(map(len, texts)) + len(d) * len(texts), self._limits)
        return str(d).join(texts)

    def _replace(self, text: object, old: str, new: str, count: int = -1) -> str:
        whole = self.text(text)
        check_size(len(whole) + whole.count(old) * len(new), self._limits)
        return whole.replace(old, new, count)

    def _to_json(
        self,
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Plain JSON without HTML escapes, with the parameters of transformers' filter."""
        self._measure(value)
        if indent is not None and not 0 <= indent <= _MAX_INDENT:
            raise LimitExceeded(f"an indent of {_MAX_INDENT}")
        if separators is not None and sum(map(len, separators)) > _MAX_SEPARATORS:
            raise LimitExceeded(f"separators of {_MAX_SEPARATORS} characters")
        return json.dumps(
            value, ensure_ascii=bool(ensure_ascii), indent=indent, separators=separators, sort_keys=bool(sort_keys)
        )

    def _indent(self, text: object, width: int = 4, first: bool = False, blank: bool = False) -> str:
        if not isinstance(width, int) or not 0 <= width <= _MAX_INDENT:
            raise LimitExceeded(f"an indent of {_MAX_INDENT}")
        lines = self.text(text).split("\n")
        check_size(sum(map(len, lines)) + (width + 1) * len(lines), self._limits)
        margin = " " * width
        done = [margin + line if (line or blank) and (first or at) else line for at, line in enumerate(lines)]
        return "\n".join(done)

    # Operators and calls

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(each) for each in (left, right) if isinstance(each, str | list | tuple)]
        whole = [each for each in (left, right) if isinstance(each, int)]
        if operator == "+" and len(sizes) == 2:
            check_size(sum(sizes), self._limits)
        elif operator == "*" and sizes and whole:
            check_size(sizes[0] * max(0, whole[0]), self._limits)
        elif operator == "*" and len(whole) == 2:
            _check_bits(sum(each.bit_length() for each in whole))
        elif operator == "**" and len(whole) == 2:
            _check_bits(left.bit_length() * max(1, right))
        elif operator == "%" and isinstance(left, str):
            if _FORMAT_WIDTH.search(left):
                raise LimitExceeded("a format width of 999")
            check_size(len(left) * (1 + len(self.text(right))), self._limits)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr not in _STR_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """None, because `format` is not available to templates."""
        return None

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name == "replace":
            return __self._replace(owner, *args, **kwargs)
        if isinstance(owner, str) and name == "join":
            return __self._join(args[0], owner)
        return super().call(__context, __obj, *args, **kwargs)


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise LimitExceeded(f"integers of {_MAX_BITS} bits")


def _add_ticks(tree: nodes.Template) -> None:
    """Adds a tick to the start of every loop and macro body, and replaces `~` with the measured concatenation."""
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):  # always true, but find_all's type is wider
            node.body.insert(0, nodes.ExprStmt(_limits_call("tick", [nodes.ContextReference()])))
    _replace_concats(tree)


def _limits_call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.ExtensionAttribute(_Ticks.identifier, name), arguments, [], None, None)


def _replace_concats(node: nodes.Node) -> None:
    for name, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, name, [_measured(each) if isinstance(each, nodes.Node) else each for each in value])
        elif isinstance(value, nodes.Node):
            setattr(node, name, _measured(value))


def _measured(node: nodes.Node) -> nodes.Node:
    _replace_concats(node)
    if not isinstance(node, nodes.Concat):
        return node
    return _limits_call("concat", node.nodes)
