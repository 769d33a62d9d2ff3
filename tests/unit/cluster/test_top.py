"""`tandem top`: how frames are joined, filtered, ordered and drawn, and what its keys do."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import msgspec
import pytest
from rich.console import Console
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Static, TabbedContent

from cluster.cli.admin_client import Admin
from cluster.cli.top.app import TopApp
from cluster.cli.top.frame import TopFrame, build, parse_snapshot
from cluster.cli.top.overview import block_bar, overview, sparkline
from cluster.cli.top.request_screen import RequestScreen
from cluster.cli.top.source import FrameSource
from cluster.cli.top.tables import FLOWS, REQUESTS, WORKERS, Order, arranged, number, seconds
from router.dashboard import snapshot as shape
from tandem.errors import NotFound, UnavailableError
from tandem.rpc.grpc_errors import abort
from tandem.v1 import cluster_pb2, cluster_pb2_grpc, trace_pb2, worker_pb2

NONE = shape.LatencyPercentiles(0, None, None, None)
SERIES = shape.Series([None], [None], [None])


def request(number: int, **fields: Any) -> shape.RequestRow:
    values: dict[str, Any] = {
        "request_id": f"{number:024x}", "model": "tiny", "state": "finished", "error": "",
        "received_unix_s": 100.0 + number,
        "prompt_tokens": 10 * number, "cached_tokens": 0, "completion_tokens": number, "ttft_s": None, "total_s": 1.0,
        "attempts": 1, "prefill_worker": "prefill-0", "decode_worker": "decode-0", "handoff_bytes": 0,
    }  # fmt: skip
    return shape.RequestRow(**(values | fields))


def view(router_id: str = "router-0", **fields: Any) -> shape.Snapshot:
    figures = shape.LatencySummary(60.0, shape.LatencyPercentiles(3, 0.1, 0.2, 0.3), NONE, NONE, NONE)
    history = shape.History(10.0, 0.0, SERIES, SERIES, SERIES, SERIES, [1], [0], [2], [3], [4])
    values: dict[str, Any] = {
        "version": shape.VERSION, "tandem": "1", "cluster": "c", "router_id": router_id, "taken_unix_s": 200.0,
        "up_s": 9.0, "ready": True, "models": ["tiny"], "controller": False, "routers": [], "queued_requests": 1,
        "workers": [
            shape.WorkerRow("prefill-0", "prefill", "tiny", "5", 1, "ready", "healthy", prefill_tokens_per_s=900.0),
            shape.WorkerRow("decode-0", "decode", "tiny", "6", 1, "ready", "healthy", tpot_s=0.02),
        ],
        "flows": [shape.FlowRow("prefill-0", "decode-0", bytes_per_s=1e6, in_flight=1, handoffs=2, bytes=100)],
        "queues": [shape.QueueRow("interactive", 1, False, 30.0, {"slo": 2})], "running_requests": 2,
        "rates": shape.Rates(20.0, 1.5, 0.0, 10.0, 20.0, 1.0, 1e6), "latency": [figures, figures], "history": history,
        "cache": shape.Cache(0.5, 0.0, 300.0, [0.5], 7, 2, 0, "up"),
        "scaling": shape.Scaling(1, 1, 1, 1, "off", []), "placements": {}, "decisions": [],
        "events": [shape.EventRow("router", "good", router_id, "ready", 1.0, 2.0, 1)],
        "requests": [
            request(3, state="decoding"), request(1, ttft_s=0.5), request(2, error="no_worker", state="failed")
        ],
    }  # fmt: skip
    return shape.Snapshot(**(values | fields))


def status(**fields: Any) -> cluster_pb2.ClusterStatus:
    blocks = worker_pb2.BlockCounts(free=50, cached=20, leased=10, in_use=20, total=100)
    live = worker_pb2.WorkerState(load=worker_pb2.WorkerLoad(running_requests=4, blocks=blocks))
    link = worker_pb2.LinkState(peer_worker="decode-0", transport="mapped", state="ready", latency_s=2e-5)
    sender = worker_pb2.WorkerState(load=worker_pb2.WorkerLoad(blocks=blocks), links=[link])
    sending = cluster_pb2.WorkerStatus(info=info("prefill-0", 5, cluster_pb2.ROLE_PREFILL), state="ready", live=sender)
    values: dict[str, Any] = {
        "cluster": "c", "version": "1", "redis": "embedded",
        "routers": [cluster_pb2.RouterStatus(router_id="router-0", state="ready", http_address="h:1")],
        "workers": [
            cluster_pb2.WorkerStatus(info=info("decode-0", 6, cluster_pb2.ROLE_DECODE), state="ready", live=live),
            cluster_pb2.WorkerStatus(
                info=info("decode-1", 7, cluster_pb2.ROLE_DECODE), state="restarting", reason="lost", restarts=2
            ),
            sending,
        ],
    }  # fmt: skip
    return cluster_pb2.ClusterStatus(**(values | fields))


def info(worker_id: str, epoch: int, role: Any) -> cluster_pb2.WorkerInfo:
    return cluster_pb2.WorkerInfo(worker_id=worker_id, epoch=epoch, role=role, model="tiny")


def drawn(frame: TopFrame, width: int, height: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(overview(frame, width, height))
    return console.export_text().splitlines()


class TestFrame:
    def test_what_routers_see_is_added_up_and_the_controller_adds_the_rest(self) -> None:
        both = [
            cluster_pb2.RouterStatus(router_id="router-0", state="ready"),
            cluster_pb2.RouterStatus(router_id="router-1", state="ready"),
            cluster_pb2.RouterStatus(router_id="router-2", state="restarting", restarts=1),
        ]
        sick = shape.WorkerRow("decode-0", "decode", "tiny", "6", 1, "ready", "ejected")
        frame = build(status(routers=both), [view(), view("router-1", workers=[sick])])
        assert [(row.router_id, row.view is not None) for row in frame.routers] == [
            ("router-0", True), ("router-1", True), ("router-2", False)
        ]  # fmt: skip
        assert [(each.worker_id, each.state, each.health) for each in frame.workers] == [
            ("prefill-0", "ready", "healthy"), ("decode-0", "ready", "ejected"), ("decode-1", "restarting", None)
        ]  # fmt: skip
        assert frame.workers[1].running_requests == 4, "the controller's word is fresher"
        assert frame.workers[1].blocks.in_use == 20
        [flow] = frame.flows
        assert (flow.bytes_per_s, flow.in_flight, flow.bytes, flow.transport) == (2e6, 2, 200, "mapped")
        [queue] = frame.queues
        assert (queue.queued, queue.refusals) == (2, {"slo": 4})
        assert [each.state for each in frame.requests[:2]] == ["decoding", "decoding"], "those on their way come first"

    def test_without_any_router_the_workers_are_shown(self) -> None:
        frame = build(status(), [])
        assert [each.worker_id for each in frame.workers] == ["prefill-0", "decode-0", "decode-1"]
        assert frame.requests == []

    @pytest.mark.parametrize("raw", [b'{"version": 99}', b"{}", b"no json", b'{"version": 1}'])
    def test_a_snapshot_of_another_version_is_refused_by_name(self, raw: bytes) -> None:
        with pytest.raises(UnavailableError, match="version"):
            parse_snapshot(raw)


class TestTables:
    def test_every_word_of_the_filter_must_be_in_the_row(self) -> None:
        rows = view().requests
        assert [each.completion_tokens for each in arranged(rows, REQUESTS, "DECODE-0 no", Order())] == [2]
        assert arranged(rows, REQUESTS, "nothing like it", Order()) == []

    def test_a_worker_whose_id_names_another_role_is_shown_with_the_one_of_the_row(self) -> None:
        flow = shape.FlowRow("decode-1", "prefill-1")
        assert [column.text(flow) for column in FLOWS[:2]] == ["decode-1 (prefill)", "prefill-1 (decode)"]
        path = next(each for each in REQUESTS if each.title == "path")
        assert path.text(request(1, prefill_worker="", decode_worker="prefill-1")) == "prefill-1 (decode)"

    def test_what_is_not_known_sorts_last_either_way(self) -> None:
        column = next(n for n, each in enumerate(REQUESTS) if each.title == "TTFT")
        rows = [*view().requests, request(4, ttft_s=0.1)]
        down = [each.ttft_s for each in arranged(rows, REQUESTS, "", Order(column))]
        up = [each.ttft_s for each in arranged(rows, REQUESTS, "", Order(column, descending=False))]
        assert (down, up) == ([0.5, 0.1, None, None], [0.1, 0.5, None, None])

    def test_a_column_of_words_sorts_its_empty_cells_too(self) -> None:
        column = next(n for n, each in enumerate(WORKERS) if each.title == "reason")
        down = arranged(build(status(), [view()]).workers, WORKERS, "", Order(column))
        assert [each.reason for each in down] == ["lost", "", ""]

    def test_sorting_goes_through_the_columns_and_back_to_none(self) -> None:
        order, seen = Order(), []
        for _ in range(len(WORKERS) + 1):
            order = order.next(len(WORKERS))
            seen.append(order.column)
        assert seen == [*range(len(WORKERS)), None]

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (seconds(None), "–"), (seconds(2.5e-5), "25 µs"), (seconds(0.0123), "12.3 ms"), (seconds(0.5), "500 ms"),
            (seconds(3.0), "3.00 s"), (seconds(600.0), "10 min"), (number(3.0), "3"), (number(3.25), "3.2"),
            (number(12345.0), "12.3k"),
        ],
    )  # fmt: skip
    def test_figures(self, text: str, expected: str) -> None:
        assert text == expected


class TestOverview:
    def test_it_shows_routers_queues_workers_links_and_requests(self) -> None:
        text = "\n".join(drawn(build(status(), [view()]), 140, 40))
        parts = ("2 of 3 workers ready", "100 ms / 300 ms", "interactive 1 waiting, 2 refused", "restarting", "mapped")
        for part in (*parts, "1.0 MB", request(3).request_id):
            assert part in text, part

    @pytest.mark.parametrize("width", [60, 80, 100, 140])
    def test_a_workers_role_is_shown_and_no_name_is_shortened(self, width: int) -> None:
        long = shape.WorkerRow("meta-llama-8b-decode-11", "prefill", "tiny", "9", 1, "ready", "healthy")
        text = "\n".join(drawn(build(status(), [view(workers=[long])]), width, 40))
        assert "meta-llama-8b-decode-11 prefill" in text
        assert "…" not in text

    @pytest.mark.parametrize(("width", "height"), [(40, 10), (80, 24), (60, 5), (200, 60)])
    def test_small_terminals_get_less_of_it_and_no_broken_lines(self, width: int, height: int) -> None:
        many = [shape.WorkerRow(f"decode-{n}", "decode", "tiny", str(n), 1, "ready", "healthy") for n in range(30)]
        frame = build(status(workers=[]), [view(workers=many, requests=[request(n) for n in range(50)])])
        lines = drawn(frame, width, height)
        assert all(len(line) <= width for line in lines)
        assert len(lines) <= max(height, 12)
        assert any("more workers" in line for line in lines) == (height < 36)

    def test_a_bar_is_as_wide_as_asked_whatever_the_shares(self) -> None:
        worker = shape.WorkerRow("d", "decode", "t", "1", 1, "ready", None, blocks=shape.Blocks(1, 1, 1, 97, 100))
        for width in (8, 9, 40):
            assert len(block_bar(worker, width)) == width

    def test_a_sparkline_has_a_space_where_nothing_was(self) -> None:
        assert sparkline([None, 0.1, 1.0], 2) == "▁█"
        assert sparkline([None, 1.0], 5) == " █"
        assert sparkline([None, None], 5) == "  "


class Controller(cluster_pb2_grpc.ClusterServicer):
    """Says what it is given, over the real protocol."""

    def __init__(self) -> None:
        self.status = status()
        self.views = [view()]
        self.traces: dict[str, trace_pb2.RequestTrace] = {}
        self.server = grpc.aio.server()
        cluster_pb2_grpc.add_ClusterServicer_to_server(self, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    async def GetStatus(self, request: Any, context: Any) -> cluster_pb2.ClusterStatus:
        return self.status

    async def ListSnapshots(self, request: Any, context: Any) -> cluster_pb2.ListSnapshotsResponse:
        snapshots = [trace_pb2.RouterSnapshot(json=msgspec.json.encode(each)) for each in self.views]
        return cluster_pb2.ListSnapshotsResponse(snapshots=snapshots)

    async def GetTrace(self, request: Any, context: Any) -> trace_pb2.RequestTrace:
        if request.request_id not in self.traces:
            await abort(context, NotFound("request_id: not among the last", field="request_id"))
        return self.traces[request.request_id]


@pytest.fixture
async def controller() -> AsyncIterator[Controller]:
    controller = Controller()  # type: ignore[abstract]  # other calls are not made
    await controller.server.start()
    yield controller
    await controller.server.stop(None)


class SlowSource:
    """Each frame takes until `go` is set, and `takes_s`. `most`: how many ran at once."""

    address = "h:1"

    def __init__(self, takes_s: float) -> None:
        self.takes_s = takes_s
        self.go = asyncio.Event()
        self.running = self.most = 0

    async def frame(self) -> TopFrame:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.go.wait()
            await asyncio.sleep(self.takes_s)
        finally:
            self.running -= 1
        return build(status(), [view()])

    async def trace(self, request_id: str) -> trace_pb2.RequestTrace:
        raise NotFound(request_id)


@pytest.fixture
async def app(controller: Controller) -> AsyncIterator[TopApp]:
    async with FrameSource(Admin(controller.address)) as source:
        yield TopApp(source, await source.frame(), 0.2)


def shown(app: TopApp, name: str, column: int = 0) -> list[str]:
    table = app.query_one(f"#{name}", DataTable)
    return [str(table.get_row_at(row)[column]) for row in range(table.row_count)]


def told(app: TopApp) -> str:
    return str(app.query_one("#status", Static).content)


def timeline(app: TopApp) -> str:
    return str(app.screen.query_one("#timeline", Static).content) if isinstance(app.screen, RequestScreen) else ""


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(60):
        while not condition():
            await pilot.pause(0.02)


class TestApp:
    async def test_it_follows_the_cluster_and_holds_still_when_paused(
        self, app: TopApp, controller: Controller
    ) -> None:
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.press("2")
            await until(pilot, lambda: shown(app, "workers") == ["prefill-0", "decode-0", "decode-1"])
            await pilot.press("p")
            controller.status = status(workers=[])
            controller.views = [view(workers=[])]
            await pilot.pause(0.6)
            assert len(shown(app, "workers")) == 3
            assert "paused" in told(app)
            await pilot.press("p")
            await until(pilot, lambda: shown(app, "workers") == [] and "live" in told(app))

    @pytest.mark.slow
    async def test_requests_are_filtered_sorted_and_reversed(self, app: TopApp) -> None:
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.press("slash", *"finished", "enter")
            await until(pilot, lambda: shown(app, "requests", 1) == ["finished"])
            assert app.query_one(TabbedContent).active == "requests-page"
            await pilot.press("escape")
            await until(pilot, lambda: len(shown(app, "requests")) == 3)
            assert app.query_one("#filter", Input).value == ""
            await pilot.press(*["s"] * 7)
            await until(pilot, lambda: shown(app, "requests", 6) == ["3", "2", "1"])
            assert "by output" in told(app)
            await pilot.press("r")
            await until(pilot, lambda: shown(app, "requests", 6) == ["1", "2", "3"])

    async def test_a_request_opens_as_a_gantt_once_it_has_ended(self, app: TopApp, controller: Controller) -> None:
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.press("4")
            await until(pilot, lambda: app.query_one("#requests", DataTable).has_focus)
            await pilot.press("enter")
            await until(pilot, lambda: "still running" in timeline(app))
            spans = [trace_pb2.Span(stage="prefill", start_s=0.01, end_s=0.2)]
            attempt = trace_pb2.Attempt(prefill_worker="prefill-0", decode_worker="decode-0", spans=spans)
            found = trace_pb2.RequestTrace(request_id=request(3).request_id, state="finished", attempts=[attempt])
            controller.traces[found.request_id] = found
            await until(pilot, lambda: "prefill-0 → decode-0" in timeline(app))
            assert "█" in timeline(app)
            await pilot.press("escape")
            await until(pilot, lambda: not isinstance(app.screen, RequestScreen))

    async def test_a_controller_that_goes_away_is_told_and_the_last_frame_stays(
        self, app: TopApp, controller: Controller
    ) -> None:
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.press("2")
            await controller.server.stop(None)
            await until(pilot, lambda: "disconnected" in told(app))
            assert len(shown(app, "workers")) == 3

    async def test_a_fetch_longer_than_the_interval_is_awaited_and_told(self) -> None:
        source = SlowSource(takes_s=0.5)
        app = TopApp(source, build(status(workers=[]), []), 0.2)
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.press("2")
            await until(pilot, lambda: "no answer for" in told(app))
            assert "live" not in told(app)
            source.go.set()
            await until(pilot, lambda: len(shown(app, "workers")) == 3 and "live" in told(app))
        assert source.most == 1

    @pytest.mark.parametrize(
        "size", [(20, 3), *(pytest.param(size, marks=pytest.mark.slow) for size in ((40, 8), (200, 60)))]
    )
    @pytest.mark.slow
    async def test_every_page_can_be_drawn_in_any_terminal(self, app: TopApp, size: tuple[int, int]) -> None:
        async with app.run_test(size=size) as pilot:
            for page in "12345":
                await pilot.press(page)
                await pilot.pause()
            await pilot.press("q")
        assert app.return_code == 0


async def test_without_a_controller_the_error_says_what_to_do() -> None:
    async with FrameSource(Admin("127.0.0.1:1")) as source:
        with pytest.raises(UnavailableError, match="tandem up"):
            await source.frame()
