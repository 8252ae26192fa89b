"""Renders the client's outputs as responses of OpenAI's Responses API, unary and as events. No IO.

A unary response is built from the same events as a stream, so both have the same items.
"""

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from octavo.frontend.http.errors import NEUTRAL_MESSAGE, public_message
from octavo.frontend.http.render.answer import AnswerStyle
from octavo.frontend.http.render.logprobs import chat_logprobs
from octavo.frontend.http.render.usage import UsageCount
from octavo.frontend.http.schemas.responses import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseFailure,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from octavo.frontend.outputs import CompletionOutput, RequestOutput
from octavo.frontend.tools.answer import AnswerDelta, CallDelta
from octavo.protocol.events import FinishReason

_encode = msgspec.json.Encoder().encode

_FAILURES = {
    str(FinishReason.ABORT): "the server ended before the response was complete; send it again",
    str(FinishReason.ERROR): NEUTRAL_MESSAGE,
}
"""Messages of failed responses, by the finish reason of their output."""

_ITEM_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponseEvents:
    """The events of one response. Each item is added, grows and is done before the next item is added.

    Args:
        style: the style of the response.
        response: the response before anything is generated.
        summarizes: whether the reasoning is shown as its summary.
        namespaces: namespace and name of each function in a namespace, by the name that the model calls.
    """

    def __init__(
        self,
        style: AnswerStyle,
        response: ResponseObject,
        *,
        summarizes: bool = False,
        namespaces: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    ) -> None:
        self._style = style
        self.response = response
        self._namespaces = namespaces
        self._reasoning = "summary_text" if summarizes else "reasoning_text"
        self._usage = UsageCount()
        self._parser = None if style.chat.parser is None else style.chat.parser.stream()
        self.num_events = 0
        """Number of events so far; the next event has this sequence number."""
        self._item: dict[str, Any] | None = None
        """The item that is growing."""
        self._call: int | None = None
        """Index of the call that is growing."""
        self._num_tokens = 0
        self._has_begun = False

    def render(self, output: RequestOutput, prompt_index: int = 0) -> list[bytes]:
        """Return the events for a delta or a complete output, as JSON. A conversation has only one prompt."""
        self._usage.add(output)
        events = self._begin()
        for choice in output.outputs:
            answer = AnswerDelta(content=choice.text) if self._parser is None else self._parser.push(choice)
            logprobs = self._logprobs(choice)
            for part in answer.in_order():
                if part.reasoning:
                    events += self._grow("reasoning", part.reasoning, [])
                if part.content:
                    events += self._grow("message", part.content, logprobs)
                    logprobs = []
                for call in part.calls:
                    events += self._grow_call(call)
            if choice.finish_reason is not None:
                if self._parser is not None:
                    self._usage.add_reasoning(self._parser.num_reasoning_tokens())
                events += self._end(choice)
        return [_encode(event) for event in events]

    def queued(self) -> list[bytes]:
        """Return the first events of a response that is queued."""
        self.response.status = "queued"
        return [_encode(self._state_event(kind)) for kind in ("response.created", "response.queued")]

    def fail(self, error: Exception) -> list[bytes]:
        """Return the events that end a failed response."""
        events = self._begin() + self._fail(public_message(error))
        return [_encode(event) for event in events]

    def cancel(self) -> list[bytes]:
        """Return the events that end a cancelled response. The API has no event of that name."""
        events = self._finish_item("incomplete")
        self.response.status = "cancelled"
        return [_encode(event) for event in [*events, self._state_event("response.incomplete")]]

    def last(self) -> list[bytes]:
        """Return nothing: the event with the complete response was the last one."""
        return []

    def _begin(self) -> list[dict[str, Any]]:
        """Return the events that precede the first item; empty if they were returned before."""
        if self._has_begun:
            return []
        self._has_begun = True
        self.response.status = "in_progress"
        kinds = ["response.created"] if self.num_events == 0 else []  # a background response has already sent it
        return [self._state_event(kind) for kind in (*kinds, "response.in_progress")]

    def _fail(self, message: str) -> list[dict[str, Any]]:
        events = self._finish_item("incomplete")
        self.response.status = "failed"
        self.response.error = ResponseFailure("server_error", message)
        return [*events, self._state_event("response.failed")]

    def _state_event(self, kind: str) -> dict[str, Any]:
        return self._event(kind, response=msgspec.to_builtins(self.response))

    def _end(self, choice: CompletionOutput) -> list[dict[str, Any]]:
        if choice.finish_reason in _FAILURES:
            return self._fail(_FAILURES[choice.finish_reason])
        is_cut = choice.finish_reason == str(FinishReason.LENGTH)
        events = self._finish_item("incomplete" if is_cut else "completed")
        self.response.status = "incomplete" if is_cut else "completed"
        self.response.incomplete_details = {"reason": "max_output_tokens"} if is_cut else None
        self.response.completed_at = None if is_cut else int(time.time())
        usage = self._usage.total()
        details = usage.completion_tokens_details
        self.response.usage = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(0 if details is msgspec.UNSET else details.reasoning_tokens),
            total_tokens=usage.total_tokens,
        )
        return [*events, self._state_event(f"response.{self.response.status}")]

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self.num_events += 1
        return {"type": kind, "sequence_number": self.num_events - 1, **fields}

    def _item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event about the item that is growing."""
        assert self._item is not None, "an item has been added"
        index = len(self.response.output)
        return self._event(kind, item_id=self._item["id"], output_index=index, **fields)

    def _add_item(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the events that end the current item and add a new one."""
        events = self._finish_item("completed")
        number = len(self.response.output)
        item_id = f"{_ITEM_PREFIXES[kind]}_{self._style.id.partition('_')[2]}_{number}"
        self._item = {"type": kind, "id": item_id, "status": "in_progress", **fields}
        added = self._event("response.output_item.added", output_index=number, item=_copy(self._item))
        return [*events, added]

    def _grow(self, kind: str, text: str, logprobs: list[Any]) -> list[dict[str, Any]]:
        """Return the events that append text to a message or to the reasoning."""
        events = []
        if self._item is None or self._item["type"] != kind:
            fields = {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
            events += self._add_item(kind, **fields)
            events.append(self._part_event("added", _empty_part(self._part_type)))
            self._parts().append(_empty_part(self._part_type))
        (part,) = self._parts()
        part["text"] += text
        extra: dict[str, Any] = {}
        if kind == "message":
            part["logprobs"] += logprobs
            extra["logprobs"] = logprobs
        name = "response.reasoning_summary_text" if self._part_type == "summary_text" else f"response.{self._part_type}"
        return [*events, self._item_event(f"{name}.delta", **self._place, delta=text, **extra)]

    def _grow_call(self, call: CallDelta) -> list[dict[str, Any]]:
        """Return the events that append arguments to a call, or add a call."""
        events = []
        if call.name is not None:
            namespace, name = self._namespaces.get(call.name, (None, call.name))
            fields = {"name": name} if namespace is None else {"name": name, "namespace": namespace}
            events += self._add_item("function_call", call_id=call.id, **fields, arguments="")
            self._call = call.index
        if call.arguments and self._item is not None:
            self._item["arguments"] += call.arguments
            events.append(self._item_event("response.function_call_arguments.delta", delta=call.arguments))
        return events

    def _finish_item(self, status: str) -> list[dict[str, Any]]:
        """Return the events that end the item that is growing."""
        item = self._item
        if item is None:
            return []
        events = []
        if item["type"] == "function_call":
            name, arguments = item["name"], item["arguments"]
            events.append(self._item_event("response.function_call_arguments.done", name=name, arguments=arguments))
        else:
            (part,) = self._parts()
            kind = self._part_type
            name = "response.reasoning_summary_text" if kind == "summary_text" else f"response.{kind}"
            extra = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
            events.append(self._item_event(f"{name}.done", **self._place, text=part["text"], **extra))
            events.append(self._part_event("done", _copy(part)))
        item["status"] = status
        events.append(
            self._event("response.output_item.done", output_index=len(self.response.output), item=_copy(item))
        )
        self.response.output.append(item)
        self._item = None
        return events

    @property
    def _part_type(self) -> str:
        assert self._item is not None, "an item has been added"
        return "output_text" if self._item["type"] == "message" else self._reasoning

    @property
    def _place(self) -> dict[str, int]:
        return {"summary_index" if self._part_type == "summary_text" else "content_index": 0}

    def _parts(self) -> list[dict[str, Any]]:
        assert self._item is not None, "an item has been added"
        parts: list[dict[str, Any]] = self._item["summary" if self._part_type == "summary_text" else "content"]
        return parts

    def _part_event(self, what: str, part: dict[str, Any]) -> dict[str, Any]:
        name = "reasoning_summary_part" if self._part_type == "summary_text" else "content_part"
        return self._item_event(f"response.{name}.{what}", **self._place, part=part)

    def _logprobs(self, choice: CompletionOutput) -> list[Any]:
        if self._style.num_logprobs is None or choice.logprobs is None:
            return []
        found = chat_logprobs(choice.token_ids, choice.logprobs, self._style.names, self._style.num_logprobs)
        tokens: list[Any] = msgspec.to_builtins(found.content)
        if self._parser is None:
            return tokens
        # The tokens of the reasoning come first.
        self._num_tokens += len(tokens)
        num_reasoning = self._parser.num_reasoning_tokens() or 0
        return tokens[max(0, num_reasoning - (self._num_tokens - len(tokens))) :]


def render_response(output: RequestOutput, events: ResponseEvents) -> bytes:
    """Return the complete response as JSON.

    Args:
        output: finished, with all generated tokens.
        events: a new event builder.
    """
    events.render(output)
    return _encode(events.response)


def response_at_start(request: ResponsesRequest, style: AnswerStyle) -> ResponseObject:
    """Return a response as it is before anything is generated."""
    reasoning = request.reasoning
    return ResponseObject(
        id=style.id,
        created_at=style.created,
        status="in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        model=style.model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        safety_identifier=request.safety_identifier,
        reasoning={"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        store=request.store is not False,
        temperature=request.temperature,
        text=_text_options(request),
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=[{"description": None, "parameters": None, "strict": False} | tool for tool in request.tools or ()],
        top_logprobs=request.top_logprobs,
        top_p=request.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
    )


def _text_options(request: ResponsesRequest) -> dict[str, Any]:
    options = request.text
    shown: dict[str, Any] = {"format": (options and options.format) or {"type": "text"}}
    return shown if options is None or options.verbosity is None else {**shown, "verbosity": options.verbosity}


def _empty_part(kind: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind, "text": ""}
    return part | {"annotations": [], "logprobs": []} if kind == "output_text" else part


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of an item: events are encoded after the item has grown further."""
    return {key: [dict(part) for part in value] if isinstance(value, list) else value for key, value in item.items()}
