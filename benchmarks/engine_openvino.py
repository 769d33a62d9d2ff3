"""OpenVINO GenAI as a peer of the engine; runs in its own virtual environment (scripts/engine-peers.sh).

    python engine_openvino.py MODEL.gguf THREADS

Reads one JSON line {"prompts": [[token ids]], "tokens": n} per request, generates n tokens for each prompt, greedily,
and answers {"first_s", "step_s"}: seconds until all have their first token, and the median of the later steps, as
OpenVINO reports them.
"""

from __future__ import annotations

import json
import statistics
import sys

import numpy as np
import openvino as ov
import openvino_genai as genai


def main() -> int:
    pipeline = genai.LLMPipeline(sys.argv[1], "CPU", INFERENCE_NUM_THREADS=int(sys.argv[2]))
    config = genai.GenerationConfig()
    config.do_sample = False
    config.ignore_eos = True
    config.apply_chat_template = False
    print(json.dumps({"version": genai.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        ids = np.asarray(request["prompts"], dtype=np.int64)
        config.max_new_tokens = request["tokens"]
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        raw = pipeline.generate(inputs, config).perf_metrics.raw_metrics
        steps_us = [sum(step) for step in zip(raw.token_infer_durations, raw.sampling_durations, strict=True)]
        step_us = statistics.median(steps_us[1:]) if len(steps_us) > 1 else 0.0
        print(json.dumps({"first_s": raw.m_times_to_first_token[0] / 1e6, "step_s": step_us / 1e6}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
