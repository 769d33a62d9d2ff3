"""vLLM's first model runner, which CPUs have: how it continues answers, and the hidden states that chose its tokens.

It continues an answer that began elsewhere only if it is helped.

It takes a request that is new to it for one without output, as every request is without handoffs; and it draws from a
generator that begins with the request, so another worker would draw the noise of the first token again. Its second
runner takes the tokens from the scheduler and draws each by its position: nothing here is for that one.
"""

from __future__ import annotations

from typing import Any

import torch

_STRIDE = 0x9E3779B97F4A7C15  # between the seeds of an answer's positions


class _SeededAnew(torch.Generator):
    """vLLM winds a generator back after each part of a prompt, which a CPU's cannot be, and this one need not."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self


def continue_answers(worker: Any) -> None:
    """Runs on each rank, once. `SchedulerOutput.scheduled_new_reqs` then say the tokens of an answer after their
    prompts, in `prefill_token_ids`."""
    runner = worker.model_runner
    update_states, add_request = runner._update_states, runner.input_batch.add_request
    begun: dict[str, list[int]] = {}

    def update_with_begun(scheduler_output: Any) -> Any:
        begun.clear()
        for new in scheduler_output.scheduled_new_reqs:
            if new.prefill_token_ids is not None:
                begun[new.req_id] = new.prefill_token_ids[len(new.prompt_token_ids) :]
        updated = update_states(scheduler_output)
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            request = runner.requests[request_id]
            if request.generator is not None:
                position = request.num_computed_tokens + count
                request.generator.manual_seed((request.sampling_params.seed + position * _STRIDE) % 2**63)
        return updated

    def add_begun(request: Any) -> Any:
        request.output_token_ids.extend(begun.pop(request.req_id, ()))
        if request.generator is not None and request.generator.device.type == "cpu":
            request.generator = _SeededAnew("cpu")
        return add_request(request)

    runner._update_states, runner.input_batch.add_request = update_with_begun, add_begun


def last_states(worker: Any) -> dict[str, torch.Tensor]:
    """After a step and before its tokens are drawn: the hidden state at each request's last token, after the model's
    last norm."""
    runner = worker.model_runner
    if runner.execute_model_state is None:
        return {}
    return dict(zip(runner.input_batch.req_ids, runner.execute_model_state.sample_hidden_states, strict=True))
