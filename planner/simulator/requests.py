"""One request on its way through the simulated cluster: what router.requests.run keeps of a real one."""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.simulator.sequence import SimSequence
from planner.simulator.worker import SimWorker
from router.policies.types import WaitReason
from router.terms import RequestTerms
from router.workers.account import Charge
from tandem.kvcache.blockhash import BlockHash
from tandem.request import Lifecycle


@dataclass(slots=True, eq=False)
class SimRequest:
    """`prompt_tokens` grows by what was answered when it goes on elsewhere. Times are virtual."""

    index: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int  # still to come when this attempt began
    terms: RequestTerms
    block_hashes: list[BlockHash]
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    waiting_since_s: float = 0.0
    excluded: frozenset[str] = frozenset()
    waiting_for: WaitReason | None = None
    attempt: int = 0
    migrations: int = 0
    was_answered: bool = False  # in part, before its last attempt
    charges: list[tuple[SimWorker, Charge]] = field(default_factory=list)
    decode: SimWorker | None = None
    prefill: SimWorker | None = None
    tokens_ahead: int = 0
    dispatched_s: float = 0.0
    reserve_sent_s: float = 0.0
    prefill_sent_s: float = 0.0
    sequence: SimSequence | None = None  # on the decode worker
    cached_blocks: int = 0  # of those the decode worker had
    first_token_s: float | None = None  # of this attempt
    landed_s: float | None = None  # the decode worker has every block

    @property
    def sequence_id(self) -> str:
        return f"{self.index}.{self.attempt}"

    @property
    def workers(self) -> list[SimWorker]:
        return [each for each in (self.decode, self.prefill) if each is not None]
