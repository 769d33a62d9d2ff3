"""A second engine, for tests: it shows what an engine needs to serve in a worker, and that nothing else is used."""

from __future__ import annotations

import json
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.checkpoint.adapter import CONFIG_FILE, WEIGHTS_FILE, adapter_fingerprint
from tandem.engine.api import (
    AdapterFiles,
    Capability,
    EngineLoad,
    EngineRequest,
    KvExporter,
    RequestEnd,
    Reservation,
    StepResult,
    TokenOut,
    check_adapter,
    needed,
)
from tandem.errors import ConfigError, ContextExceeded, InputError, KvExhausted, UnsupportedField
from tandem.images import ExpandedPrompt, PromptImage
from tandem.kvcache.block_pool import BlockCounts, CacheEvent
from tandem.kvcache.layout import blocks_for
from tandem.request import FinishReason
from tandem.scheduler.plan import ExportRange

VOCAB = 317
BLOCK_TOKENS = 4


MARKER = 0  # of an image in a prompt, and its placeholder token


def read_as(prompt: Sequence[int], images: Sequence[PromptImage] = ()) -> list[int]:
    """The KV of a prompt: of its tokens, and of an image's placeholders the digest of its file."""
    kv = list(prompt)
    for image in images:
        kv[image.start : image.start + image.tokens] = [image.digest[0] % VOCAB] * image.tokens
    return kv


def next_token(kv: Sequence[int], shift: int = 0) -> int:
    """Depends on each position's KV, so an answer is right only if all of it is."""
    return (shift + sum(value * (place + 1) for place, value in enumerate(kv))) % VOCAB


def answer_of(prompt: Sequence[int], tokens: int, shift: int = 0, images: Sequence[PromptImage] = ()) -> list[int]:
    """What any `SmallEngine` answers. `shift`: its adapter's."""
    kv = read_as(prompt, images)
    for _ in range(tokens):
        kv.append(next_token(kv, shift))
    return kv[len(prompt) :]


def write_shift(folder: Path, shift: int | None) -> AdapterFiles:
    """Writes an adapter. None: one that cannot be loaded."""
    folder.mkdir()
    (folder / CONFIG_FILE).write_text(json.dumps({} if shift is None else {"shift": shift}))
    (folder / WEIGHTS_FILE).write_text(folder.name)
    return AdapterFiles(adapter_fingerprint(folder), str(folder))


@dataclass(slots=True, eq=False)
class _Request:
    given: EngineRequest
    blocks: list[int]  # for the prompt and the whole answer; empty: it waits for them
    answered: list[int] = field(default_factory=list)
    is_reserved: bool = False  # its KV is still to come

    @property
    def most_tokens(self) -> int:
        return len(self.given.prompt) + self.given.sampling.max_tokens

    @property
    def reason(self) -> FinishReason | None:
        """Of its end, if it has come."""
        if self.answered and self.answered[-1] in self.given.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.answered) == self.given.sampling.max_tokens else None


class SmallEngine:
    """An `Engine` with no Capability but images, no prefix cache and no preemption. The KV of a position is its token,
    or an image's byte.

    Args:
        exporter: None: it exports nothing.
        kv: the cells of each block; None: lists.
    """

    proposer = ""
    preemptions = 0
    is_collecting = False
    can = frozenset({Capability.IMAGES})

    def __init__(
        self,
        num_blocks: int,
        exporter: KvExporter | None = None,
        *,
        block_tokens: int = BLOCK_TOKENS,
        kv: Sequence[MutableSequence[float]] | None = None,
    ) -> None:
        self.kv = kv or [[0.0] * block_tokens for _ in range(num_blocks)]
        self._block_tokens = block_tokens
        self._total = num_blocks
        self._free = list(range(num_blocks))
        self._exporter = exporter
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []
        self._leased: dict[str, _Request] = {}  # reserved, or exported and not released
        self._shifts: dict[str, int] = {}  # of each adapter

    # --- requests

    def add(self, request: EngineRequest) -> None:
        self._waiting.append(self._checked(request))

    def reserve(self, request: EngineRequest) -> Reservation:
        made = self._checked(request)
        if not self._take_blocks(made):
            raise KvExhausted(
                f"expected {self._most_blocks(made)} free blocks, got {len(self._free)}", retry_after_s=1.0
            )
        made.is_reserved = True
        self._leased[request.request_id] = made
        return Reservation(
            request.request_id, tuple(made.blocks[: blocks_for(len(request.prompt), self._block_tokens)]), 0, 0
        )

    def join(self, request_id: str, first_token: int) -> None:
        if not 0 <= first_token < VOCAB:
            raise InputError(f"first_token: expected token ids from 0 to {VOCAB - 1}", field="first_token")
        if self._leased[request_id].given.sampling.max_tokens <= 1:
            raise InputError(f"{request_id}: expected a request of several tokens")
        joined = self._leased.pop(request_id)
        joined.is_reserved = False
        joined.answered.append(first_token)
        self._write(joined, len(joined.given.prompt), [first_token])
        self._running.append(joined)

    def cancel(self, request_id: str) -> bool:
        found = [each for each in (*self._waiting, *self._running) if each.given.request_id == request_id]
        if (leased := self._leased.pop(request_id, None)) is not None:
            found.append(leased)
        for each in found:
            self._free_blocks(each)
        self._waiting = [each for each in self._waiting if each not in found]
        self._running = [each for each in self._running if each not in found]
        return bool(found)

    def hold(self, request_id: str) -> bool:
        return False

    def resume(self, request_id: str) -> None:
        raise InputError(f"{request_id}: expected a held request")

    def export_held(self, request_id: str, first_block: int) -> int:
        raise InputError(f"{request_id}: expected a held request")

    def release_export(self, request_id: str) -> None:
        self._free_blocks(self._leased.pop(request_id))

    # --- adapters

    @property
    def adapters(self) -> frozenset[str]:
        return frozenset(self._shifts)

    def load_adapter(self, adapter: AdapterFiles) -> None:
        try:
            self._shifts[adapter.fingerprint] = int(
                json.loads((Path(adapter.folder) / CONFIG_FILE).read_text())["shift"]
            )
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{adapter.folder}: expected a number as its shift: {error}") from error

    def drop_adapter(self, fingerprint: str) -> bool:
        requests = [*self._waiting, *self._running, *self._leased.values()]
        if any(each.given.hash_key.adapter == fingerprint for each in requests):
            return False
        self._shifts.pop(fingerprint, None)
        return True

    # --- images

    def expand(self, prompt: Sequence[int], images: Sequence[bytes], cache_salt: bytes) -> ExpandedPrompt:
        """An image has as many placeholder tokens as its file has bytes beyond ten."""
        if prompt.count(MARKER) != len(images):
            raise InputError(f"messages: expected {prompt.count(MARKER)} images, got {len(images)}", field="messages")
        left, tokens, spans = iter(images), list[int](), list[tuple[int, int]]()
        for token in prompt:
            count = len(next(left)) - 10 if token == MARKER else 1
            if token == MARKER:
                spans.append((len(tokens), count))
            tokens += [token] * count
        return ExpandedPrompt(tuple(tokens), tuple(spans))

    def read_images(self, images: Sequence[PromptImage], cache_salt: bytes) -> object:
        """Nothing is to be done beforehand."""
        return None

    # --- steps

    @property
    def has_work(self) -> bool:
        return bool(self._running) or any(self._fits(each) for each in self._waiting)

    def step(self) -> StepResult:
        began = []
        for each in [*self._waiting]:
            if self._take_blocks(each):
                self._waiting.remove(each)
                self._running.append(each)
                self._write(each, 0, read_as(each.given.prompt, each.given.images))
                began.append(each)
        tokens, ended = [], []
        for each in [*self._running]:
            cached_tokens = None if each.answered else 0
            token = next_token(self._read(each), self._shifts.get(each.given.hash_key.adapter, 0))
            each.answered.append(token)
            tokens.append(TokenOut(each.given.request_id, token, cached_tokens=cached_tokens))
            if each.given.export_from_block is not None:
                ended.append(self._exported(each, each.given.export_from_block))
            elif (reason := each.reason) is not None:
                self._running.remove(each)
                self._free_blocks(each)
                ended.append(RequestEnd(each.given.request_id, reason))
            else:
                self._write(each, len(each.given.prompt) + len(each.answered) - 1, [token])
        return StepResult(tuple(tokens), tuple(ended), began=tuple(each.given.request_id for each in began))

    def _exported(self, each: _Request, first_block: int) -> RequestEnd:
        prompt = each.given.prompt
        blocks = tuple(each.blocks[first_block : blocks_for(len(prompt), self._block_tokens)])
        if blocks and self._exporter is not None:
            last = (len(prompt) - 1) % self._block_tokens + 1
            self._exporter.begin_step([ExportRange(each.given.request_id, first_block, blocks, last, False, True)])
            self._exporter.layer_done(0)
        self._running.remove(each)
        self._leased[each.given.request_id] = each
        return RequestEnd(each.given.request_id, each.reason)

    def collect(self) -> float | None:
        return None

    def report_layers(self, after_layer: Callable[[], None]) -> None:
        """Its steps take no time."""

    def idle_tick(self) -> None:
        """Nothing waits for it."""

    def close(self) -> None:
        """It started nothing."""

    # --- state

    def load(self) -> EngineLoad:
        leased = sum(len(each.blocks) for each in self._leased.values())
        in_use = self._total - len(self._free) - leased
        return EngineLoad(
            len(self._waiting),
            len(self._running),
            sum(len(each.given.prompt) for each in self._waiting),
            BlockCounts(len(self._free), 0, leased, in_use, self._total),
            sum(each.is_reserved for each in self._leased.values()),
        )

    def take_cache_events(self) -> list[CacheEvent]:
        return []

    # --- inside

    def _checked(self, request: EngineRequest) -> _Request:
        check_adapter(request, self.adapters)
        if lacking := needed(request.sampling, request.images) - self.can:
            raise UnsupportedField(f"expected a request that needs none of {', '.join(sorted(lacking))}")
        if not request.prompt or not all(0 <= token < VOCAB for token in request.prompt):
            raise InputError(f"prompt: expected token ids from 0 to {VOCAB - 1}", field="prompt")
        made = _Request(request, [])
        if (blocks := self._most_blocks(made)) > self._total:
            raise ContextExceeded(f"prompt: expected at most {self._total} blocks with its answer, got {blocks}")
        return made

    def _most_blocks(self, request: _Request) -> int:
        return blocks_for(request.most_tokens, self._block_tokens)

    def _fits(self, request: _Request) -> bool:
        return self._most_blocks(request) <= len(self._free)

    def _take_blocks(self, request: _Request) -> bool:
        if not self._fits(request):
            return False
        request.blocks = [self._free.pop() for _ in range(self._most_blocks(request))]
        for block in request.blocks:
            self.kv[block][:] = [0.0] * self._block_tokens
        return True

    def _free_blocks(self, request: _Request) -> None:
        self._free += request.blocks
        request.blocks = []

    def _write(self, request: _Request, start: int, tokens: Sequence[int]) -> None:
        for place, token in enumerate(tokens, start):
            self.kv[request.blocks[place // self._block_tokens]][place % self._block_tokens] = token

    def _read(self, request: _Request) -> list[int]:
        kv = [int(value) for block in request.blocks for value in self.kv[block]]
        return kv[: len(request.given.prompt) + len(request.answered)]
