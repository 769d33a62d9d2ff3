"""The dashboard in a real browser, before a live cluster with traffic. The pictures of docs/images are made here:
TANDEM_SCREENSHOTS=docs/images make check-deploy ARGS=tests/system/test_dashboard_browser.py
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, Route, async_playwright, expect

from cluster.cli.admin_client import Admin
from cluster.cli.top.app import TopApp
from cluster.cli.top.source import FrameSource
from cluster.control.controller import Controller
from cluster.testing.running import running
from tandem.testing.models import random_prompt, write_tiny_llama

pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module")]  # one cluster serves all

expect.set_options(timeout=60_000)  # the cluster, its traffic and the browser share a small machine
VOCAB = 300
SNAPSHOT = "**/dashboard/api/v1/snapshot"
MAX_PICTURE_BYTES = 300_000
VIOLATIONS = """addEventListener("securitypolicyviolation", (event) =>
    console.error(`CSP: ${event.violatedDirective} ${event.blockedURI}`))"""
COLOURS = """async (source) => {
    const image = new Image();
    image.src = source;
    await image.decode();
    const canvas = new OffscreenCanvas(image.width, image.height), context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
    const pixels = new Uint32Array(context.getImageData(0, 0, image.width, image.height).data.buffer);
    return { width: image.width, height: image.height, colours: new Set(pixels).size };
}"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def controller(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Controller]:
    folder = tmp_path_factory.mktemp("d")
    model = write_tiny_llama(folder / "tiny", vocab=VOCAB, seed=1, scale=2.0)
    source = {
        "name": "demo",
        "models": [
            {
                "source": str(model),
                "prefill": {"workers": 2},
                "decode": {"workers": 2},
                "engine": {"kv_blocks": 400, "max_step_tokens": 100},
            }
        ],
        "router": {"disaggregation": "always"},
    }
    async with running(source, folder) as controller:
        yield controller


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traffic(controller: Controller) -> AsyncIterator[None]:
    """Three clients that ask again and again; some prompts begin alike."""
    client = openai.AsyncOpenAI(base_url=f"http://{controller.http_address}/v1", api_key="none", max_retries=0)

    async def ask(number: int) -> None:
        drawn = random.Random(number)
        while True:
            prompt = random_prompt(192, VOCAB, number % 2) + random_prompt(drawn.randrange(60, 300), VOCAB, number)
            tokens = drawn.randrange(10, 60)
            await client.completions.create(model="tiny", prompt=prompt, max_tokens=tokens)
            await asyncio.sleep(2 * drawn.random())

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(number)) for number in range(3)]
        yield
        for task in tasks:
            task.cancel()
    await client.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    chromium = shutil.which("chromium")
    assert chromium, "chromium is not installed: scripts/system-tools.sh chromium"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        await browser.close()


class Viewer:
    """One tab on the dashboard. `faults`: what the browser complained of; `asked`: where it sent requests."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.base_url = f"http://{address}"
        self.faults: list[str] = []
        self.asked: set[str] = set()
        page.on("console", lambda message: self.faults.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("request", lambda request: self.asked.add(urlsplit(request.url).netloc))

    async def open(self) -> None:
        await self.page.add_init_script(VIOLATIONS)
        await self.page.goto(f"{self.base_url}/dashboard")
        await expect(self.page.locator("#live")).to_have_attribute("data-state", "live")


@pytest_asyncio.fixture(loop_scope="module")
async def viewer(controller: Controller, traffic: None, browser: Browser) -> AsyncIterator[Viewer]:
    page = await browser.new_page(viewport={"width": 1440, "height": 1000}, color_scheme="dark")
    viewer = Viewer(page, controller.http_address)
    await viewer.open()
    yield viewer
    assert viewer.asked == {controller.http_address}, "something was asked of another origin"
    await page.close()
    assert viewer.faults == []


async def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.1)


@asynccontextmanager
async def held(page: Page) -> AsyncIterator[Callable[..., Awaitable[None]]]:
    """Inside, a snapshot is asked for. What it yields lets the answer, or an error, come and the page take it in."""
    asked, decided = asyncio.Event(), asyncio.Event()
    fails = False

    async def hold(route: Route) -> None:
        asked.set()
        await decided.wait()
        await (route.abort() if fails else route.fallback())

    async def answer(*, with_error: bool = False) -> None:
        nonlocal fails
        fails = with_error
        decided.set()
        await asyncio.sleep(1.0)

    await page.route(SNAPSHOT, hold)
    async with asyncio.timeout(60):
        await asked.wait()
    yield answer
    await page.unroute(SNAPSHOT, hold)


async def keep(viewer: Viewer, browser: Browser, folder: Path, name: str) -> None:
    """A picture that has something on it. It goes to the folder that TANDEM_SCREENSHOTS names, if it does."""
    picture = await viewer.page.screenshot()
    blank = await browser.new_page()
    found = await blank.evaluate(COLOURS, "data:image/png;base64," + base64.b64encode(picture).decode())
    await blank.close()
    assert (found["width"], found["height"]) == (1440, 1000)
    assert found["colours"] > 500, "the picture is all but empty"
    assert len(picture) < MAX_PICTURE_BYTES
    (Path(os.environ.get("TANDEM_SCREENSHOTS", folder)) / name).write_bytes(picture)


async def test_the_topology_shows_every_worker_and_what_flows(viewer: Viewer) -> None:
    page = viewer.page
    for worker in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        await expect(page.locator(f'[data-worker="{worker}"] .name')).to_have_text(worker)
    await expect(page.locator("[data-flow]")).to_have_count(4)

    async def rates() -> list[int]:
        found = await page.locator("[data-flow]").evaluate_all("all => all.map((each) => each.dataset.bytesPerS)")
        return [int(rate) for rate in found]

    async def flowing() -> bool:
        return max(await rates()) > 1000

    await until(flowing)
    where = "() => [...document.querySelectorAll('.dots.kv')].map((path) => getComputedStyle(path).strokeDashoffset)"
    before = await page.evaluate(where)
    await asyncio.sleep(0.5)
    assert await page.evaluate(where) != before, "nothing moves"
    await expect(page.locator('[data-tile="kv"] .value')).not_to_have_text("0B/s")


async def test_workers_lie_under_the_roofline(viewer: Viewer) -> None:
    points = viewer.page.locator("#roofline .roof-point")
    await until(lambda: points.count())
    assert re.search(
        r"(prefill|decode)-\d: MFU [\d.]+ %, MBU [\d.]+ %, [\d.]+ FLOPs per byte", await points.first.inner_html()
    )
    roof = await viewer.page.locator("#roofline .roof-line").get_attribute("d")
    left, ridge, right = [tuple(map(float, pair.split(","))) for pair in re.split("[ML]", str(roof))[1:]]
    for point in await points.all():
        x, y = [float(str(await point.get_attribute(name))) for name in ("cx", "cy")]
        assert left[0] <= x <= right[0]
        slope = left[1] + (x - left[0]) / (ridge[0] - left[0]) * (ridge[1] - left[1])
        assert y >= max(ridge[1], slope) - 0.1, "above the roof"


async def test_nothing_moves_for_who_asked_for_less_motion(viewer: Viewer) -> None:
    await viewer.page.emulate_media(reduced_motion="reduce")
    await asyncio.sleep(1.5)
    running = "() => document.getAnimations().filter((each) => each.playState === 'running').length"
    assert await viewer.page.evaluate(running) == 0


async def test_a_requests_timeline_opens_by_mouse_and_by_key_and_closes(viewer: Viewer) -> None:
    page = viewer.page
    rows = page.locator("#requests tbody tr", has_text="finished")
    await expect(rows.first).to_be_visible()
    await rows.first.click()
    await expect(page.locator("dialog .gantt")).to_be_visible()
    stages = await page.locator("dialog .span").evaluate_all("all => all.map((each) => each.dataset.stage)")
    assert {"queue", "reserve", "dispatch", "prefill", "first_token"} <= set(stages)
    assert {"pieces", "verify", "join", "decode"} <= set(stages)
    await page.keyboard.press("Escape")
    await expect(page.locator("dialog")).to_be_hidden()
    await page.locator("#pause").click()  # rows stay where they are
    await rows.first.locator("button").focus()
    await page.keyboard.press("Enter")
    await expect(page.locator("dialog .gantt")).to_be_visible()
    await page.keyboard.press("Escape")
    await page.locator('[data-worker="decode-0"]').focus()
    await page.keyboard.press("Enter")
    await expect(page.locator("dialog")).to_contain_text("KV blocks")


async def test_requests_are_filtered_and_sorted(viewer: Viewer) -> None:
    page = viewer.page
    await expect(page.locator("#requests tbody tr").nth(3)).to_be_visible()
    await page.keyboard.press("p")
    await expect(page.locator("#live")).to_have_text("paused")
    await page.locator('th[data-column="prompt_tokens"] button').click()
    prompts = [int(text) for text in await page.locator("#requests tbody td:nth-child(5)").all_text_contents()]
    assert prompts == sorted(prompts, reverse=True)
    assert len(prompts) > 3
    await page.keyboard.press("/")
    await page.keyboard.type("no such request")
    await expect(page.locator("#no-requests")).to_have_text("No request matches the filter.")


async def test_a_lost_connection_is_told_and_mended(viewer: Viewer) -> None:
    page = viewer.page
    await page.route(SNAPSHOT, lambda route: route.abort())
    await expect(page.locator("#banner")).to_contain_text("No data from the router")
    await expect(page.locator("body")).to_have_attribute("data-stale", "true")
    await page.unroute(SNAPSHOT)
    await expect(page.locator("#live")).to_have_text("live")
    await expect(page.locator("#banner")).to_be_hidden()
    viewer.faults = [fault for fault in viewer.faults if "ERR_FAILED" not in fault]


async def test_a_pause_is_told_when_the_last_snapshot_fails(viewer: Viewer) -> None:
    async with held(viewer.page) as answer:
        await viewer.page.keyboard.press("p")
        await answer(with_error=True)
        await expect(viewer.page.locator("#live")).to_have_text("paused")
        await expect(viewer.page.locator("#banner")).to_be_hidden()
    viewer.faults = [fault for fault in viewer.faults if "ERR_FAILED" not in fault]


async def test_a_snapshot_of_another_version_is_refused(viewer: Viewer) -> None:
    other = json.dumps({"version": 99})
    await viewer.page.route(SNAPSHOT, lambda route: route.fulfill(body=other, content_type="application/json"))
    await expect(viewer.page.locator("#banner")).to_contain_text("the router sent 99")


async def test_an_empty_cluster_says_so(viewer: Viewer) -> None:
    page = viewer.page

    async def empty(route: Route) -> None:
        found = await (await route.fetch()).json()
        for name in ("workers", "flows", "requests", "decisions", "events", "queues", "routers"):
            found[name] = []
        await route.fulfill(json=found | {"placements": {}, "ready": False})

    await page.route(SNAPSHOT, empty)
    await expect(page.locator("#banner")).to_contain_text("No worker has joined")
    await expect(page.locator("#no-requests")).to_have_text("This router has received no requests yet.")
    await expect(page.locator("#ready")).to_have_text("not ready")
    await expect(page.locator("#roofline .empty")).to_have_text("No steps in the last seconds.")
    await expect(page.locator("[data-worker]")).to_have_count(0)
    await page.unroute_all(behavior="wait")


async def test_a_key_is_asked_for_kept_in_the_tab_and_forgotten(viewer: Viewer) -> None:
    page = viewer.page

    async def guarded(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer right-key":
            await route.continue_()
        else:
            await route.fulfill(status=401, json={"error": {"message": "expected an API key"}})

    await page.route("**/dashboard/api/**", guarded)
    await expect(page.locator("#login-title")).to_be_visible()
    await expect(page.locator("main")).to_be_hidden()
    for wrong, said in (("wrong-key", "This key is not accepted."), ("schlüssel", "A key has no spaces")):
        await page.locator("#key").fill(wrong)
        await page.keyboard.press("Enter")
        await expect(page.locator("#login-error")).to_contain_text(said)
    await page.locator("#key").fill("right-key")
    await page.keyboard.press("Enter")
    await expect(page.locator("main")).to_be_visible()
    assert "right-key" in await page.evaluate("JSON.stringify(sessionStorage)")
    assert "right-key" not in await page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href")
    await page.reload()
    await expect(page.locator("main")).to_be_visible()
    async with held(page) as answer:
        await page.locator("#leave").click()
        await expect(page.locator("#login-title")).to_be_visible()
        await answer()
        await expect(page.locator("main")).to_be_hidden()
    assert "right-key" not in await page.evaluate("JSON.stringify(sessionStorage)")
    await page.unroute_all(behavior="wait")
    viewer.faults = [fault for fault in viewer.faults if "401" not in fault]


async def test_everything_that_can_be_used_has_a_name(viewer: Viewer) -> None:
    unnamed = """() => [...document.querySelectorAll("button, input, [role=button], [role=img]")].filter((each) =>
        !each.closest("#login") && !(each.getAttribute("aria-label") || each.textContent.trim() || each.labels?.length))
        .map((each) => each.outerHTML.slice(0, 80))"""
    assert await viewer.page.evaluate(unnamed) == []


async def test_it_fits_a_phone(viewer: Viewer) -> None:
    await viewer.page.set_viewport_size({"width": 390, "height": 844})
    wider = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert await viewer.page.evaluate(wider) <= 0


@pytest.mark.parametrize("width", [360, 400, 760])
async def test_a_phone_shows_the_router_and_both_pools_without_scrolling_sideways(viewer: Viewer, width: int) -> None:
    page = viewer.page
    await page.set_viewport_size({"width": width, "height": 844})
    boxes = {}
    for name in ("router", "prefill-0", "prefill-1", "decode-0", "decode-1"):
        node = page.locator('[data-role="router"].node' if name == "router" else f'[data-worker="{name}"]')
        box = await node.bounding_box()
        assert box is not None
        assert box["x"] >= 0, name
        assert box["x"] + box["width"] <= width, name
        boxes[name] = box
    assert boxes["router"]["y"] + boxes["router"]["height"] <= boxes["prefill-0"]["y"]
    assert boxes["prefill-0"]["x"] + boxes["prefill-0"]["width"] < boxes["decode-0"]["x"]
    heads = await page.locator(".topo .column").all_text_contents()
    assert heads == ["Router", "Prefill", "Decode"]
    clipped = (
        "() => { const holder = document.querySelector('#topology'); return holder.scrollWidth - holder.clientWidth }"
    )
    assert await page.evaluate(clipped) <= 0


async def test_the_topology_is_drawn_anew_when_the_width_changes_even_while_paused(viewer: Viewer) -> None:
    page = viewer.page
    await page.locator("#pause").click()
    wide = await page.locator(".topo").get_attribute("viewBox")
    await page.set_viewport_size({"width": 400, "height": 844})
    await expect(page.locator(".topo")).not_to_have_attribute("viewBox", wide or "")
    await page.set_viewport_size({"width": 1440, "height": 1000})
    await expect(page.locator(".topo")).to_have_attribute("viewBox", wide or "")


async def test_a_worker_whose_id_names_another_role_is_shown_with_its_own(viewer: Viewer) -> None:
    page = viewer.page

    async def changed(route: Route) -> None:
        found = await (await route.fetch()).json()
        for worker in found["workers"]:
            if worker["worker_id"] == "prefill-1":
                worker["role"] = "decode"
        request = found["requests"][0] | {"attempts": 1, "prefill_worker": "", "decode_worker": "prefill-1"}
        decision = found["decisions"][0] | {"prefill_worker": "prefill-0", "decode_worker": "prefill-1"}
        await route.fulfill(json=found | {"requests": [request], "decisions": [decision]})

    node = page.locator('[data-worker="prefill-1"]')
    await expect(node).to_have_attribute("data-role", "prefill")
    await expect(page.locator("#requests tbody tr").first).to_be_visible()
    await page.route(SNAPSHOT, changed)
    await expect(node.locator(".name")).to_have_text("prefill-1 (decode)")
    await expect(node).to_have_attribute("data-role", "decode")
    await expect(node.locator(".stripe")).to_have_attribute("data-role", "decode")
    await expect(page.locator("#requests tbody td:nth-child(3)")).to_have_text("prefill-1 (decode)")
    await expect(page.locator("#decisions .what")).to_contain_text("prefill-0 → prefill-1 (decode)")
    await page.unroute_all(behavior="wait")


async def test_pictures_of_both_themes(viewer: Viewer, browser: Browser, tmp_path: Path) -> None:
    page = viewer.page
    await expect(page.locator("#requests tbody tr").nth(8)).to_be_visible(timeout=60_000)
    await asyncio.sleep(float(os.environ.get("TANDEM_SCREENSHOTS_AFTER_S", 0)))
    await keep(viewer, browser, tmp_path, "dashboard-dark.png")
    await page.locator("#theme").click()
    await asyncio.sleep(0.5)
    await keep(viewer, browser, tmp_path, "dashboard-light.png")
    await page.locator("#theme").click()
    await page.locator("#requests tbody tr", has_text="finished").first.click()
    await expect(page.locator("dialog .gantt")).to_be_visible()
    await asyncio.sleep(0.5)
    await keep(viewer, browser, tmp_path, "dashboard-request.png")


async def test_a_picture_of_tandem_top(controller: Controller, traffic: None, tmp_path: Path) -> None:
    async with FrameSource(Admin(controller.admin_address)) as source:
        app = TopApp(source, await source.frame(), 0.5)
        async with app.run_test(size=(130, 36)) as pilot:
            await pilot.pause(2.0)
            drawn = app.export_screenshot(title="tandem top")
    assert "prefill-0" in drawn
    # Textual's export names a font on the web, which a picture in our documentation must not ask for.
    local = re.sub(r"@font-face\s*\{.*?\}", "", drawn, flags=re.DOTALL)
    assert not re.search(r"url\(\s*[\"']?https?:", local)
    (Path(os.environ.get("TANDEM_SCREENSHOTS", tmp_path)) / "tandem-top.svg").write_text(local)


async def test_durations_are_told_in_a_unit_that_fits(viewer: Viewer) -> None:
    path = "/dashboard/static/format.js"
    script = f"import('{path}').then(format => [0.004, 90, 119, 121, 600, 3599, 7200].map(format.seconds))"
    told = await viewer.page.evaluate(script)
    assert told == ["4.00 ms", "90.0 s", "119 s", "2.02 min", "10.0 min", "60.0 min", "2.00 h"]


async def test_the_open_slice_is_divided_by_the_time_it_has_covered(viewer: Viewer) -> None:
    """Else every line of rates would end in a drop."""
    taken = "[103, 100.5].map((taken_unix_s) => ({ history: { slice_s: 10, last_unix_s: 100 }, taken_unix_s }))"
    path = "/dashboard/static/cards.js"
    script = f"import('{path}').then((cards) => {taken}.map((view) => cards.perSecond([20, 30, 9], view)))"
    assert await viewer.page.evaluate(script) == [[2, 3, 3], [2, 3, None]]


async def test_a_legend_tells_the_time_that_its_values_cover(viewer: Viewer) -> None:
    for name in ("ttft", "tpot", "itl", "e2e"):
        await expect(viewer.page.locator(f'[data-chart="{name}"] .keys')).to_contain_text("last 5 min")
    await expect(viewer.page.locator("#throughput .keys")).to_contain_text(re.compile(r"last \d+ s"))
