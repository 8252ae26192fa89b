"""The client libraries under test: their packages, and the features that each program exercises."""

from collections.abc import Callable
from dataclasses import dataclass

from client_environments import Environment, node_environment, python_environment

STRUCTURED = "structured output"


@dataclass(frozen=True)
class Client:
    """A client library and the program that uses it."""

    packages: tuple[str, ...]
    """Packages with the versions that were tested last; the first one names the client."""
    program: str
    features: tuple[str, ...]
    """Features that the program reports, in this order."""

    def environment(self) -> Environment:
        """Return the environment of the program; raises as `client_environments`."""
        install: Callable[[tuple[str, ...]], Environment] = (
            node_environment if self.program.endswith(".mjs") else python_environment
        )
        return install(self.packages)


CLIENTS = {
    "openai (Python)": Client(
        ("openai==3.57.0",),
        "openai_client.py",
        (
            "models",
            "chat",
            "chat parse",
            "chat tools",
            "responses",
            "responses parse",
            "responses tools",
            "errors",
        ),
    ),
    "anthropic (Python)": Client(
        ("anthropic==2.14.0",), "anthropic_client.py", ("messages", "stream", "tools", "count_tokens", "errors")
    ),
    "LiteLLM": Client(
        ("litellm==1.110.2",), "litellm_client.py", ("chat", "tools", STRUCTURED, "messages", "responses")
    ),
    "langchain-openai": Client(
        ("langchain-openai==1.7.4",),
        "langchain_client.py",
        ("chat", "chat tools", f"chat {STRUCTURED}", "responses", "responses tools", f"responses {STRUCTURED}"),
    ),
    "llama-index-llms-openai-like": Client(
        ("llama-index-llms-openai-like==0.8.1",), "llama_index_client.py", ("chat", "complete", "tools")
    ),
    "Pydantic AI": Client(
        ("pydantic-ai-slim[openai,anthropic]==2.68.0",),
        "pydantic_ai_client.py",
        ("chat", "chat tools", "responses", "responses tools", "messages", "messages tools", STRUCTURED),
    ),
    "Instructor": Client(("instructor==1.17.0",), "instructor_client.py", ("tool_call", "json_schema_mode", "partial")),
    "OpenAI Agents SDK": Client(
        ("openai-agents==0.24.0",),
        "openai_agents_client.py",
        ("chat", "chat streamed", "responses", "responses streamed"),
    ),
    "openai (Node)": Client(
        ("openai@7.59.0",),
        "openai_client.mjs",
        ("chat", "chat parse", "chat tools", "responses", "responses parse", "responses tools"),
    ),
    "anthropic (Node)": Client(
        ("@anthropic-ai/sdk@1.14.0",), "anthropic_client.mjs", ("messages", "tools", "count_tokens", "errors")
    ),
    "AI SDK (Node)": Client(
        ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "@ai-sdk/openai@4.0.118", "@ai-sdk/anthropic@4.0.105"),
        "ai_sdk_client.mjs",
        ("chat", "chat tools", "responses", "responses tools", "messages", "messages tools", STRUCTURED),
    ),
}
