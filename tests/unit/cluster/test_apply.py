from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from cluster.control.apply import Apply
from cluster.spec.changes import SpecSource
from cluster.spec.loader import spec_of_text
from tandem.errors import InsufficientMemory


def two_models(decode: int) -> str:
    models = [
        {"source": f"/models/{name}", "name": name, "prefill": {"workers": 1}, "decode": {"workers": decode}}
        for name in ("one", "two")
    ]
    return yaml.safe_dump({"models": models})


class LiveRatio:
    """Has room for no more of the second model."""

    async def scale(self, model: str, prefill: int, decode: int) -> None:
        if model == "two":
            raise InsufficientMemory("two: expected 2 free devices, got 1")

    def sizes(self, model: str) -> tuple[int, int]:
        return 1, 1


async def test_what_was_set_before_a_model_that_cannot_be_so_is_said() -> None:
    controller: Any = SimpleNamespace(live_ratio=LiveRatio())
    apply = Apply(controller, SpecSource(spec_of_text(two_models(1), below={}, flags={}), {}))
    with pytest.raises(InsufficientMemory) as caught:
        await apply.apply(two_models(2), dry_run=False)
    said = "two: expected 2 free devices, got 1 (set before that: one: 1 prefill and 2 decode workers)"
    assert caught.value.message == str(caught.value) == said
