"""OpenAI's Agents SDK: an agent with a tool, which it must call first, through both of OpenAI's APIs."""

import asyncio
from typing import Literal

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_responses import OpenAIResponsesModel
from openai import AsyncOpenAI
from program import BASE_URL, MODEL, QUESTION, check_weather, exercised

set_tracing_disabled(True)
calls: list[dict[str, object]] = []


@function_tool
def weather(city: Literal["Ulm", "Bonn"], days: Literal[1, 2, 3]) -> str:
    """Return the weather of a city."""
    calls.append({"city": city, "days": days})
    return f"rain in {city} for {days} days"


async def main() -> None:
    client = AsyncOpenAI(base_url=BASE_URL + "/v1", api_key="none", max_retries=0)
    for name, kind in (("chat", OpenAIChatCompletionsModel), ("responses", OpenAIResponsesModel)):
        agent = Agent(
            name="forecaster",
            instructions="Use the tool.",
            tools=[weather],
            model=kind(model=MODEL, openai_client=client),
            model_settings=ModelSettings(tool_choice="required", max_tokens=200, temperature=0),
        )
        for run in ("", " streamed"):
            calls.clear()
            if run:
                result = Runner.run_streamed(agent, QUESTION)
                async for _ in result.stream_events():
                    pass
            else:
                result = await Runner.run(agent, QUESTION)
            assert calls and isinstance(result.final_output, str)
            for call in calls:
                check_weather(call)
            exercised(name + run)


asyncio.run(main())
