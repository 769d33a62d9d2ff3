"""A cluster whose pools change while clients read: every answer is what it would have been, and nothing leaks."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
import yaml

from cluster.control.controller import Controller
from cluster.control.record import WorkerState
from cluster.control.scaling.autoscaling import Autoscaling
from cluster.control.worker_slot import WorkerSlot
from cluster.testing.kubernetes_api import FakeKubernetes, served
from cluster.testing.running import ON_FREE_PORTS, running
from router.testing.stub_worker import until
from tandem.config.autoscaler import AutoscalerSpec
from tandem.config.model import Role
from tandem.errors import ConfigError
from tandem.testing.models import random_prompt, write_tiny_llama
from tandem.v1 import cluster_pb2
from tests.unit.cluster.test_scale_adapter import check, pool, settled

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one cluster serves all
PAGE = Path(__file__).parents[2] / "docs" / "live-ratio.md"
VOCAB = 300
LONG_S = 240.0  # never waited for where all is well; workers start anew, on a machine that other tests may keep busy
CYCLES = 20 if os.environ.get("TANDEM_SOAK") else 1
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
# None of these answers rests on a near tie of two logits.
ASKS = [(random_prompt(60 + 40 * n, VOCAB, n), SEEDED if n % 2 else GREEDY) for n in range(6)]


def tiny_spec(source: str) -> dict[str, Any]:
    return {
        "models": [{"source": source, "engine": {"kv_blocks": 400, "max_step_tokens": 100}}],
        "router": ON_FREE_PORTS["router"] | {"disaggregation": "always", "queue_timeout_s": LONG_S},
        "control": ON_FREE_PORTS["control"],
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def controller(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Controller]:
    folder = tmp_path_factory.mktemp("r")
    model = write_tiny_llama(folder / "tiny", vocab=VOCAB, seed=1, scale=2.0)
    async with running(tiny_spec(str(model)), folder) as controller:
        yield controller


async def answer(controller: Controller, prompt: list[int], sampling: dict[str, Any]) -> str:
    async with openai.AsyncOpenAI(
        base_url=f"http://{controller.http_address}/v1", api_key="none", max_retries=0, timeout=LONG_S
    ) as client:
        done = await client.completions.create(model="tiny", prompt=prompt, max_tokens=200, **sampling)
    return str(done.choices[0].text)


async def streamed_answer(client: openai.AsyncOpenAI, prompt: list[int], sampling: dict[str, Any]) -> tuple[str, float]:
    """The beginning of an answer, and the longest time between two parts of it."""
    gaps_s, text, last_s = [0.0], "", None
    parts = await client.completions.create(model="tiny", prompt=prompt, max_tokens=24, stream=True, **sampling)
    async for part in parts:
        now_s = asyncio.get_running_loop().time()
        if last_s is not None:
            gaps_s.append(now_s - last_s)
        last_s = now_s
        text += part.choices[0].text
    return text, max(gaps_s)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(controller: Controller) -> list[str]:
    """What is answered while nothing is disturbed."""
    return await answers(controller)


async def answers(controller: Controller) -> list[str]:
    return await asyncio.gather(*(answer(controller, *ask) for ask in ASKS))


@asynccontextmanager
async def load(controller: Controller, expected: list[str], clients: int = 2) -> AsyncIterator[None]:
    """So many clients that ask again and again; each of their answers must be the undisturbed one."""
    stop = asyncio.Event()

    async def client(number: int) -> int:
        rounds = 0
        while not stop.is_set():
            assert await answer(controller, *ASKS[number]) == expected[number]
            rounds += 1
        return rounds

    asking = [asyncio.create_task(client(number)) for number in range(clients)]
    try:
        yield
    finally:
        stop.set()
        rounds = await asyncio.gather(*asking)
    assert min(rounds) > 0


def roles(controller: Controller) -> tuple[int, int]:
    found = [slot.role for slot in controller.workers.slots.values()]
    return found.count(Role.PREFILL), found.count(Role.DECODE)


async def metrics(controller: Controller) -> str:
    async with httpx.AsyncClient(verify=False, timeout=LONG_S) as client:
        answer = await client.get(f"http://{controller.http_address}/metrics")
    return str(answer.text)


async def tandem(controller: Controller, folder: Path, command: str) -> str:
    """What the command line prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cluster", *shlex.split(command), "--address", controller.admin_address),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.slow
async def test_the_commands_of_the_page_say_what_the_page_says(
    controller: Controller, expected: list[str], tmp_path: Path
) -> None:
    """First: the page begins with one prefill and one decode worker."""
    spec = tiny_spec(controller.workers.models[0].spec.source)
    spec["models"][0]["decode"] = {"workers": 2}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(spec))
    page = re.findall(r"^```\n(\$ tandem .*?)^```", PAGE.read_text(), re.S | re.M)
    commands = [part for block in page for part in block.removeprefix("$ tandem ").split("\n$ tandem ")]
    assert len(commands) == 8
    for part in commands:
        command, _, said = part.partition("\n")
        async with load(controller, expected) if command == "restart" else nullcontext():
            printed = await tandem(controller, tmp_path, command)
        assert printed == said.replace("smollm2-135m", "tiny").rstrip("\n") + "\n", command
    assert roles(controller) == (1, 2)


async def test_a_drain_whose_caller_goes_away_leaves_the_worker_serving(
    controller: Controller, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await controller.scaler.scale("", 1, 2)
    monkeypatch.setattr(controller.scaler, "_poll_s", LONG_S)  # the drain waits, with requests or without
    leaving = next(slot for slot in controller.workers.slots.values() if slot.role is Role.DECODE)
    async with load(controller, expected):
        drain = asyncio.create_task(controller.scaler.drain(leaving.worker_id, restart=False, move=False))
        await until(lambda: leaving.drain == cluster_pb2.DRAIN_FINISH)
        drain.cancel()
        await asyncio.gather(drain, return_exceptions=True)
        assert (leaving.drain, leaving.state) == (cluster_pb2.DRAIN_NONE, WorkerState.READY)
        info = controller.workers.directory.get(leaving.worker_id)
        assert info is not None
        assert info.drain == cluster_pb2.DRAIN_NONE
        assert not controller.scaler.is_busy


@pytest.mark.slow
@pytest.mark.acceptance(31, here="six answers at a time")
async def test_requests_that_outlast_a_drains_deadline_continue_on_other_workers(
    controller: Controller, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await controller.scaler.scale("", 1, 2)
    leaving = next(slot for slot in controller.workers.slots.values() if slot.role is Role.DECODE)
    short = controller.spec.control.model_copy(update={"drain_timeout_s": 0.0})
    monkeypatch.setattr(controller.scaler, "_control", short)
    monkeypatch.setattr(controller.scaler, "_poll_s", 0.01)
    before = retries(await metrics(controller))
    async with load(controller, expected, clients=len(ASKS)):
        await computes(controller, leaving)  # it may have ended all that it had
        await controller.scaler.drain(leaving.worker_id, restart=False, move=False)
    assert roles(controller) == (1, 1)
    assert retries(await metrics(controller)) > before, "nothing remained on it"


async def computes(controller: Controller, slot: WorkerSlot) -> None:
    """Returns when the worker has a running request."""
    async with asyncio.timeout(LONG_S):
        while (state := await controller.workers.state(slot)) is None or not state.load.running_requests:
            await asyncio.sleep(0.005)


def retries(text: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("tandem_retries_total{"))


@pytest.mark.parametrize("workers", [2, 1], ids=["another goes on", "the last one comes back"])
@pytest.mark.slow
async def test_a_decode_worker_that_gets_sigterm_costs_no_answer(
    controller: Controller, expected: list[str], workers: int
) -> None:
    await controller.scaler.scale("", 1, workers)
    decode = next(slot for slot in controller.workers.slots.values() if slot.role is Role.DECODE)
    before = decode.epoch
    async with load(controller, expected):
        await computes(controller, decode)
        pid = next(each.pid for each in await decode.processes() if each.name == "rank-0")
        os.kill(pid, signal.SIGTERM)
        await until(lambda: decode.epoch != before and decode.state is WorkerState.READY, LONG_S)


@pytest.mark.slow
async def test_the_autoscaler_follows_the_load_and_comes_to_rest(controller: Controller, expected: list[str]) -> None:
    await controller.scaler.scale("", 2, 1)
    # Six answers at a time are more than a fifth of one decode worker's places, however fast this machine is.
    spec = AutoscalerSpec(
        enabled=True, interval_s=0.2, min_workers=2, max_workers=3, headroom=0.2, role_cooldown_s=0.5, stop_after_s=1
    )
    autoscaling = Autoscaling(
        controller.workers,
        controller.scaler,
        controller.routers,
        controller.spec.model_copy(update={"autoscaler": spec}),
    )
    running = asyncio.create_task(autoscaling.run())
    try:
        async with load(controller, expected, clients=len(ASKS)):
            await until(lambda: roles(controller) == (1, 2), LONG_S)
            await asyncio.sleep(2)
            assert roles(controller) == (1, 2)
        await until(lambda: roles(controller) == (1, 1), LONG_S)
        await until(lambda: autoscaling.status().decisions[0].outcome == "done", LONG_S)
        status = autoscaling.status()
        scraped = await metrics(controller)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert [(each.action, each.outcome) for each in status.decisions] == [("stop", "done"), ("change_roles", "done")]
    assert "2P:1D to 1P:2D" in status.decisions[1].reason
    assert 'tandem_autoscaler_decisions_total{action="change_roles"} 1.0' in scraped
    assert await answers(controller) == expected


async def test_a_dry_run_decides_and_changes_nothing(controller: Controller, expected: list[str]) -> None:
    before = roles(controller)
    spec = AutoscalerSpec(enabled=True, dry_run=True, interval_s=0.1, min_workers=2, max_workers=4, headroom=0.01)
    autoscaling = Autoscaling(
        controller.workers,
        controller.scaler,
        controller.routers,
        controller.spec.model_copy(update={"autoscaler": spec}),
    )
    running = asyncio.create_task(autoscaling.run())
    try:
        async with load(controller, expected):
            await until(lambda: bool(autoscaling.status().decisions), LONG_S)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    (first, *_) = autoscaling.status().decisions
    assert (first.action, first.outcome) == ("start", "dry_run")
    assert roles(controller) == before


@pytest.mark.parametrize("gone", [False, True])
async def test_a_worker_that_does_not_start_leaves_nothing_behind(controller: Controller, gone: bool) -> None:
    """`gone`: because who asked for it went away."""
    await controller.scaler.scale("", 1, 1)
    before = set(controller.workers.slots)
    asked = asyncio.create_task(controller.scaler.scale("", 1, 2))
    await until(lambda: len(controller.workers.slots) == len(before) + 1)
    (new,) = set(controller.workers.slots) - before
    if gone:
        asked.cancel()
    else:
        controller.workers.slots[new].refuse("it cannot work with the others")
    (failure,) = await asyncio.gather(asked, return_exceptions=True)
    assert isinstance(failure, asyncio.CancelledError if gone else ConfigError)
    assert set(controller.workers.slots) == before
    assert {place.worker_id for place in controller.workers.directory.snapshot().places} == before
    assert await controller.scaler.scale("", 1, 1) == ()


@pytest.mark.slow
async def test_workers_start_side_by_side_and_one_that_fails_leaves_the_others(controller: Controller) -> None:
    await controller.scaler.scale("", 1, 1)
    before = set(controller.workers.slots)
    asked = asyncio.create_task(controller.scaler.scale("", 1, 3))
    await until(lambda: len(controller.workers.slots) == len(before) + 2)
    first, second = (slot for name, slot in controller.workers.slots.items() if name not in before)
    assert (first.state, second.state) == (WorkerState.STARTING, WorkerState.STARTING)
    first.refuse("it cannot work with the others")
    said = f"{first.worker_id} cannot start: it cannot work with the others (started and kept: {second.worker_id})"
    with pytest.raises(ConfigError, match=re.escape(said)):
        await asked
    assert set(controller.workers.slots) == before | {second.worker_id}
    assert second.state is WorkerState.READY
    assert await controller.scaler.scale("", 1, 2) == ()


async def test_a_changed_spec_is_applied_or_refused_by_the_field(controller: Controller) -> None:
    spec = tiny_spec(controller.workers.models[0].spec.source)
    (model,) = spec["models"]
    await controller.scaler.scale("", 1, 1)
    assert await controller.applier.apply(yaml.safe_dump(spec), dry_run=False) == ()
    refused = {**spec, "router": {**spec["router"], "replicas": 2}, "models": [model | {"name": "other"}]}
    with pytest.raises(ConfigError, match=r"models\.0\.name, router\.replicas: .* needs a restart"):
        await controller.applier.apply(yaml.safe_dump(refused), dry_run=False)
    with pytest.raises(ConfigError, match=r"decode\.workers: expected at least 1"):
        await controller.applier.apply("models: [{decode: {workers: 0}}]", dry_run=False)
    assert roles(controller) == (1, 1)
    larger = yaml.safe_dump(spec | {"models": [model | {"decode": {"workers": 2}}]})
    assert await controller.applier.apply(larger, dry_run=True) == ("would set tiny: 1 prefill and 2 decode workers",)
    assert roles(controller) == (1, 1)
    assert await controller.applier.apply(larger, dry_run=False) == ("tiny: 1 prefill and 2 decode workers",)
    assert roles(controller) == (1, 2)
    scaled = yaml.safe_dump(spec | {"autoscaler": {"enabled": True, "dry_run": True}})
    done = await controller.applier.apply(scaled, dry_run=False)
    assert done == ("tiny: 1 prefill and 1 decode workers", "autoscaler: enabled True, dry_run True")
    assert roles(controller) == (1, 1)
    assert controller.autoscaling.status().mode == "dry_run"
    await controller.applier.apply(yaml.safe_dump(spec), dry_run=False)
    assert controller.autoscaling.status().mode == "off"


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.acceptance(30, here="once, up to 3 workers", soak="20 times")
async def test_pools_change_under_load_without_a_lost_or_changed_answer(
    controller: Controller, expected: list[str]
) -> None:
    ratio = controller.scaler
    await ratio.scale("", 1, 1)
    async with load(controller, expected):
        for _ in range(CYCLES):
            assert len(await ratio.scale("", 1, 3)) == 2
            assert roles(controller) == (1, 3)
            changed = await ratio.scale("tiny", 3, 1)
            assert all(each.endswith("becomes a prefill worker") for each in changed)
            assert roles(controller) == (3, 1)
            left = await ratio.scale("", 1, None)
            assert all(each.endswith("leaves") for each in left)
            assert roles(controller) == (1, 1)
    assert await answers(controller) == expected


@pytest.mark.slow
async def test_pool_objects_of_kubernetes_drive_the_pools_under_load(
    controller: Controller, expected: list[str]
) -> None:
    """The adapter's process, as the chart runs it, beside an API server of ours."""
    await controller.scaler.scale("", 1, 1)
    api = FakeKubernetes(check=check)
    api.add_pool(pool("p", "prefill"))
    api.add_pool(pool("d", "decode"))
    with served(api) as url:
        adapter = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cluster.scale_adapter", "--api", url, "--controller", controller.admin_address),
            *("--namespace", "serving", "--release", "demo", "--poll", "0.1", "--settle", "0.5"),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            await until(settled(api, "d", 1), LONG_S)
            async with load(controller, expected):
                api.scale("d", 2)
                await until(settled(api, "d", 2), LONG_S)
                assert roles(controller) == (1, 2)
                workers = {name: slot.epoch for name, slot in controller.workers.slots.items()}
                for sizes in ((2, 1), (1, 2)):
                    api.scale("p", sizes[0])
                    api.scale("d", sizes[1])
                    await until(settled(api, "p", sizes[0]), LONG_S)
                    await until(settled(api, "d", sizes[1]), LONG_S)
                    assert roles(controller) == sizes
                assert {name: slot.epoch for name, slot in controller.workers.slots.items()} == workers, "one step"
                api.scale("d", 4000)
                await until(lambda: api.pools["d"]["status"]["conditions"][0]["reason"] == "Refused", LONG_S)
                assert "more workers: about" in api.pools["d"]["status"]["conditions"][0]["message"]
                await controller.scaler.drain(next(iter(workers)), restart=False, move=True)
                api.scale("d", 2)
                await until(lambda: roles(controller) == (1, 2), LONG_S)
                api.scale("d", 1)
                await until(settled(api, "d", 1), LONG_S)
        finally:
            adapter.terminate()
            out, _ = await adapter.communicate()
    assert adapter.returncode == 0, out.decode()
    assert "tiny: 1 prefill worker and 2 decode workers reached" in out.decode()
    assert api.pools["p"]["spec"]["replicas"] == 1
    assert await answers(controller) == expected


@pytest.mark.soak_only
async def test_rolling_restarts_fail_none_of_two_thousand_requests(controller: Controller) -> None:
    await controller.scaler.scale("", 1, 2)
    before = {name: slot.epoch for name, slot in controller.workers.slots.items()}
    left, gaps_s, rolls = iter(range(2000)), [], 0
    async with openai.AsyncOpenAI(
        base_url=f"http://{controller.http_address}/v1", api_key="none", max_retries=0
    ) as client:
        undisturbed = [text for text, _ in await asyncio.gather(*(streamed_answer(client, *ask) for ask in ASKS))]

        async def ask_again(ask: int) -> None:
            for _ in left:
                text, gap_s = await streamed_answer(client, *ASKS[ask])
                assert text == undisturbed[ask]
                gaps_s.append(gap_s)

        asking = asyncio.gather(*(ask_again(number % len(ASKS)) for number in range(2 * len(ASKS))))
        while not asking.done():
            for name in before:
                await controller.scaler.drain(name, restart=True, move=True)
            rolls += 1
        await asking
    assert len(gaps_s) == 2000
    assert all(controller.workers.slots[name].epoch != epoch for name, epoch in before.items())
    print(f"{rolls} rolling restarts of {len(before)} workers under 2,000 requests; longest gap {max(gaps_s):.2f} s")


@pytest.mark.slow
async def test_what_cannot_be_is_refused_and_changes_nothing(controller: Controller) -> None:
    before = {name: slot.role for name, slot in controller.workers.slots.items()}
    only = next(name for name, role in before.items() if role is Role.DECODE)
    with pytest.raises(ConfigError, match="decode: expected 1 to"):
        await controller.scaler.scale("", 1, 0)
    with pytest.raises(ConfigError, match="model: expected one of tiny, got 'other'"):
        await controller.scaler.scale("other", 1, 1)
    with pytest.raises(ConfigError, match="more workers: about"):
        await controller.scaler.scale("", 1, 4000)
    with pytest.raises(ConfigError, match="worker_id: expected one of"):
        await controller.scaler.drain("nobody", restart=False, move=True)
    with pytest.raises(ConfigError, match="last decode worker"):
        await controller.scaler.drain(only, restart=False, move=True)
    assert {name: slot.role for name, slot in controller.workers.slots.items()} == before
