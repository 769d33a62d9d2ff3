"""Imports every module of every Tandem package as installed, so that nothing the wheel forgot goes unnoticed.

import-all.py REPOSITORY      exits 1 when a module is missing, does not import, or comes from REPOSITORY
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import tomllib
from pathlib import Path

HELPERS = "testing"  # for tests and benchmarks, not in the wheel
NOT_EVERYWHERE = ("PIL", "flashinfer", "triton", "vllm")  # come with torch for GPUs, or with an extra


def main(repository: Path) -> int:
    with (repository / "pyproject.toml").open("rb") as file:
        packages = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    imported = 0
    for name in packages:
        package = importlib.import_module(name)
        origin = Path(package.__path__[0]).resolve()
        if origin.is_relative_to(repository / name):
            print(f"{name}: expected the installed package, got {origin}", file=sys.stderr)
            return 1
        if not (origin / "py.typed").is_file():
            print(f"{name}: py.typed is missing from the wheel", file=sys.stderr)
            return 1
        sources = (path.relative_to(repository) for path in (repository / name).rglob("*.py"))
        wanted = {path for path in sources if HELPERS not in path.parts}
        if (origin / HELPERS).exists():
            print(f"{name}: expected a wheel without {HELPERS}/, got one with it", file=sys.stderr)
            return 1
        missing = sorted(str(path) for path in wanted if not (origin.parent / path).is_file())
        if missing:
            print(f"{name}: missing from the wheel: {', '.join(missing)}", file=sys.stderr)
            return 1
        for module in pkgutil.walk_packages(package.__path__, prefix=f"{name}."):
            if not module.name.endswith("__main__"):  # those start a server when imported
                imported += imports(module.name)
    print(f"imported {imported} modules of {len(packages)} packages from {sys.prefix}")
    return 0


def imports(module: str) -> bool:
    """False where it needs what is not installed everywhere."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name not in NOT_EVERYWHERE:
            raise
        print(f"{module}: not imported without {missing.name}")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
