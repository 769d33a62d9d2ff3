"""One request of a live cluster, exported to a real OTLP receiver: one trace that holds every stage and explains the
time to first token."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.app import RouterApp
from router.observe.span_tree import CHAIN
from router.testing.otlp import GotSpan, OtlpReceiver, otlp_receiver
from router.testing.stub_worker import until
from tandem.config.engine import EngineSpec
from tandem.config.observability import ObservabilitySpec, TracingSpec
from tandem.testing.models import random_prompt, write_tiny_llama
from tests.integration.conftest import StartRouted

VOCAB = 300
PROMPT_TOKENS = 4000
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
STAGES = {"queue", "reserve", "connect", "prefill", "pieces", "verify", "first_token", "join", "decode"}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(
        tmp_path_factory.mktemp("otlp") / "tiny", vocab=VOCAB, heads=4, kv_heads=2, layers=4, max_positions=4096, seed=1
    )


# A process of its own: the router and the receiver, which share this one, must not hold the clock up.
CLIENT = """
import http.client, json, sys, time
asked = json.load(sys.stdin)
connection = http.client.HTTPConnection("127.0.0.1", asked["port"], timeout=30)
connection.connect()
body = json.dumps(asked["body"])
began_s = time.monotonic()
connection.request("POST", "/v1/completions", body, {"content-type": "application/json", **asked["headers"]})
answer = connection.getresponse()
assert answer.status == 200, answer.read()
assert answer.readline().startswith(b"data: {")
print(time.monotonic() - began_s)
assert answer.read().rstrip().endswith(b"data: [DONE]")
"""


async def first_token_s(port: int, seed: int, headers: dict[str, str]) -> float:
    """Streams one answer to its end; seconds from the request's first byte to the first token's."""
    body = {
        "model": "tiny",
        "prompt": random_prompt(PROMPT_TOKENS, VOCAB, seed),
        "max_tokens": 8,
        "stream": True,
        "ignore_eos": True,
    }
    client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    asked = json.dumps({"port": port, "body": body, "headers": headers})
    took_s, failed = await client.communicate(asked.encode())
    assert client.returncode == 0, failed.decode()
    return float(took_s)


async def trace_of(receiver: OtlpReceiver, trace_id: str) -> dict[str, GotSpan]:
    """Its spans by name, once they have come."""

    def mine() -> list[GotSpan]:
        return [each for each in receiver.spans() if each.span.trace_id.hex() == trace_id]

    await until(lambda: bool(mine()))
    spans = mine()
    assert len({each.name for each in spans}) == len(spans)
    return {each.name: each for each in spans}


async def told(app: RouterApp) -> dict[tuple[str, str, str], float]:
    """The samples about workers by name, worker and kind, once both have told of their steps."""

    def samples() -> dict[tuple[str, str, str], float]:
        return {
            (sample.name, sample.labels["worker"], sample.labels.get("kind", "")): sample.value
            for family in text_string_to_metric_families(app.metrics.render().decode())
            for sample in family.samples
            if "worker" in sample.labels
        }

    def tokens(worker: str, kind: str) -> float:
        return samples().get(("tandem_worker_tokens_total", worker, kind), 0)

    await until(lambda: tokens("decode-0", "decode") >= 14 and tokens("prefill-0", "prefill") >= 2 * PROMPT_TOKENS)
    return samples()


async def test_one_trace_holds_every_stage_and_the_stages_sum_to_the_clients_ttft(
    routed: StartRouted, model_dir: Path
) -> None:
    with otlp_receiver() as receiver:
        seen = ObservabilitySpec(tracing=TracingSpec(otlp_endpoint=receiver.endpoint, sample_ratio=0))
        engine = EngineSpec(kv_blocks=512, max_step_tokens=256)
        async with routed(model_dir, prefill=1, decode=1, engine=engine, observability=seen) as live:
            await first_token_s(live.app.http_port, 1, {})  # links, caches, imports
            given = {"traceparent": f"00-{TRACE_ID}-{CALLER}-01", "tracestate": "shop=a1"}
            ttft_s = await first_token_s(live.app.http_port, 2, given)
            spans = await trace_of(receiver, TRACE_ID)

            assert spans.keys() >= STAGES
            root, attempt = spans["request"], spans["attempt"]
            assert (root.span.parent_span_id.hex(), root.span.trace_state) == (CALLER, "shop=a1")
            assert attempt.span.parent_span_id == root.span.span_id
            below = {name for name, each in spans.items() if each.span.parent_span_id == attempt.span.span_id}
            assert below == STAGES - {"queue"} | {"dispatch"}
            services = {name: (each.service, each.instance) for name, each in spans.items()}
            assert services["request"] == services["reserve"] == ("tandem-router", "router-0")
            assert services["prefill"] == services["connect"] == ("tandem-prefill", "prefill-0")
            by_decode = {services[name] for name in ("pieces", "verify", "join", "decode")}
            assert by_decode == {("tandem-decode", "decode-0")}
            assert root.attribute("gen_ai.usage.input_tokens") == PROMPT_TOKENS
            assert root.attribute("gen_ai.usage.output_tokens") == 8

            chain = [spans[name] for name in CHAIN]
            gaps = [abs(b.span.start_time_unix_nano - a.span.end_time_unix_nano) / 1e9 for a, b in pairwise(chain)]
            assert max(gaps) < 0.001, gaps
            stages_s = sum(each.duration_s for each in chain)
            assert 0 < stages_s < ttft_s
            print(f"stages {stages_s * 1e3:.1f} ms of {ttft_s * 1e3:.1f} ms at the client")

            # And what the workers told of their work.
            shown = await told(live.app)
            assert shown["tandem_worker_tokens_total", "prefill-0", "prefill"] >= 2 * PROMPT_TOKENS
            assert shown["tandem_worker_tokens_total", "decode-0", "decode"] >= 2 * 7
            flops = {name: shown["tandem_worker_flops_total", name, ""] for name in ("prefill-0", "decode-0")}
            assert flops["prefill-0"] > flops["decode-0"] > 0
            assert 0 < shown["tandem_worker_mfu_ratio", "prefill-0", ""] < 10
            assert shown["tandem_worker_link_bytes_total", "prefill-0", ""] > 0
            assert shown["tandem_worker_preemptions_total", "decode-0", ""] == 0

            # Without a sampled parent and at a ratio of 0 nothing more is sent.
            assert {each.span.trace_id.hex() for each in receiver.spans()} == {TRACE_ID}
