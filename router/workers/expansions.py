"""Prompts with images that one worker expands: what was asked over its link and is not answered yet."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count

from tandem.errors import TandemError, WorkerLost
from tandem.images import ExpandedPrompt
from tandem.v1 import worker_pb2
from worker.wire import parse_expanded

Expansion = asyncio.Future[ExpandedPrompt]


class Expansions:
    def __init__(self) -> None:
        self._asked: dict[str, Expansion] = {}
        self._ids = count()

    def __len__(self) -> int:
        return len(self._asked)

    def wire_ids(self) -> list[str]:
        return list(self._asked)

    def ask(
        self, prompt: Sequence[int], images: Sequence[bytes], cache_salt: bytes
    ) -> tuple[worker_pb2.ExpandImages, Expansion]:
        """What to send, and its answer."""
        wire_id = f"images-{next(self._ids)}"
        asked = worker_pb2.ExpandImages(request_id=wire_id, prompt=prompt, images=images, cache_salt=cache_salt)
        answer: Expansion = asyncio.get_running_loop().create_future()
        self._asked[wire_id] = answer
        answer.add_done_callback(lambda _: self._asked.pop(wire_id))
        return asked, answer

    def take(self, expanded: worker_pb2.ImagesExpanded) -> None:
        """The worker's answer."""
        if (answer := self._asked.get(expanded.request_id)) is not None and not answer.done():
            try:
                answer.set_result(parse_expanded(expanded))
            except TandemError as error:
                answer.set_exception(error)

    def fail(self, error: WorkerLost) -> None:
        for answer in [*self._asked.values()]:
            if not answer.done():
                answer.set_exception(error)
