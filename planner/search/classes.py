"""The router's classes in a plan: those of the trace's requests, with the plan's objectives."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from planner.simulator.setup import Slo
from planner.traces.trace import DEFAULT_CLASS
from tandem.config.router import ClassSpec, RouterSpec
from tandem.errors import InputError

MOST_CLASSES = 16  # of router.classes
UNLABELLED = ((DEFAULT_CLASS, ""),)
_DEFAULTS = {each.name: each for each in RouterSpec().classes}
_FIRST, *_OTHERS = _DEFAULTS


def classes_of(labels: Sequence[tuple[str, str]], slo: Slo, *, refuses: bool) -> tuple[ClassSpec, ...]:
    """`labels`: of a trace. Requests without a class, or with one that no router can have, get the first. `refuses`:
    classes have their objectives, and a request that is predicted to miss its TTFT is refused; else it waits."""
    named = dict.fromkeys(name if _is_class(name) else _FIRST for name, _ in labels)
    own, found = dict(slo.of_class), list[ClassSpec]()
    usual = [name for name in named if name not in _OTHERS]
    first = [_FIRST] if _FIRST in named or not usual else []
    for name in dict.fromkeys([*first, *usual, *_OTHERS]):
        objectives = own.get(name, slo) if refuses and name in named else Slo()
        update = {"ttft_slo_s": objectives.ttft_s, "tpot_slo_s": objectives.tpot_s}
        found.append(_DEFAULTS.get(name, ClassSpec(name=name)).model_copy(update=update))
    return tuple(found[:MOST_CLASSES])


def check_classes(labels: Sequence[tuple[str, str]]) -> None:
    """Raises InputError for classes that no values file can have."""
    names = list(dict.fromkeys(name for name, _ in labels if name))
    if wrong := [name for name in names if not _is_class(name)]:
        raise InputError(
            "--values: expected classes of the trace that router.classes can have (a letter from a to z, then up to 31 "
            f"of a to z, 0 to 9, _ and -), got {wrong[0][:40]!r}: rename them in the trace",
            field="class",
        )
    if len(classes_of(labels, Slo(), refuses=False)) < len(names):
        raise InputError(
            f"--values: expected at most {MOST_CLASSES} classes in the trace, as in router.classes, got {len(names)}",
            field="class",
        )


def _is_class(name: str) -> bool:
    try:
        ClassSpec(name=name)
    except ValidationError:
        return False
    return True
