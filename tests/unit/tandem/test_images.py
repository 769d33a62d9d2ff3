"""Images in prompts: whose KV may be shared, and which files are taken for images."""

from __future__ import annotations

import pytest

from tandem.errors import InputError
from tandem.images import PromptImage, check_spans, has_known_format
from tandem.kvcache.blockhash import HashKey, hash_blocks

KEY = HashKey("model")
BLOCK = 16
TOKENS = list(range(100))


def hashes(*images: PromptImage) -> list[bytes]:
    return hash_blocks(TOKENS, BLOCK, KEY, images=images)


def same(one: list[bytes], other: list[bytes]) -> list[bool]:
    return [mine == theirs for mine, theirs in zip(one, other, strict=True)]


def test_blocks_before_an_image_are_shared_and_those_from_it_on_are_its_own() -> None:
    plain, cat, dog = hashes(), hashes(PromptImage.of(40, 20, b"cat")), hashes(PromptImage.of(40, 20, b"dog"))
    assert same(plain, cat) == same(cat, dog) == [True, True, False, False, False, False]
    assert same(cat, hashes(PromptImage.of(40, 20, b"cat"))) == [True] * 6


@pytest.mark.parametrize("start", [0, 15, 16, 95])
def test_an_image_counts_in_the_block_where_it_begins(start: int) -> None:
    found = same(hashes(PromptImage.of(start, 4, b"cat")), hashes(PromptImage.of(start, 4, b"dog")))
    assert found == [number < start // BLOCK for number in range(6)]


def test_order_and_place_of_images_count() -> None:
    cat, dog = PromptImage.of(3, 2, b"cat"), PromptImage.of(8, 2, b"dog")
    turned = [PromptImage.of(3, 2, b"dog"), PromptImage.of(8, 2, b"cat")]
    moved = [cat, PromptImage.of(9, 2, b"dog")]
    one_alone = [cat]
    found = {hashes(*images)[0] for images in ([cat, dog], turned, moved, one_alone, [])}
    assert len(found) == 5


def test_a_chain_goes_on_where_it_was_left() -> None:
    images = [PromptImage.of(5, 4, b"cat"), PromptImage.of(40, 20, b"dog"), PromptImage.of(70, 3, b"owl")]
    whole = hash_blocks(TOKENS, BLOCK, KEY, images=images)
    for done in range(1, len(whole)):
        first = done * BLOCK
        later = [each for each in images if each.start >= first]
        rest = hash_blocks(TOKENS[first:], BLOCK, KEY, parent=whole[done - 1], images=later, first_token=first)
        assert rest == whole[done:]


@pytest.mark.parametrize("spans", [[(0, 0)], [(98, 3)], [(5, 3), (7, 2)], [(5, 2), (3, 2)], [(-1, 2)]])
def test_places_that_overlap_or_lie_outside_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(InputError, match="placeholders that follow each other within 100 tokens"):
        check_spans(spans, 100)


def test_places_that_follow_each_other_are_taken() -> None:
    check_spans([], 0)
    check_spans([(0, 3), (3, 1), (99, 1)], 100)


@pytest.mark.parametrize(
    ("data", "is_known"),
    [
        (b"\x89PNG\r\n\x1a\n...", True),
        (b"\xff\xd8\xff\xe0", True),
        (b"GIF89a", True),
        (b"RIFF\0\0\0\0WEBPVP8 ", True),
        (b"RIFF\0\0\0\0WAVE", False),
        (b"%!PS-Adobe", False),
        (b"<svg>", False),
        (b"", False),
    ],
)
def test_files_are_known_by_how_they_begin(data: bytes, is_known: bool) -> None:
    assert has_known_format(data) is is_known
