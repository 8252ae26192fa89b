"""Canonical form of answers: two are equal exactly if all bits that must be deterministic are equal.

Fields that vary between runs are dropped: ids, times, fingerprints, and the number of cached prompt tokens.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

Answer = dict[str, Any]
"""JSON with `choices` by index and `usage`; for a pooling model `data`, with a digest of each text's numbers."""

_USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


class MalformedAnswer(Exception):
    """A stream that ends twice, never ends, or continues after its end."""


def whole_answer(response: dict[str, Any]) -> Answer:
    """Return the answer in a unary response."""
    if "data" in response:
        data = sorted(response["data"], key=lambda entry: int(entry["index"]))
        return pooled_answer([entry["data"] for entry in data], response["usage"]["prompt_tokens"])
    streamed = StreamedAnswer()
    streamed.take({**response, "choices": [_as_chunk(choice) for choice in response["choices"]]})
    streamed.end()
    return streamed.answer


def pooled_answer(numbers: Sequence[list[Any]], num_tokens: int) -> Answer:
    """Return the answer of a pooling model.

    Args:
        numbers: the numbers of each text: a vector, or a vector for each token.
        num_tokens: number of tokens of all texts.
    """
    digests = [hashlib.sha256(json.dumps(one).encode()).hexdigest()[:32] for one in numbers]
    return {"choices": [], "data": digests, "usage": {"prompt_tokens": num_tokens}}


class StreamedAnswer:
    """Assembles the chunks of a stream."""

    def __init__(self) -> None:
        self._choices: dict[int, dict[str, Any]] = {}
        self._usage: dict[str, int] | None = None
        self._is_over = False

    @property
    def answer(self) -> Answer:
        """The answer assembled so far."""
        return {"choices": [self._choices[index] for index in sorted(self._choices)], "usage": self._usage}

    def take(self, chunk: dict[str, Any]) -> None:
        """Add a chunk.

        Raises:
            MalformedAnswer: the stream, or this choice, has already ended.
        """
        if self._is_over:
            raise MalformedAnswer("the stream continues after its end")
        for choice in chunk["choices"]:
            self._take_choice(choice)
        if usage := chunk.get("usage"):
            if self._usage is not None:
                raise MalformedAnswer("usage appears twice")
            self._usage = {name: usage[name] for name in _USAGE}

    def end(self) -> None:
        """Handle the end marker of the stream.

        Raises:
            MalformedAnswer: a choice has not ended, there are no choices, or the marker came twice.
        """
        if self._is_over:
            raise MalformedAnswer("the stream ends twice")
        self._is_over = True
        unended = [index for index, choice in self._choices.items() if choice["finish_reason"] is None]
        if unended or not self._choices:
            raise MalformedAnswer(
                f"the stream ended before its choices {unended}" if unended else "the answer is empty"
            )

    def _take_choice(self, choice: dict[str, Any]) -> None:
        index = choice["index"]
        state = self._choices.setdefault(index, _empty_choice(index))
        delta = choice.get("delta") or {}
        content = choice.get("text") or delta.get("content") or ""
        if state["finish_reason"] is not None:
            raise MalformedAnswer(f"choice {index} continues after its end")
        state["text"] += content
        state["token_ids"] += choice.get("token_ids") or []
        for call in delta.get("tool_calls") or ():
            _take_call(state["tool_calls"], call)
        for name, values in (choice.get("logprobs") or {}).items():
            if values is not None:
                state["logprobs"].setdefault(name, []).extend(values)
        if choice.get("finish_reason") is not None:
            state["finish_reason"] = choice["finish_reason"]
            state["stop_reason"] = choice.get("stop_reason")


def _empty_choice(index: int) -> dict[str, Any]:
    return {
        "index": index,
        "text": "",
        "token_ids": [],
        "tool_calls": [],
        "logprobs": {},
        "finish_reason": None,
        "stop_reason": None,
    }


def _take_call(calls: list[dict[str, str]], call: dict[str, Any]) -> None:
    if call["index"] == len(calls):
        calls.append({"name": "", "arguments": ""})
    function = call.get("function") or {}
    calls[call["index"]]["name"] += function.get("name") or ""
    calls[call["index"]]["arguments"] += function.get("arguments") or ""


def _as_chunk(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice of a unary response as a single chunk."""
    if "message" not in choice:
        return choice
    message = dict(choice["message"])
    message["tool_calls"] = [{**call, "index": index} for index, call in enumerate(message.get("tool_calls") or ())]
    return {**choice, "delta": message}


def is_beginning(part: Answer, whole: Answer) -> bool:
    """Return whether a partial answer is a prefix of the complete answer, token by token."""
    by_index = {choice["index"]: choice["token_ids"] for choice in whole["choices"]}
    return all(
        choice["token_ids"] == by_index.get(choice["index"], [])[: len(choice["token_ids"])]
        for choice in part["choices"]
    )
