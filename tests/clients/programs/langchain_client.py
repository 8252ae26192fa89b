"""`langchain-openai`: chat, streams, tools and structured output through both of OpenAI's APIs."""

from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from program import BASE_URL, MODEL, QUESTION, check_weather, exercised
from pydantic import BaseModel, Field


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Ulm", "Bonn"]
    days: int = Field(ge=1, le=9)


@tool(args_schema=Weather)
def weather(city: str, days: int) -> str:
    """Return the weather of a city."""
    return f"rain in {city} for {days} days"


for use_responses in (False, True):
    api = "responses" if use_responses else "chat"
    llm = ChatOpenAI(
        base_url=BASE_URL + "/v1",
        api_key="none",
        model=MODEL,
        use_responses_api=use_responses,
        max_tokens=200,
        temperature=0,
    )
    short = llm.model_copy(update={"max_tokens": 12})
    whole = short.invoke(QUESTION)
    assert whole.usage_metadata["output_tokens"] <= 12
    assert "".join(part.text for part in short.stream(QUESTION)) == whole.text
    exercised(api)

    called = llm.bind_tools([weather], tool_choice="weather").invoke(QUESTION)
    check_weather(called.tool_calls[0]["args"])
    result = weather.invoke(called.tool_calls[0])
    assert short.invoke([("user", QUESTION), called, result]).type == "ai"
    exercised(f"{api} tools")

    form = llm.with_structured_output(Weather, method="json_schema").invoke(QUESTION)
    check_weather(form.model_dump())
    exercised(f"{api} structured output")
