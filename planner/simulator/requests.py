"""One request of a trace, in the form that the router's core reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.requests.output import TextPiece
from tandem.images import PromptImage
from tandem.kvcache.blockhash import BlockHash
from tandem.request import SamplingParams

MODEL = "model"
LAST_TOKEN = 1  # the stop token of simulated answers; all other tokens are 0
# As if clients set no `max_tokens`: the router cannot foresee an answer's length.
SAMPLING = SamplingParams(max_tokens=1 << 30, stop_token_ids=frozenset({LAST_TOKEN}))
_NO_TEXT = TextPiece("", ())


@dataclass(frozen=True, slots=True, eq=False)
class SimRequest:
    """`output_tokens`: the answer's length in the trace. Only simulated workers read it."""

    index: int
    request_id: str
    prompt_tokens: int
    output_tokens: int
    block_hashes: Sequence[BlockHash]
    block_tokens: int
    model: str = MODEL
    sampling: SamplingParams = SAMPLING
    prompt: Sequence[int] = ()
    session: bytes | None = None
    adapter: str = ""
    adapter_name: str = ""
    images: tuple[PromptImage, ...] = ()


@dataclass(frozen=True, slots=True)
class SimToken:
    token_id: int
    cached_tokens: int
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    from_prediction: bool = False


class NullAssembler:
    """Simulated tokens have no text."""

    stopped = False
    stop_string = None

    def push(self, token: SimToken) -> TextPiece:
        return _NO_TEXT

    def flush(self) -> None:
        return None
