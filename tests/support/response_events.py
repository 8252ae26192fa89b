"""Requests to `/v1/responses`, and the events of its streams."""

import json
from typing import Any

import pydantic
from fake_client import MODEL
from openai.types.responses import ResponseStreamEvent

PATH = "/v1/responses"
_EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hi", **fields}


def events_of(response: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, each valid for OpenAI's client and in its place."""
    *blocks, end = response.text.split("\n\n")
    assert (response.status_code, end) == (200, "")
    events = []
    for position, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == position
        assert type(_EVENT.validate_python(event)).__name__ != "BaseModel"
        events.append(event)
    return events
