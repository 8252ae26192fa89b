"""`prepare_chat` prepares a conversation in one call, independently of HTTP."""

import asyncio
import dataclasses

import msgspec
import pytest
from fake_client import FakeClient
from source_tree import modules

from octavo.frontend.conversation.context import ChatContext
from octavo.frontend.conversation.prepare import PreparedChat, prepare_chat
from octavo.frontend.conversation.request import ChatInput, ChatRequest, ChatTool
from octavo.frontend.conversation.settings import ChatSettings
from octavo.frontend.generation.params_resolver import ParamsResolver
from octavo.frontend.generation.request import BeamOptions, GenerationRequest, Truncation
from octavo.frontend.http.body import decode
from octavo.frontend.http.schemas.chat import ChatCompletionRequest
from octavo.frontend.reasoning.parser import ReasoningState
from octavo.frontend.reasoning.registry import reasoning_parser
from octavo.frontend.tools.plan import ToolChoice
from octavo.protocol.params import BeamSearchParams

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = ChatTool(name="look", description="looks", parameters={"properties": {"x": {"type": "integer"}}})


def prepare(request: ChatRequest, settings: ChatSettings | None = None) -> PreparedChat:
    client = FakeClient()
    context = ChatContext(client, ParamsResolver(client), settings or ChatSettings())
    return asyncio.run(prepare_chat(request, context))


def test_a_plain_conversation_becomes_a_prompt_and_parameters() -> None:
    prepared = prepare(ChatRequest(input=ChatInput(messages=MESSAGES), generation=GenerationRequest(max_tokens=5)))
    generation = prepared.generation
    assert generation.text is not None and "hi" in generation.text
    assert list(generation.token_ids) == FakeClient().tokenizer.encode(generation.text, add_special_tokens=False)
    assert generation.params.max_tokens == 5 and generation.params.structured_outputs is None
    assert prepared.rendering.parser is None and prepared.rendering.role == "assistant"
    with pytest.raises(dataclasses.FrozenInstanceError):
        prepared.generation = generation  # type: ignore[misc]


def test_a_forced_call_behind_undecided_reasoning_opens_the_reasoning() -> None:
    settings = ChatSettings(reasoning=reasoning_parser("qwen3"))
    chat_input = ChatInput(messages=MESSAGES, tools=[TOOL])
    free = prepare(
        ChatRequest(input=chat_input, generation=GenerationRequest(), tool_choice=ToolChoice("none")), settings
    )
    forced = prepare(
        ChatRequest(input=chat_input, generation=GenerationRequest(), tool_choice=ToolChoice(named="look")), settings
    )
    assert forced.generation.text == f"{free.generation.text}<think>\n"
    form, parser = forced.generation.params.structured_outputs, forced.rendering.parser
    assert form is not None and form.start_after == "</think>"
    assert parser is not None and parser.format.initial_state is ReasoningState.INSIDE
    assert parser.is_named and not parser.ends_in_calls("stop", 1)
    answer = parser.parse('why not</think>{"x": 1}')
    assert (answer.reasoning, [(call.name, call.arguments) for call in answer.calls]) == (
        "why not",
        [("look", '{"x": 1}')],
    )


def test_search_or_sampling_is_decided_once() -> None:
    request = GenerationRequest(
        overrides={"n": 3, "temperature": 1.0}, max_tokens=4, beam=BeamOptions(length_penalty=2.0)
    )
    generation = prepare(ChatRequest(input=ChatInput(messages=MESSAGES), generation=request)).generation
    assert generation.beam_params == BeamSearchParams(beam_width=3, max_tokens=4, length_penalty=2.0)
    plain = dataclasses.replace(request, beam=None)
    assert prepare(ChatRequest(input=ChatInput(messages=MESSAGES), generation=plain)).generation.beam_params is None


@pytest.mark.parametrize(("keeps_start", "expected"), [(True, slice(None, 3)), (False, slice(-3, None))])
def test_a_prompt_is_cut_before_its_parameters_are_resolved(keeps_start: bool, expected: slice) -> None:
    chat_input = ChatInput(messages=MESSAGES)
    whole = prepare(ChatRequest(input=chat_input, generation=GenerationRequest())).generation
    cut = GenerationRequest(truncation=Truncation(3, keeps_start))
    assert prepare(ChatRequest(input=chat_input, generation=cut)).generation.token_ids == whole.token_ids[expected]


def test_a_body_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    body = msgspec.json.encode({"messages": MESSAGES, "stream_options": {"include_usage": True}, "stream": True})
    decode(body, ChatCompletionRequest)
    monkeypatch.setattr(msgspec.json, "decode", None)  # parses whatever the schema's own decoder has rejected
    assert decode(body, ChatCompletionRequest).messages == MESSAGES


def test_the_pipeline_knows_no_http() -> None:
    folders = ("conversation", "generation", "tools", "reasoning", "text")
    names = tuple(f"octavo.frontend.{folder}" for folder in folders)
    pipeline = [module for module in modules() if module.name.startswith(names)]
    assert len(pipeline) > 40
    for module in pipeline:
        assert not any(name.startswith("octavo.frontend.http") for name in module.imports), module.name
