"""The frames that wait on one worker link, and the order in which they leave. Pure.

Small frames leave first: a Join, or the Reserve of a short prompt, would otherwise wait behind long prompts of other
requests. The frames of one request keep their order.
"""

from __future__ import annotations

from collections import Counter, deque

import msgspec

from tandem.rpc.wire_format import message_field
from tandem.v1 import worker_pb2

SMALL_BYTES = 1 << 10  # a Join has 50, a Reserve with a prompt of 256 tokens under 1,000
SMALL_ROOM_BYTES = 256 << 10  # of a message
LARGE_ROOM_BYTES = 32 << 10  # of a message, for which the next small frame may have to wait
MAX_UNSEEN = 16_384  # large frames: a worker that does not count frames reports none of them as processed


class _Frame(msgspec.Struct, frozen=True, gc=False):  # created faster than a frozen dataclass
    number: int
    wire_id: str
    raw: bytes
    is_large: bool  # or behind a large one of its request


class FrameQueue:
    """The frames of one session, numbered from 1 in the order of `add`.

    `takes_batches`: the worker accepts several frames per message.
    """

    def __init__(self, *, takes_batches: bool) -> None:
        self._takes_batches = takes_batches
        self._small: deque[_Frame] = deque()
        self._large: deque[_Frame] = deque()
        self._large_of: Counter[str] = Counter()  # frames in `_large`, by wire id
        self._added = 0
        self._sent = 0
        # Large frames that were sent and not processed yet: number, and how many frames were sent up to it.
        self._unseen: deque[tuple[int, int]] = deque(maxlen=MAX_UNSEEN)

    def __len__(self) -> int:
        return len(self._small) + len(self._large)

    def add(self, wire_id: str, raw: bytes) -> int:
        """Queues a serialized RouterFrame of a request. Returns its number."""
        self._added += 1
        is_large = len(raw) > SMALL_BYTES or wire_id in self._large_of
        frame = _Frame(self._added, wire_id, raw, is_large)
        if is_large:
            self._large.append(frame)
            self._large_of[wire_id] += 1
        else:
            self._small.append(frame)
        return frame.number

    def next_message(self) -> bytes:
        """Takes the frames of the next message: all small ones, then as many large ones as have room, but at least one.
        Call it only while frames wait."""
        if self._takes_batches:
            frames = _take(self._small, SMALL_ROOM_BYTES)
            if not self._small:  # large frames overtake no small one: `seen` relies on it
                frames += _take(self._large, LARGE_ROOM_BYTES)
        else:
            frames = [(self._small or self._large).popleft()]
        for frame in frames:
            self._sent += 1
            if frame.is_large:
                self._unseen.append((frame.number, self._sent))
                self._large_of[frame.wire_id] -= 1
                if not self._large_of[frame.wire_id]:
                    del self._large_of[frame.wire_id]
        first, *more = (frame.raw for frame in frames)
        return first + b"".join(message_field(worker_pb2.RouterFrame.MORE_FIELD_NUMBER, each) for each in more)

    def seen(self, count: int) -> int:
        """The worker has processed the first `count` frames that were sent. Returns the number up to which it has
        processed all frames: one that was overtaken may be missing among the first `count` numbers."""
        while self._unseen and self._unseen[0][1] <= count:
            self._unseen.popleft()
        if self._unseen:
            missing, _ = self._unseen[0]
        elif self._large:
            missing = self._large[0].number
        else:
            return count
        return min(count, missing - 1)


def _take(frames: deque[_Frame], room_bytes: int) -> list[_Frame]:
    """As many as fit, but at least one."""
    taken: list[_Frame] = []
    while frames and (not taken or len(frames[0].raw) <= room_bytes):
        taken.append(frames.popleft())
        room_bytes -= len(taken[-1].raw)
    return taken
