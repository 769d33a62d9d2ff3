from __future__ import annotations

import asyncio

import pytest
import yaml

from cluster.control.apply import SpecApplier
from cluster.spec.changes import SpecSource
from cluster.spec.loader import load_spec, spec_of_text
from tandem.checkpoint.adapter import Adapter
from tandem.config.spec import ClusterSpec
from tandem.errors import ConfigError, InsufficientMemory, UnavailableError


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


class QuietAutoscaling:
    async def configure(self, spec: ClusterSpec) -> None:
        """Does nothing."""


class NoAutoscaling:
    async def configure(self, spec: ClusterSpec) -> None:
        raise AssertionError("the autoscaler did not change")


class NoAdapters:
    async def changed(self, spec: ClusterSpec) -> dict[str, tuple[Adapter, ...]]:
        return {}

    def words(self, model: str, wanted: tuple[Adapter, ...]) -> str:
        raise AssertionError("no adapter changed")

    async def change(self, model: str, adapters: tuple[Adapter, ...]) -> None:
        raise AssertionError("no adapter changed")


class SettledRouters:
    def __init__(self) -> None:
        self.specs: list[ClusterSpec] = []

    async def change(self, spec: ClusterSpec) -> None:
        self.specs.append(spec)


class ScaledPools(FullPools):
    """Another autoscaler gave both models three decode workers."""

    def __init__(self) -> None:
        self.scaled: list[tuple[str, int | None, int | None]] = []

    async def scale(self, model_name: str, prefill: int | None, decode: int | None) -> tuple[str, ...]:
        self.scaled.append((model_name, prefill, decode))
        return ()

    def sizes(self, model_name: str) -> tuple[int, int]:
        return 1, 3


@pytest.mark.parametrize("word", ["enabled", "external"])
async def test_only_sizes_that_a_spec_changes_are_set_while_an_autoscaler_chooses_them(word: str) -> None:
    text = f"{two_models(1)}autoscaler: {{{word}: true}}\nrouter: {{classes: [{{name: a, ttft_slo_s: 1}}]}}\n"
    pools = ScaledPools()
    source = SpecSource(spec_of_text(text, fallbacks={}, flags={}), {})
    applier = SpecApplier(pools, QuietAutoscaling(), SettledRouters(), NoAdapters(), source)
    assert await applier.apply(text, dry_run=False) == ()
    assert pools.scaled == []
    changed = text.replace("decode:\n    workers: 1", "decode:\n    workers: 2", 1)
    assert await applier.apply(changed, dry_run=False) == ("one: 1 prefill and 2 decode workers",)
    assert pools.scaled == [("one", 1, 2)]


def test_two_autoscalers_are_refused() -> None:
    text = "autoscaler: {enabled: true, external: true}\nrouter: {classes: [{name: a, ttft_slo_s: 1}]}\n"
    with pytest.raises(ConfigError, match=r"external: expected false with autoscaler\.enabled"):
        spec_of_text(text, fallbacks={}, flags={})


async def test_routers_are_told_what_concerns_them() -> None:
    routers, levels = SettledRouters(), list[ClusterSpec]()
    source = SpecSource(load_spec(None, {}, {}), {})
    applier = SpecApplier(FullPools(), QuietAutoscaling(), routers, NoAdapters(), source, set_log_levels=levels.append)
    text = "router: {max_queued_requests: 9, dashboard: false}"
    said = "routers, one after another: max_queued_requests 256 → 9, dashboard true → false"
    assert await applier.apply(text, dry_run=True) == (f"would set {said}",)
    assert routers.specs == []
    assert await applier.apply(text, dry_run=False) == (said,)
    assert await applier.apply(text, dry_run=False) == ()
    (spec,) = routers.specs
    assert (spec.router.max_queued_requests, spec.router.dashboard) == (9, False)
    changes = await applier.apply(f"{text}\nlog_level: debug", dry_run=False)
    everyone = ("the controller", "the routers, one after another", "each worker when it next starts (tandem restart)")
    assert changes == tuple(f"log level debug: {each}" for each in everyone)
    assert levels[-1].log_level == routers.specs[-1].log_level == "debug"
    (change,) = await applier.apply(f"{text}\nlog_level: debug\nlog_levels: {{worker: error}}", dry_run=False)
    assert change == f"log level error: {everyone[-1]}"
    assert (levels[-1].log_level_of("worker"), len(routers.specs)) == ("error", 2), "no router restarts for that"


class RefusingRouters:
    """They cannot serve with the settings that they are given."""

    async def change(self, spec: ClusterSpec) -> None:
        raise UnavailableError("router-0 did not serve again within 1 s")


async def test_settings_that_routers_cannot_serve_with_are_not_kept() -> None:
    source, levels = SpecSource(load_spec(None, {}, {}), {}), list[ClusterSpec]()
    applier = SpecApplier(
        FullPools(), QuietAutoscaling(), RefusingRouters(), NoAdapters(), source, set_log_levels=levels.append
    )
    for _ in range(2):  # it is no "nothing to do" when it is tried again
        with pytest.raises(UnavailableError, match=r"did not serve again .* earlier settings again"):
            await applier.apply("log_level: debug\nrouter: {record: /dev/null/x}", dry_run=False)
    assert applier.source.spec.router == source.spec.router
    assert levels[-1].log_level == source.spec.log_level


async def test_settings_refused_after_the_caller_left_are_not_kept_either() -> None:
    refused = asyncio.Event()

    class Slow(RefusingRouters):
        async def change(self, spec: ClusterSpec) -> None:
            await refused.wait()
            await super().change(spec)

    source, configured = SpecSource(load_spec(None, {}, {}), {}), list[ClusterSpec]()

    class Autoscaling(QuietAutoscaling):
        async def configure(self, spec: ClusterSpec) -> None:
            configured.append(spec)

    applier = SpecApplier(FullPools(), Autoscaling(), Slow(), NoAdapters(), source)
    applying = asyncio.create_task(applier.apply("router: {record: /dev/null/x}", dry_run=False))
    await asyncio.sleep(0.01)
    applying.cancel()
    await asyncio.sleep(0.01)
    assert not applying.done(), "another apply has to wait for what becomes of this one"
    refused.set()
    await asyncio.wait([applying])
    assert applying.cancelled()
    assert applier.source.spec.router == source.spec.router
    assert configured[-1].router == source.spec.router, "the autoscaler keeps none of them"


async def test_an_error_lists_the_changes_made_before_it() -> None:
    applier = SpecApplier(
        FullPools(),
        NoAutoscaling(),
        SettledRouters(),
        NoAdapters(),
        SpecSource(spec_of_text(two_models(1), fallbacks={}, flags={}), {}),
    )
    with pytest.raises(InsufficientMemory) as caught:
        await applier.apply(two_models(2), dry_run=False)
    said = "two: expected 2 free devices, got 1 (set before that: one: 1 prefill and 2 decode workers)"
    assert caught.value.message == str(caught.value) == said


async def test_a_change_that_an_earlier_controller_began_is_completed_or_set_back() -> None:
    before = load_spec(None, {}, {})
    after = spec_of_text("router: {max_queued_requests: 9}", fallbacks={}, flags={})
    routers = SettledRouters()
    await SpecApplier(FullPools(), QuietAutoscaling(), routers, NoAdapters(), SpecSource(after, {})).resume(before)
    assert routers.specs == [after]
    failing = SpecApplier(FullPools(), QuietAutoscaling(), RefusingRouters(), NoAdapters(), SpecSource(after, {}))
    await failing.resume(before)
    assert failing.source.spec == before
