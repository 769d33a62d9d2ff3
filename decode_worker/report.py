"""What the decode worker tells a router of a handoff that joined."""

from __future__ import annotations

from decode_worker.incoming import Incoming
from kvtransfer.stages import earliest, latest
from tandem.v1 import worker_pb2


def handoff_done(request_id: str, entry: Incoming, joined_at_s: float) -> worker_pb2.HandoffDone:
    anchor_s = entry.taken_up_at_s

    def offset(at_s: float | None) -> float | None:
        return None if at_s is None else at_s - anchor_s

    ranks = entry.stages
    return worker_pb2.HandoffDone(
        request_id=request_id,
        bytes=entry.received_bytes,
        blocks=entry.blocks,
        pieces=entry.pieces,
        verify_s=entry.verify_s,
        reserve_to_join_s=joined_at_s - anchor_s,
        anchor_at_s=anchor_s,
        received=worker_pb2.ReceiveStages(
            reserved_s=entry.reserved_at_s - anchor_s,
            linked_s=offset(latest(rank.linked_at_s for rank in ranks)),
            first_piece_s=offset(earliest(rank.first_piece_at_s for rank in ranks)),
            last_piece_s=offset(latest(rank.last_piece_at_s for rank in ranks)),
            verified_s=offset(latest(rank.verified_at_s for rank in ranks)),
            first_token_s=offset(entry.first_token_at_s),
            joined_s=joined_at_s - anchor_s,
        ),
    )
