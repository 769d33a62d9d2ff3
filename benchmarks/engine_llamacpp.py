"""llama.cpp as a peer of the engine; runs in its own virtual environment (scripts/engine-peers.sh --llama-cpp).

    python engine_llamacpp.py MODEL.gguf THREADS

Input and output lines as in engine_openvino.py. The prompts of a request are sequences of one context; each step
decodes one token of every sequence in one batch, greedily, as llama.cpp's server does.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time
from collections.abc import Sequence

import llama_cpp
import numpy as np
from numpy.typing import NDArray

CHUNK = 512  # prompt tokens per call, llama.cpp's default
MAX_SEQUENCES = 32
CONTEXT = 2560  # tokens of the longest sequence, prompt and answer


class Llama:
    def __init__(self, path: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = MAX_SEQUENCES * CONTEXT, MAX_SEQUENCES
        params.kv_unified = False  # as its header advises for sequences without a long shared prefix
        params.n_batch = params.n_ubatch = CHUNK
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._batch = llama_cpp.llama_batch_init(CHUNK, 0, 1)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
        """Returns the seconds until all sequences have their first token, and the median of the later steps."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        began = time.perf_counter()
        last = [self._prefill(sequence, prompt) for sequence, prompt in enumerate(prompts)]
        first_s = time.perf_counter() - began
        steps: list[float] = []
        for position in range(len(prompts[0]), len(prompts[0]) + tokens - 1):
            began = time.perf_counter()
            last = self._decode([(token, position, sequence, True) for sequence, token in enumerate(last)])
            steps.append(time.perf_counter() - began)
        return first_s, statistics.median(steps) if steps else 0.0

    def _prefill(self, sequence: int, prompt: Sequence[int]) -> int:
        end = len(prompt)
        for start in range(0, end, CHUNK):
            places = range(start, min(end, start + CHUNK))
            chosen = self._decode([(prompt[place], place, sequence, place == end - 1) for place in places])
        return chosen[0]

    def _decode(self, cells: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Decodes (token, position, sequence, wanted) cells; returns the likeliest next token of each wanted one."""
        batch = self._batch
        batch.n_tokens = len(cells)
        for at, (token, position, sequence, wanted) in enumerate(cells):
            batch.token[at], batch.pos[at] = token, position
            batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = 1, sequence, wanted
        if failed := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode: expected 0, got {failed}")
        return [int(self._row(at).argmax()) for at, cell in enumerate(cells) if cell[3]]

    def _row(self, at: int) -> NDArray[np.float32]:
        logits = llama_cpp.llama_get_logits_ith(self._context, at)
        return np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self._vocab,))


def main() -> int:
    llama = Llama(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        first_s, step_s = llama.generate(request["prompts"], request["tokens"])
        print(json.dumps({"first_s": first_s, "step_s": step_s}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
