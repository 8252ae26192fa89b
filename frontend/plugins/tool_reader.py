"""`PluginToolReader`: parses the text after the reasoning with a plugin's tool parser."""

import json
from collections.abc import Sequence
from typing import Any

from octavo.frontend.plugins.calls import PluginObject
from octavo.frontend.tools.answer import AnswerDelta, CallDelta
from octavo.frontend.tools.call_id import new_call_id


class PluginToolReader:
    """Parses one output: complete text at once, otherwise each piece with its tokens.

    Args:
        parser: parser of the plugin.
        request: in the form that plugins see.
        max_calls: further calls are dropped. `None`: no limit.
    """

    def __init__(self, parser: PluginObject, request: Any, max_calls: int | None) -> None:
        self._parser = parser
        self._request = request
        self._max_calls = max_calls
        self._text = ""
        self._token_ids: list[int] = []
        self._has_begun = False
        self._places: dict[int, int | None] = {}
        """Our index of each started call, by the plugin's index. `None`: the call is dropped."""
        self._arguments: dict[int, list[str]] = {}
        """Pieces of arguments so far, by the plugin's index."""
        self._is_calling = False
        """Whether the plugin's last message was part of a call."""
        self._waiting: dict[int, str] = {}
        """Arguments of calls that have no name yet, by the plugin's index."""
        self.num_calls = 0
        """Number of calls that have started."""

    def push(self, text: str, is_final: bool = False, token_ids: Sequence[int] = ()) -> AnswerDelta:
        """Add text and return what is new.

        Args:
            text: continues the earlier text.
            is_final: no more text will follow.
            token_ids: tokens of this text.

        Raises:
            RequestFailedError: the code of the plugin failed.
        """
        if is_final and not self._has_begun:
            return self._whole(text)
        delta = AnswerDelta()
        if text or token_ids:
            self._has_begun = True
            self._push(delta, text, list(token_ids))
        if is_final and self._is_calling and self._lacks_arguments():
            rest = self._parser.call("get_remaining_unstreamed_args")
            self._add(delta, max(self._places), None, None, str(rest))
        return delta

    def _whole(self, text: str) -> AnswerDelta:
        found = self._parser.call("extract_tool_calls", text, self._request)
        if not found.tools_called:
            return AnswerDelta(content=text if found.content is None else found.content)
        delta = AnswerDelta(content=found.content or "")
        for index, call in enumerate(found.tool_calls):
            self._add(delta, index, call.id, call.function.name, call.function.arguments)
        return delta

    def _push(self, delta: AnswerDelta, text: str, token_ids: list[int]) -> None:
        """Add a piece of a stream."""
        before, ids_before = self._text, list(self._token_ids)
        self._text += text
        self._token_ids += token_ids
        ids = (ids_before, list(self._token_ids), token_ids)
        message = self._parser.call("extract_tool_calls_streaming", before, self._text, text, *ids, self._request)
        if message is None:
            return
        delta.content = message.content or ""
        for call in message.tool_calls or ():
            name, arguments = (call.function.name, call.function.arguments) if call.function else (None, None)
            self._add(delta, call.index, call.id, name, arguments or "")
        self._is_calling = bool(message.tool_calls)

    def _lacks_arguments(self) -> bool:
        """Return whether the last call's arguments are incomplete and the plugin may still have the rest."""
        if not self._places or not self._parser.has("get_remaining_unstreamed_args"):
            return False
        try:
            json.loads("".join(self._arguments[max(self._places)]))
        except ValueError:
            return True
        return False

    def _add(self, delta: AnswerDelta, index: int, call_id: str | None, name: str | None, arguments: str) -> None:
        """Add to a call, or start it once it has a name."""
        if index not in self._places:
            arguments = self._waiting.pop(index, "") + arguments
            if not name:
                self._waiting[index] = arguments
                return
            is_dropped = self._max_calls is not None and self.num_calls >= self._max_calls
            self._places[index] = None if is_dropped else self.num_calls
            if not is_dropped:
                delta.calls.append(CallDelta(self.num_calls, arguments, call_id or new_call_id(), name))
                self.num_calls += 1
        elif (place := self._places[index]) is not None and arguments:
            delta.calls.append(CallDelta(place, arguments))
        self._arguments.setdefault(index, []).append(arguments)
