"""Frames that wait until the images of their request are read."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tandem.errors import InputError, RequestCancelled, RequestFailed, UnavailableError, WorkerLost
from tandem.images import ExpandedPrompt, PromptImage
from tandem.testing.small_engine import SmallEngine
from tandem.v1 import worker_pb2
from worker.image_reading import READ_LIMIT_S, WAIT_LIMIT_S, ImageReading, ReadingThread
from worker.inbox import ImagesRead

SESSION = 3
IMAGE = b"GIF89a, 13 B."


class ByHand:
    """Runs its work when it is told to."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.is_shut = False

    def submit(self, work: Callable[[], None]) -> None:
        self.work.append(work)

    def close(self) -> None:
        self.is_shut = True

    def run(self) -> None:
        self.work.pop(0)()


class Reader(SmallEngine):
    def __init__(self) -> None:
        super().__init__(4)
        self.read: list[Sequence[PromptImage]] = []
        self.salts: list[bytes] = []
        self.fails_with: Exception | None = None

    def expand(self, prompt: Sequence[int], images: Sequence[bytes], cache_salt: bytes) -> ExpandedPrompt:
        self.salts.append(cache_salt)
        return super().expand(prompt, images, cache_salt)

    def read_images(self, images: Sequence[PromptImage], cache_salt: bytes) -> object:
        if self.fails_with is not None:
            raise self.fails_with
        self.read.append(images)
        self.salts.append(cache_salt)
        return "kept"


class Reading:
    def __init__(self) -> None:
        self.engine, self.thread, self.told = Reader(), ByHand(), list[ImagesRead]()
        self.images = ImageReading(self.engine, self.thread, self.told.append)

    def takes(self, name: str, **frame: Any) -> bool:
        return self.images.takes(SESSION, name, worker_pb2.RouterFrame(**frame))

    def work(self, name: str, images: int = 1) -> worker_pb2.Work:
        given = [worker_pb2.Image(start=1, tokens=3, data=IMAGE)] * images
        return worker_pb2.Work(request_id=name, prompt=[5, 0, 0, 0], images=given)

    def generate(self, name: str, images: int = 1) -> bool:
        return self.takes(name, generate=worker_pb2.Generate(work=self.work(name, images)))

    def cancel(self, name: str) -> bool:
        return self.takes(name, cancel=worker_pb2.Cancel(request_id=name))

    def wait(self, passed_s: float) -> None:
        """Second by second."""
        for _ in range(int(passed_s)):
            self.images.tick(1.0)

    def kinds(self, result: ImagesRead) -> list[str | None] | None:
        frames = self.images.read(result)
        return None if frames is None else [each.WhichOneof("frame") for each in frames]


@pytest.fixture
def reading() -> Reading:
    return Reading()


def test_only_what_has_images_waits(reading: Reading) -> None:
    assert not reading.generate("text", images=0)
    assert not reading.cancel("text")
    assert reading.images.sessions() == set()
    assert reading.generate("pictures")
    assert reading.images.sessions() == {SESSION}


def test_later_frames_of_a_request_wait_in_order_and_others_pass(reading: Reading) -> None:
    assert reading.takes("r", reserve=worker_pb2.Reserve(work=reading.work("r")))
    assert reading.takes("r", join=worker_pb2.Join(request_id="r", first_token=1))
    assert not reading.takes("other", join=worker_pb2.Join(request_id="other", first_token=1))
    reading.thread.run()
    (result,) = reading.told
    assert result.result == "kept", "until the engine has the request"
    assert reading.kinds(result) == ["reserve", "join"]
    assert reading.kinds(result) is None
    assert len(reading.engine.read) == 1


def test_what_waits_counts_as_load(reading: Reading) -> None:
    reading.generate("a")
    reading.takes("b", prefill=worker_pb2.Prefill(work=reading.work("b")))
    reading.takes("c", reserve=worker_pb2.Reserve(work=reading.work("c")))
    reading.takes("d", expand_images=worker_pb2.ExpandImages(request_id="d", prompt=[0], images=[IMAGE]))
    assert reading.images.load() == (2, 8, 1)


def test_a_prompt_is_expanded(reading: Reading) -> None:
    reading.takes("e", expand_images=worker_pb2.ExpandImages(request_id="e", prompt=[7, 0], images=[IMAGE]))
    reading.thread.run()
    (result,) = reading.told
    assert result.result == ExpandedPrompt((7, 0, 0, 0), ((1, 3),))
    assert reading.kinds(result) == []


def test_what_is_read_is_kept_for_the_salt_of_its_request(reading: Reading) -> None:
    asked = worker_pb2.ExpandImages(request_id="e", prompt=[7, 0], images=[IMAGE], cache_salt=b"one")
    reading.takes("e", expand_images=asked)
    work = reading.work("r")
    work.cache_salt = b"another"
    reading.takes("r", generate=worker_pb2.Generate(work=work))
    reading.thread.run()
    reading.thread.run()
    assert reading.engine.salts == [b"one", b"another"]


def test_no_frames_wait_for_a_prompt_that_is_expanded(reading: Reading) -> None:
    """A router that is out of its mind: other frames have no id for the worker, or the same."""
    for _ in range(2):
        with contextlib.suppress(InputError):
            reading.takes("", expand_images=worker_pb2.ExpandImages(prompt=[0], images=[IMAGE]))
    assert not reading.takes("", hold=worker_pb2.Hold(request_id="r"))
    assert not reading.takes("", generate=worker_pb2.Generate(work=reading.work("")))
    assert reading.images.load() == (0, 0, 0)
    reading.thread.run()
    assert [reading.kinds(each) for each in reading.told] == [[]]
    assert not reading.thread.work


def test_what_is_cancelled_before_it_begins_is_never_read(reading: Reading) -> None:
    reading.generate("r")
    assert reading.cancel("r")
    reading.thread.run()
    (result,) = reading.told
    assert isinstance(result.result, RequestCancelled)
    assert reading.kinds(result) == ["generate"]
    assert reading.engine.read == []


@pytest.mark.parametrize("order", ["read first", "cancelled first"])
def test_a_cancelled_request_never_begins(reading: Reading, order: str) -> None:
    """The thread may have read its images at the moment when it is cancelled."""
    reading.generate("r")
    reading.thread.run()
    reading.cancel("r")
    results = reading.told if order == "read first" else reading.told[::-1]
    begun = [result.result for result in results if reading.kinds(result) is not None]
    assert [type(each) for each in begun] == [RequestCancelled]


def test_nothing_goes_on_of_a_session_that_ended(reading: Reading) -> None:
    reading.generate("begun")
    reading.thread.run()
    reading.generate("waits")
    reading.images.drop(SESSION)
    reading.thread.run()
    assert len(reading.told) == 1
    assert reading.kinds(reading.told[0]) is None
    assert len(reading.engine.read) == 1


@pytest.mark.parametrize("error", [InputError("no"), MemoryError("none left"), RuntimeError("torch's")])
def test_any_failure_ends_the_request(reading: Reading, error: Exception) -> None:
    reading.engine.fails_with = error
    reading.generate("r")
    reading.thread.run()
    (result,) = reading.told
    assert isinstance(result.result, InputError if isinstance(error, InputError) else RequestFailed)
    assert reading.kinds(result) == ["generate"]


def test_what_has_not_begun_at_the_end_never_does(reading: Reading) -> None:
    reading.generate("r")
    reading.images.close()
    reading.thread.run()
    assert reading.thread.is_shut
    assert reading.engine.read == []


def test_what_has_waited_too_long_is_refused_and_never_read(reading: Reading) -> None:
    reading.generate("r")
    reading.takes("e", expand_images=worker_pb2.ExpandImages(request_id="e", prompt=[0], images=[IMAGE]))
    reading.wait(WAIT_LIMIT_S)
    assert reading.told == []
    reading.wait(2)
    assert [type(each.result) for each in reading.told] == [UnavailableError] * 2
    assert [reading.kinds(each) for each in reading.told] == [["generate"], []]
    while reading.thread.work:
        reading.thread.run()
    assert reading.engine.read == []
    assert len(reading.told) == 2


def test_a_host_that_was_suspended_has_not_waited(reading: Reading) -> None:
    reading.generate("r")
    reading.images.tick(3600.0)
    assert reading.told == []


def test_a_read_that_never_returns_ends_the_worker() -> None:
    """Even if its router is gone: all others wait for it."""
    begun, goes_on = threading.Event(), threading.Event()

    class Hanging(Reader):
        def read_images(self, images: Sequence[PromptImage], cache_salt: bytes) -> object:
            begun.set()
            goes_on.wait()
            return None

    reading = Reading()
    images = reading.images = ImageReading(Hanging(), ReadingThread(), reading.told.append)
    reading.generate("hangs")
    assert begun.wait(60)
    images.drop(SESSION)
    reading.wait(READ_LIMIT_S)
    with pytest.raises(WorkerLost, match="images: a read took over 40 s"):
        reading.wait(2)
    images.close()
    goes_on.set()


def test_a_read_that_never_returns_does_not_keep_its_process_from_ending() -> None:
    hangs = "import time, worker.image_reading as it; it.ReadingThread().submit(lambda: time.sleep(3600))"
    subprocess.run([sys.executable, "-c", hangs], check=True, timeout=60)
