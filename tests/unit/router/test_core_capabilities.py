"""Requests that need what not every engine can do: routers ask for the capability, never for the engine."""

from __future__ import annotations

import pytest

from tandem.engine.api import Capability
from tandem.errors import ErrorCode
from tandem.request import SamplingParams
from tandem.v1 import cluster_pb2
from tests.unit.router.core_cluster import CoreCluster
from worker.wire import lacks

CONSTRAINED = SamplingParams(max_tokens=4, grammar="{}")
SCORED = SamplingParams(max_tokens=4, prompt_logprobs=1)
OTHERS = frozenset(Capability)


@pytest.mark.parametrize(
    ("sampling", "capability"), [(CONSTRAINED, Capability.GRAMMARS), (SCORED, Capability.PROMPT_LOGPROBS)]
)
def test_a_request_goes_to_workers_whose_engine_can_do_what_it_needs(
    sampling: SamplingParams, capability: Capability
) -> None:
    cluster = CoreCluster("p0", "d0")
    able, unable = cluster.worker("d0"), cluster.add("d1", can=OTHERS - {capability})
    unable_prefill = cluster.add("p1", can=OTHERS - {capability})
    for _ in range(3):
        cluster.ask(sampling=sampling)
    cluster.run()
    assert len(able.frames("reserve")) == len(cluster.worker("p0").frames("prefill")) == 3
    assert not [*unable.frames("reserve"), *unable_prefill.frames("prefill")]
    for _ in range(4):
        cluster.ask()
    cluster.run()
    assert len(unable.frames("reserve")) == 2, "what any engine can do goes to all"
    cluster.check_settled()


def test_what_no_worker_can_do_is_refused_at_once_and_by_name() -> None:
    cluster = CoreCluster("p0")
    unable = cluster.add("d0", can=())
    constrained, scored, plain = cluster.ask(sampling=CONSTRAINED), cluster.ask(sampling=SCORED), cluster.ask()
    cluster.run()
    for asked, name in ((constrained, "a constraint of the answer"), (scored, "logprobs of the prompt")):
        assert asked.error.code is ErrorCode.UNSUPPORTED_FIELD
        assert asked.error.message == f"expected a request without {name}: no engine of tiny can do that"
    assert plain.tokens == [70, 71, 72, 73]
    assert len(unable.frames("reserve")) == 1
    cluster.check_settled()


def test_a_request_waits_for_a_worker_that_can_while_all_others_are_gone() -> None:
    cluster = CoreCluster("p0")
    asked = cluster.ask(sampling=CONSTRAINED)
    cluster.run(1.0)
    cluster.add("d0")
    cluster.run()
    assert asked.tokens == [70, 71, 72, 73]
    cluster.check_settled()


def test_a_request_waits_for_the_worker_that_can_while_that_one_takes_none() -> None:
    cluster = CoreCluster("p0", "d0")
    cluster.add("d1", can=())
    able = cluster.worker("d0").worker
    able.drain = cluster_pb2.DRAIN_FINISH
    asked = cluster.ask(sampling=CONSTRAINED)
    cluster.run(1.0)
    able.drain = cluster_pb2.DRAIN_NONE
    cluster.pump()
    cluster.run()
    assert asked.tokens == [70, 71, 72, 73]
    cluster.check_settled()


def test_two_needs_that_no_single_worker_meets_are_refused() -> None:
    cluster = CoreCluster("p0")
    for name, can in (("d0", Capability.GRAMMARS), ("d1", Capability.PROMPT_LOGPROBS)):
        cluster.add(name, can={can})
    asked = cluster.ask(sampling=SamplingParams(max_tokens=4, grammar="{}", prompt_logprobs=1))
    cluster.run()
    assert asked.error.code is ErrorCode.UNSUPPORTED_FIELD
    cluster.check_settled()


def test_an_answer_whose_prompt_was_scored_no_longer_needs_a_worker_that_can_score() -> None:
    cluster = CoreCluster("p0", "d0")
    run = cluster.ask(sampling=SCORED).run
    cluster.add("d1", can=OTHERS - {Capability.PROMPT_LOGPROBS})
    placer = cluster.core.placer
    assert [each.worker_id for each in placer._decode_candidates(run)] == ["d0"]
    run._answer.append(70)
    assert [each.worker_id for each in placer._decode_candidates(run)] == ["d0", "d1"]


def test_answers_are_not_moved_off_a_worker_whose_engine_cannot_move_them() -> None:
    cluster = CoreCluster("p0", "d0")
    stays = cluster.add("d1", can=OTHERS - {Capability.MOVES})
    for worker in (cluster.worker("d0"), stays):
        worker.worker.drain = cluster_pb2.DRAIN_MOVE
    assert [key.worker_id for key in cluster.fleet.leaving()] == ["d0"]


def test_workers_of_before_there_were_capabilities_lack_what_came_with_them() -> None:
    assert lacks(cluster_pb2.WorkerInfo()) == {Capability.EMBEDDINGS, Capability.IMAGES}
    assert lacks(cluster_pb2.WorkerInfo(can=cluster_pb2.Capabilities())) == frozenset(Capability)
    newer = cluster_pb2.Capabilities(names=["moves", "of_a_later_version"])
    assert lacks(cluster_pb2.WorkerInfo(can=newer)) == frozenset(Capability) - {Capability.MOVES}
