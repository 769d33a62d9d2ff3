"""The physical limits for the handoff's figures: memcpy in one process, gloo and a socket between two.

Each moves the same bytes from one large array to another, in messages of a piece's size, and does nothing else. The
other process is `python -m benchmarks.handoff_limits`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType

import numpy as np

from kvtransfer.pool.pool import Bytes

HOST = "127.0.0.1"
START_TIMEOUT_S = 60.0
_DONE = b"\1"


def memcpy_s(target: Bytes, source: Bytes) -> float:
    """Seconds for one large copy in this thread. Both arrays must be resident."""
    started_s = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - started_s


class Stream(ABC):
    """A one-way stream to another process, which answers when it has received everything."""

    def __init__(self, kind: str, port: int, message_bytes: int, total_bytes: int) -> None:
        self._data = _touched(total_bytes)
        self._message_bytes = message_bytes
        command = [sys.executable, "-m", "benchmarks.handoff_limits", kind, str(port), str(message_bytes)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self._child = subprocess.Popen([*command, str(total_bytes)], env=environment)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.kill()
        self._child.wait()

    def seconds(self) -> float:
        """Seconds from the first byte sent to the answer."""
        started_s = time.perf_counter()
        for part in _messages(self._data, self._message_bytes):
            self._send(part)
        self._wait()
        return time.perf_counter() - started_s

    @abstractmethod
    def _send(self, part: Bytes) -> None: ...

    @abstractmethod
    def _wait(self) -> None: ...


class RawSocket(Stream):
    def __init__(self, message_bytes: int, total_bytes: int) -> None:
        with socket.create_server((HOST, 0)) as listener:
            listener.settimeout(START_TIMEOUT_S)
            super().__init__("socket", listener.getsockname()[1], message_bytes, total_bytes)
            self._socket, _ = listener.accept()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _send(self, part: Bytes) -> None:
        self._socket.sendall(part.data)

    def _wait(self) -> None:
        if self._socket.recv(1) != _DONE:
            raise ConnectionError("the receiving process exited")


class BareGloo(Stream):
    def __init__(self, message_bytes: int, total_bytes: int) -> None:
        from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415 - only this figure needs torch

        store = TCPStore(HOST, 0, None, True, wait_for_workers=False)
        super().__init__("gloo", store.port, message_bytes, total_bytes)
        _join(store, 0)

    def _send(self, part: Bytes) -> None:
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415

        dist.send(torch.from_numpy(part), 1)

    def _wait(self) -> None:
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415

        dist.recv(torch.empty(1, dtype=torch.uint8), 1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import torch.distributed as dist  # noqa: PLC0415

        super().__exit__(kind, error, trace)
        dist.destroy_process_group()


def _join(store: object, rank: int) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)  # type: ignore[arg-type]


def _receive_socket(port: int, message_bytes: int, data: Bytes) -> None:
    with socket.create_connection((HOST, port)) as raw:
        while True:
            for part in _messages(data, message_bytes):
                view = part.data
                while view:
                    size = raw.recv_into(view)
                    if not size:
                        return
                    view = view[size:]
            raw.sendall(_DONE)


def _receive_gloo(port: int, message_bytes: int, data: Bytes) -> None:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415

    _join(TCPStore(HOST, port, None, False), 1)
    while True:
        for part in _messages(data, message_bytes):
            dist.recv(torch.from_numpy(part), 0)
        dist.send(torch.ones(1, dtype=torch.uint8), 0)


def _messages(data: Bytes, message_bytes: int) -> Iterator[Bytes]:
    for start in range(0, data.size, message_bytes):
        yield data[start : start + message_bytes]


def _touched(size: int) -> Bytes:
    """Random bytes, so every page is resident and none is shared."""
    return np.random.default_rng(0).integers(0, 256, size, np.uint8)


def main() -> None:
    kind, port, message_bytes, total_bytes = sys.argv[1], *map(int, sys.argv[2:])
    receive = _receive_gloo if kind == "gloo" else _receive_socket
    receive(port, message_bytes, _touched(total_bytes))


if __name__ == "__main__":
    main()
