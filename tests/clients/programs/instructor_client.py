"""Instructor: objects by forced tool calls and by JSON schema, whole and as partial objects of a stream."""

from typing import Literal

import instructor
import openai
from program import BASE_URL, MODEL, QUESTION, check_weather, exercised
from pydantic import BaseModel, Field


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Ulm", "Bonn"]
    days: int = Field(ge=1, le=9)


ask = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 200, "seed": 1}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=BASE_URL + "/v1", api_key="none"), mode=mode)
    whole = client.chat.completions.create(**ask, response_model=Weather, max_retries=0)
    check_weather(whole.model_dump())
    exercised(mode.value)

partial = client.chat.completions.create_partial(**ask, response_model=Weather)
assert list(partial)[-1].model_dump() == whole.model_dump()
exercised("partial")
