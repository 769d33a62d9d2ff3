"""Where each request goes: placement, another worker after a refusal, a new worker for one that has to move. Pure.

Also keeps what follows from that: which workers a request is charged to, and which prompts are being computed where.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from router.policies.types import Candidate, Placement, PlacementQuery, PlacementRules, WaitReason
from router.prefix_index.in_flight_prefills import InFlightPrefills
from router.prefix_index.mirror import WorkerKey
from router.requests.state_machine import RequestRun
from router.workers.load_account import Charge
from tandem.clock import Clock
from tandem.config.model import Role
from tandem.engine.api import Capability, needed
from tandem.errors import ContextExceeded, KvExhausted, TandemError, UnavailableError, UnsupportedField
from tandem.kvcache.blockhash import BlockHash
from tandem.kvcache.layout import blocks_for

_NAMES = {
    Capability.GRAMMARS: "a constraint of the answer",
    Capability.PROMPT_LOGPROBS: "logprobs of the prompt",
    Capability.EMBEDDINGS: "an embedding",
    Capability.IMAGES: "images",
}


class FleetView(Protocol):
    """The workers as placement sees and charges them: the router's fleet, or the simulator's."""

    def candidates(
        self, model: str, role: Role, cached_blocks: Mapping[WorkerKey, int], block_tokens: int
    ) -> list[Candidate]:
        """Those that can take a request now. A large pool may leave out workers that cannot win."""
        ...

    def candidate(self, key: WorkerKey, cached_tokens: int) -> Candidate | None: ...

    def count(self, model: str, role: Role) -> int:
        """Workers that can take a request now."""
        ...

    def pool_blocks(self, model: str) -> Sequence[int]:
        """KV blocks of the decode workers that can take a request now; 0: not known."""
        ...

    def lacks(self, model: str) -> Sequence[frozenset[Capability]]:
        """What the engine of each decode worker cannot do, those included that take no request now."""
        ...

    def has_adapter(self, key: WorkerKey, adapter: str) -> bool: ...

    def serves_adapter(self, model: str, adapter: str) -> bool:
        """Whether the model's workers are to have it."""
        ...

    def some_have_adapter(self, model: str, adapter: str) -> bool:
        """Whether a decode worker has it, those included that take no request now."""
        ...

    def ready_ids(self, model: str, role: Role) -> frozenset[str]: ...

    def answer_tokens(self, model: str) -> int:
        """How long answers of the model are expected to be."""
        ...

    def leaving(self) -> Sequence[WorkerKey]:
        """Workers whose requests are to go on elsewhere."""
        ...

    def add_charge(self, key: WorkerKey, charge: Charge) -> bool:
        """False: there is no such worker any more."""
        ...

    def remove_charge(self, key: WorkerKey, charge: Charge) -> None: ...

    def prefilled(self, key: WorkerKey, charge: Charge) -> None:
        """The prompt of this charge is computed."""
        ...


class PrefixIndex(Protocol):
    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerKey, int]:
        """Leading blocks that each worker has cached."""
        ...


class PlacementSeen(msgspec.Struct, frozen=True):
    """All that one decision of the policy was made from, and what came of it: what a recording keeps."""

    query: PlacementQuery
    decode: Sequence[Candidate]
    prefill: Sequence[Candidate]
    outcome: Placement | WaitReason


class Placer:
    """Iterates over the requests that are on workers."""

    def __init__(self, policy: PlacementRules, fleet: FleetView, index: PrefixIndex, clock: Clock) -> None:
        self._policy, self._fleet, self._index = policy, fleet, index
        self._in_flight = InFlightPrefills(clock)
        self._charges: dict[RequestRun, list[tuple[WorkerKey, Charge]]] = {}
        self._placed = 0
        self.seen: list[PlacementSeen] | None = None  # a list: decisions are recorded there

    def __len__(self) -> int:
        return len(self._charges)

    def __contains__(self, run: RequestRun) -> bool:
        return run in self._charges

    def __iter__(self) -> Iterator[RequestRun]:
        return iter(self._charges)

    # ---- decisions

    def place(self, run: RequestRun) -> Placement | WaitReason | TandemError:
        """Where a queued request goes now, why it waits, or why it is refused for good.

        Workers that refused or failed it are avoided while others can take it. Changes `run.excluded` alone.
        """
        if run.deaths.is_suspected and (apart := self._workers_of_suspects()):
            # Beside the request that stops workers, another would be taken for it at the second death.
            outcome = self.decide(run, apart)
            if isinstance(outcome, Placement):
                return outcome
        outcome = self.decide(run)
        if isinstance(outcome, Placement):
            return outcome
        if (refusal := self._too_long(run) or self._unloaded(run) or self._unable(run)) is not None:
            return refusal
        if run.excluded:  # decode workers that failed or refused it are asked again,
            run.excluded -= self._fleet.ready_ids(run.request.model, Role.DECODE)
            outcome = self.decide(run)
        if isinstance(outcome, WaitReason) and run.excluded:
            run.excluded = frozenset()  # and then all
            outcome = self.decide(run)
        return outcome

    def _workers_of_suspects(self) -> frozenset[str]:
        """Of the running requests that were computed by a worker that died or stalled."""
        runs = [each for each in self._charges if each.deaths.is_suspected]
        return frozenset(key.worker_id for each in runs for key in (each.prefill, each.decode) if key is not None)

    def decide(self, run: RequestRun, avoided: frozenset[str] = frozenset()) -> Placement | WaitReason:
        """The policy's choice now, without the workers `avoided`. Changes nothing."""
        request, fleet = run.request, self._fleet
        cached = self._in_flight.credit(self._index.match(request.block_hashes), request.block_hashes)
        query = self._query(run, avoided)
        decode = self._fitting(run, fleet.candidates(request.model, Role.DECODE, cached, request.block_tokens))
        prefill = self._fitting(run, fleet.candidates(request.model, Role.PREFILL, cached, request.block_tokens))
        outcome = self._policy.place(query, decode, prefill)
        if self.seen is not None:
            self.seen.append(PlacementSeen(query, decode, prefill, outcome))
        return outcome

    def another_decode(self, run: RequestRun) -> WorkerKey | None:
        """Instead of a decode worker that refused, for the same prefill worker. None: no worker has room."""
        sender = None if run.prefill is None else self._fleet.candidate(run.prefill, run.credited_tokens)
        if sender is None:
            return None
        return _key(self._policy.another_decode(self._query(run), self._decode_candidates(run), sender))

    def next_decode(self, run: RequestRun) -> WorkerKey | None:
        """For a request that decodes and has to leave its worker. None: no worker has room; those that failed it may be
        asked again next time."""
        choice = _key(self._policy.next_decode(self._query(run), self._decode_candidates(run)))
        if choice is None:
            run.excluded = frozenset()
        return choice

    def to_move(self) -> list[RequestRun]:
        """Requests that decode on workers that are to be emptied."""
        leaving = set(self._fleet.leaving())
        return [run for run in self._charges if run.decode in leaving] if leaving else []

    def prefillers(self, model: str) -> int:
        """Workers that prefill for a model; 0 without a decode worker."""
        decode = self._fleet.count(model, Role.DECODE)
        return decode and (self._fleet.count(model, Role.PREFILL) or decode)

    # ---- books

    def occupy(self, run: RequestRun, placement: Placement) -> bool:
        """The request takes its place. False: one of the workers is gone."""
        decode, prefill = _key(placement.decode), _key(placement.prefill)
        if decode is None:
            return False
        tokens = placement.prefiller.uncached_tokens(self._query(run))
        if not self._charge(run, decode, prefill, tokens):
            return False
        self._placed += 1
        self._in_flight.began(run, prefill or decode, run.request.block_hashes)
        return True

    def reroute(self, run: RequestRun, decode: WorkerKey) -> bool:
        """Another decode worker takes the place of the one that refused."""
        tokens = sum(charge.prefill_tokens for _, charge in self._charges.get(run, ()))
        self._discharge(run)
        return self._charge(run, decode, run.prefill, tokens)

    def add_target(self, run: RequestRun, target: WorkerKey) -> bool:
        """A move takes room on its target as well. False: the target is gone."""
        charge = Charge(0, blocks_needed(run))
        if not self._fleet.add_charge(target, charge):
            return False
        self._charges[run].append((target, charge))
        return True

    def sent(self, run: RequestRun, worker: WorkerKey, frame: int) -> None:
        """The frame that gives the worker its part was the session's `frame`th."""
        for charged, charge in self._charges.get(run, ()):
            if charged == worker and charge.frame is None:
                charge.frame = frame

    def prefill_tokens(self, run: RequestRun) -> int:
        """To compute for it, as charged."""
        return sum(charge.prefill_tokens for _, charge in self._charges.get(run, ()))

    def prefilled(self, run: RequestRun) -> None:
        self._in_flight.computed(run)
        for worker, charge in self._charges.get(run, ()):
            self._fleet.prefilled(worker, charge)

    def leave(self, run: RequestRun, worker: WorkerKey) -> None:
        """It is not, or no longer, on this worker."""
        kept = []
        for charged, charge in self._charges.get(run, ()):
            if charged == worker:
                self._fleet.remove_charge(charged, charge)
            else:
                kept.append((charged, charge))
        if run in self._charges:
            self._charges[run] = kept

    def release(self, run: RequestRun) -> None:
        """It is on no worker any more. Idempotent."""
        self._in_flight.failed(run)
        self._discharge(run)

    def _charge(self, run: RequestRun, decode: WorkerKey, prefill: WorkerKey | None, tokens: int) -> bool:
        blocks = blocks_needed(run)
        charges = [(decode, Charge(tokens if prefill is None else 0, blocks))]
        if prefill is not None:
            charges.append((prefill, Charge(tokens, blocks)))
        taken: list[tuple[WorkerKey, Charge]] = []
        for worker, charge in charges:
            if not self._fleet.add_charge(worker, charge):
                self._remove(taken)
                return False
            taken.append((worker, charge))
        self._charges[run] = taken
        return True

    def _discharge(self, run: RequestRun) -> None:
        self._remove(self._charges.pop(run, ()))

    def _remove(self, charges: Iterable[tuple[WorkerKey, Charge]]) -> None:
        for worker, charge in charges:
            self._fleet.remove_charge(worker, charge)

    # ---- inside

    def _decode_candidates(self, run: RequestRun) -> list[Candidate]:
        request = run.request
        cached = self._index.match(request.block_hashes)
        return self._fitting(run, self._fleet.candidates(request.model, Role.DECODE, cached, request.block_tokens))

    def _fitting(self, run: RequestRun, candidates: list[Candidate]) -> list[Candidate]:
        blocks = blocks_needed(run)
        fitting = [each for each in candidates if each.total_blocks >= blocks or not each.total_blocks]
        if adapter := run.request.adapter:
            fleet = self._fleet
            fitting = [each for each in fitting if fleet.has_adapter(WorkerKey(each.worker_id, each.epoch), adapter)]
        needs = _needs(run)
        return [each for each in fitting if not needs & each.lacks] if needs else fitting

    def _too_long(self, run: RequestRun) -> TandemError | None:
        """A prompt that no decode worker there is could ever hold."""
        blocks, sizes = blocks_needed(run), self._fleet.pool_blocks(run.request.model)
        if not sizes or any(size >= blocks or not size for size in sizes):
            return None
        most = max(sizes) * run.request.block_tokens - 1
        limit = f"expected at most {most} tokens (a worker's KV blocks), got {run.prefill_tokens}"
        if run.answer_tokens:  # the worker that had room for it is gone
            return KvExhausted(f"prompt and answer so far: {limit}; a retry may succeed", retry_after_s=1.0)
        return ContextExceeded(f"prompt: {limit}", field="prompt")

    def _unloaded(self, run: RequestRun) -> TandemError | None:
        """An adapter that no decode worker has: a request for it would only hold up those behind it. An answer that has
        begun waits for one, if one is to come."""
        model, adapter = run.request.model, run.request.adapter
        if not adapter or self._fleet.some_have_adapter(model, adapter):
            return None
        if self._fleet.serves_adapter(model, adapter):
            if run.answer_tokens:
                return None
            return UnavailableError("model: no worker has loaded its adapter yet; retry later", retry_after_s=1.0)
        return UnavailableError("model: its adapter was replaced or removed after the request came: send it again")

    def _unable(self, run: RequestRun) -> TandemError | None:
        """What the engine of no decode worker can do, those included that take no request now. An answer that has
        begun waits for a worker as its first was."""
        if run.answer_tokens or not (needs := _needs(run)):
            return None
        lacking = [needs & lacks for lacks in self._fleet.lacks(run.request.model)]
        if not lacking or not all(lacking):
            return None
        fewest = min(lacking, key=len)
        named = " and ".join(_NAMES[each] for each in sorted(fewest))
        return UnsupportedField(f"expected a request without {named}: no engine of {run.request.model} can do that")

    def _query(self, run: RequestRun, avoided: frozenset[str] = frozenset()) -> PlacementQuery:
        request = run.request
        left = request.sampling.max_tokens - run.answer_tokens
        expected = min(left, self._fleet.answer_tokens(request.model))
        return PlacementQuery(
            run.prefill_tokens,
            run.excluded | avoided,
            expected,
            request.session,
            self._placed,
            is_prompt_alone=request.sampling.max_tokens == 1,
        )


def _needs(run: RequestRun) -> frozenset[Capability]:
    """Of the engines of its next workers. The scores of a prompt come with the first token."""
    needs = needed(run.request.sampling, run.request.images)
    return needs - {Capability.PROMPT_LOGPROBS} if needs and run.answer_tokens else needs


def blocks_needed(run: RequestRun) -> int:
    return blocks_for(run.prefill_tokens + 1, run.request.block_tokens)  # and a token to answer with


def _key(candidate: Candidate | None) -> WorkerKey | None:
    return None if candidate is None else WorkerKey(candidate.worker_id, candidate.epoch)
