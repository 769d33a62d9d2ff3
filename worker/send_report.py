"""What the prefill worker tells a router of a handoff whose every block was acknowledged."""

from __future__ import annotations

from kvtransfer.stages import earliest, latest
from tandem.v1 import worker_pb2
from worker.outgoing import Outgoing


def handoff_done(request_id: str, entry: Outgoing) -> worker_pb2.HandoffDone:
    anchor_s = entry.taken_up_at_s

    def offset(at_s: float | None) -> float | None:
        return None if at_s is None else at_s - anchor_s

    done = worker_pb2.HandoffDone(
        request_id=request_id, bytes=entry.sent_bytes, pieces=entry.pieces, anchor_at_s=anchor_s
    )
    if ranks := entry.stages:
        sent = worker_pb2.SendStages(
            opened_s=offset(earliest(rank.opened_at_s for rank in ranks)),
            computing_s=offset(earliest(rank.computing_at_s for rank in ranks)),
            linked_s=offset(latest(rank.linked_at_s for rank in ranks)),
            first_piece_s=offset(earliest(rank.first_piece_at_s for rank in ranks)),
            last_layer_s=offset(latest(rank.last_layer_at_s for rank in ranks)),
            last_ack_s=offset(latest(rank.last_ack_at_s for rank in ranks)),
            first_token_s=offset(entry.first_token_at_s),
            hidden_bytes=sum(rank.hidden_bytes for rank in ranks),
        )
        done.sent.CopyFrom(sent)
    return done
