"""Random faults in a running cluster under load, and the history of every request."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

from cluster.cli.admin_client import Admin, fetch_status
from tandem.errors import TandemError
from tandem.request import RequestState
from tandem.v1 import cluster_pb2, cluster_pb2_grpc, worker_pb2

RETRIES = 2  # by the client, as OpenAI's does by default
RETRY_S = 1.0
FROZEN_S = 8.0
CUT_WITHIN_S = 0.2  # about as long as an answer takes
ANSWER_S = 120.0
SETTLED_S = 120.0
TOKENS = 48

Fault = Callable[[], Awaitable[str]]


@dataclass(slots=True)
class Try:
    """What one router did with a request, as its client saw it."""

    router: str
    began_s: float = field(default_factory=lambda: time.clock_gettime(time.CLOCK_BOOTTIME))  # as `_started_s`
    was_heard: bool = True  # unless it could not be connected to
    was_answered: bool = False
    text: str = ""
    finished: bool = False


@dataclass(slots=True)
class Entry:
    """One request: what a right answer is, and each end that its client saw."""

    expected: str
    ends: list[str] = field(default_factory=list)  # "right", "wrong" or the error
    tries: list[Try] = field(default_factory=list)
    pause_s: float = 0.0  # the longest without a token, from the first try to the end
    heard_s: float = field(default_factory=time.monotonic)

    def hear(self) -> None:
        now_s = time.monotonic()
        self.pause_s, self.heard_s = max(self.pause_s, now_s - self.heard_s), now_s

    @property
    def is_wrong(self) -> bool:
        """Whether any try, also one that was cut, brought text that is not of the right answer."""
        return "wrong" in self.ends or not all(self.expected.startswith(each.text) for each in self.tries)


@dataclass(slots=True)
class History:
    entries: list[Entry] = field(default_factory=list)
    cancelled: list[Entry] = field(default_factory=list)  # by their clients
    faults: Counter[str] = field(default_factory=Counter)
    miscounted: list[str] = field(default_factory=list)  # routers whose own counts of ends differ from this history

    @property
    def success(self) -> float:
        return sum(entry.ends == ["right"] for entry in self.entries) / len(self.entries)

    @property
    def wrong(self) -> int:
        return sum(entry.is_wrong for entry in self.entries + self.cancelled)

    @property
    def retried(self) -> int:
        return sum(len(entry.tries) > 1 for entry in self.entries)

    def tries(self, router: str, since_s: float) -> list[Try]:
        found = (each for entry in self.entries for each in entry.tries)
        return [each for each in found if each.router == router and each.began_s >= since_s]

    def failures(self) -> list[str]:
        return [str(entry.ends) for entry in self.entries if entry.ends != ["right"]]


class Chaos:
    """Asks for the answers to `prompts` from every router of a cluster, and injures it meanwhile.

    Args:
        keeper: the process id of `tandem up`, whose descendants are killed.
        prompts: token ids. Their answers are taken from the cluster before the first fault.
    """

    def __init__(
        self, admin: Admin, routers: Sequence[str], keeper: int, model: str, prompts: Sequence[list[int]], seed: int
    ) -> None:
        self.history = History()
        self._admin = admin
        self._clients = [
            openai.AsyncOpenAI(base_url=f"http://{each}/v1", api_key="none", max_retries=0, timeout=ANSWER_S)
            for each in routers
        ]
        self._keeper = keeper
        self._model = model
        self._prompts = prompts
        self._random = random.Random(seed)
        self._expected: list[str] = []
        self._others: list[Entry] = []  # that were asked for the right answers, or ended before they were cancelled
        self._stopped = False
        self._traffic: list[asyncio.Task[None]] = []
        self._faults: dict[str, Fault] = {
            "kill a rank": lambda: self._signal_worker("rank-", signal.SIGKILL),
            "kill a service": lambda: self._signal_worker("service", signal.SIGKILL),
            "kill an agent": lambda: self._signal_worker("agent-", signal.SIGKILL),
            "freeze a rank": lambda: self._signal_worker("rank-", signal.SIGSTOP),
            "freeze an agent": lambda: self._signal_worker("agent-", signal.SIGSTOP),
            "kill a router": lambda: self._kill("-m router"),
            "kill the controller": lambda: self._kill("cluster.control"),
            "kill Redis": lambda: self._kill("valkey-server"),
            "scale": self._scale,
        }
        self._ray_faults: dict[str, Fault] = {
            "kill the raylet": lambda: self._kill("raylet/raylet"),
            "kill the GCS": lambda: self._kill("gcs_server"),
        }

    async def run(self, for_s: float, every_s: float, streams: int) -> History:
        """Faults of every kind in turn, in random order, while `streams` clients ask one request after another.

        Returns when every request has ended and the cluster has settled. Raises TimeoutError if it does not.
        """
        await self.begin(streams)
        until_s, kinds = time.monotonic() + for_s, list[str]()
        while time.monotonic() < until_s:
            kinds = kinds or self._random.sample(list(self._faults), len(self._faults))
            if await self.injure(kinds[-1]):
                kinds.pop()
            await asyncio.sleep(every_s)
        await self.end()
        return self.history

    async def begin(self, streams: int) -> None:
        self._others = [Entry("") for _ in self._prompts]
        self._expected = [await self._ask(self._clients[0], each, entry) for each, entry in enumerate(self._others)]
        self._traffic = [asyncio.create_task(self._ask_on(number)) for number in range(streams)]

    async def cancel(self, count: int, at_once: int) -> None:
        """Asks until `count` requests were cut by their clients, at any moment between their start and their end."""

        async def cancel_on() -> None:
            while len(self.history.cancelled) < count:
                number = self._random.randrange(len(self._prompts))
                entry = Entry(self._expected[number])
                try:
                    async with asyncio.timeout(self._random.uniform(0.0, CUT_WITHIN_S)):
                        await self._ask(self._random.choice(self._clients), number, entry)
                except TimeoutError:
                    self.history.cancelled.append(entry)
                    continue
                except openai.APIError:  # refused, or cut by a fault
                    await asyncio.sleep(CUT_WITHIN_S)
                self._others.append(entry)

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(cancel_on())

    async def injure(self, kind: str) -> bool:
        """False: there is nothing to injure at this moment, because the last fault is not healed."""
        try:
            self.history.faults[f"{kind}: {await (self._faults | self._ray_faults)[kind]()}"] += 1
        except (TandemError, grpc.aio.AioRpcError, psutil.Error, LookupError, ProcessLookupError):
            return False
        return True

    async def end(self) -> None:
        self._stopped = True
        await asyncio.gather(*self._traffic)
        await self.healed(at_rest=True)
        self.history.miscounted = await self._miscounted()
        for client in self._clients:
            await client.close()

    # ---- the clients

    async def _ask_on(self, stream: int) -> None:
        turn = stream
        while not self._stopped:
            turn += 1
            number = self._random.randrange(len(self._prompts))
            entry = Entry(self._expected[number])
            self.history.entries.append(entry)
            end = await self._end_of(entry, number, turn)
            entry.hear()
            entry.ends.append(end)

    async def _end_of(self, entry: Entry, number: int, turn: int) -> str:
        while True:
            client = self._clients[(turn + len(entry.tries) + 1) % len(self._clients)]
            try:
                return "right" if await self._ask(client, number, entry) == entry.expected else "wrong"
            except openai.APIError as error:  # refused, cut, or ended with an error event
                if len(entry.tries) > RETRIES:
                    return repr(error)
            await asyncio.sleep(RETRY_S * 2 ** (len(entry.tries) - 1))

    async def _ask(self, client: openai.AsyncOpenAI, number: int, entry: Entry) -> str:
        body: dict[str, Any] = {"prompt": self._prompts[number], "max_tokens": TOKENS, "temperature": number % 2}
        entry.tries.append(this := Try(client.base_url.netloc.decode()))
        try:
            stream = await client.completions.create(
                model=self._model, stream=True, seed=7, extra_body={"ignore_eos": True}, **body
            )
        except openai.APIConnectionError as error:
            this.was_heard = not isinstance(error.__cause__, httpx.ConnectError)
            raise
        except openai.APIStatusError:
            this.was_answered = True
            raise
        this.was_answered = True
        async with stream:
            async for chunk in stream:
                entry.hear()
                if this.finished and chunk.choices:
                    return "more after the end"
                for choice in chunk.choices:
                    this.text += choice.text
                    this.finished = choice.finish_reason is not None
        if not this.finished:
            raise openai.APIConnectionError(request=stream.response.request)
        return this.text

    # ---- the faults

    async def _signal_worker(self, process: str, signum: signal.Signals) -> str:
        workers = [each.info for each in (await fetch_status(self._admin)).workers if each.state == "ready"]
        worker = self._random.choice(workers)
        pid = next((each.pid for each in worker.processes if each.name.startswith(process)), None)
        if pid is None:
            raise LookupError(f"{worker.worker_id} has no {process}")
        os.kill(pid, signum)
        if signum == signal.SIGSTOP:
            await asyncio.sleep(FROZEN_S)
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGCONT)
        return cluster_pb2.Role.Name(worker.role)

    async def _kill(self, words: str) -> str:
        children = psutil.Process(self._keeper).children(recursive=True)
        found = [each for each in children if words in " ".join(each.cmdline())]
        self._random.choice(found).kill()
        return f"one of {len(found)}"

    async def _scale(self) -> str:
        """Another decode worker, and back."""
        workers = (await fetch_status(self._admin)).workers
        size = sum(each.info.role == cluster_pb2.ROLE_DECODE for each in workers)
        async with self._admin.channel() as channel:
            stub: cluster_pb2_grpc.ClusterAsyncStub = cluster_pb2_grpc.ClusterStub(channel)
            for target in (size + 1, size):
                await stub.Scale(cluster_pb2.ScaleRequest(model=self._model, decode=target))
        return f"decode {size} to {size + 1} and back"

    async def _miscounted(self) -> list[str]:
        """The routers that did not count one end for each try since they started, or not one finished answer for each
        whole one. What an earlier process of a router had counted is lost with it."""
        found = []
        for router, started_s in self._started_s().items():
            async with httpx.AsyncClient(timeout=ANSWER_S) as client:
                counted = _ends((await client.get(f"http://{router}/metrics")).text)
            cut = History(self.history.cancelled).tries(router, started_s)
            tries = History(self._others + self.history.entries).tries(router, started_s) + cut
            heard, answered = sum(each.was_heard for each in tries), sum(each.was_answered for each in tries)
            finished = sum(each.finished for each in tries)
            more = counted[RequestState.FINISHED] - finished  # answers that were whole before their clients cut them
            if not (answered <= counted.total() <= heard and 0 <= more <= sum(not each.finished for each in cut)):
                found.append(
                    f"{router}: {dict(counted)}, but {answered} to {heard} were asked, {finished} got an answer"
                )
        return found

    def _started_s(self) -> dict[str, float]:
        """When the process that listens at each router's address started."""
        listening = {}
        for process in psutil.Process(self._keeper).children(recursive=True):
            if "-m router" in " ".join(process.cmdline()):
                for each in process.net_connections(kind="inet"):
                    if each.status == psutil.CONN_LISTEN:
                        listening[f"{each.laddr.ip}:{each.laddr.port}"] = _started_s(process.pid)
        return {router: listening[router] for router in (each.base_url.netloc.decode() for each in self._clients)}

    async def healed(self, *, at_rest: bool) -> None:
        """Returns when every worker and router is ready. `at_rest`: and has no requests, with every block accounted
        for."""
        async with asyncio.timeout(SETTLED_S):
            while True:
                try:
                    status = await fetch_status(self._admin)
                except TandemError:
                    status = cluster_pb2.ClusterStatus()
                states = [each.state for each in status.workers] + [each.state for each in status.routers]
                rests = not at_rest or all(_rests(each.live.load.blocks) for each in status.workers)
                if set(states) == {"ready"} and rests:
                    return
                await asyncio.sleep(0.2)


def _ends(metrics: str) -> Counter[str]:
    """How many requests a router counted in each end state."""
    ends = Counter[str]()
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == "tandem_requests_total":
                ends[sample.labels["state"]] += int(sample.value)
    return ends


def _rests(blocks: worker_pb2.BlockCounts) -> bool:
    return not blocks.leased and not blocks.in_use and blocks.free + blocks.cached == blocks.total


def _started_s(pid: int) -> float:
    """Seconds from the machine's start to the process's. As a time of day, it would be off by what the clock has been
    corrected since."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")
