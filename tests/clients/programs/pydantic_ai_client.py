"""Pydantic AI: agents with structured output and tools through chat completions, responses and messages."""

from typing import Literal

from program import BASE_URL, MODEL, QUESTION, check_weather, exercised
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Ulm", "Bonn"]
    days: int = Field(ge=1, le=9)


openai = OpenAIProvider(base_url=BASE_URL + "/v1", api_key="none")
models = {
    "chat": OpenAIChatModel(MODEL, provider=openai),
    "responses": OpenAIResponsesModel(MODEL, provider=openai),
    "messages": AnthropicModel(MODEL, provider=AnthropicProvider(base_url=BASE_URL, api_key="none")),
}
for name, model in models.items():
    settings = {"max_tokens": 200, "temperature": 0.0}
    text = Agent(model, model_settings={**settings, "max_tokens": 12}).run_sync(QUESTION).output
    assert isinstance(text, str)
    exercised(name)

    # The output is a forced call of a tool that takes it.
    check_weather(Agent(model, output_type=Weather, model_settings=settings).run_sync(QUESTION).output.model_dump())
    exercised(f"{name} tools")

native = Agent(models["chat"], output_type=NativeOutput(Weather), model_settings={"max_tokens": 200})
check_weather(native.run_sync(QUESTION).output.model_dump())
exercised("structured output")
