"""Requests as vLLM has them, and its outputs as an `Engine` gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams as VllmSampling
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request

from tandem.engine.api import EngineRequest, PromptScores, ScoredToken
from tandem.images import PromptImage
from tandem.kvcache.blockhash import HashKey, hash_blocks
from tandem.request import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class Hasher:
    """vLLM finds blocks by our hashes, so tenants stay apart, and its events are those of our prefix index."""

    key: HashKey
    block_tokens: int
    images: tuple[PromptImage, ...]

    def __call__(self, request: Request) -> list[bytes]:
        """Of the full blocks that `request` has no hash of yet."""
        known = request.block_hashes
        if request.num_tokens < (len(known) + 1) * self.block_tokens:
            return []
        first = len(known) * self.block_tokens
        images = [each for each in self.images if each.start >= first]
        parent = known[-1] if known else None
        tokens = request.all_token_ids[first:]
        return hash_blocks(tokens, self.block_tokens, self.key, parent=parent, images=images, first_token=first)


def sampling_of(request: EngineRequest) -> VllmSampling:
    """An export stops after one token. What another worker answered counts as output, as in vLLM after a preemption."""
    given: SamplingParams = request.sampling
    most = request.answered_tokens + (given.max_tokens if request.export_from_block is None else 1)
    return VllmSampling(
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k or 0,
        min_p=given.min_p,
        seed=given.seed % 2**63,
        max_tokens=most,
        min_tokens=min(given.min_tokens, most),
        stop_token_ids=sorted(given.stop_token_ids),
        ignore_eos=True,  # the router says what ends an answer
        logprobs=given.logprobs,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        repetition_penalty=given.repetition_penalty,
        logit_bias=dict(given.logit_bias) or None,
        detokenize=False,
        prompt_logprobs=given.prompt_logprobs,
        skip_reading_prefix_cache=not request.use_prefix_cache or given.prompt_logprobs is not None,
    )


def logprobs_of(found: Any, place: int, wanted: int | None) -> tuple[float | None, tuple[TokenLogprob, ...]]:
    """vLLM's row: the chosen token, then the most likely ones, best first."""
    if found is None or wanted is None:
        return None, ()
    ids, values = found.logprob_token_ids[place], found.logprobs[place]
    top = tuple(TokenLogprob(int(ids[at]), float(values[at])) for at in range(1, wanted + 1))
    return float(values[0]), top


def prompt_scores_of(output: EngineCoreOutput, given: EngineRequest) -> PromptScores | None:
    """vLLM gives those of the whole prompt once it is computed, from its second token on."""
    found, wanted = output.new_prompt_logprobs_tensors, given.sampling.prompt_logprobs
    if found is None or wanted is None:
        return None
    tokens = []
    for place, token in enumerate(given.prompt[1:]):
        logprob, top = logprobs_of(found, place, wanted)
        tokens.append(ScoredToken(token, logprob or 0.0, top))
    return PromptScores(given.request_id, 1, tuple(tokens))
