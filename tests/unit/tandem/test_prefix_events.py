import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.kvcache.prefix_events import (
    MAX_EVENT_HASHES,
    SNAPSHOT_HEADER_BYTES,
    PrefixEvent,
    PrefixEventError,
    PrefixSnapshot,
    SnapshotHeader,
    decode_event,
    decode_snapshot,
    decode_snapshot_header,
    encode_event,
    encode_snapshot,
    entry_id,
    join_hashes,
    snapshot_key,
    split_hashes,
    stream_key,
    wanted_key,
)

HASHES = st.lists(st.binary(min_size=16, max_size=16), max_size=8).map(join_hashes)
COUNTS = st.integers(min_value=0, max_value=2**64 - 1)


@given(COUNTS, COUNTS, st.booleans(), HASHES)
def test_event_survives_the_wire(epoch: int, seq: int, stored: bool, hashes: bytes) -> None:
    event = PrefixEvent(epoch, seq, stored, hashes)
    assert decode_event(entry_id(epoch, seq), encode_event(event)) == event


@given(COUNTS, COUNTS, HASHES)
def test_snapshot_survives_the_wire(epoch: int, seq: int, hashes: bytes) -> None:
    snapshot = PrefixSnapshot(epoch, seq, hashes)
    assert decode_snapshot(encode_snapshot(snapshot)) == snapshot


@given(st.binary(max_size=64))
def test_any_bytes_decode_or_are_refused(value: bytes) -> None:
    for decode in (decode_snapshot, lambda data: decode_event("1-1", data)):
        try:
            decode(value)
        except PrefixEventError:
            pass


@pytest.mark.parametrize("entry", ["", "1", "1-2-3", "a-b"])
def test_entry_id_of_another_form_is_refused(entry: str) -> None:
    with pytest.raises(PrefixEventError, match="entry id"):
        decode_event(entry, encode_event(PrefixEvent(1, 1, True, b"")))


def test_version_unknown_is_refused() -> None:
    with pytest.raises(PrefixEventError, match="version"):
        decode_event("1-1", b"\x63\x01")


def test_hashes_that_are_no_whole_hashes_or_too_many_are_refused() -> None:
    joined = join_hashes([bytes(16)] * 3)
    assert split_hashes(joined) == [bytes(16)] * 3
    head = encode_event(PrefixEvent(1, 1, True, b""))
    for bad in (joined[:-1], bytes(16 * (MAX_EVENT_HASHES + 1))):
        with pytest.raises(PrefixEventError, match=f"at most {MAX_EVENT_HASHES}"):
            decode_event("1-1", head + bad)


def test_header_of_a_snapshot_is_read_without_the_rest() -> None:
    value = encode_snapshot(PrefixSnapshot(3, 7, bytes(64)))
    assert decode_snapshot_header(value[:SNAPSHOT_HEADER_BYTES]) == SnapshotHeader(3, 7)
    with pytest.raises(PrefixEventError, match="at least"):
        decode_snapshot_header(value[: SNAPSHOT_HEADER_BYTES - 1])


def test_keys_are_apart_by_cluster_and_worker() -> None:
    keys = {key(c, w) for key in (stream_key, snapshot_key, wanted_key) for c in ("a", "b") for w in ("x", "y")}
    assert len(keys) == 12
    assert all(key.startswith("tandem:") for key in keys)
