"""Embeddings, and scores of texts against each other, which are made of them: as OpenAI's, Jina's and vLLM's APIs.

A text's embedding is the model's last hidden state at its last token, scaled to length 1. The score of two texts is the
cosine of the angle between theirs.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray
from pydantic import Field, WrapValidator

from router.edge.json_slices import on_demand, one_by_one
from router.edge.openai.answer_schema import AnswerStruct, Count
from router.edge.openai.request_schema import CacheSalt, checked_prompts, listed
from router.edge.strict_model import Items, Neutral, StrictModel, at_most, equals, never, refuse_unsupported
from router.requests.raw_request import RawRequest, RawSampling
from tandem.errors import InputError, InternalError

MAX_INPUTS = 2048  # of a call, as in OpenAI's API
MAX_NUMBERS = 1 << 22  # in an answer: inputs times dimensions, about 80 MB of JSON
SAMPLING = RawSampling(max_tokens=1, temperature=0.0, embeds=True)

Vectors = NDArray[np.float32]  # [texts, dimensions]
Texts = Annotated[Items[str], Field(min_length=1, max_length=MAX_INPUTS)]


class _EmbeddingFields(StrictModel):
    model: str
    user: str | None = None
    cache_salt: CacheSalt = None
    truncate_prompt_tokens: int | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Only the first numbers of each embedding, for models that were trained for it."
    )

    def check_size(self, hidden_size: int) -> None:
        """Raises InputError for more dimensions than the model has, and for an answer that is too large."""
        if self.dimensions is not None and self.dimensions > hidden_size:
            raise InputError(
                f"dimensions: expected at most {hidden_size}, as many as the model has, got {self.dimensions}",
                field="dimensions",
            )

    def _raw(self, text: str | tuple[int, ...]) -> RawRequest:
        return RawRequest(self.model, text, SAMPLING, self.user or "", self.cache_salt or "")


class EmbeddingRequest(_EmbeddingFields):
    input: Annotated[
        str | Items[int] | Items[str] | Items[Items[int]], WrapValidator(partial(checked_prompts, "input", MAX_INPUTS))
    ]
    encoding_format: Literal["float", "base64"] | None = Field(None, description="base64: of little-endian float32.")
    add_special_tokens: bool | None = None

    def parse(self) -> list[RawRequest]:
        """Raises InputError, UnsupportedField."""
        refuse_unsupported(self, _NEUTRAL | {"add_special_tokens": equals(True)})
        return [self._raw(each) for each in listed("input", self.input)]

    @property
    def fields(self) -> list[str]:
        """Of the texts, one by one."""
        return _numbered("input", self.input)

    def check_size(self, hidden_size: int) -> None:
        super().check_size(hidden_size)
        texts, each = len(self.fields), self.dimensions or hidden_size
        if texts * each > MAX_NUMBERS:
            raise InputError(
                f"input: expected at most {MAX_NUMBERS // each} texts at a time with embeddings of {each} numbers, got "
                f"{texts}: send them in several calls",
                field="input",
            )


class ScoreRequest(_EmbeddingFields):
    """Pairs of texts: each of one list with the same of the other, or one text with each."""

    text_1: str | Texts
    text_2: str | Texts

    def parse(self) -> list[RawRequest]:
        """Raises InputError, UnsupportedField."""
        refuse_unsupported(self, _NEUTRAL)
        first, second = self.texts
        if len(first) not in (1, len(second)):
            raise InputError(
                f"text_2: expected as many texts as text_1 ({len(first)}), or one text as text_1, got {len(second)}",
                field="text_2",
            )
        return [self._raw(each) for each in (*first, *second)]

    @property
    def fields(self) -> list[str]:
        return [*_numbered("text_1", self.text_1), *_numbered("text_2", self.text_2)]

    @property
    def texts(self) -> tuple[list[str], list[str]]:
        first, second = ([each] if isinstance(each, str) else each for each in (self.text_1, self.text_2))
        return first, second


class DocumentText(StrictModel):
    text: str


class RerankRequest(_EmbeddingFields):
    query: str
    documents: Annotated[Items[str | DocumentText], Field(min_length=1), at_most(MAX_INPUTS, "documents")]
    top_n: Annotated[int, Field(ge=1)] | None = Field(None, description="So many documents, the best; absent: all.")
    return_documents: bool | None = Field(None, description="Absent: true.")

    def parse(self) -> list[RawRequest]:
        """Raises InputError, UnsupportedField."""
        refuse_unsupported(self, _NEUTRAL)
        return [self._raw(each) for each in (self.query, *self.texts)]

    @property
    def fields(self) -> list[str]:
        return ["query", *_numbered("documents", self.documents)]

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


def _numbered(field: str, given: str | Sequence[object]) -> list[str]:
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [field]
    return [f"{field}.{number}" for number in range(len(given))]


_NEUTRAL: Neutral = {"truncate_prompt_tokens": never}


# ---- answers


class EmbeddingUsage(AnswerStruct):
    prompt_tokens: Count
    total_tokens: Count


class Embedding(AnswerStruct):
    index: Count
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingList(AnswerStruct):
    id: str
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class TextScore(AnswerStruct):
    index: Count
    score: float
    object: Literal["score"] = "score"


class ScoreList(AnswerStruct):
    id: str
    model: str
    data: list[TextScore]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class RankedText(AnswerStruct):
    text: str


class Ranked(AnswerStruct):
    index: Count
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class RankedList(AnswerStruct):
    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage


def vectors(embeddings: Sequence[bytes], dimensions: int | None = None) -> Vectors:
    """Scaled to length 1. Raises InternalError for one that is missing."""
    if not all(embeddings):
        raise InternalError("a worker left out an embedding")
    rows = np.stack([np.frombuffer(each, dtype="<f4") for each in embeddings])[:, :dimensions]
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    scaled: Vectors = (rows / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return scaled


@dataclass(frozen=True, slots=True)
class Embedded:
    """The texts of a request: `rows` as of `vectors`."""

    answer_id: str
    model: str
    rows: Vectors
    usage: EmbeddingUsage


def embedding_list(given: EmbeddingRequest, found: Embedded) -> EmbeddingList:
    def made(number: int) -> Embedding:
        row = found.rows[number]
        if given.encoding_format == "base64":
            return Embedding(number, base64.b64encode(row.astype("<f4").tobytes()).decode())
        return Embedding(number, row.tolist())

    return EmbeddingList(found.answer_id, found.model, one_by_one(made, range(len(found.rows))), found.usage)


def score_list(given: ScoreRequest, found: Embedded) -> ScoreList:
    count = len(given.texts[0])
    scores = (found.rows[:count] * found.rows[count:]).sum(axis=1)
    data = [TextScore(*each) for each in enumerate(scores.tolist())]
    return ScoreList(found.answer_id, found.model, data, found.usage)


def ranked_list(given: RerankRequest, found: Embedded) -> RankedList:
    """The best first."""
    scores, texts = found.rows[1:] @ found.rows[0], given.texts
    order = np.argsort(-scores, kind="stable")[: given.top_n]
    shows = given.return_documents is not False

    def made(number: int) -> Ranked:
        return Ranked(number, float(scores[number]), RankedText(texts[number]) if shows else UNSET)

    return RankedList(found.answer_id, found.model, on_demand(made, order.tolist()), found.usage)
