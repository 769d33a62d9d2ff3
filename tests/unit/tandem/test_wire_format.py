"""Messages that are joined from serialized parts."""

from __future__ import annotations

import pytest

from tandem.rpc.wire_format import message_field
from tandem.v1 import worker_pb2


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 70_000, 3 << 20])
def test_a_message_of_any_size_is_read_where_it_was_appended(size: int) -> None:
    inner = worker_pb2.RouterFrame(cancel=worker_pb2.Cancel(request_id="x" * size))
    raw = message_field(worker_pb2.RouterFrame.MORE_FIELD_NUMBER, inner.SerializeToString())
    assert worker_pb2.RouterFrame.FromString(raw) == worker_pb2.RouterFrame(more=[inner])


def test_fields_of_large_numbers_and_repeated_ones_are_kept_in_order() -> None:
    scores = [worker_pb2.PromptScores(request_id=each) for each in "ab"]
    number = worker_pb2.WorkerFrame.PROMPT_SCORES_FIELD_NUMBER
    raw = worker_pb2.WorkerFrame(computing=True).SerializeToString()
    raw += b"".join(message_field(number, each.SerializeToString()) for each in scores)
    assert worker_pb2.WorkerFrame.FromString(raw) == worker_pb2.WorkerFrame(computing=True, prompt_scores=scores)
    assert message_field(1 << 20, b"")[:-1] == b"\x82\x80\x80\x04"  # (2^20 << 3 | 2), seven bits at a time
