"""What a worker counts of its steps."""

import pytest

from tandem.engine.step_work import StepWork, WorkShape
from tandem.kvcache.host_tier import TierCounts
from tandem.v1 import worker_pb2
from worker.meters import STEP_BOUNDS_S, StepKind, StepMeters, kind_of

SHAPE = WorkShape(block_params=100, head_params=10, attention_width=4, weights_bytes=1000.0, kv_token_bytes=8.0)


@pytest.mark.parametrize(
    ("work", "kind"),
    [
        (StepWork(prefill_tokens=3), StepKind.PREFILL),
        (StepWork(decode_tokens=3), StepKind.DECODE),
        (StepWork(prefill_tokens=1, decode_tokens=1), StepKind.MIXED),
    ],
)
def test_steps_have_a_kind(work: StepWork, kind: StepKind) -> None:
    assert kind_of(work) is kind


def test_steps_are_counted_by_kind_and_how_long_they_took() -> None:
    meters = StepMeters(SHAPE, peak_flops_per_s=5.0, peak_memory_bytes_per_s=6.0)
    prompt = StepWork().with_chunk(0, 4, decodes=False, samples=True)
    token = StepWork().with_chunk(4, 1, decodes=True, samples=True)
    meters.stepped(prompt, 0.001)
    meters.stepped(token, 0.0011)
    meters.stepped(token, 1e6)
    speculative = StepWork(proposed_tokens=5, accepted_tokens=3, sampled_tokens=6, decode_tokens=6)
    meters.stepped(speculative, 1e6)
    meters.stepped(StepWork(), 0.5)  # it ended a request and computed nothing
    host = TierCounts(free=1, used=2, total=3, blocks_out=5, blocks_in=4)
    frame = meters.frame(2, host, [worker_pb2.LinkState(peer_worker="d0")])
    prefill, decode = (list(next(s.counts for s in frame.steps if s.kind == kind)) for kind in ("prefill", "decode"))
    assert (prefill[0], sum(prefill)) == (1, 1)
    assert (decode[1], decode[-1], sum(decode)) == (1, 2, 3)
    assert len(decode) == len(STEP_BOUNDS_S) + 1
    assert (frame.prefill_tokens, frame.decode_tokens, frame.sampled_tokens, frame.preemptions) == (4, 8, 9, 2)
    assert (frame.proposed_tokens, frame.accepted_tokens) == (5, 3)
    assert (frame.host_blocks_out, frame.host_blocks_in) == (5, 4)
    assert frame.flops == SHAPE.flops(prompt) + 2 * SHAPE.flops(token) + SHAPE.flops(speculative)
    assert frame.memory_bytes == 4 * 1000 + 8 * (4 + 5 + 5)
    assert (frame.peak_flops_per_s, frame.links[0].peer_worker) == (5.0, "d0")
