"""Messages between GPUs, with fakes for torch's NCCL and CUDA: when they end, late, unmoved or abandoned, and what then
uses the staging."""

from __future__ import annotations

import asyncio
import datetime
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, TCPStore

from kvtransfer.causes import DeviceLost, HandoffCause, HandoffFault
from kvtransfer.connection.handshake import LocalRank
from kvtransfer.pool import cuda_ipc
from kvtransfer.pool.device_pool import DevicePool
from kvtransfer.transports import nccl, process_group
from kvtransfer.transports.nccl import DeviceMessages
from kvtransfer.transports.process_group import TIMEOUT, Group
from kvtransfer.transports.threads import AgentThreads, LinkThread
from tandem.kvcache.layout import KvPoolLayout

GPU = torch.device("cuda", 0)
LAYOUT = KvPoolLayout(num_blocks=2, layers=1, kv_heads=1, block_tokens=4, head_dim=8, dtype="bfloat16")
SOON = datetime.timedelta(seconds=0.05)
DATA = torch.arange(8, dtype=torch.uint8)


@dataclass
class FakeNccl:
    """The part of `dist.ProcessGroupNCCL` that a link uses. Its operations end when `moved` is set, or by an abort."""

    backend_options: Any
    moved: threading.Event = field(default_factory=threading.Event)
    aborts: int = 0
    sent: list[list[int]] = field(default_factory=list)
    fails: str | None = None
    lets_abort: threading.Event = field(default_factory=threading.Event)

    Options = SimpleNamespace  # as torch's has them, the options of a group

    def __post_init__(self) -> None:
        self.lets_abort.set()

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> FakeNccl:
        if self.fails is not None:
            raise dist.DistBackendError(self.fails)
        self.sent.append([rank, *tensors[0].tolist()])
        return self

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> FakeNccl:
        tensors[0].fill_(rank)
        return self

    def wait(self) -> bool:
        return True  # makes a stream wait, not the thread

    def abort(self) -> None:
        self.lets_abort.wait()
        self.aborts += 1
        self.moved.set()


@dataclass
class FakeEvent:
    nccl: FakeNccl
    waited: list[str]

    def query(self) -> bool:
        self.waited.append("query")
        return self.nccl.moved.is_set()

    def synchronize(self) -> None:
        assert not self.nccl.sent or self.nccl.moved.wait(10), "nothing ends this operation"
        self.waited.append("synchronize")


@dataclass
class Link:
    messages: DeviceMessages
    group: Group
    nccl: FakeNccl
    thread: LinkThread
    waited: list[str]
    hung: list[str]


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    """One end of a link between GPUs: our code as it is, from the pool's streams up."""
    made: list[FakeNccl] = []
    waited: list[str] = []
    hung: list[str] = []

    def new_nccl(store: object, rank: int, size: int, options: object) -> FakeNccl:
        made.append(FakeNccl((rank, size, options)))
        return made[-1]

    new_nccl.Options = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "ProcessGroupNCCL", new_nccl, raising=False)
    pool = DevicePool(LAYOUT, torch.zeros(LAYOUT.pool_bytes, dtype=torch.uint8))
    pool.device = GPU

    def start_on(stream: object, work: Callable[[], None]) -> FakeEvent:
        work()
        return FakeEvent(made[0], waited)

    def run_on(stream: object, work: Callable[[], None]) -> None:
        work()
        FakeEvent(made[0], waited).synchronize()

    monkeypatch.setattr(cuda_ipc, "make_stream", lambda device: device)
    monkeypatch.setattr(cuda_ipc, "start_on", start_on)
    monkeypatch.setattr(cuda_ipc, "run_on", run_on)
    thread = LinkThread("link", AgentThreads(hung.append))
    store = cast(TCPStore, HashStore())
    group = Group(store, 1, cast(LocalRank, None), thread, GPU)
    return Link(DeviceMessages(pool, group, thread), group, made[0], thread, waited, hung)


def test_a_group_of_gpus_is_one_of_nccl_with_the_terms_of_a_link(link: Link) -> None:
    rank, size, options = link.nccl.backend_options
    assert (rank, size, options._timeout, options.is_high_priority_stream) == (1, 2, TIMEOUT, True)


async def test_a_message_ends_when_the_device_has_moved_it(link: Link) -> None:
    link.nccl.moved.set()
    await link.thread.run(link.messages.send, DATA)
    received = torch.zeros(4, dtype=torch.uint8)
    await link.thread.run(link.messages.receive, received)
    assert link.nccl.sent == [[0, *DATA.tolist()]]
    assert received.tolist() == [0] * 4  # from rank 0
    assert (link.waited, link.nccl.aborts) == (["query", "query"], 0)


async def test_a_message_may_take_its_time(link: Link) -> None:
    sending = asyncio.create_task(link.thread.run(link.messages.send, DATA))
    while len(link.waited) < 3:
        await asyncio.sleep(0)
    link.nccl.moved.set()
    await sending
    assert link.nccl.aborts == 0


async def test_a_message_that_is_not_moved_in_time_is_aborted_before_its_staging_is_free(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "TIMEOUT", SOON)
    with pytest.raises(HandoffFault, match="did not take part in time") as late:
        await link.thread.run(link.messages.send, DATA)
    assert late.value.cause == HandoffCause.TRANSPORT
    assert link.nccl.aborts == 1
    assert link.waited[-1] == "synchronize"


async def test_a_link_that_closes_ends_its_message(link: Link) -> None:
    sending = asyncio.create_task(link.thread.run(link.messages.send, DATA))
    while not link.waited:
        await asyncio.sleep(0)
    link.group.close()
    with pytest.raises(HandoffFault, match="or the link closed"):
        await sending
    assert link.hung == []


async def test_an_abort_is_not_taken_for_the_end_of_a_message(link: Link) -> None:
    """The device's event is reached by an abort, too."""
    sending = asyncio.create_task(link.thread.run(link.messages.send, DATA))
    while not link.waited:
        await asyncio.sleep(0)
    link.group.is_closed = True
    link.nccl.moved.set()
    with pytest.raises(HandoffFault, match="or the link closed"):
        await sending


async def test_an_abort_that_hangs_ends_the_process(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "ABORT_S", 0.02)
    link.nccl.lets_abort.clear()
    link.group.close()
    try:
        async with asyncio.timeout(10):
            while not link.hung:
                await asyncio.sleep(0.01)
    finally:
        link.nccl.lets_abort.set()
    assert link.hung == ["link"]


@pytest.mark.parametrize("closes", [False, True])
async def test_what_nccl_refuses_is_a_fault_of_the_link_and_leaves_nothing_running(link: Link, closes: bool) -> None:
    link.nccl.fails = "NCCL error in: group.cpp:1, remote process exited\nmore"
    if closes:
        link.group.destroy()
    with pytest.raises(HandoffFault, match="the link failed before" if closes else "remote process exited") as failed:
        await link.thread.run(link.messages.send, DATA)
    assert failed.value.cause == HandoffCause.TRANSPORT
    assert (link.waited, link.nccl.aborts) == (["synchronize"], 0 if closes else 1)


async def test_a_device_that_is_lost_during_a_message_is_reported(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(event: FakeEvent) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(FakeEvent, "query", lost)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        await link.thread.run(link.messages.send, DATA)
    assert link.hung == ["link"]
