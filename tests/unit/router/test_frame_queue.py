"""In what order the frames that wait for a worker leave, and what its count of them means."""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args

from hypothesis import given
from hypothesis import strategies as st

from router.workers.frame_queue import LARGE_ROOM_BYTES, SMALL_BYTES, SMALL_ROOM_BYTES, FrameQueue
from tandem.v1 import worker_pb2

LONG = 1500  # tokens of a prompt, two bytes each


def reserve(wire_id: str, tokens: int) -> bytes:
    work = worker_pb2.Work(request_id=wire_id, prompt=[200] * tokens)
    return worker_pb2.RouterFrame(reserve=worker_pb2.Reserve(work=work)).SerializeToString()


def join(wire_id: str) -> bytes:
    return worker_pb2.RouterFrame(join=worker_pb2.Join(request_id=wire_id, first_token=7)).SerializeToString()


def cancel(wire_id: str) -> bytes:
    return worker_pb2.RouterFrame(cancel=worker_pb2.Cancel(request_id=wire_id)).SerializeToString()


def ids(message: bytes) -> list[str]:
    """The frames of a message as a worker reads them: kind and request."""
    first = worker_pb2.RouterFrame.FromString(message)
    return [_name(frame) for frame in (first, *first.more)]


def _name(frame: worker_pb2.RouterFrame) -> str:
    kind = frame.WhichOneof("frame")
    wire_id = frame.reserve.work.request_id if kind == "reserve" else getattr(frame, kind or "hello").request_id
    return f"{kind} {wire_id}"


def messages(queue: FrameQueue) -> list[list[str]]:
    sent = []
    while queue:
        sent.append(ids(queue.next_message()))
    return sent


def batching() -> FrameQueue:
    return FrameQueue(takes_batches=True)


def test_a_join_goes_before_the_long_prompts_of_other_requests() -> None:
    queue = batching()
    for each in ("a", "b"):
        queue.add(each, reserve(each, LONG))
    queue.add("c", join("c"))
    assert messages(queue) == [["join c", "reserve a", "reserve b"]]


def test_so_does_the_reserve_of_a_short_prompt() -> None:
    queue = batching()
    queue.add("long", reserve("long", LONG))
    queue.add("short", reserve("short", 64))
    assert messages(queue) == [["reserve short", "reserve long"]]


def test_a_cancel_stays_behind_the_long_prompt_that_it_cancels() -> None:
    queue = batching()
    queue.add("a", reserve("a", LONG))
    queue.add("b", reserve("b", LONG))
    queue.add("a", cancel("a"))
    queue.add("c", join("c"))
    assert messages(queue) == [["join c", "reserve a", "reserve b", "cancel a"]]


def test_a_cancel_goes_first_once_the_prompt_has_left() -> None:
    queue = batching()
    queue.add("a", reserve("a", LONG))
    assert ids(queue.next_message()) == ["reserve a"]
    queue.add("b", reserve("b", LONG))
    queue.add("a", cancel("a"))
    assert messages(queue) == [["cancel a", "reserve b"]]


def test_a_small_frame_waits_for_one_message_of_bounded_size() -> None:
    queue, each = batching(), len(reserve("0", LONG))
    for number in range(30):
        queue.add(f"{number}", reserve(f"{number}", LONG))
    first = queue.next_message()
    assert LARGE_ROOM_BYTES - each - 100 < len(first) < LARGE_ROOM_BYTES + 100
    queue.add("c", join("c"))
    assert ids(queue.next_message())[0] == "join c"


def test_a_frame_larger_than_a_message_should_be_goes_all_the_same() -> None:
    queue = batching()
    for each in ("a", "b"):
        queue.add(each, reserve(each, LARGE_ROOM_BYTES))
    queue.add("c", join("c"))
    assert messages(queue) == [["join c", "reserve a"], ["reserve b"]]


def test_large_frames_leave_while_small_ones_keep_coming() -> None:
    queue = batching()
    for number in range(100):
        queue.add(f"{number}", reserve(f"{number}", LONG))
    for number in range(100, 111):
        queue.add(f"{number}", join(f"{number}"))
        queue.next_message()
    assert not queue


def test_small_frames_fill_several_messages_before_a_large_one_if_they_must() -> None:
    queue, body = batching(), "x" * (SMALL_BYTES - 100)
    queue.add("large", reserve("large", LONG))
    small = [f"{number}{body}" for number in range(SMALL_ROOM_BYTES // len(body) + 1)]
    for each in small:
        queue.add(each, cancel(each))
    first = queue.next_message()
    assert SMALL_ROOM_BYTES - SMALL_BYTES < len(first) < SMALL_ROOM_BYTES + SMALL_BYTES
    rest = ids(queue.next_message())
    assert ids(first) + rest == [*(f"cancel {each}" for each in small), "reserve large"]


def test_a_worker_that_takes_one_frame_per_message_gets_the_small_ones_first_too() -> None:
    queue = FrameQueue(takes_batches=False)
    queue.add("a", reserve("a", LONG))
    queue.add("a", cancel("a"))
    queue.add("c", join("c"))
    assert messages(queue) == [["join c"], ["reserve a"], ["cancel a"]]


# ---- the worker's count


def test_without_overtaking_the_count_is_the_number() -> None:
    queue = batching()
    assert [queue.add(each, join(each)) for each in "abc"] == [1, 2, 3]
    queue.next_message()
    assert [queue.seen(count) for count in range(4)] == [0, 1, 2, 3]


def test_an_overtaken_frame_is_not_seen_before_the_worker_has_processed_it() -> None:
    queue = batching()
    assert queue.add("large", reserve("large", LARGE_ROOM_BYTES)) == 1
    queue.next_message()
    assert queue.add("next", reserve("next", LONG)) == 2
    assert [queue.add(each, join(each)) for each in "abc"] == [3, 4, 5]
    assert queue.seen(1) == 1
    queue.next_message()  # a, b, c and next
    assert [queue.seen(count) for count in (2, 3, 4)] == [1, 1, 1], "joins alone"
    assert queue.seen(5) == 5


def test_a_frame_that_still_waits_is_not_seen() -> None:
    queue = batching()
    for number in range(12):
        queue.add(f"{number}", reserve(f"{number}", LONG))
    sent = len(ids(queue.next_message()))
    assert sent < 12
    assert queue.add("c", join("c")) == 13
    assert queue.seen(sent) == sent


Step = Literal["small", "large", "follow", "send", "report"]


@given(st.lists(st.sampled_from(get_args(Step)), max_size=60), st.booleans())
def test_requests_keep_their_order_and_the_worker_has_all_frames_up_to_the_number_seen(
    steps: list[Step], takes_batches: bool
) -> None:
    queue, added, sent, processed = FrameQueue(takes_batches=takes_batches), list[str](), list[str](), 0

    def add(wire_id: str, raw: bytes) -> None:
        added.extend(ids(raw))
        assert queue.add(wire_id, raw) == len(added)

    for number, step in enumerate(steps):
        match step:
            case "small":
                add(f"{number}", cancel(f"{number}"))
            case "large":
                add(f"{number}", reserve(f"{number}", LONG))
            case "follow" if added:  # a further frame of the latest request
                add(wire_id := added[-1].split()[1], cancel(wire_id))
            case "send" if queue:
                sent += ids(queue.next_message())
            case "report":  # about the first half of what it had not processed
                processed += (len(sent) - processed + 1) // 2
                seen = queue.seen(processed)
                assert not Counter(added[:seen]) - Counter(sent[:processed])
    while queue:
        sent += ids(queue.next_message())
    for wire_id in {each.split()[1] for each in added}:
        of_request = [[each for each in frames if each.split()[1] == wire_id] for frames in (added, sent)]
        assert of_request[0] == of_request[1]
    assert queue.seen(len(sent)) == len(sent) == len(added)
