"""Machines with a network between them that delays, loses and cuts packets, one way or both. On Linux, for root.

Each machine is a network namespace with a TUN device; this process carries the packets. Namespaces and devices end with
it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import heapq
import os
import random
import selectors
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from queue import SimpleQueue
from typing import Any, Final, TypeVar

T = TypeVar("T")

HOME: Final = "home"  # the machine of this process's main thread
CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
NETWORK = "10.78.0."
MTU = 1500


@dataclass(frozen=True, slots=True)
class Way:
    """One direction between two machines."""

    delay_s: float = 0.0
    loss: float = 0.0  # share of packets
    is_cut: bool = False


class Machine:
    """Runs calls on a thread in a namespace of its own; processes that they start are in it too."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=address, daemon=True)
        self._thread.start()
        self.device: int = self.run(lambda: new_namespace(address))

    def run(self, call: Callable[[], T]) -> T:
        done: Future[T] = Future()
        self._jobs.put((call, done))
        return done.result()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, done = job
            try:
                done.set_result(call())
            except Exception as error:
                done.set_exception(error)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        os.close(self.device)


class Machines:
    """Moves the main thread to the machine HOME. See `call_far`."""

    def __init__(self, *names: str) -> None:
        self.addresses = {name: f"{NETWORK}{number}" for number, name in enumerate((HOME, *names), 1)}
        self._home = new_namespace(self.addresses[HOME])
        self._machines = {name: Machine(self.addresses[name]) for name in names}
        self._ways: dict[tuple[str, str], Way] = {}
        self._all = Way()
        self._closed = threading.Event()
        self._carrier = threading.Thread(target=self._carry, name="carrier", daemon=True)
        self._carrier.start()

    def run_on(self, name: str, call: Callable[[], T]) -> T:
        """Calls `call` on the machine; HOME: here."""
        return call() if name == HOME else self._machines[name].run(call)

    def set_all(self, way: Way) -> None:
        """Between all machines, unless set otherwise."""
        self._all = way

    def cut(self, source: str, target: str, *, both: bool) -> None:
        self._ways = self._ways | {(source, target): Way(is_cut=True)}
        if both:
            self._ways = self._ways | {(target, source): Way(is_cut=True)}

    def heal(self) -> None:
        self._all, self._ways = Way(), {}

    def close(self) -> None:
        self._closed.set()
        self._carrier.join()
        for machine in self._machines.values():
            machine.close()
        os.close(self._home)

    def _carry(self) -> None:
        """Packets that were sent earlier arrive earlier, unless the delay has changed."""
        dice, order = random.Random(0), count()
        devices = {HOME: self._home} | {name: machine.device for name, machine in self._machines.items()}
        by_address = {address: name for name, address in self.addresses.items()}
        waiting: list[tuple[float, int, int, bytes]] = []
        with selectors.DefaultSelector() as ready:
            for name, device in devices.items():
                ready.register(device, selectors.EVENT_READ, name)
            while not self._closed.is_set():
                soonest_s = waiting[0][0] - time.monotonic() if waiting else 0.1
                for key, _ in ready.select(min(max(soonest_s, 0.0), 0.1)):
                    for packet in _packets(key.fd):
                        target = by_address.get(".".join(map(str, packet[16:20])))
                        way = self._ways.get((key.data, target or ""), self._all)
                        if target is None or way.is_cut or dice.random() < way.loss:
                            continue
                        due_s = time.monotonic() + way.delay_s
                        heapq.heappush(waiting, (due_s, next(order), devices[target], packet))
                while waiting and waiting[0][0] <= time.monotonic():
                    _, _, device, packet = heapq.heappop(waiting)
                    os.write(device, packet)


def call_far(call: Callable[[Machines], None], *names: str, timeout_s: float) -> None:
    """Calls `call`, which must be picklable, in a process of its own, whose main thread is on the machine HOME.

    Machines are created before `call` is imported: threads that libraries start when they are imported would stay on
    the old network.
    """
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_create, initargs=names) as process:
        process.submit(_call, call).result(timeout_s)


_created: list[Machines] = []


def _create(*names: str) -> None:
    _created.append(Machines(*names))


def _call(call: Callable[[Machines], None]) -> None:
    (machines,) = _created
    try:
        call(machines)
    finally:
        machines.close()


def _packets(device: int) -> list[bytes]:
    """Those that wait at a TUN device; no IPv6."""
    found = []
    for _ in range(64):
        try:
            packet = os.read(device, MTU)
        except BlockingIOError:
            break
        if packet[0] >> 4 == 4:
            found.append(packet)
    return found


def new_namespace(address: str) -> int:
    """Moves this thread into a new network namespace. Returns its TUN device, which has `address`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"network namespace: {errno.errorcode[code]}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"tun0", IFF_TUN | IFF_NO_PI))
    for command in ("link set lo up", f"addr add {address}/24 dev tun0", f"link set tun0 mtu {MTU} up"):
        subprocess.run(["ip", *command.split()], check=True)
    return device
