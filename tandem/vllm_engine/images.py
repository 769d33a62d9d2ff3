"""Images as vLLM's models read them: its processors make placeholder tokens and pixels of an image's file.

The images of a request are processed together, when its prompt is expanded and when a request brings them: what one of
them becomes may depend on how many there are.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from io import BytesIO
from typing import Any
from weakref import WeakValueDictionary

from PIL import Image
from torch import Tensor, nn
from vllm import envs
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.cache import MultiModalProcessorOnlyCache
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.processing import BaseMultiModalProcessor

from tandem.errors import ContextExceeded, InputError, TandemError, UnavailableError
from tandem.images import DIGEST_BYTES, FORMATS, ExpandedPrompt, PromptImage, has_known_format
from tandem.kvcache.blockhash import HashKey
from tandem.vllm_engine.settings import first_line

KEPT_BYTES = 256 << 20  # of the pixels of the latest requests, most of which are in vLLM's own cache too
# What processors raise for images that do not fit. A RuntimeError may be torch's.
_CLIENTS = (ArithmeticError, AssertionError, LookupError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class _Image:
    """`is_embed`: which of its placeholder tokens the image's embeddings replace; None: all."""

    item: MultiModalKwargsItem
    tokens: int
    is_embed: Tensor | None


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class ReadImages:
    """Of one request. Found again as long as it is kept somewhere."""

    images: tuple[_Image, ...]
    bytes: int


class VllmImages:
    """Used from several threads.

    Args: `most_tokens`: embeddings of one image, which the encoder's cache must hold at once."""

    def __init__(self, model_config: Any, most_tokens: int) -> None:
        processor = MULTIMODAL_REGISTRY.create_processor(model_config)
        processor._apply_prompt_updates_via_text = _refuse_text
        settings = model_config.get_multimodal_config()
        self._processor = processor
        self._media = ImageMediaIO(**settings.media_io_kwargs.get("image", {}))
        self._cache = MultiModalProcessorOnlyCache(model_config)
        self._most_tokens = most_tokens
        self._max_model_tokens: int = model_config.max_model_len
        # Then vLLM itself processes an image without those that it has the pixels of.
        apart = BaseMultiModalProcessor._cached_apply_hf_processor
        self._reads_each_apart = type(processor)._cached_apply_hf_processor is apart
        self._processing = threading.Lock()
        self._changing = threading.Lock()
        self._kept: OrderedDict[tuple[str, ...], ReadImages] = OrderedDict()  # by names
        self._kept_bytes = 0
        self._known: WeakValueDictionary[tuple[str, ...], ReadImages] = WeakValueDictionary()

    def expand(self, prompt: Sequence[int], images: Sequence[bytes], cache_salt: bytes) -> ExpandedPrompt:
        """Raises InputError, ContextExceeded."""
        names = _names([PromptImage.of(0, 0, data) for data in images], cache_salt)
        files = self._opened(images)
        self._check_context(files, names)
        tokens, spans, read = self._process([*prompt], files, names)
        self._keep(names, read)
        return ExpandedPrompt(tuple(tokens), spans)

    def read(self, images: Sequence[PromptImage], cache_salt: bytes) -> ReadImages:
        """Raises InputError."""
        names = _names(images, cache_salt)
        with self._changing:
            if (known := self._known.get(names)) is not None:
                return known
        files = self._opened([each.data for each in images])
        _, _, read = self._process(self._markers(len(files)), files, names)
        self._keep(names, read)
        return read

    def features(self, images: Sequence[PromptImage], key: HashKey) -> list[MultiModalFeatureSpec]:
        """What vLLM's requests have. Raises InputError, and UnavailableError if a worker with other settings expanded
        the prompt."""
        if not images:
            return []
        features, names = [], _names(images, key.cache_salt)
        for image, named, made in zip(images, names, self.read(images, key.cache_salt).images, strict=True):
            if made.tokens != image.tokens:
                raise UnavailableError(
                    f"images: expected {made.tokens} placeholder tokens for an image, got {image.tokens} from another "
                    "worker: retry later; all workers of a model need the same files and settings",
                    field="images",
                )
            name = f"{named}-{made.tokens}"
            features.append(
                MultiModalFeatureSpec(
                    data=made.item,
                    modality="image",
                    identifier=f"{key.adapter}:{name}" if key.adapter else name,
                    mm_position=PlaceholderRange(image.start, image.tokens, made.is_embed),
                    mm_hash=name,
                )
            )
        return features

    def _process(
        self, prompt: list[int], files: Sequence[Any], names: Sequence[str]
    ) -> tuple[list[int], tuple[tuple[int, int], ...], ReadImages]:
        """The expanded prompt, the place of each image, and what came of them. Raises InputError."""
        made = self._made(prompt, files, names)
        found, spans, size = [], [], 0
        for place, item in zip(made["mm_placeholders"]["image"], made["mm_kwargs"]["image"], strict=True):
            if (embeds := place.get_num_embeds()) > self._most_tokens:
                raise InputError(
                    f"messages: expected images of at most {self._most_tokens} tokens, got one of {embeds}: send a "
                    "smaller one, or raise engine.max_step_tokens",
                    field="messages",
                )
            size += _own_memory(item)
            spans.append((place.offset, place.length))
            found.append(_Image(item, place.length, place.is_embed))
        return [*made["prompt_token_ids"]], tuple(spans), ReadImages(tuple(found), size)

    def _made(self, prompt: list[int], files: Sequence[Any], names: Sequence[str]) -> Any:
        """By vLLM. Raises InputError."""
        try:
            with self._processing:
                items = self._processor.info.parse_mm_data({"image": [*files]})
                return self._processor(prompt, items, {"image": [*names]}, cache=self._cache)
        except _CLIENTS as error:
            raise InputError(
                f"messages: expected images that the model's chat template has a place for, got: {first_line(error)}",
                field="messages",
            ) from error

    def _markers(self, images: int) -> list[int]:
        text = self._processor.dummy_inputs.get_dummy_text({"image": images})
        return [*self._processor.info.get_tokenizer().encode(text, add_special_tokens=False)]

    def _check_context(self, files: Sequence[Any], names: Sequence[str]) -> None:
        """Raises ContextExceeded for images that fill the context, before all of them are processed: of a small file,
        processors may make many pixels. vLLM's cache keeps what is made here."""
        tokens, marker = 0, self._markers(1)
        for number, file in enumerate(files[:-1] if self._reads_each_apart else ()):
            made = self._made(marker, [file], [names[number]])
            tokens += made["mm_placeholders"]["image"][0].length
            if tokens >= self._max_model_tokens:
                raise ContextExceeded(
                    f"messages: This model's maximum context length is {self._max_model_tokens} tokens, and "
                    f"{number + 1} of {len(files)} images alone have {tokens}; send fewer, or smaller ones",
                    field="messages",
                )

    def _opened(self, files: Sequence[bytes]) -> list[Any]:
        """Raises InputError, before anything large is made of a small file."""
        pixels = 0
        try:
            for data in files:
                if not has_known_format(data):
                    raise InputError(f"messages: expected images in {FORMATS}, got another file", field="messages")
                with Image.open(BytesIO(data)) as opened:
                    pixels += opened.width * opened.height
            if 0 < envs.VLLM_MAX_IMAGE_PIXELS < pixels:  # 0: no limit, as in vLLM
                raise InputError(
                    f"messages: expected at most {envs.VLLM_MAX_IMAGE_PIXELS} pixels in all images of a request, got "
                    f"{pixels}: send smaller ones",
                    field="messages",
                )
            return [self._media.load_bytes(data) for data in files]
        except (TandemError, MemoryError):
            raise
        except Exception as error:  # a broken file makes decoders raise anything
            raise InputError(
                f"messages: expected images that can be read, got: {first_line(error)}", field="messages"
            ) from error

    def _keep(self, names: tuple[str, ...], read: ReadImages) -> None:
        with self._changing:
            if (earlier := self._kept.pop(names, None)) is not None:
                self._kept_bytes -= earlier.bytes
            self._kept[names] = self._known[names] = read
            self._kept_bytes += read.bytes
            while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
                _, oldest = self._kept.popitem(last=False)
                self._kept_bytes -= oldest.bytes


def images_of(config: Any, most_tokens: int) -> VllmImages | None:
    """None: the model takes none. `config`: vLLM's."""
    model = config.model_config
    if not model.is_multimodal_model:
        return None
    limits = MULTIMODAL_REGISTRY.get_processing_info(model).allowed_mm_limits
    return VllmImages(model, most_tokens) if limits.get("image") else None


def report_encoder(model: Any, after_layer: Callable[[], None]) -> None:
    """Calls `after_layer` after each layer of what reads images. It runs before the layers with KV, and may take longer
    than all of them."""
    text = {*model.get_language_model().modules()}
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and module not in text:
            for layer in module:
                layer.register_forward_hook(lambda *_: after_layer())


def _names(images: Sequence[PromptImage], cache_salt: bytes) -> tuple[str, ...]:
    """In every cache. Each salt has its own: else the time to read a file would show that another tenant sent it."""
    return tuple(blake2b(each.digest + cache_salt, digest_size=DIGEST_BYTES).hexdigest() for each in images)


def _refuse_text(*_: object) -> Any:
    """Instead of vLLM's search for markers in the prompt's text, which would make special tokens of what clients wrote,
    and take a marker from there."""
    raise ValueError("no marker of an image")


def _own_memory(item: MultiModalKwargsItem) -> int:
    """Bytes of an item's tensors. Those that are a part of the request's get memory of their own: they may be kept
    longer than the others."""
    for field in item.values():
        if isinstance(field.data, Tensor) and field.data.untyped_storage().nbytes() > field.data.nbytes:
            field.data = field.data.clone()
    return sum(each.nbytes for each in _tensors([field.data for field in item.values()]))


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tensors(each)
