"""Tools and reasoning over gRPC: calls as deltas, what goes back to the model, what is refused."""

from __future__ import annotations

import json
from typing import Any, cast

import grpc
import pytest

from tandem.errors import InputError
from tandem.rpc.grpc_errors import error_from_rpc
from tandem.v1 import inference_pb2 as pb
from tests.unit.router.conftest import Cluster
from tests.unit.router.test_tools import CALL, MODEL, OTHER, PB, chat, max_model_tokens, prompt, says, work

__all__ = ["max_model_tokens"]  # a fixture


class TestGrpc:
    async def ask(self, cluster: Cluster, **chat: Any) -> tuple[list[pb.Chunk], pb.Finished]:
        fields: dict[str, Any] = {"messages": [pb.ChatMessage(role="user", content="Weather?")], "tools": PB}
        given = pb.ChatMessages(**fields | chat)
        responses = [each async for each in cluster.inference.Generate(pb.GenerateRequest(model=MODEL, chat=given))]
        return [each.chunk for each in responses if each.HasField("chunk")], responses[-1].finished

    async def test_calls_come_as_deltas(self, cluster: Cluster) -> None:
        says(cluster, "Let me see. " + CALL + OTHER)
        chunks, finished = await self.ask(cluster)
        assert finished.reason == pb.FINISH_REASON_TOOL_CALLS
        assert "".join(chunk.text for chunk in chunks) == "Let me see. "
        deltas = [delta for chunk in chunks for delta in chunk.tool_calls]
        texts = ["".join(delta.arguments for delta in deltas if delta.index == index) for index in range(2)]
        assert [json.loads(each) for each in texts] == [{"city": "Paris"}, {}]
        assert [(delta.name, len(delta.id)) for delta in deltas if delta.name] == [("get_weather", 9), ("get_time", 9)]
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        assert tokens[:-1] == cluster.tokenizer.encode("Let me see. " + CALL + OTHER, add_special_tokens=False)

    async def test_calls_and_results_go_back_to_the_model(self, cluster: Cluster) -> None:
        says(cluster, "Rain.")
        call = pb.ToolCall(id="c1", name="get_weather", arguments='{"city": "Paris"}')
        history = [
            pb.ChatMessage(role="user", content="Weather?"),
            pb.ChatMessage(role="assistant", tool_calls=[call]),
            pb.ChatMessage(role="tool", tool_call_id="c1", content="It rains."),
        ]
        await self.ask(cluster, messages=history)
        assert "<tool_response>\nIt rains.\n</tool_response>" in prompt(cluster)

    @pytest.mark.parametrize(
        ("chat", "field"),
        [
            ({"tools": [pb.Tool(name="f g")]}, "tools.0.name"),
            ({"tools": [pb.Tool(name="f", parameters="{")]}, "tools.0.parameters"),
            ({"tool_choice": pb.ToolChoice(names=["f"])}, "tool_choice"),
            ({"tools": [], "tool_choice": pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED)}, "tool_choice"),
            ({"messages": [pb.ChatMessage(role="tool", tool_call_id="c1")]}, "chat.messages.0.tool_call_id"),
            (
                {"messages": [pb.ChatMessage(role="user", tool_calls=[pb.ToolCall(id="c")])]},
                "chat.messages.0.tool_calls",
            ),
            ({"template_settings": "["}, "template_settings"),
            ({"tool_choice": pb.ToolChoice(mode=cast(Any, 7))}, "tool_choice.mode"),
            ({"template_settings": "[]"}, "template_settings"),
            ({"template_settings": '{"tone": "kind"}'}, "template_settings.tone"),
            ({"template_settings": '{"messages": []}'}, "template_settings.messages"),
            ({"reasoning_effort": "low"}, "reasoning_effort"),
            ({"reasoning_effort": "banana"}, "reasoning_effort"),
            ({"messages": [pb.ChatMessage(role="nonsense", content="x")]}, "chat.messages.0.role"),
            ({"messages": [pb.ChatMessage(role="user", reasoning="x")]}, "chat.messages.0.reasoning"),
            ({"messages": [pb.ChatMessage(role="user", tool_call_id="x")]}, "chat.messages.0.tool_call_id"),
        ],
    )
    async def test_what_is_wrong_is_refused_by_its_field(
        self, cluster: Cluster, chat: dict[str, Any], field: str
    ) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await self.ask(cluster, **chat)
        error = error_from_rpc(refused.value)
        assert isinstance(error, InputError)
        assert error.field == field
        assert error.message.startswith(f"{field}: ")

    async def test_a_named_tool_is_called_once(self, cluster: Cluster) -> None:
        async def grammar(names: list[str], **fields: bool) -> str:
            says(cluster, "x")
            await self.ask(cluster, tool_choice=pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED, names=names), **fields)
            return str(work(cluster).sampling.grammar)

        named = {"type": "function", "function": {"name": "get_time"}}
        says(cluster, "x")
        await chat(cluster, tool_choice=named)
        once = str(work(cluster).sampling.grammar)
        assert await grammar(["get_time"]) == await grammar(["get_time"], parallel_tool_calls=False) == once
        several = await grammar(["get_time"], parallel_tool_calls=True)
        assert several != once
        both = await grammar(["get_time", "get_weather"])
        assert both == await grammar(["get_time", "get_weather"], parallel_tool_calls=True)
