"""LiteLLM as a client of chat completions and messages."""

import json

import litellm
from program import BASE_URL, MODEL, QUESTION, WEATHER, check_weather, exercised

messages = [{"role": "user", "content": QUESTION}]
openai = {"model": f"hosted_vllm/{MODEL}", "api_base": BASE_URL + "/v1", "api_key": "none"}
chat = {**openai, "messages": messages, "max_tokens": 12, "seed": 1}

whole = litellm.completion(**chat)
parts = litellm.completion(**chat, stream=True)
assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
exercised("chat")

tool = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
called = litellm.completion(**{**chat, "max_tokens": 200}, tools=[tool], tool_choice="required")
check_weather(json.loads(called.choices[0].message.tool_calls[0].function.arguments))
exercised("tools")

form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
answer = litellm.completion(**{**chat, "max_tokens": 200}, response_format=form)
check_weather(json.loads(answer.choices[0].message.content))
exercised("structured output")

message = litellm.completion(
    model=f"anthropic/{MODEL}", api_base=BASE_URL, api_key="none", messages=messages, max_tokens=12
)
assert message.choices[0].message.role == "assistant"
exercised("messages")

response = litellm.responses(
    model=f"openai/{MODEL}", api_base=BASE_URL + "/v1", api_key="none", input=QUESTION, max_output_tokens=12
)
assert response.output[0].type == "message"
exercised("responses")
