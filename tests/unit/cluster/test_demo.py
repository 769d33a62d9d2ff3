"""`tandem demo`: what it says of the repeated question is what was measured."""

from __future__ import annotations

from cluster.cli.commands.demo import DemoRequest, moved
from tandem.v1 import inference_pb2


def asked(moved_bytes: int, cached_tokens: int) -> DemoRequest:
    timeline = inference_pb2.Timeline(kv_bytes_moved=moved_bytes)
    usage = inference_pb2.Usage(prompt_tokens=36, cached_tokens=cached_tokens)
    return DemoRequest("?", finished=inference_pb2.Finished(timeline=timeline, usage=usage))


def test_the_bytes_of_both_times_are_told() -> None:
    assert moved(asked(1_658_880, 0), asked(230_400, 32)) == (
        "KV cache moved for the first question: 1,620 KiB the first time, 225 KiB the second time, when 32 of its 36 "
        "prompt tokens were cached"
    )
