"""Images as vLLM's models read them: its processors make placeholder tokens and pixels of an image's file.

Each image is processed on its own when a request brings it, as when its prompt is expanded: both give the same.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.cache import MultiModalProcessorOnlyCache
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.multimodal.media.image import ImageMediaIO

from tandem.errors import InputError
from tandem.images import FORMATS, ExpandedPrompt, PromptImage, has_known_format
from tandem.vllm_engine.settings import first_line

KEPT = 256  # of the latest images; their pixels are in vLLM's cache of processed images too, which bounds its bytes
KEPT_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class _Processed:
    """`is_embed`: which of its placeholder tokens the image's embeddings replace; None: all."""

    item: MultiModalKwargsItem
    tokens: int
    is_embed: Tensor | None
    bytes: int


class VllmImages:
    """Used from several threads.

    Args: `most_tokens`: embeddings of one image, which the encoder's cache must hold at once."""

    def __init__(self, model_config: Any, most_tokens: int) -> None:
        self._processor = MULTIMODAL_REGISTRY.create_processor(model_config)
        self._cache = MultiModalProcessorOnlyCache(model_config)
        text = self._processor.dummy_inputs.get_dummy_text({"image": 1})
        self._marker: list[int] = self._processor.info.get_tokenizer().encode(text, add_special_tokens=False)
        self._most_tokens = most_tokens
        self._processing = threading.Lock()
        self._changing = threading.Lock()
        self._kept: OrderedDict[bytes, _Processed] = OrderedDict()
        self._kept_bytes = 0

    def expand(self, prompt: Sequence[int], images: Sequence[bytes]) -> ExpandedPrompt:
        """Raises InputError."""
        whole = [PromptImage.of(0, 0, data) for data in images]
        tokens, processed = self._process([*prompt], whole)
        for image, (_, made) in zip(whole, processed, strict=True):
            self._keep(image.digest, made)
        return ExpandedPrompt(tuple(tokens), tuple((place.offset, place.length) for place, _ in processed))

    def read(self, images: Sequence[PromptImage]) -> list[_Processed]:
        """Raises InputError."""
        return [self._found(each) for each in images]

    def features(self, images: Sequence[PromptImage], adapter: str) -> list[MultiModalFeatureSpec]:
        """What vLLM's requests have. Raises InputError."""
        features = []
        for image, made in zip(images, self.read(images), strict=True):
            if made.tokens != image.tokens:
                raise InputError(
                    f"images: expected {made.tokens} placeholder tokens for an image, got {image.tokens}: all workers "
                    "of a model need the same files and settings",
                    field="images",
                )
            name = image.digest.hex()
            features.append(
                MultiModalFeatureSpec(
                    data=made.item,
                    modality="image",
                    identifier=f"{adapter}:{name}" if adapter else name,
                    mm_position=PlaceholderRange(image.start, image.tokens, made.is_embed),
                    mm_hash=name,
                )
            )
        return features

    def _found(self, image: PromptImage) -> _Processed:
        with self._changing:
            if (kept := self._kept.get(image.digest)) is not None:
                self._kept.move_to_end(image.digest)
                return kept
        _, [(_, made)] = self._process([*self._marker], [image])
        self._keep(image.digest, made)
        return made

    def _process(
        self, prompt: list[int], images: Sequence[PromptImage]
    ) -> tuple[list[int], list[tuple[PlaceholderRange, _Processed]]]:
        """The expanded prompt, and each image with its place in it. Raises InputError."""
        files = [_opened(each.data) for each in images]
        names = [each.digest.hex() for each in images]
        try:
            with self._processing:
                items = self._processor.info.parse_mm_data({"image": files})
                made = self._processor(prompt, items, {"image": names}, cache=self._cache)
        except Exception as error:  # of a model's own code: nothing says which ones it may raise
            raise InputError(
                f"messages: expected images that the model's chat template has a place for, got: {first_line(error)}",
                field="messages",
            ) from error
        placed = []
        for place, item in zip(made["mm_placeholders"]["image"], made["mm_kwargs"]["image"], strict=True):
            if (embeds := place.get_num_embeds()) > self._most_tokens:
                raise InputError(
                    f"messages: expected images of at most {self._most_tokens} tokens, got one of {embeds}: send a "
                    "smaller one, or raise engine.max_step_tokens",
                    field="messages",
                )
            size = sum(each.nbytes for each in _tensors([field.data for field in item.values()]))
            placed.append((place, _Processed(item, place.length, place.is_embed, size)))
        return [*made["prompt_token_ids"]], placed

    def _keep(self, digest: bytes, made: _Processed) -> None:
        with self._changing:
            if (earlier := self._kept.pop(digest, None)) is not None:
                self._kept_bytes -= earlier.bytes
            self._kept[digest] = made
            self._kept_bytes += made.bytes
            while len(self._kept) > KEPT or (self._kept_bytes > KEPT_BYTES and len(self._kept) > 1):
                _, oldest = self._kept.popitem(last=False)
                self._kept_bytes -= oldest.bytes


def images_of(config: Any, most_tokens: int) -> VllmImages | None:
    """None: the model takes none. `config`: vLLM's."""
    model = config.model_config
    if not model.is_multimodal_model:
        return None
    limits = MULTIMODAL_REGISTRY.get_processing_info(model).allowed_mm_limits
    return VllmImages(model, most_tokens) if limits.get("image") else None


def _opened(data: bytes) -> Any:
    if not has_known_format(data):
        raise InputError(f"messages: expected images in {FORMATS}, got another file", field="messages")
    try:
        return ImageMediaIO().load_bytes(data)
    except Exception as error:
        raise InputError(f"messages: expected images that can be read, got: {error}", field="messages") from error


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for each in values:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, list | tuple):
            found += _tensors(each)
    return found
