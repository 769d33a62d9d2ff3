"""`tandem demo`: runs a small cluster and shows where the time of four requests went."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc.aio
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cluster.cli.commands.running import running_cluster
from cluster.cli.console import console
from cluster.cli.router_client import chat_request, edge_channel, generate
from cluster.interruptible import run_interruptible
from cluster.keeper.lossy_output import lossy_output
from cluster.spec.loader import load_spec
from cluster.spec.resolve import free_ports, port_is_free
from tandem.config.model import DEMO_MODEL
from tandem.config.spec import ClusterSpec
from tandem.v1 import inference_pb2

PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Explain why the sky is blue in one sentence.",
)
MAX_TOKENS = 32


@dataclass(slots=True)
class DemoRequest:
    """One question, its answer so far and, at the end, its timeline."""

    question: str
    answer: str = ""
    finished: inference_pb2.Finished = field(default_factory=inference_pb2.Finished)


def run_demo(name: str) -> int:
    """Raises ConfigError."""
    with lossy_output():
        return run_interruptible(_demo(console(), demo_spec(name)))


def demo_spec(name: str) -> ClusterSpec:
    """The default spec under another name. Replaces ports that are in use by free ones. Raises ConfigError."""
    default = load_spec(None, {"name": name})
    ports = {
        "router.http_port": (default.router.http_host, default.router.http_port),
        "router.grpc_port": (default.router.grpc_host, default.router.grpc_port),
        "control.admin_port": (default.control.admin_host, default.control.admin_port),
    }
    free = free_ports(*(host for host, _ in ports.values()))
    chosen = {
        field: port if port_is_free(host, port) else other
        for (field, (host, port)), other in zip(ports.items(), free, strict=True)
    }
    # Makes every question show a handoff, even if it adds few tokens to the shared system prompt.
    return load_spec(None, {"name": name, "router.disaggregation": "always"} | chosen)


async def _demo(console: Console, spec: ClusterSpec) -> int:
    started_s = time.monotonic()

    def progress(what: str) -> None:
        console.print(f"[dim]{time.monotonic() - started_s:5.1f} s  {escape(what)}[/]")

    console.print("[bold]Tandem[/]: one prefill worker, one decode worker; KV blocks move from one to the other")
    async with running_cluster(spec, progress) as cluster:
        console.print(f"[dim]{time.monotonic() - started_s:5.1f} s[/]  [green]ready[/]\n")
        tls = cluster.spec.router.tls
        async with edge_channel(cluster.grpc_address, tls.cert if tls is not None else None) as channel:
            asked = [DemoRequest(question) for question in PROMPTS]
            await _ask(console, channel, asked)
            again = DemoRequest(PROMPTS[0])
            console.print("[bold]The first question again:[/] only blocks that the decode worker lacks are moved")
            await _ask(console, channel, [again])
        console.print(moved(asked[0], again))
        console.print(timelines([*asked, again]))
        unfinished = [entry for entry in (*asked, again) if not entry.finished.usage.completion_tokens]
    console.print(f"[dim]{time.monotonic() - started_s:5.1f} s  stopped[/]")
    return 1 if unfinished else 0


async def _ask(console: Console, channel: grpc.aio.Channel, questions: list[DemoRequest]) -> None:
    """Sends the questions one after another, so that their timelines do not affect each other."""
    for entry in questions:
        message = inference_pb2.ChatMessage(role="user", content=entry.question)
        request = chat_request([message], model=DEMO_MODEL, temperature=0.0, max_tokens=MAX_TOKENS)
        with Live(_panel(entry), console=console, refresh_per_second=20, transient=not console.is_terminal) as live:
            async for event in generate(channel, request):
                entry.answer += event.chunk.text
                if event.WhichOneof("event") == "finished":
                    entry.finished = event.finished
                live.update(_panel(entry))
        if not console.is_terminal:
            console.print(f"> {entry.question}\n{entry.answer}\n", markup=False)


def _panel(entry: DemoRequest) -> Group:
    return Group(Panel(Text(entry.answer), title=entry.question, title_align="left", width=78), "")


def moved(first: DemoRequest, again: DemoRequest) -> str:
    """Compares the KV moved for both times of the same question."""
    before, now = first.finished, again.finished
    return (
        f"KV cache moved for the first question: {_kib(before.timeline.kv_bytes_moved)} the first time, "
        f"{_kib(now.timeline.kv_bytes_moved)} the second time, when {now.usage.cached_tokens} of its "
        f"{now.usage.prompt_tokens} prompt tokens were cached"
    )


def timelines(entries: list[DemoRequest]) -> Table:
    """Stages as rows and requests as columns, which fits a terminal of 80 columns."""
    table = Table(title="Where the time went", title_justify="left", box=None, padding=(0, 1))
    table.add_column("")
    for number, entry in enumerate(entries, 1):
        table.add_column(f"{number}: {entry.question[:9]}…", justify="right", no_wrap=True)
    rows: dict[str, Callable[[inference_pb2.Finished], str]] = {
        "queue": lambda done: _ms(done.timeline.queue_s),
        "prefill": lambda done: _ms(done.timeline.prefill_s),
        "handoff": lambda done: _ms(done.timeline.handoff_s) if done.timeline.kv_bytes_moved else "local",
        "first token": lambda done: _ms(done.timeline.ttft_s),
        "decode": lambda done: _ms(done.timeline.decode_s),
        "tokens": lambda done: f"{done.usage.prompt_tokens} + {done.usage.completion_tokens}",
        "KV moved": lambda done: _kib(done.timeline.kv_bytes_moved),
        "cached tokens": lambda done: str(done.usage.cached_tokens),
    }
    for name, cell in rows.items():
        table.add_row(name, *(cell(entry.finished) for entry in entries))
    return table


def _kib(size_bytes: int) -> str:
    return f"{size_bytes / 1024:,.0f} KiB"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
