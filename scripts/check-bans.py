"""Checks that product code contains no banned construct (docs/architecture.md, Security).

    check-bans.py [FILE ...]      without FILE: every module of every package in the wheel

Banned: modules and calls that execute the data they load, and wildcard binds. A line with `# ban-ok: REASON` is
exempt. Prints one line per fault and exits 1 if there is any.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BANNED_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
BANNED_NAMES = {"eval", "exec", "__import__"}
# Attribute calls by their last two parts; None: any object.
BANNED_ATTRIBUTES = {
    ("torch", "load"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("yaml", "full_load"),
    ("os", "system"),
    (None, "send_object_list"),  # torch.distributed's *_object calls pickle
    (None, "recv_object_list"),
    (None, "broadcast_object_list"),
    (None, "scatter_object_list"),
    (None, "gather_object"),
    (None, "all_gather_object"),
}
WILDCARDS = {"0.0.0.0", "::", "[::]", "*:*"}
EXEMPTION = "# ban-ok: "


def product_files() -> Iterator[Path]:
    """Every module in the wheel, including generated code."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        packages = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    for package in packages:
        yield from sorted((ROOT / package).rglob("*.py"))


def faults_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields line and reason of every banned construct."""
    docstrings = {id(node) for node in _docstrings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in BANNED_MODULES:
                    yield node.lineno, f"imports {alias.name}"
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0 and (node.module or "").split(".")[0] in BANNED_MODULES:
                yield node.lineno, f"imports from {node.module}"
            if node.module == "torch" and any(alias.name == "load" for alias in node.names):
                yield node.lineno, "imports torch.load"
        elif isinstance(node, ast.Call):
            yield from _faults_of_call(node)
        elif isinstance(node, ast.Constant) and _is_wildcard(node.value) and id(node) not in docstrings:
            yield node.lineno, f"contains the wildcard address {node.value!r}; bind to a named interface"


def _faults_of_call(node: ast.Call) -> Iterator[tuple[int, str]]:
    if isinstance(node.func, ast.Name) and node.func.id in BANNED_NAMES:
        yield node.lineno, f"calls {node.func.id}"
    if isinstance(node.func, ast.Attribute):
        owner = node.func.value.id if isinstance(node.func.value, ast.Name) else None
        if {(owner, node.func.attr), (None, node.func.attr)} & BANNED_ATTRIBUTES:
            yield node.lineno, f"calls {owner or '…'}.{node.func.attr}"
    for keyword in node.keywords:
        if keyword.arg == "allow_pickle" and not (
            isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        ):
            yield node.lineno, "passes allow_pickle"


def _is_wildcard(value: object) -> bool:
    if not isinstance(value, str):
        return False
    host = value.split("://")[-1]
    return host in WILDCARDS or host.startswith(("0.0.0.0:", "[::]:"))


def _docstrings(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr):
                yield first.value


def main(arguments: list[str]) -> int:
    files = [Path(argument).resolve() for argument in arguments] or list(product_files())
    found = 0
    for path in files:
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        for line, reason in sorted(set(faults_of(ast.parse(source, filename=str(path))))):
            if EXEMPTION in lines[line - 1]:
                continue
            found += 1
            shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            print(f"{shown}:{line}: {reason}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
