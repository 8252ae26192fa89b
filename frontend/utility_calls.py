"""`UtilityCalls`: utility calls that the engine has not answered yet. It has no socket."""

import asyncio
import itertools
from typing import TypeAlias

from octavo.protocol.errors import ConflictError, EngineDeadError, InvalidRequestError, OctavoError, RequestFailedError
from octavo.protocol.events import CallFailed, CallFault, Reply, UtilityResult
from octavo.protocol.requests import Call, ProfileCall, Utility

Answer: TypeAlias = asyncio.Future[UtilityResult]

_ERRORS: dict[CallFault, type[OctavoError]] = {
    "engine": RequestFailedError,
    "arguments": InvalidRequestError,
    "state": ConflictError,
}


def error_of(failed: CallFailed) -> OctavoError:
    """Return the error that the caller gets."""
    return _ERRORS[failed.fault](failed.message)


class UtilityCalls:
    """Hands each reply to its caller."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[Utility, Answer]] = {}
        self._ids = itertools.count()

    def __len__(self) -> int:
        return len(self._calls)

    def next_id(self) -> int:
        """Return an id for a new call."""
        return next(self._ids)

    def add(self, call: Call) -> Answer:
        """Add a call; return the future of its reply. The caller must call `remove` in the end."""
        answer: Answer = asyncio.get_running_loop().create_future()
        self._calls[call.call_id] = call.utility, answer
        return answer

    def remove(self, call: Call) -> None:
        """Forget a call: its caller no longer waits for the reply."""
        self._calls.pop(call.call_id, None)

    def reply(self, reply: Reply) -> None:
        """Hand a reply to its caller, unless the call was removed."""
        _, answer = self._calls.get(reply.call_id, (None, None))
        if answer and not answer.done():
            answer.set_result(reply.result)

    def lose_core(self, cause: str) -> None:
        """Fail the calls that cannot be repeated on another core."""
        for utility, answer in self._calls.values():
            if isinstance(utility, ProfileCall) and not answer.done():
                answer.set_result(CallFailed(f"the engine died meanwhile: {cause}"))

    def unanswered(self) -> list[Call]:
        """Return the calls to repeat on another core."""
        return [Call(call_id, utility) for call_id, (utility, answer) in self._calls.items() if not answer.done()]

    def fail(self, error: EngineDeadError) -> None:
        """Fail every call."""
        for _, answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # maybe no caller waits for it, which is not an error
