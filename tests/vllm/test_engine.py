"""vLLM as an engine, without workers: what it answers, what it holds, and what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from tandem.engine.api import EngineRequest, RequestEnd, ScoredToken, TokenOut
from tandem.errors import ContextExceeded, InputError, KvExhausted
from tandem.grammar.compiler import GrammarCompiler, Matcher
from tandem.grammar.constraint import json_schema
from tandem.grammar.masks import Grammars
from tandem.kvcache.blockhash import HashKey, hash_blocks
from tandem.request import FinishReason, SamplingParams
from tandem.testing.engine import EngineDriver, single_rank
from tandem.testing.models import random_prompt
from tests.vllm.conftest import ENGINE, VOCAB, Exporter

if TYPE_CHECKING:
    from tandem.vllm_engine.engine import VllmEngine
    from tandem.vllm_engine.rank import VllmRank

pytestmark = pytest.mark.filterwarnings("default")  # those of vLLM's own modules
BLOCK = ENGINE.block_tokens
GREEDY: dict[str, Any] = {"temperature": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "seeded": {"temperature": 1.0, "seed": 7},
    "narrow": {"temperature": 0.7, "seed": 3, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3},
    "penalised": GREEDY | {"presence_penalty": 1.5, "frequency_penalty": 1.0},
}
_numbers = count()


@pytest.fixture
def engine(rank: VllmRank) -> Iterator[VllmEngine]:
    """With nothing in it, before and after."""
    yield rank.engine
    drain(rank.engine)
    counts = rank.engine.load().blocks
    assert counts.conserved
    assert (counts.leased, counts.in_use) == (0, 0)


def made(
    prompt: list[int],
    tokens: int = 20,
    *,
    salt: bytes | None = None,
    export: int | None = None,
    answered: int = 0,
    **sampling: Any,
) -> EngineRequest:
    """`salt` None: a salt of its own."""
    number = next(_numbers)
    return EngineRequest(
        f"request-{number}",
        tuple(prompt),
        SamplingParams(max_tokens=tokens, **(GREEDY | sampling)),
        HashKey("tiny", cache_salt=b"%d" % number if salt is None else salt),
        export_from_block=export,
        answered_tokens=answered,
    )


def drain(engine: VllmEngine) -> tuple[dict[str, list[int]], dict[str, RequestEnd]]:
    tokens: dict[str, list[int]] = {}
    ends: dict[str, RequestEnd] = {}
    while engine.has_work:
        result = engine.step()
        for each in result.tokens:
            tokens.setdefault(each.request_id, []).append(each.token_id)
        ends |= {each.request_id: each for each in result.ended}
        assert engine.load().blocks.conserved
    return tokens, ends


def answer(engine: VllmEngine, request: EngineRequest) -> list[int]:
    engine.add(request)
    return drain(engine)[0][request.request_id]


def handed_off(rank: VllmRank, exporter: Exporter, prompt: list[int], tokens: int, **sampling: Any) -> list[int]:
    """The answer by a prefill and a decode: the blocks are copied as transfer agents would, and the row of the batch
    that had the prompt has other tokens meanwhile."""
    engine = rank.engine
    prefill, decode = made(prompt, tokens, export=0, **sampling), made(prompt, tokens, **sampling)
    engine.add(prefill)
    answered, ends = drain(engine)
    (first,) = answered[prefill.request_id]
    assert ends[prefill.request_id] == RequestEnd(prefill.request_id)
    source = [block for each in exporter.ranges[prefill.request_id] for block in each.block_ids]
    reserved = engine.reserve(decode)
    assert not engine.has_work
    answer(engine, made(random_prompt(90, VOCAB, 99), 30))
    rank.pool.tensor[list(reserved.block_ids)] = rank.pool.tensor[source]
    engine.join(decode.request_id, first)
    rest = drain(engine)[0][decode.request_id]
    engine.release_export(prefill.request_id)
    return [first, *rest]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt_tokens", [1, 31, 32, 150])
def test_a_handoff_changes_no_token(
    rank: VllmRank, engine: VllmEngine, exporter: Exporter, kind: str, prompt_tokens: int
) -> None:
    prompt = random_prompt(prompt_tokens, VOCAB, prompt_tokens)
    expected = answer(engine, made(prompt, **KINDS[kind]))
    assert len(expected) == 20
    assert handed_off(rank, exporter, prompt, 20, **KINDS[kind]) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_goes_on_where_another_engine_left_it(engine: VllmEngine, kind: str) -> None:
    prompt = random_prompt(100, VOCAB, 5)
    expected = answer(engine, made(prompt, **KINDS[kind]))
    for kept in (1, 8, 19):
        rest = made([*prompt, *expected[:kept]], 20 - kept, answered=kept, **KINDS[kind])
        assert answer(engine, rest) == expected[kept:]


def test_an_answer_goes_on_where_its_own_kv_is_cached(engine: VllmEngine) -> None:
    """A second retry finds more than the prompt: also what it answered before the first."""
    prompt = random_prompt(20, VOCAB, 5)
    expected = answer(engine, made(prompt, 120, salt=b"first"))
    for kept in (60, 100):
        rest = made([*prompt, *expected[:kept]], 120 - kept, salt=b"retried", answered=kept)
        assert answer(engine, rest) == expected[kept:]
    again = made([*prompt, *expected[:100]], 20, salt=b"retried", answered=100)
    engine.add(again)
    result = engine.step()
    assert result.began == (again.request_id,)
    assert [each.cached_tokens for each in result.tokens] == [96]


def test_answers_together_are_those_alone(engine: VllmEngine) -> None:
    asks = [(random_prompt(10 + 37 * number, VOCAB, number), kind) for number, kind in enumerate(KINDS.values())]
    expected = [answer(engine, made(prompt, **kind)) for prompt, kind in asks]
    together = [made(prompt, **kind) for prompt, kind in asks]
    for each in together:
        engine.add(each)
    tokens, _ = drain(engine)
    assert [tokens[each.request_id] for each in together] == expected


def test_each_part_of_a_prompt_is_exported_when_its_step_computes_it(engine: VllmEngine, exporter: Exporter) -> None:
    request = made(random_prompt(150, VOCAB, 1), export=1)
    engine.add(request)
    drain(engine)
    ranges = exporter.ranges[request.request_id]
    assert [(each.first_block, len(each.block_ids), each.in_cache, each.is_last) for each in ranges] == [
        (1, 1, False, False),
        (2, 2, False, False),
        (4, 1, False, True),
    ]
    assert exporter.layers[-1] == 1
    counts = engine.load().blocks
    assert (counts.leased, counts.in_use) == (5, 0)
    engine.release_export(request.request_id)


def test_cached_blocks_are_exported_at_once_unless_the_step_computes_them(
    engine: VllmEngine, exporter: Exporter
) -> None:
    """vLLM finds a block as soon as its computation is planned: in the same step, its KV is not there yet."""
    prompt = random_prompt(40, VOCAB, 2)
    first, same_step, later = (made(prompt, export=0, salt=b"shared") for _ in range(3))
    engine.add(first)
    engine.add(same_step)
    drain(engine)
    engine.add(later)
    drain(engine)
    parts = {
        each: [(part.first_block, part.block_ids, part.in_cache) for part in exporter.ranges[each.request_id]]
        for each in (same_step, later)
    }
    shared = exporter.ranges[first.request_id][0].block_ids[:1]
    assert parts[same_step][0] == (0, shared, False)
    assert parts[later][0] == (0, shared, True)
    for each in (first, same_step, later):
        engine.release_export(each.request_id)


def test_prefixes_are_found_by_our_hashes_and_by_their_tenant_alone(engine: VllmEngine) -> None:
    engine.take_cache_events()
    prompt = random_prompt(100, VOCAB, 3)
    request = made(prompt, 40, salt=b"tenant")
    tokens = answer(engine, request)
    stored = {each for event in engine.take_cache_events() if event.stored for each in event.hashes}
    computed = [*prompt, *tokens[:-1]]  # the last token's KV was never needed
    assert stored == set(hash_blocks(computed, BLOCK, request.hash_key))
    for salt, cached in ((b"tenant", 3), (b"other", 0)):
        again = made(prompt, salt=salt)
        assert engine.reserve(again).first_missing_block == cached
        assert engine.cancel(again.request_id)


def test_what_is_evicted_is_said(engine: VllmEngine) -> None:
    engine.take_cache_events()
    found: set[bytes] = set()
    for seed in range(30):
        answer(engine, made(random_prompt(150, VOCAB, 100 + seed), 2))
        for event in engine.take_cache_events():
            found = found | set(event.hashes) if event.stored else found - set(event.hashes)
    engine.idle_tick()  # while it computes, cached blocks are told from free ones now and then
    counts = engine.load().blocks
    assert len(found) == counts.cached


def test_requests_are_cancelled_in_every_state(engine: VllmEngine) -> None:
    prompt = random_prompt(150, VOCAB, 4)
    waiting, running, exporting, exported, reserved, joined = (
        made(prompt, 50, export=0 if place in (2, 3) else None) for place in range(6)
    )
    engine.add(exported)
    drain(engine)
    engine.reserve(reserved)
    engine.reserve(joined)
    engine.join(joined.request_id, 5)
    engine.add(running)
    engine.add(exporting)
    engine.step()
    engine.add(waiting)
    for each in (waiting, running, exporting, exported, reserved, joined):
        assert engine.cancel(each.request_id)
        assert engine.load().blocks.conserved
        assert not engine.cancel(each.request_id)
    assert not engine.has_work


def test_a_preempted_answer_comes_whole(engine: VllmEngine) -> None:
    """Blocks run out while answers grow: the pool has 63."""
    asks = [(random_prompt(300, VOCAB, 200 + number), kind) for number, kind in enumerate([*KINDS.values()] * 2)]
    expected = [answer(engine, made(prompt, 150, **kind)) for prompt, kind in asks]
    before = engine.preemptions
    together = [made(prompt, 150, **kind) for prompt, kind in asks]
    for each in together:
        engine.add(each)
    tokens, _ = drain(engine)
    assert engine.preemptions > before, "nothing was preempted"
    assert [tokens[each.request_id] for each in together] == expected


def test_an_export_goes_on_while_an_answer_before_it_waits_for_blocks(engine: VllmEngine) -> None:
    """The pool is full when the answer needs its 16th block, and the export behind it is halfway."""
    prompt = random_prompt(470, VOCAB, 8)
    expected = answer(engine, made(prompt, 30))
    answering, export = made(prompt, 30), made(random_prompt(320, VOCAB, 9), export=0)
    engine.add(answering)
    tokens: list[int] = []
    while len(tokens) < 8:
        tokens += [each.token_id for each in engine.step().tokens]
    held = [made(random_prompt(size, VOCAB, size), 5) for size in (383, 384, 382, 64)]
    for each in held:
        engine.reserve(each)
    engine.add(export)
    before = engine.preemptions
    found, ends = drain(engine)
    assert ends == {export.request_id: RequestEnd(export.request_id)}
    assert engine.preemptions == before + 1
    engine.release_export(export.request_id)
    rest, _ = drain(engine)
    assert [*tokens, *found[answering.request_id], *rest[answering.request_id]] == expected
    for each in held:
        engine.cancel(each.request_id)


def test_too_few_free_blocks_refuse_a_reservation_and_change_nothing(engine: VllmEngine) -> None:
    held = [made(random_prompt(400, VOCAB, number), 5) for number in range(4)]
    for each in held:
        engine.reserve(each)
    before = engine.load()
    with pytest.raises(KvExhausted):
        engine.reserve(made(random_prompt(400, VOCAB, 50), 5))
    assert engine.load() == before
    for each in held:
        engine.cancel(each.request_id)


def test_imported_prompts_that_fill_the_pool_do_not_wait_for_each_other_forever(engine: VllmEngine) -> None:
    """Each of 9 has 7 full blocks of 63, and needs one more."""
    full = [made(random_prompt(7 * BLOCK, VOCAB, 300 + number), 10) for number in range(9)]
    for each in full:
        engine.reserve(each)
    for each in full:
        engine.join(each.request_id, 5)
    before = engine.preemptions
    tokens, ends = drain(engine)
    assert engine.preemptions > before, "some gave their blocks up"
    assert {each.reason for each in ends.values()} == {FinishReason.LENGTH}
    assert [len(tokens[each.request_id]) for each in full] == [9] * 9


def test_no_import_takes_the_blocks_that_an_answer_gave_up_and_waits_for(engine: VllmEngine) -> None:
    full = [made(random_prompt(7 * BLOCK, VOCAB, 400 + number), 10) for number in range(9)]
    for each in full:
        engine.reserve(each)
    for each in full:
        engine.join(each.request_id, 5)
    before = engine.preemptions
    while engine.preemptions == before:
        engine.step()
    engine.cancel(full[0].request_id)
    with pytest.raises(KvExhausted):
        engine.reserve(made([1, 2, 3], 5))
    drain(engine)
    engine.reserve(late := made([1, 2, 3], 5))
    engine.cancel(late.request_id)


def test_an_answer_whose_grammar_is_compiled_holds_up_no_other(
    engine: VllmEngine, rank: VllmRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, may_compile = GrammarCompiler.load(rank.model_dir, engine.vocab_size, (2,)), threading.Event()

    class Slow:
        def compile(self, grammar: str) -> Matcher:
            assert may_compile.wait(60.0)
            return compiler.compile(grammar)

    grammars = Grammars(lambda: cast(GrammarCompiler, Slow()))
    monkeypatch.setattr(engine, "_grammars", grammars)
    constraint = json_schema({"enum": ["a", "b"]}, "response_format")
    bound = made([1, 5, 7], 30, grammar=constraint.grammar, stop_token_ids=frozenset({2}))
    free = made(random_prompt(40, VOCAB, 61), 20)
    engine.add(bound)
    engine.add(free)
    ended: set[str] = set()
    while free.request_id not in ended:
        result = engine.step()
        ended |= {each.request_id for each in result.ended}
        assert {each.request_id for each in result.tokens} <= {free.request_id}
    assert engine.step().ended == (), "it waits, and does not lack blocks"
    assert engine.has_work
    may_compile.set()
    tokens, ends = drain(engine)
    assert ends[bound.request_id].reason == FinishReason.STOP
    assert tokens[bound.request_id]
    grammars.close()


def test_an_answer_ends_with_a_stop_token_and_an_export_says_so(engine: VllmEngine) -> None:
    prompt = random_prompt(40, VOCAB, 6)
    tokens = answer(engine, made(prompt, 20))
    at = next(place for place in range(1, 20) if tokens[place] not in tokens[:place])
    request = made(prompt, 20, stop_token_ids=frozenset({tokens[at]}))
    engine.add(request)
    found, ends = drain(engine)
    assert found[request.request_id] == tokens[: at + 1]
    assert ends[request.request_id].reason is FinishReason.STOP
    export = made(prompt, 20, export=0, stop_token_ids=frozenset({tokens[0]}))
    engine.add(export)
    assert drain(engine)[1][export.request_id].reason is FinishReason.STOP
    engine.release_export(export.request_id)
    single = made(prompt, 1, export=0)
    engine.add(single)
    assert drain(engine)[1][single.request_id].reason is FinishReason.LENGTH
    engine.release_export(single.request_id)


def test_logprobs_are_of_the_models_own_distribution(engine: VllmEngine) -> None:
    request = made(random_prompt(40, VOCAB, 7), 5, logprobs=3, temperature=0.5, seed=1)
    engine.add(request)
    tokens: list[TokenOut] = []
    while engine.has_work:
        tokens += engine.step().tokens
    for each in tokens:
        assert each.logprob is not None
        assert len(each.top) == 3
        assert [it.logprob for it in each.top] == sorted((it.logprob for it in each.top), reverse=True)
        assert each.logprob <= each.top[0].logprob <= 0.0


@pytest.mark.parametrize(
    ("request_", "error", "field"),
    [
        (made([], 5), InputError, "prompt"),
        (made([VOCAB * 2], 5), InputError, "prompt"),
        (made([1], 5, logit_bias=((VOCAB * 2, 1.0),)), InputError, "logit_bias"),
        (made([1], 5, stop_token_ids=frozenset({VOCAB * 2})), InputError, "stop_token_ids"),
        (made([1], 5, answered=1), InputError, "answer_tokens"),
        (made([1] * 512, 5), ContextExceeded, "prompt"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(
    engine: VllmEngine, request_: EngineRequest, error: type[InputError], field: str | None
) -> None:
    for ask in (engine.add, engine.reserve):
        with pytest.raises(error) as refused:
            ask(request_)
        assert refused.value.field == field
    assert not engine.has_work


@pytest.mark.parametrize(
    "request_",
    [made([1, 2, 3], 1), made([1, 2, 3], 5, stop_token_ids=frozenset({1})), made([1] * 511, 5)],
    ids=["one token", "a stop token", "the context's end"],
)
def test_a_join_is_checked(engine: VllmEngine, request_: EngineRequest) -> None:
    engine.reserve(request_)
    with pytest.raises(InputError, match="first_token"):
        engine.join(request_.request_id, VOCAB * 2)
    with pytest.raises(InputError, match="max_tokens"):
        engine.join(request_.request_id, 1)
    assert engine.cancel(request_.request_id)


def test_an_export_that_fills_the_context_says_so(engine: VllmEngine) -> None:
    export = made(random_prompt(511, VOCAB, 10), 20, export=0)
    engine.add(export)
    assert drain(engine)[1][export.request_id].reason is FinishReason.LENGTH
    engine.release_export(export.request_id)


def test_no_more_is_reserved_than_can_run(engine: VllmEngine) -> None:
    held = [made([1, 2, number], 5) for number in range(63)]
    for each in held:
        engine.reserve(each)
    with pytest.raises(KvExhausted):
        engine.reserve(made([1, 2, 3], 5))
    for each in held:
        engine.cancel(each.request_id)


def scores(engine: VllmEngine, request: EngineRequest) -> list[ScoredToken]:
    engine.add(request)
    found: list[ScoredToken] = []
    while engine.has_work:
        result = engine.step()
        for part in result.prompt_scores:
            assert part.start == 1 + len(found)
            found += part.tokens
        assert found or not result.tokens, "scores come before the first token"
    return found


def test_prompts_are_scored_as_by_our_own_engine(engine: VllmEngine, rank: VllmRank, tmp_path: Path) -> None:
    prompt = random_prompt(150, VOCAB, 12)  # several steps
    own = EngineDriver(single_rank(rank.model_dir, tmp_path / "rendezvous").engine)
    own.add("own", prompt, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2))
    own.run()
    answer(engine, made(prompt, 1, salt=b"scored"))  # what is cached is scored as well
    exported = made(prompt, 5, salt=b"scored", export=0, prompt_logprobs=2)
    for request in (made(prompt, 5, salt=b"scored", prompt_logprobs=2), exported):
        found = scores(engine, request)
        assert [each.token_id for each in found] == prompt[1:]
        for one, other in zip(found, own.scores["own"], strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert [each.token_id for each in one.top] == [each.token_id for each in other.top]
    engine.release_export(exported.request_id)


def test_embeddings_are_those_of_our_own_engine(engine: VllmEngine, rank: VllmRank, tmp_path: Path) -> None:
    own = EngineDriver(single_rank(rank.model_dir, tmp_path / "rendezvous").engine)
    prompts = {f"{length}": random_prompt(length, VOCAB, length) for length in (1, 31, 32, 33, 150)}
    for name, prompt in prompts.items():
        own.add(name, prompt, SamplingParams(max_tokens=1, temperature=0.0, embeds=True))
    own.run()
    for _ in range(2):  # again behind cached prefixes
        asked = {made(prompt, 1, salt=b"embeds", embeds=True): own.embeddings[name] for name, prompt in prompts.items()}
        engine.add(made(random_prompt(60, VOCAB, 3), 9))
        for request in asked:
            engine.add(request)
        found: dict[str, bytes] = {}
        while engine.has_work:
            found |= {each.request_id: each.embedding for each in engine.step().tokens if each.embedding}
        assert found.keys() == {request.request_id for request in asked}
        for request, embedding in asked.items():
            one, other = (np.frombuffer(each, dtype="<f4") for each in (found[request.request_id], embedding))
            np.testing.assert_allclose(one, other, atol=1e-3)
    gone = made(prompts["150"], 1, embeds=True)
    engine.add(gone)
    engine.step()
    assert engine.cancel(gone.request_id)
    drain(engine)
    assert not engine._executor.embeddings


def test_a_reserved_prompt_is_scored_elsewhere(engine: VllmEngine) -> None:
    request = made(random_prompt(40, VOCAB, 13), 5, prompt_logprobs=2)
    engine.reserve(request)
    engine.join(request.request_id, 7)
    while engine.has_work:
        assert not engine.step().prompt_scores


def test_steps_are_as_small_as_a_profile_asks_for(engine: VllmEngine) -> None:
    engine.limit_steps(24)
    try:
        engine.add(made(random_prompt(100, VOCAB, 4), 1))
        computed = []
        while engine.has_work:
            computed.append(engine.step().work.prefill_tokens)
    finally:
        engine.limit_steps(ENGINE.max_step_tokens)
    assert computed == [24, 24, 24, 24, 4]
