"""What vLLM's processors make of image files, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tandem.errors import ContextExceeded, InputError, UnavailableError
from tandem.images import PromptImage
from tandem.kvcache.blockhash import HashKey
from tests.vllm.vllms_models import CONTEXT, MARKER, blank, picture, write_image_model

if TYPE_CHECKING:
    from tandem.vllm_engine.images import VllmImages

pytestmark = pytest.mark.filterwarnings("default")  # those of vLLM's own modules
MOST_TOKENS = 64
IMAGE_TOKENS = 34  # of each image
SALT = b"of a tenant"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from vllm import EngineArgs

    folder = write_image_model(tmp_path_factory.mktemp("read") / "images")
    args = EngineArgs(
        model=str(folder), dtype="float32", max_model_len=CONTEXT, block_size=32, limit_mm_per_prompt={"image": 64}
    )
    return args.create_engine_config()


@pytest.fixture
def reader(config: Any) -> VllmImages:
    from tandem.vllm_engine.images import images_of

    made = images_of(config, MOST_TOKENS)
    assert made is not None
    return made


@pytest.fixture
def marker(reader: VllmImages) -> int:
    return int(reader._processor.info.get_tokenizer().convert_tokens_to_ids(MARKER))


def expand(reader: VllmImages, marker: int, *files: bytes, salt: bytes = SALT) -> list[PromptImage]:
    """The images of a prompt with a token before each."""
    expanded = reader.expand([7, marker] * len(files), files, salt)
    assert len(expanded.tokens) == (1 + IMAGE_TOKENS) * len(files)
    return [PromptImage.of(*span, data) for span, data in zip(expanded.spans, files, strict=True)]


def cache_hits(reader: VllmImages) -> int:
    return int(reader._cache.make_stats().hits)


def test_an_image_is_found_again_by_its_own_tenant_only(reader: VllmImages, marker: int) -> None:
    file = picture(1)
    images = expand(reader, marker, file)
    kept = reader.read(images, SALT)
    assert reader.read(images, SALT) is kept
    assert reader.read(images, b"of another") is not kept
    assert cache_hits(reader) == 0
    expand(reader, marker, file)
    assert cache_hits(reader) == 1
    expand(reader, marker, file, salt=b"of a third")
    assert cache_hits(reader) == 1


def test_the_encoder_computes_an_image_for_each_tenant_and_adapter(reader: VllmImages, marker: int) -> None:
    images = expand(reader, marker, picture(1), picture(2))
    keys = [HashKey("m", adapter, salt) for salt in (SALT, b"of another", b"") for adapter in ("", "sql")]
    names = [[each.identifier for each in reader.features(images, key)] for key in [*keys, keys[0]]]
    assert names[0] == names[-1]
    assert len({name for of_key in names for name in of_key}) == 2 * len(keys)


@pytest.fixture
def most_pixels(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets VLLM_MAX_IMAGE_PIXELS, which vLLM reads once."""
    from vllm import envs

    return lambda pixels: monkeypatch.setitem(vars(envs), "VLLM_MAX_IMAGE_PIXELS", pixels)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_broken_file_is_refused_or_read(
    reader: VllmImages, marker: int, most_pixels: Callable[[int], None], kind: str
) -> None:
    most_pixels(1_000_000)
    file, dice = picture(1, kind=kind), np.random.default_rng(0)
    broken = [file[:size] for size in range(0, len(file), len(file) // 40 + 1)]
    for _ in range(200):
        flipped = bytearray(file)
        flipped[min(int(dice.exponential(40)), len(file) - 1)] ^= 1 << int(dice.integers(8))
        broken.append(bytes(flipped))
    refused = 0
    for each in broken:
        try:
            reader.expand([marker], [each], SALT)
        except InputError:
            refused += 1
    assert refused > 30


def test_a_limit_of_0_pixels_is_none(reader: VllmImages, marker: int, most_pixels: Callable[[int], None]) -> None:
    """As in vLLM."""
    most_pixels(0)
    expand(reader, marker, blank(300, 200), blank(300, 201))
    most_pixels(2 * 300 * 200)
    with pytest.raises(InputError, match="expected at most 120000 pixels in all images of a request, got 120300"):
        expand(reader, marker, blank(300, 200), blank(300, 201))


def test_a_prompt_expanded_with_other_settings_may_try_another_worker(reader: VllmImages, marker: int) -> None:
    (image,) = expand(reader, marker, picture(1))
    other = PromptImage.of(image.start, IMAGE_TOKENS - 1, image.data)
    with pytest.raises(UnavailableError, match="expected 34 placeholder tokens for an image, got 33 from another"):
        reader.features([other], HashKey("m", "", SALT))


def test_images_that_fill_the_context_are_refused_before_all_are_processed(reader: VllmImages, marker: int) -> None:
    files = [picture(number) for number in range(40)]
    with pytest.raises(ContextExceeded, match="context length is 512 tokens, and 16 of 40 images alone have 544"):
        reader.expand([marker] * len(files), files, SALT)
    assert reader._cache.make_stats().total == 16
    assert len(expand(reader, marker, *files[:15])) == 15
