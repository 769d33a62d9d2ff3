"""Breaks running clusters and records what Prometheus would have read, in tests/data/prometheus/recorded.

    python scripts/record-outages.py                     # every outage, one after the other: hours
    python scripts/record-outages.py --at-once 2 redis-stopped kv-corrupted

A recording takes 3 to 25 minutes, most of them idle. Prints which alerts fired, and exits 1 if one that must fire did
not. Needs promtool (scripts/system-tools.sh promtool). The pages of kube-state-metrics and of NVIDIA's DCGM exporter
are written by cluster/testing/exporter_pages.py, about processes that really end.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import ipaddress
import os
import resource
import signal
import ssl
import sys
import tempfile
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import redis.asyncio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cluster.testing.alert_rules import NAMESPACE, RELEASE, RULE_FILES, fired, groups_of, metrics_of
from cluster.testing.exporter_pages import HEAD, NEXT_HEAD, Dcgm, Pods, served
from cluster.testing.failing_rank import FAULT_FILE, RAISES
from cluster.testing.leaking_rank import LEAK_FILE
from cluster.testing.scraper import Recording, Scraper, Target
from cluster.testing.stage import AGENT, RANK, Load, Stage, Upped, throttle, until
from router.testing.otlp import otlp_receiver
from tandem.kvcache.prefix_events import stream_key
from tandem.testing.models import FaultSettings

RECORDED = Path(__file__).resolve().parents[1] / "tests" / "data" / "prometheus" / "recorded"
RULES = groups_of(RULE_FILES)
INTERVAL_S = 15.0
CALM_MINUTES = 1.0  # before anything is broken


class Scene:
    """One recording: what runs for it, and the scraper that reads it."""

    def __init__(self, folder: Path, running: AsyncExitStack) -> None:
        self.folder = folder
        self.scraper = Scraper(metrics_of(RULES), INTERVAL_S)
        self._running = running
        self._tasks: list[asyncio.Task[None]] = []

    async def stage(self, *, verify: ssl.SSLContext | bool = True, **options: Any) -> Stage:
        stage = Stage(self.folder, options.pop("settings", {}), **options)
        self._running.push_async_callback(stage.close)
        await stage.start()
        self.watch_routers(stage.urls, verify)
        return stage

    async def upped(self) -> Upped:
        upped = Upped(self.folder, {})
        self._running.push_async_callback(upped.close)
        upped.start()
        await upped.until_ready()
        self.watch_routers(upped.urls, True)
        return upped

    def watch_routers(self, urls: list[str], verify: ssl.SSLContext | bool) -> None:
        """As the chart's PodMonitor finds them."""
        for number, url in enumerate(urls):
            labels = {
                "namespace": NAMESPACE,
                "job": f"{NAMESPACE}/{RELEASE}",
                "pod": HEAD,
                "instance": f"router-{number}:8000",
            }
            self.scraper.targets.append(Target(f"{url}/metrics", labels, verify))

    async def calm(self, stage: Stage | Upped, every_s: float = 2.0, **load: Any) -> asyncio.Task[None]:
        """Begins load and the recording. Returns the load, after a time in which nothing is wrong."""
        asking = self.do(Load(stage.urls, every_s, **load).run())
        self.do(self.scraper.run())
        await minutes(CALM_MINUTES)
        return asking

    def do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs it beside what follows, until the recording ends."""
        self._tasks.append(asyncio.create_task(work))
        return self._tasks[-1]

    async def end(self) -> None:
        """Ends the recording, so that it does not show how the cluster is stopped in order."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def minutes(count: float) -> None:
    await asyncio.sleep(60 * count)


Break = Callable[[Scene], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Outage:
    """`must`: the alerts that it is recorded for; none fires if it is empty."""

    broken: str
    run: Break
    must: tuple[str, ...]

    def is_shown_by(self, fires: tuple[str, ...]) -> bool:
        return set(self.must) <= set(fires) if self.must else not fires


OUTAGES: dict[str, Outage] = {}  # by the name of their recording


def outage(broken: str, *must: str) -> Callable[[Break], Break]:
    def add(run: Break) -> Break:
        OUTAGES[run.__name__.replace("_", "-")] = Outage(broken, run, must)
        return run

    return add


# ---- nothing is broken


@outage("nothing: one prefill and two decode workers under load")
async def healthy(scene: Scene) -> None:
    await scene.calm(await scene.stage())
    await minutes(21)


@outage("a decode worker's rank is killed once; another worker has its role")
async def one_rank_killed(scene: Scene) -> None:
    stage = await scene.stage()
    await scene.calm(stage)
    await stage.send("decode-1.0", "rank-0", signal.SIGKILL)
    await minutes(10)


# ---- routers and the controller


@outage("the keeper of a cluster is killed, and with it every process", "TandemDown", "TandemRouterDown")
async def everything_killed(scene: Scene) -> None:
    upped = await scene.upped()
    await scene.calm(upped)
    upped.kill()
    await minutes(4)


@outage("keeper and controller are stopped; routers and workers run on", "TandemControllerDown")
async def controller_frozen(scene: Scene) -> None:
    upped = await scene.upped()
    await scene.calm(upped)
    keeper = psutil.Process(upped.process.pid)
    frozen = [keeper, *(each for each in keeper.children() if "cluster.control" in each.cmdline())]
    for process in frozen:
        process.suspend()
    try:
        await minutes(8)
    finally:
        for process in frozen:
            process.resume()


@outage("one of two routers is killed, and another program takes its port", "TandemRouterDown")
async def router_port_taken(scene: Scene) -> None:
    stage = await scene.stage(settings={"router": {"replicas": 2}})
    await scene.calm(stage)
    host, _, port = stage.urls[1].removeprefix("http://").rpartition(":")
    await stage.send("router-1", "", signal.SIGKILL)
    async with await until(lambda: listener(host, int(port)), 0.02):
        await minutes(4)


async def listener(host: str, port: int) -> asyncio.Server | None:
    """None: the port is taken."""
    with suppress(OSError):
        return await asyncio.start_server(lambda reader, writer: None, host, port)
    return None


@outage("a router runs for 0.4 s of each second", "TandemRouterLate")
async def router_starved(scene: Scene) -> None:
    stage = await scene.stage()
    await scene.calm(stage)
    scene.do(throttle(lambda: stage.pid("router-0", ""), 0.4, 0.6))
    await minutes(8)


@outage("every rank is stopped, and the router starts again", "TandemRouterNotReady")
async def ranks_stalled(scene: Scene) -> None:
    stage = await scene.stage(decode=1)
    await scene.calm(stage)
    for worker in ("prefill-0", "decode-0"):
        await stage.send(f"{worker}.0", "rank-0", signal.SIGSTOP)
    await stage.send("router-0", "", signal.SIGKILL)
    await minutes(7)


@outage("the edge's certificate has 40 minutes left of 3 hours 40", "TandemCertificateExpires")
async def certificate_not_renewed(scene: Scene) -> None:
    files = certificate(scene.folder, lasted=datetime.timedelta(hours=3), lasts=datetime.timedelta(minutes=40))
    trusted = ssl.create_default_context(cafile=files["cert"])
    stage = await scene.stage(settings={"router": {"tls": files}}, verify=trusted)
    await scene.calm(stage, verify=trusted)
    await minutes(12)


def certificate(folder: Path, *, lasted: datetime.timedelta, lasts: datetime.timedelta) -> dict[str, str]:
    """Signed by itself, for this machine."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "edge")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - lasted, now + lasts)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .sign(key, hashes.SHA256())
    )
    files = {"cert": str(folder / "edge.pem"), "key": str(folder / "edge.key")}
    Path(files["cert"]).write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    Path(files["key"]).write_bytes(private)
    return files


@outage("a router may open no more files", "TandemResourceExhausted")
async def no_open_files(scene: Scene) -> None:
    stage = await scene.stage()
    await scene.calm(stage)
    pid = await stage.pid("router-0", "")
    left = len(os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (left, left))
    host, _, port = stage.urls[0].removeprefix("http://").rpartition(":")
    held = [await asyncio.open_connection(host, int(port)) for _ in range(32)]
    await minutes(4)
    for _, writer in held:
        writer.close()


@outage("the collector of traces ends", "TandemTracesDropped")
async def collector_gone(scene: Scene) -> None:
    with otlp_receiver() as collector:
        tracing = {"tracing": {"otlp_endpoint": collector.endpoint, "sample_ratio": 1.0}}
        stage = await scene.stage(settings={"observability": tracing})
        await scene.calm(stage)
    await minutes(13)


# ---- workers


@outage(
    "the ranks of both decode workers are killed and the model's folder is moved away",
    "TandemNoDecodeWorker",
    "TandemWorkerDown",
    "TandemSloBurnsFast",
)
async def decode_workers_lost(scene: Scene) -> None:
    await lost(scene, "decode-0", "decode-1")


@outage(
    "the rank of the prefill worker is killed and the model's folder is moved away",
    "TandemNoPrefillWorker",
    "TandemWorkerDown",
)
async def prefill_workers_lost(scene: Scene) -> None:
    await lost(scene, "prefill-0")


async def lost(scene: Scene, *workers: str) -> None:
    """Their model is gone too, so that they cannot start again."""
    stage = await scene.stage(settings={"router": {"queue_timeout_s": 20}})
    await scene.calm(stage)
    stage.model.rename(scene.folder / "moved")
    for worker in workers:
        await stage.send(f"{worker}.0", "rank-0", signal.SIGKILL)
    await minutes(8)


@outage("the rank of one of two decode workers is stopped", "TandemWorkerEjected")
async def rank_stalled(scene: Scene) -> None:
    stage = await scene.stage()
    await scene.calm(stage, every_s=1.0)
    await stage.send("decode-1.0", "rank-0", signal.SIGSTOP)
    await minutes(4)
    await stage.send("decode-1.0", "rank-0", signal.SIGCONT)


@outage("a decode worker's rank is killed whenever it is ready", "TandemWorkerRestarts")
async def rank_killed_often(scene: Scene) -> None:
    stage = await scene.stage()
    await scene.calm(stage)
    for times in range(4):
        await stage.until_ready("decode-1", after=times)
        await stage.send("decode-1.0", "rank-0", signal.SIGKILL)
    await minutes(1)


@outage("long answers fill the KV blocks of the decode worker, whose device is slow", "TandemKvPoolFull")
async def kv_pool_full(scene: Scene) -> None:
    stage = await scene.stage(decode=1, settings={"engine": {"kv_blocks": 512, "max_running_requests": 256}})
    await scene.calm(stage)
    scene.do(throttle(lambda: stage.pid("decode-0.0", "rank-0"), 0.1, 0.6))
    scene.do(Load(stage.urls, 0.4, prompt=16, answer=300).run())
    await minutes(10)


@outage("a rank forgets blocks of requests that end", "TandemBlocksLeaked")
async def blocks_leaked(scene: Scene) -> None:
    stage = await scene.stage(decode=1, programs={RANK: ("cluster.testing.leaking_rank",)})
    asking = await scene.calm(stage)
    await asyncio.to_thread((await stage.run_dir("decode-0.0") / LEAK_FILE).touch)
    await minutes(1)
    asking.cancel()
    await minutes(8)


@outage("every third request fails the step that it is in", "TandemRequestsFail")
async def requests_that_fail(scene: Scene) -> None:
    stage = await scene.stage(programs={RANK: ("cluster.testing.failing_rank",)})
    await scene.calm(stage)
    scene.do(Load(stage.urls, 5.0, begins=RAISES).run())
    await minutes(12)


@outage("a rank ends with a CUDA error; the page of the DCGM exporter is ours", "TandemGpuFault")
async def gpu_fault(scene: Scene) -> None:
    stage = await scene.stage(programs={RANK: ("cluster.testing.failing_rank",)})
    page = Dcgm()
    with served(page) as exporter:
        scene.scraper.targets.append(exporter)
        await scene.calm(stage)
        await asyncio.to_thread((await stage.run_dir("decode-1.0") / FAULT_FILE).write_text, "3")
        await stage.until_ready("decode-1", after=1)
        page.xid = 31  # a memory page fault of the GPU, which is how the driver names what that rank reported
        await minutes(1)


# ---- load


@outage(
    "a slow device, and more requests than it answers", "TandemQueueGrows", "TandemSloBurnsFast", "TandemSloBurnsSlowly"
)
async def more_than_it_can(scene: Scene) -> None:
    classes = [{"name": "interactive", "tpot_slo_s": 0.01}]  # which the slow device misses
    router = {"max_prefill_tokens_in_flight": 48, "max_queued_requests": 4096, "queue_timeout_s": 3600}
    settings = {"engine": {"max_running_requests": 1}, "router": router | {"classes": classes}}
    stage = await scene.stage(prefill=0, decode=1, settings=settings)
    await scene.calm(stage, every_s=8.0)
    scene.do(throttle(lambda: stage.pid("decode-0.0", "rank-0"), 0.1, 0.6))
    scene.do(Load(stage.urls, 0.5, answer=64).run())
    await minutes(19)


@outage("a slow device, and a queue of one request", "TandemLoadShed")
async def queue_full(scene: Scene) -> None:
    router = {"max_prefill_tokens_in_flight": 48, "max_queued_requests": 1}
    settings = {"engine": {"max_running_requests": 1}, "router": router}
    stage = await scene.stage(prefill=0, decode=1, settings=settings)
    await scene.calm(stage, every_s=8.0)
    scene.do(throttle(lambda: stage.pid("decode-0.0", "rank-0"), 0.1, 0.6))
    scene.do(Load(stage.urls, 0.3, answer=64).run())
    await minutes(13)


# ---- handoffs and the index


@outage("bits of received KV blocks flip", "TandemKvCorrupted", "TandemHandoffsFail")
async def kv_corrupted(scene: Scene) -> None:
    # a bit of every eighth received piece
    faults = FaultSettings(seed=3, every=8, kinds=("flip",), points=("place",)).to_json()
    stage = await scene.stage(programs={AGENT: ("kvtransfer.testing.agent", "--faults", faults)})
    await scene.calm(stage, every_s=1.0, prompt=200)
    await minutes(12)


@outage("Redis is stopped", "TandemRedisDown")
async def redis_stopped(scene: Scene) -> None:
    stage = await scene.stage()
    await scene.calm(stage)
    await stage.send("redis", "", signal.SIGSTOP)
    await minutes(3)
    await stage.send("redis", "", signal.SIGCONT)


@outage("another program writes to the streams of prefix events", "TandemIndexUnsettled")
async def strange_writer(scene: Scene) -> None:
    stage = await scene.stage()
    await scene.calm(stage)
    url = stage.controller._redis.url
    assert url is not None
    client = redis.asyncio.from_url(url)

    async def write_on() -> None:
        while True:
            for worker in ("prefill-0", "decode-0", "decode-1"):
                key = stream_key(stage.controller.spec.name, worker)
                entries: Any = await client.xrevrange(key, count=1)
                for last, _ in entries:
                    epoch, _, seq = last.decode().partition("-")
                    await client.xadd(key, {"job": "another"}, id=f"{epoch}-{int(seq) + 1}")
            await asyncio.sleep(10.0)

    scene.do(write_on())
    await minutes(11)
    await client.aclose()


@outage("more cached blocks than the index holds", "TandemIndexFull")
async def index_too_small(scene: Scene) -> None:
    settings = {"engine": {"kv_blocks": 6000, "block_tokens": 8}, "router": {"index_memory_bytes": 1 << 16}}
    stage = await scene.stage(settings=settings)
    await scene.calm(stage, every_s=3.0, prompt=1600)
    await minutes(11)


# ---- pods


@outage(
    "the head pod's processes are killed, and the next pod stays pending; the page of kube-state-metrics is ours",
    "TandemNoHeadPod",
    "TandemPodPending",
    "TandemDown",
)
async def head_pod_evicted(scene: Scene) -> None:
    upped = await scene.upped()
    pods = Pods()
    with served(pods) as exporter:
        scene.scraper.targets.append(exporter)
        await scene.calm(upped)
        upped.kill()
        del scene.scraper.targets[0]
        del pods.phase[HEAD]
        pods.phase[NEXT_HEAD] = "Pending"
        await minutes(17)


@outage(
    "the head's container is killed whenever it is ready; the page of kube-state-metrics is ours", "TandemPodRestarts"
)
async def head_killed_often(scene: Scene) -> None:
    upped = await scene.upped()
    pods = Pods()
    with served(pods) as exporter:
        scene.scraper.targets.append(exporter)
        await scene.calm(upped)
        for _ in range(3):
            upped.kill()
            upped.start()  # as the kubelet does
            pods.restarts[HEAD] = upped.restarts
            await upped.until_ready()
            await asyncio.sleep(INTERVAL_S)
        await minutes(1)


async def record(name: str, room: asyncio.Semaphore) -> bool:
    """True: every alert that the outage is recorded for has fired."""
    outage = OUTAGES[name]
    async with room:
        with tempfile.TemporaryDirectory(prefix="o-") as folder:
            print(f"{now()} {name}: {outage.broken}", flush=True)
            try:
                scraper = await played(outage, Path(folder))
                seen = Recording(outage.broken, INTERVAL_S, scraper.scrapes, (), scraper.series())
                fires = await asyncio.to_thread(fired, seen, RULES, Path(folder))
            except Exception:
                print(f"{now()} {name}:\n{traceback.format_exc()}", flush=True)
                return False
    replace(seen, fires=fires).write(RECORDED / f"{name}.yaml")
    print(f"{now()} {name}: {', '.join(fires) or 'nothing'} fired, expected {', '.join(outage.must) or 'nothing'}")
    return outage.is_shown_by(fires)


async def played(outage: Outage, folder: Path) -> Scraper:
    async with AsyncExitStack() as running:
        scene = Scene(folder, running)
        try:
            await outage.run(scene)
        finally:
            await scene.end()
    return scene.scraper


def now() -> str:
    return f"{datetime.datetime.now():%H:%M:%S}"


async def main(names: list[str], at_once: int) -> int:
    RECORDED.mkdir(parents=True, exist_ok=True)
    room = asyncio.Semaphore(at_once)
    shown = await asyncio.gather(*(record(name, room) for name in names))
    failed = [name for name, is_shown in zip(names, shown, strict=True) if not is_shown]
    print(f"{len(failed)} failed: {', '.join(failed)}" if failed else "all recorded")
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(OUTAGES))
    parser.add_argument("--at-once", type=int, default=1)
    options = parser.parse_args()
    if unknown := set(options.names) - OUTAGES.keys():
        parser.error(f"expected names of {[*OUTAGES]}, got {sorted(unknown)}")
    sys.exit(asyncio.run(main(options.names or [*OUTAGES], options.at_once)))
