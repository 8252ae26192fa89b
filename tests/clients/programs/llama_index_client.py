"""`llama-index-llms-openai-like`: complete, chat, streams and tools."""

from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from program import BASE_URL, MODEL, QUESTION, check_weather, exercised


def weather(city: Literal["Ulm", "Bonn"], days: Literal[1, 2, 3]) -> str:
    """Return the weather of a city."""
    return f"rain in {city} for {days} days"


def connect(max_tokens: int) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=BASE_URL + "/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=max_tokens,
        temperature=0,
    )


llm = connect(12)
message = ChatMessage(role="user", content=QUESTION)
whole = llm.chat([message])
assert "".join(part.delta or "" for part in llm.stream_chat([message])) == whole.message.content
exercised("chat")

assert "".join(part.delta or "" for part in llm.stream_complete(QUESTION)) == llm.complete(QUESTION).text
exercised("complete")

tool = FunctionTool.from_defaults(weather)
called = connect(200).chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
call = llm.get_tool_calls_from_response(called)[0]
assert call.tool_name == "weather"
check_weather(call.tool_kwargs)
exercised("tools")
