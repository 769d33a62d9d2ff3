"""A busy router sends several tokens in one gRPC message, and says of each what it would have said alone."""

from __future__ import annotations

from typing import Any

import pytest

from router.edge.write_pauses import WritePauses
from router.texts.detokenizer import Detokenizer
from tandem.v1 import inference_pb2 as pb
from tests.unit.router.conftest import MODEL, Cluster

TEXT = "Grüße €5 an alle"
SAMPLING: dict[str, Any] = {"logprobs": 1, "max_tokens": 40}


async def chunks(cluster: Cluster, **fields: Any) -> list[pb.Chunk]:
    request = pb.GenerateRequest(model="tiny", sampling=pb.SamplingParams(**SAMPLING), **fields)
    return [each.chunk async for each in cluster.inference.Generate(request) if each.HasField("chunk")]


def joined(found: list[pb.Chunk]) -> tuple[str, list[int], list[float]]:
    return (
        "".join(chunk.text for chunk in found),
        [token for chunk in found for token in chunk.token_ids],
        [each.logprob for chunk in found for each in chunk.logprobs],
    )


async def test_each_token_of_a_batch_has_its_text_and_its_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = cluster.says(TEXT)
    for worker in (cluster.prefill, cluster.decode):
        worker.behaviour.token_delay_s = 0.005
    monkeypatch.setattr(WritePauses, "measure", lambda pauses, tokens: setattr(pauses, "pause_s", 0.025))
    batches = await chunks(cluster, prompt="Hi")
    assert joined(batches) == (TEXT, tokens, [cluster.decode.behaviour.logprob] * len(tokens))
    assert max(len(chunk.token_ids) for chunk in batches) > 1
    texts = []
    for chunk in batches:
        if len(chunk.token_ids) > 1:
            assert len(chunk.text_ends) == len(chunk.after_s) == len(chunk.token_ids) == len(chunk.logprobs)
            assert [*chunk.after_s] == sorted(chunk.after_s)
            assert chunk.after_s[-1] > 0
            starts = [0, *chunk.text_ends[:-1]]
            texts += [chunk.text[start:end] for start, end in zip(starts, chunk.text_ends, strict=True)]
        else:
            assert not chunk.text_ends
            texts.append(chunk.text)
    model = cluster.app.service.models.by_name[MODEL].tokenizer
    detokenizer = Detokenizer(model, model.encode("Hi", add_special_tokens=False))
    assert texts == [detokenizer.push(token) for token in tokens]
