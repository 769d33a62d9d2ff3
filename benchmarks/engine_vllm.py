"""vLLM on CPUs as a peer of the engine; runs in its own virtual environment (scripts/engine-peers.sh --vllm).

    python engine_vllm.py MODEL_FOLDER THREADS [pair]

Input and output lines as in engine_openvino.py. `pair`: a second engine computes the prompts and passes their KV in
files through vLLM's connector, like a vLLM prefill and decode worker. The two engines run one after the other, each on
both cores.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

threads = int(sys.argv[2])
os.environ |= {  # vllm reads these at import
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import vllm  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402

CONTEXT = 2560  # tokens of the longest sequence, prompt and answer
MAX_SEQUENCES = 32


class Vllm:
    def __init__(self, folder: str, kv_folder: str | None) -> None:
        transfer = kv_folder and KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": kv_folder},
        )
        self._engine = vllm.LLM(
            folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            max_model_len=CONTEXT,
            max_num_seqs=MAX_SEQUENCES,
            enable_prefix_caching=kv_folder is None,
            kv_transfer_config=transfer or None,
        ).llm_engine
        self._requests = 0

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, list[float]]:
        """Returns the seconds until all have their first token, and the seconds of each later step."""
        params = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for prompt in prompts:
            self._engine.add_request(str(self._requests), {"prompt_token_ids": list(prompt)}, params)
            self._requests += 1
        began, first_s = time.perf_counter(), 0.0
        steps: list[float] = []
        started: set[str] = set()
        while self._engine.has_unfinished_requests():
            before = time.perf_counter()
            outputs = self._engine.step()
            if len(started) == len(prompts):
                steps.append(time.perf_counter() - before)
            else:
                started |= {output.request_id for output in outputs if output.outputs[0].token_ids}
                first_s = time.perf_counter() - began
        return first_s, steps


def main() -> int:
    with tempfile.TemporaryDirectory() as files:
        pair = sys.argv[3:] == ["pair"]
        decodes = Vllm(sys.argv[1], files if pair else None)
        prefills = Vllm(sys.argv[1], files) if pair else None
        print(json.dumps({"version": vllm.__version__}), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            before_s = prefills.generate(request["prompts"], 1)[0] if prefills else 0.0
            first_s, steps = decodes.generate(request["prompts"], request["tokens"])
            step_s = statistics.median(steps) if steps else 0.0
            print(json.dumps({"first_s": before_s + first_s, "step_s": step_s}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
