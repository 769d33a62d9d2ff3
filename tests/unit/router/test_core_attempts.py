"""Attempts of a request that fail or are cancelled: where it goes on, what its client gets, what is left on workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from router.requests.output import OutputAssembler
from router.requests.raw_request import ValidRequest
from tandem.config.router import Disaggregation, RouterSpec
from tandem.errors import NoWorker, WorkerLost
from tandem.request import FinishReason, RequestState, SamplingParams
from tandem.text.tokenizer import Tokenizer
from tests.unit.router.core_cluster import Asked, CoreCluster, CoreWorker

EOS = 2
ANSWER = tuple(range(70, 83))
FOUR = ("p0", "d0", "p1", "d1")


def with_migrations(number: int) -> RouterSpec:
    return RouterSpec(disaggregation=Disaggregation.ALWAYS, max_migrations=number)


def waiting_at(cluster: CoreCluster, stage: str) -> None:
    """No worker takes a request further than `stage`."""
    for worker in cluster.workers.values():
        worker.unanswered = frozenset({"queue": (), "decode": ()}.get(stage, (stage,)))
        worker.token_s = 1.0
    if stage == "queue":
        for worker in cluster.workers.values():
            worker.lose()


# ---- cancellation


@pytest.mark.parametrize("stage", ["queue", "reserve", "prefill", "join", "decode"])
def test_a_request_that_is_cancelled_leaves_nothing_wherever_it_is(stage: str) -> None:
    cluster = CoreCluster("p0", "d0")
    waiting_at(cluster, stage)
    asked = cluster.ask()
    cluster.run(0.5)
    cluster.cancel(asked)
    assert cluster.ends("cancelled") == 1
    assert cluster.worker("d0").cancelled == ([] if stage == "queue" else ["r0.1"])
    assert cluster.worker("p0").cancelled == (["r0.1"] if stage == "prefill" else [])
    cluster.run()
    cluster.check_settled()


def test_a_request_that_is_cancelled_between_two_attempts_leaves_nothing() -> None:
    cluster = CoreCluster("p0", "d0")
    cluster.worker("d0").token_s = 0.1
    asked = cluster.ask()
    cluster.run(0.25)
    cluster.worker("d0").lose()
    assert cluster.metric("tandem_retries_total") == 1
    cluster.cancel(asked)
    assert cluster.ends("cancelled") == 1
    cluster.run()
    cluster.check_settled()


# ---- handoffs that fail


def test_without_another_prefill_worker_the_decode_worker_prefills_it() -> None:
    cluster = CoreCluster("p0", "d0", answer=ANSWER)
    cluster.worker("d0").failing_handoffs = 1000
    asked = cluster.ask()
    cluster.run()
    assert asked.tokens == [*ANSWER]
    assert [kind for kind, _ in cluster.worker("d0").received] == ["reserve", "join", "generate"]
    assert cluster.metric('tandem_placements_total{model="tiny",reason="local_prefill_failed"}') == 1
    cluster.check_settled()


def test_with_others_both_sides_of_a_failed_handoff_are_avoided() -> None:
    cluster = CoreCluster(*FOUR, answer=ANSWER)
    cluster.worker("d0").failing_handoffs = 1
    asked = cluster.ask()
    cluster.run()
    line = asked.final.timeline
    assert (line.prefill_worker, line.decode_worker) == ("p0", "d1"), "the first token was of p0"
    assert cluster.worker("p1").frames("prefill") == ["r0.2"]
    assert cluster.metric('tandem_retries_total{code="handoff_failed"') == 1
    assert cluster.metric("tandem_requests_total") == 1
    cluster.check_settled()


@pytest.mark.parametrize("stage", ["prefill", "join"])
def test_a_request_whose_prefill_worker_is_lost_goes_on_without_it(stage: str) -> None:
    cluster = CoreCluster("p0", "d0", answer=ANSWER)
    cluster.worker("p0").reports = False
    for name in ("p0", "d0"):
        cluster.worker(name).unanswered = frozenset({stage})
    asked = cluster.ask()
    cluster.run()
    cluster.worker("p0").lose()
    cluster.run()
    assert asked.tokens == [*ANSWER]
    assert cluster.worker("d0").cancelled == ["r0.1"], "the first attempt was taken off the decode worker"
    assert cluster.worker("d0").frames("generate") == ["r0.2"], "attempts have ids of their own"
    assert cluster.metric('tandem_retries_total{code="worker_lost"') == 1
    cluster.check_settled()


def test_a_prefill_worker_that_is_lost_while_room_is_reserved_is_missed_when_its_turn_comes() -> None:
    cluster = CoreCluster("p0", "d0", answer=ANSWER)
    cluster.worker("d0").reserve_s = 0.5
    asked = cluster.ask()
    cluster.run(0.25)
    cluster.worker("p0").lose()
    cluster.run()
    assert asked.tokens == [*ANSWER]
    assert cluster.worker("p0").received == []
    assert cluster.worker("d0").received == [("reserve", "r0.1"), ("generate", "r0.2")]
    assert cluster.worker("d0").cancelled == ["r0.1"]
    cluster.check_settled()


def test_the_loss_of_a_prefill_worker_after_the_handoff_changes_nothing() -> None:
    cluster = CoreCluster("p0", "d0", answer=ANSWER)
    cluster.worker("p0").reports = False
    cluster.worker("d0").token_s = 0.1
    asked = cluster.ask()
    cluster.run(0.25)
    cluster.worker("p0").lose()
    cluster.run()
    assert asked.tokens == [*ANSWER]
    assert asked.run.attempts == 1
    assert cluster.metric("tandem_retries_total") == 0


# ---- decode workers that are lost


def test_a_lost_decode_workers_request_waits_for_its_next_epoch_when_there_is_no_other() -> None:
    cluster = CoreCluster("p0", "d0", answer=ANSWER)
    cluster.worker("d0").token_s = 0.1
    asked = cluster.ask()
    cluster.run(0.25)
    cluster.worker("d0").lose()
    cluster.run(0.1)
    given = len(asked.tokens)
    assert (given, asked.run.state) == (3, RequestState.QUEUED)
    fresh = cluster.add("d0", epoch=2)
    cluster.run()
    assert asked.tokens == [*ANSWER]
    assert fresh.frames("join") == ["r0.2"], "a worker that failed it is asked again when there is no other"
    cluster.check_settled()


def test_the_wait_of_a_broken_answer_begins_at_the_break() -> None:
    spec = RouterSpec(disaggregation=Disaggregation.ALWAYS, queue_timeout_s=0.5)
    cluster = CoreCluster("p0", "d0", answer=ANSWER, spec=spec)
    cluster.worker("d0").token_s = 0.1
    asked = cluster.ask()
    cluster.run(0.7)  # longer than a request may wait
    cluster.worker("d0").lose()
    cluster.run(0.45)
    assert asked.end is None
    cluster.add("d1")
    cluster.run()
    assert asked.tokens == [*ANSWER]
    cluster.check_settled()


def test_a_broken_answer_without_a_worker_fails_and_is_not_called_refused() -> None:
    spec = RouterSpec(disaggregation=Disaggregation.ALWAYS, queue_timeout_s=0.5)
    cluster = CoreCluster("p0", "d0", answer=ANSWER, spec=spec)
    cluster.worker("d0").token_s = 0.1
    asked = cluster.ask()
    cluster.run(0.25)
    cluster.worker("d0").lose()
    cluster.run()
    assert isinstance(asked.error, NoWorker)
    assert (cluster.ends("failed"), cluster.ends("rejected")) == (1, 0)
    assert cluster.loop.now_s() == pytest.approx(0.75)
    cluster.check_settled()


# ---- a decode worker that is lost after each of its tokens, so that attempts end anywhere in an answer


def breaking(answer: tuple[int, ...], migrations: int = 100) -> tuple[CoreCluster, CoreWorker]:
    cluster = CoreCluster("p0", "d0", answer=answer, spec=with_migrations(migrations))
    cluster.worker("d0").failing_decodes = 1000
    return cluster, cluster.worker("d0")


def test_so_many_migrations_and_then_a_typed_error() -> None:
    cluster, _ = breaking(ANSWER, migrations=2)
    asked = cluster.ask()
    cluster.run()
    assert isinstance(asked.error, WorkerLost)
    assert asked.tokens == [*ANSWER[:6]], "three attempts of two tokens"
    assert cluster.metric("tandem_retries_total") == 2
    assert cluster.ends("failed") == 1
    cluster.check_settled()


@pytest.mark.parametrize("length", [2, 3, 4])
def test_an_answer_that_was_whole_is_not_continued(length: int) -> None:
    tokens = (*ANSWER[: length - 1], EOS)
    cluster, decode = breaking((*tokens, *ANSWER))
    asked = cluster.ask(sampling=SamplingParams(max_tokens=99, stop_token_ids=frozenset({EOS})))
    cluster.run()
    assert asked.tokens == [*tokens]
    assert asked.final.reason is FinishReason.STOP
    assert len(decode.frames("reserve")) == (length + 1) // 2
    cluster.check_settled()


def test_times_and_counts_are_of_the_whole_answer() -> None:
    cluster, decode = breaking(ANSWER)
    prefill = cluster.worker("p0")
    prefill.cached_tokens = decode.cached_tokens = 1
    prefill.prefill_s, decode.handoff_s, decode.token_s = 1.0, 0.25, 0.5
    asked = cluster.ask(20)
    cluster.run()
    line, attempts = asked.final.timeline, len(decode.frames("join"))
    assert attempts == len(ANSWER) // 2
    assert (line.queue_s, line.prefill_s, line.ttft_s) == (0.0, 1.0, 1.0)
    assert line.handoff_s == 0.25
    assert line.total_s == attempts * 1.75 + 1.0, "the last token is prefilled, and is the last"
    assert line.decode_s == line.total_s - line.ttft_s
    assert line.kv_blocks_moved == 2 * attempts, "every attempt moved its own"
    assert (line.prefill_worker, line.decode_worker) == ("p0", "d0")
    assert asked.final.usage.cached_tokens == line.cached_tokens_prefill == line.cached_tokens_decode == 1


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


class TestText:
    def asked(self, tokenizer: Tokenizer, text: str, stop: tuple[str, ...], options: Any, *, breaks: bool) -> Asked:
        tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
        cluster = CoreCluster("p0", "d0", answer=tokens, spec=with_migrations(100))
        cluster.worker("d0").failing_decodes = 1000 if breaks else 0
        prompt = tuple(tokenizer.encode("Hi", add_special_tokens=False))
        sampling = SamplingParams(**{"max_tokens": len(tokens)} | options)
        asked = cluster.ask(prompt, sampling, assembler=OutputAssembler(tokenizer, prompt, stop, frozenset()))
        cluster.run()
        if breaks and sampling.max_tokens > 1:  # else nothing is handed off
            assert len(cluster.worker("d0").frames("reserve")) == (asked.final.usage.completion_tokens + 1) // 2
        cluster.check_settled()
        return asked

    @pytest.mark.parametrize(
        ("text", "stop", "options"),
        [
            ("xx STOP yy", ("STOP",), {}),
            ("xxx STOP yy", ("STOP",), {}),
            ("a STO PS STOP", ("STOP", "OPS"), {}),
            ("é😀 and ü", (), {}),
            ("xé😀 and ü", (), {}),
            ("a long answer", (), {"logprobs": 2}),
            *(("a long answer", (), {"max_tokens": limit}) for limit in (1, 2, 3, 4, 5)),
        ],
    )
    def test_the_client_cannot_tell(
        self, tokenizer: Tokenizer, text: str, stop: tuple[str, ...], options: dict[str, int]
    ) -> None:
        whole, broken = (self.asked(tokenizer, text, stop, options, breaks=breaks) for breaks in (False, True))
        assert broken.text == whole.text == (text.split("STOP")[0] if stop else text)[: len(whole.text)]
        assert [token for piece in broken.pieces for token in piece.tokens] == [
            token for piece in whole.pieces for token in piece.tokens
        ]
        assert (broken.final.reason, broken.final.usage) == (whole.final.reason, whole.final.usage)


class TestWork:
    """What an attempt is to a worker."""

    def request(self) -> ValidRequest:
        sampling = SamplingParams(max_tokens=9, seed=5, prompt_logprobs=1)
        return ValidRequest("r", "tiny", (70, 71), sampling, (), (), 16)

    def test_an_attempt_that_goes_on_has_the_answer_in_its_prompt_and_asks_for_the_rest(self) -> None:
        first, second = self.request().work("r.1", ()), self.request().work("r.2", (72, 73))
        assert (list(first.prompt), first.answer_tokens, first.sampling.max_tokens) == ([70, 71], 0, 9)
        assert (list(second.prompt), second.answer_tokens, second.sampling.max_tokens) == ([70, 71, 72, 73], 2, 7)
        assert first.sampling.seed == second.sampling.seed == 5
        assert first.sampling.prompt_logprobs == 1
        assert not second.sampling.HasField("prompt_logprobs"), "they were given out"


# ---- size


def test_the_attributes_of_a_run_stay_together_in_memory() -> None:
    """CPython keeps at most 29 attributes of an instance without a dict of its own, which every token would look up."""
    cluster = CoreCluster("p0", "d0")
    waiting_at(cluster, "decode")
    cluster.ask()
    cluster.run(0.5)
    (run,) = cluster.core.running()
    assert len(vars(run)) < 30
