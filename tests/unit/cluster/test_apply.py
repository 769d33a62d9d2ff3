from __future__ import annotations

import pytest
import yaml

from cluster.control.apply import SpecApplier
from cluster.spec.changes import SpecSource
from cluster.spec.loader import spec_of_text
from tandem.config.spec import ClusterSpec
from tandem.errors import InsufficientMemory


def two_models(decode: int) -> str:
    models = [
        {"source": f"/models/{name}", "name": name, "prefill": {"workers": 1}, "decode": {"workers": decode}}
        for name in ("one", "two")
    ]
    return yaml.safe_dump({"models": models})


class FullPools:
    """No device has room for more workers of the second model."""

    async def scale(self, model_name: str, prefill: int | None, decode: int | None) -> tuple[str, ...]:
        if model_name == "two":
            raise InsufficientMemory("two: expected 2 free devices, got 1")
        return ()

    def sizes(self, model_name: str) -> tuple[int, int]:
        return 1, 1


class NoAutoscaling:
    async def configure(self, spec: ClusterSpec) -> None:
        raise AssertionError("the autoscaler did not change")


async def test_an_error_lists_the_changes_made_before_it() -> None:
    applier = SpecApplier(
        FullPools(), NoAutoscaling(), SpecSource(spec_of_text(two_models(1), fallbacks={}, flags={}), {})
    )
    with pytest.raises(InsufficientMemory) as caught:
        await applier.apply(two_models(2), dry_run=False)
    said = "two: expected 2 free devices, got 1 (set before that: one: 1 prefill and 2 decode workers)"
    assert caught.value.message == str(caught.value) == said
