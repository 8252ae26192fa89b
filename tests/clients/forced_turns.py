"""ASGI middleware that makes a tiny random model act as an agent's model: call one tool, then answer "done".

Coding agents let the model choose tools and run what comes back. Here the first turn of a conversation is a forced
call with fixed arguments, and a conversation with a result of a tool is answered with one word: the server's grammars
enforce both. The agent is unmodified, and so is the server behind this middleware.
"""

import json
import os
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

MAX_TOKENS = 400
ANSWER = "done"
_FORM = {"type": "json_schema", "schema": {"const": ANSWER}}


class ForcedTurns:
    """Rewrites requests; reads the tool and its arguments as JSON from the environment variable FORCED_CALL."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        call = json.loads(os.environ["FORCED_CALL"])
        self._name: str = call["name"]
        self._schema = {
            "type": "object",
            "properties": {key: {"const": value} for key, value in call["arguments"].items()},
            "required": list(call["arguments"]),
            "additionalProperties": False,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, rewritten if it asks for an answer."""
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        sent = False
        new_body = self._rewrite(scope["path"], body)
        headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        headers.append((b"content-length", str(len(new_body)).encode()))

        async def receive_rewritten() -> Any:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": new_body, "more_body": False}

        return await self._app({**scope, "headers": headers}, receive_rewritten, send)

    def _rewrite(self, path: str, body: bytes) -> bytes:
        match path:
            case "/v1/chat/completions":
                return json.dumps(self._rewrite_chat(json.loads(body))).encode()
            case "/v1/responses":
                return json.dumps(self._rewrite_response(json.loads(body))).encode()
            case "/v1/messages":
                return json.dumps(self._rewrite_message(json.loads(body))).encode()
        return body

    def _rewrite_chat(self, request: dict[str, Any]) -> dict[str, Any]:
        request.pop("max_completion_tokens", None)
        has_result = any(message["role"] == "tool" for message in request["messages"])
        functions = [tool["function"] for tool in request.get("tools", ())]
        if not has_result and self._constrain(functions):
            request["tool_choice"] = {"type": "function", "function": {"name": self._name}}
        else:
            request["structured_outputs"] = {"choice": [ANSWER]}
            request["tool_choice"] = "none"
        return {**request, "max_tokens": MAX_TOKENS}

    def _rewrite_response(self, request: dict[str, Any]) -> dict[str, Any]:
        items = request["input"] if isinstance(request["input"], list) else []
        has_result = any(item.get("type") == "function_call_output" for item in items)
        functions = [tool for tool in request.get("tools", ()) if tool["type"] == "function"]
        if not has_result and self._constrain(functions):
            request["tool_choice"] = {"type": "function", "name": self._name}
        else:
            request["text"] = {"format": {**_FORM, "name": "answer"}}
            request["tool_choice"] = "none"
        return {**request, "max_output_tokens": MAX_TOKENS}

    def _rewrite_message(self, request: dict[str, Any]) -> dict[str, Any]:
        blocks = [block for message in request["messages"] for block in message["content"]]
        has_result = any(isinstance(block, dict) and block["type"] == "tool_result" for block in blocks)
        if not has_result and self._constrain(request.get("tools", []), "input_schema"):
            request["tool_choice"] = {"type": "tool", "name": self._name}
        else:
            request["output_config"] = {"format": _FORM}
            request["tool_choice"] = {"type": "none"}
        return {**request, "max_tokens": MAX_TOKENS}

    def _constrain(self, functions: list[dict[str, Any]], schema_key: str = "parameters") -> bool:
        """Give our tool the schema of the fixed arguments; return whether the agent offers it."""
        ours = [function for function in functions if function["name"] == self._name]
        for function in ours:
            function[schema_key] = self._schema
        return bool(ours)
