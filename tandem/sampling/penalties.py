"""Changes to logits that a request asks for, before temperature and truncation.

In this order, for a token that occurs `count` times in the output so far (without the prompt):

1. repetition penalty r (Keskar et al. 2019, arXiv:1909.05858), for every token of prompt or output: a positive logit is
   divided by r, another one multiplied by it;
2. OpenAI's penalties: logit - count · frequency_penalty - (1 if count else 0) · presence_penalty;
3. logit_bias, added;
4. min_tokens: stop tokens cannot be chosen while the output is shorter.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tandem.request import SamplingParams
from tandem.token_history import TokenHistory

Row = NDArray[np.float32]  # [vocab_size]


def penalised_logits(logits: Row, params: SamplingParams, history: TokenHistory) -> Row:
    """A changed copy of `logits`. All ids in `params` and `history` must be below `vocab_size`."""
    row = logits.copy()
    if params.repetition_penalty != 1.0:
        ids = history.seen()
        own = logits[ids]
        row[ids] = np.where(own > 0, own / params.repetition_penalty, own * params.repetition_penalty)
    if params.frequency_penalty or params.presence_penalty:
        ids, counts = history.answer()
        row[ids] -= (counts * params.frequency_penalty + params.presence_penalty).astype(np.float32)
    if params.logit_bias:
        biases = np.asarray([bias for _, bias in params.logit_bias], dtype=np.float32)
        row[[token for token, _ in params.logit_bias]] += biases
    if history.answer_tokens < params.min_tokens:
        row[sorted(params.stop_token_ids)] = -np.inf
    return row
