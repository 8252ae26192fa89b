"""The `openai` package for Python: chat and responses, whole, streamed and parsed, tools, errors."""

import json
from typing import Literal

import openai
from program import BASE_URL, MODEL, QUESTION, WEATHER, check_weather, exercised
from pydantic import BaseModel, Field


class Weather(BaseModel):
    city: Literal["Ulm", "Bonn"]
    days: int = Field(ge=1, le=9)


client = openai.OpenAI(base_url=BASE_URL + "/v1", api_key="none", max_retries=0, _strict_response_validation=True)
messages = [{"role": "user", "content": QUESTION}]
chat = {"model": MODEL, "messages": messages, "max_tokens": 200, "seed": 1}

assert MODEL in [model.id for model in client.models.list()]
exercised("models")

whole = client.chat.completions.create(**{**chat, "max_tokens": 12})
parts = list(
    client.chat.completions.create(**{**chat, "max_tokens": 12}, stream=True, stream_options={"include_usage": True})
)
text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
assert text == whole.choices[0].message.content
assert parts[-1].usage.total_tokens == whole.usage.total_tokens
exercised("chat")

parsed = client.chat.completions.parse(**chat, response_format=Weather).choices[0].message.parsed
check_weather(parsed.model_dump())
with client.chat.completions.stream(**chat, response_format=Weather) as stream:
    final = stream.get_final_completion().choices[0].message.parsed
assert final == parsed
exercised("chat parse")

tool = {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}}
forced = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
call = client.chat.completions.create(**chat, **forced).choices[0].message.tool_calls[0]
check_weather(json.loads(call.function.arguments))
with client.chat.completions.stream(**chat, **forced) as stream:
    streamed = stream.get_final_completion().choices[0].message.tool_calls[0].function
assert streamed.arguments == call.function.arguments
history = [
    *messages,
    {"role": "assistant", "tool_calls": [call.model_dump()]},
    {"role": "tool", "tool_call_id": call.id, "content": "rain"},
]
answer = client.chat.completions.create(**{**chat, "messages": history, "max_tokens": 8}, tools=[tool])
assert answer.choices[0].message.role == "assistant"
exercised("chat tools")

response = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=12)
assert response.output_text and response.status in ("completed", "incomplete")
assert client.responses.retrieve(response.id).output_text == response.output_text
follow_up = client.responses.create(
    model=MODEL, input="And tomorrow?", previous_response_id=response.id, max_output_tokens=12, stream=True
)
events = list(follow_up)
assert [event.sequence_number for event in events] == list(range(len(events)))
assert events[0].type == "response.created" and events[-1].type in ("response.completed", "response.incomplete")
assert [item.role for item in client.responses.input_items.list(response.id)] == ["user"]
client.responses.delete(response.id)
exercised("responses")

form = client.responses.parse(model=MODEL, input=QUESTION, text_format=Weather, max_output_tokens=200)
check_weather(form.output_parsed.model_dump())
exercised("responses parse")

function = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
called = client.responses.create(
    model=MODEL, input=QUESTION, tools=[function], tool_choice="required", max_output_tokens=200
)
call = next(item for item in called.output if item.type == "function_call")
check_weather(json.loads(call.arguments))
result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
last = client.responses.create(
    model=MODEL, input=[result], previous_response_id=called.id, tools=[function], max_output_tokens=8
)
assert last.status in ("completed", "incomplete")
exercised("responses tools")

try:
    client.chat.completions.create(**{**chat, "temperature": -1})
except openai.BadRequestError as error:
    assert error.param == "temperature"
    exercised("errors")
