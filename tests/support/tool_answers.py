"""A chat client whose template supports tools, and its responses, complete and streamed."""

import json
from typing import Any

from fake_client import MODEL, FakeClient
from http_client import events, post

from octavo.frontend.text.chat_template import ChatTemplate
from octavo.protocol.config import ServerConfig

PATH = "/v1/chat/completions"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": WEATHER}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments.city }}){% endfor %}"
    "{% if m.reasoning_content %}~{{ m.reasoning_content }}~{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and enable_thinking %}<think>\n"
    "{% elif enable_thinking is defined %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
HERMES = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="hermes")
QWEN = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3")


class ToolClient(FakeClient):
    """A model with a template that knows tools and thinking."""

    def chat_template(self, content_format: Any = "auto") -> ChatTemplate:
        return ChatTemplate(TEMPLATE, {}, content_format=content_format)


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def add_up(response: Any) -> list[dict[str, Any]]:
    """Assemble the choices of a stream, as the API defines it."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in events(response):
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"message": {"content": None}, "finish_reason": None})
            assert choice["finish_reason"] is None, "something came after the end"
            message, delta = choice["message"], part["delta"]
            for name in ("content", "reasoning"):
                if delta.get(name):
                    message[name] = (message.get(name) or "") + delta[name]
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if "id" in call:
                    assert call["index"] == len(calls) and call["type"] == "function"
                    calls.append({"id": call["id"], "function": dict(call["function"]), "type": "function"})
                else:
                    assert call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"}
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            choice["finish_reason"] = part["finish_reason"]
    return [choices[index] for index in sorted(choices)]


def both_ways(reply: str, body: dict[str, Any], config: ServerConfig) -> dict[str, Any]:
    """Return the choice of the complete response, after checking that the stream adds up to it."""
    (whole,) = post(ToolClient(reply), PATH, body, config=config).json()["choices"]
    (streamed,) = add_up(post(ToolClient(reply), PATH, body | {"stream": True}, config=config))
    for message in (whole["message"], streamed["message"]):
        for call in message.get("tool_calls", ()):
            assert call.pop("id").startswith("call_")
    shown = {name: value for name, value in whole["message"].items() if name not in ("role", "refusal")}
    if shown.get("reasoning", "") is None:
        del shown["reasoning"]
    assert streamed["message"] == (shown if shown["content"] else shown | {"content": None})
    assert streamed["finish_reason"] == whole["finish_reason"]
    return whole


def weather(city: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": city})}}
