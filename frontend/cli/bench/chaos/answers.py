"""Answers in a form in which two are equal exactly when every bit is that must be: of HTTP, whole and streamed.

What depends on the moment is left out: ids, times, fingerprints, and how much of the prompt the cache had.
"""

from typing import Any

Answer = dict[str, Any]
"""JSON: `choices` by index, and `usage`."""

_USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


class Garbled(Exception):
    """A stream that ends twice, not at all, or goes on after its end."""


def whole_answer(response: dict[str, Any]) -> Answer:
    """Return what a response says that was not streamed."""
    answer = StreamedAnswer()
    answer.take({**response, "choices": [_as_chunk(choice) for choice in response["choices"]]})
    answer.end()
    return answer.told


class StreamedAnswer:
    """Puts the chunks of a stream together."""

    def __init__(self) -> None:
        self._choices: dict[int, dict[str, Any]] = {}
        self._usage: dict[str, int] | None = None
        self._is_over = False

    @property
    def told(self) -> Answer:
        """What the chunks so far say."""
        return {"choices": [self._choices[index] for index in sorted(self._choices)], "usage": self._usage}

    def take(self, chunk: dict[str, Any]) -> None:
        """Add a chunk.

        Raises:
            Garbled: the stream has ended before, in whole or for this choice.
        """
        if self._is_over:
            raise Garbled("the stream goes on after its end")
        for choice in chunk["choices"]:
            self._take_choice(choice)
        if usage := chunk.get("usage"):
            if self._usage is not None:
                raise Garbled("the usage is told twice")
            self._usage = {name: usage[name] for name in _USAGE}

    def end(self) -> None:
        """The stream says that it is over.

        Raises:
            Garbled: a choice has not ended, or there is none, or this is said twice.
        """
        if self._is_over:
            raise Garbled("the stream ends twice")
        self._is_over = True
        unended = [index for index, choice in self._choices.items() if choice["finish_reason"] is None]
        if unended or not self._choices:
            raise Garbled(f"the stream is over before its choices {unended}" if unended else "the answer is empty")

    def _take_choice(self, choice: dict[str, Any]) -> None:
        index = choice["index"]
        told = self._choices.setdefault(index, _empty_choice(index))
        delta = choice.get("delta") or {}
        content = choice.get("text") or delta.get("content") or ""
        if told["finish_reason"] is not None:
            raise Garbled(f"choice {index} goes on after its end")
        told["text"] += content
        told["token_ids"] += choice.get("token_ids") or []
        for call in delta.get("tool_calls") or ():
            _take_call(told["tool_calls"], call)
        for name, values in (choice.get("logprobs") or {}).items():
            if values is not None:
                told["logprobs"].setdefault(name, []).extend(values)
        if choice.get("finish_reason") is not None:
            told["finish_reason"] = choice["finish_reason"]
            told["stop_reason"] = choice.get("stop_reason")


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
    """Return a choice of a whole response as the one chunk that says all of it."""
    if "message" not in choice:
        return choice
    message = dict(choice["message"])
    message["tool_calls"] = [{**call, "index": index} for index, call in enumerate(message.get("tool_calls") or ())]
    return {**choice, "delta": message}


def is_beginning(part: Answer, whole: Answer) -> bool:
    """Whether an answer that was not read to its end is how the whole one begins, token by token."""
    by_index = {choice["index"]: choice["token_ids"] for choice in whole["choices"]}
    return all(
        choice["token_ids"] == by_index.get(choice["index"], [])[: len(choice["token_ids"])]
        for choice in part["choices"]
    )
