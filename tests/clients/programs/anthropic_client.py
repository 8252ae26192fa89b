"""The `anthropic` package for Python: messages whole and streamed, tools, counting, errors."""

import anthropic
from program import BASE_URL, MODEL, QUESTION, WEATHER, check_weather, exercised

client = anthropic.Anthropic(base_url=BASE_URL, api_key="none", max_retries=0, _strict_response_validation=True)
messages = [{"role": "user", "content": QUESTION}]
ask = {"model": MODEL, "messages": messages, "system": "Be brief.", "max_tokens": 12, "extra_body": {"temperature": 0}}

whole = client.messages.create(**ask)
assert whole.stop_reason in ("max_tokens", "end_turn") and whole.usage.output_tokens <= 12
exercised("messages")

with client.messages.stream(**ask) as stream:
    text = "".join(stream.text_stream)
    assert stream.get_final_message().stop_reason == whole.stop_reason
assert text == whole.content[0].text
exercised("stream")

tools = [{"name": "weather", "input_schema": WEATHER}]
called = client.messages.create(**{**ask, "max_tokens": 200}, tools=tools, tool_choice={"type": "any"})
use = next(block for block in called.content if block.type == "tool_use")
check_weather(use.input)
assert called.stop_reason == "tool_use"
history = [
    *messages,
    {"role": "assistant", "content": [block.model_dump() for block in called.content]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "rain"}]},
]
assert client.messages.create(**{**ask, "messages": history}, tools=tools).role == "assistant"
exercised("tools")

assert client.messages.count_tokens(model=MODEL, messages=messages, system="Be brief.").input_tokens > 0
exercised("count_tokens")

try:
    client.messages.create(**{**ask, "extra_body": {"temperature": -1}})
except anthropic.BadRequestError as error:
    assert error.body["error"]["type"] == "invalid_request_error"
    exercised("errors")
