"""Instructor, in each of its modes that a server of OpenAI's API has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import instructor
import openai
import pytest

from tests.clients.asks import MODEL, City, user

if TYPE_CHECKING:
    from tests.clients.conftest import Server

MODES = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS")


@pytest.mark.parametrize("mode", MODES)
def test_structured_answer(server: Server, mode: str) -> None:
    client = instructor.from_openai(openai.OpenAI(**server.openai), mode=instructor.Mode[mode])
    answer = client.create(
        response_model=City, messages=user("Describe Oslo as JSON."), model=MODEL, temperature=0, max_retries=1
    )
    assert isinstance(answer, City)


def test_default_mode(server: Server) -> None:
    client = instructor.from_openai(openai.OpenAI(**server.openai))
    answer = client.chat.completions.create(
        response_model=City, messages=user("Describe Oslo."), model=MODEL, temperature=0
    )
    assert isinstance(answer, City)


def test_stream_of_partial_answers(server: Server) -> None:
    client = instructor.from_openai(openai.OpenAI(**server.openai), mode=instructor.Mode.TOOLS_STRICT)
    *_, last = client.create_partial(response_model=City, messages=user("Describe Oslo."), model=MODEL, temperature=0)
    assert City.model_validate(last.model_dump())
